"""The boto3 client of values: slower, for systems without obstore."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from kvtiers_objectstore.values import Body
from kvtiers_s3.boto3_errors import ABSENT, translated
from kvtiers_s3.connection import Connection

__all__ = ["Boto3Client"]


class Boto3Client:
    """The fallback."""

    name = "boto3"

    def __init__(self, connection: Connection) -> None:
        self._connection, self._client = connection, connection.boto3_client(attempts=1)
        self._bucket, self._requests = connection.config.bucket, connection.requests

    def get(self, key: str, start: int, nbytes: int, longest: int) -> Body | None:
        """Request a part of an object. A body that has not come whole in time is given up."""
        until = time.monotonic() + self._connection.config.timeout
        part = {"Range": f"bytes={start}-{start + nbytes - 1}"} if nbytes != longest else {}
        with self._asking("GET", key), contextlib.ExitStack() as stack:
            found = self._client.get_object(Bucket=self._bucket, Key=key, **part)
            body = stack.enter_context(contextlib.closing(found["Body"]))
            # A server that ignores Range sends all from byte 0 on, and no ContentRange: that is a KeyError, not a part.
            length = int(found["ContentRange"].rpartition("/")[2] if part else found["ContentLength"])
            if length <= longest:
                left = min(nbytes, length - start)
                return Body(str(found.get("ETag", "")), length, self._pieces(key, body, left, until, stack.pop_all()))
        return None

    def _pieces(self, key: str, body: Any, left: int, until: float, stack: contextlib.ExitStack) -> Iterator[bytes]:
        with self._asking("GET", key), stack:
            while left:
                body.set_socket_timeout(max(0.001, until - time.monotonic()))
                # One recv at a time: body.read() would wait for a body that drips for as long as it does.
                piece: bytes = body._raw_stream.read1(left)  # noqa: SLF001
                if not piece or time.monotonic() > until:
                    raise TimeoutError if piece else ConnectionResetError
                left -= len(piece)
                self._requests.count_bytes(read=len(piece))
                yield piece

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Put the object from a copy: boto3 takes no view."""
        options = self._connection.put_options | ({"IfNoneMatch": "*"} if only_new else {})
        with self._asking("PUT", key, absent={"PreconditionFailed", "412"}):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=bytes(src), **options)
            self._requests.count_bytes(written=len(src))
            return True
        return False

    def size(self, key: str) -> int | None:
        """Request the headers alone."""
        with self._asking("HEAD", key):
            return int(self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"])
        return None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextlib.contextmanager
    def _asking(self, method: str, key: str, absent: set[str] = ABSENT) -> Iterator[None]:
        """Swallow an error that says absent; translate every other."""
        try:
            yield
        except (ClientError, BotoCoreError, HTTPError, OSError, KeyError, ValueError) as error:
            if not (isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") in absent):
                self._requests.count_failed(raised := translated(self._connection.failures, f"{method} {key}", error))
                raise raised from None
