"""Values by boto3: slower, and there where obstore is not."""

import contextlib
import time
from collections.abc import Iterator

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from kvtiers_s3.boto3_errors import translated
from kvtiers_s3.connection import Connection

__all__ = ["Boto3Client"]

_ABSENT = {"NoSuchKey", "404", "InvalidRange", "416"}


class Boto3Client:
    """The fallback."""

    name = "boto3"

    def __init__(self, connection: Connection) -> None:
        self._client = connection.boto3_client(attempts=1)
        self._bucket = connection.config.bucket
        self._timeout = connection.config.timeout
        self._put_options = connection.put_options
        self._requests = connection.requests

    def read(self, key: str, dst: memoryview, start: int, total: int) -> str | None:
        """Fill ``dst``; a body that does not come whole in time is given up."""
        until = time.monotonic() + self._timeout
        part = {"Range": f"bytes={start}-{start + len(dst) - 1}"} if len(dst) != total else {}
        with self._asking("GET", key):
            found = self._client.get_object(Bucket=self._bucket, Key=key, **part)
            with contextlib.closing(found["Body"]) as body:
                if int(found.get("ContentRange", "").rpartition("/")[2] or found["ContentLength"]) != total:
                    return None
                at = 0
                while at < len(dst):
                    # One recv at a time: body.read() would wait for a body that drips for as long as it does.
                    piece: bytes = body._raw_stream.read1(len(dst) - at)  # noqa: SLF001
                    if not piece or time.monotonic() > until:
                        raise TimeoutError if piece else ConnectionResetError
                    dst[at : at + len(piece)] = piece
                    at += len(piece)
            self._requests.count_bytes(read=at)
            return str(found.get("ETag", ""))
        return None

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Put the object from a copy: boto3 takes no view."""
        options = self._put_options | ({"IfNoneMatch": "*"} if only_new else {})
        with self._asking("PUT", key, absent={"PreconditionFailed", "412"}):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=bytes(src), **options)
            self._requests.count_bytes(written=len(src))
            return True
        return False

    def size(self, key: str) -> int | None:
        """Ask for the head alone."""
        with self._asking("HEAD", key):
            return int(self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"])
        return None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextlib.contextmanager
    def _asking(self, method: str, key: str, absent: set[str] = _ABSENT) -> Iterator[None]:
        """Swallow an error that says absent; translate every other."""
        try:
            yield
        except (ClientError, BotoCoreError, HTTPError, OSError) as error:
            if isinstance(error, ClientError) and error.response["Error"]["Code"] in absent:
                return
            self._requests.count_failed(raised := translated(f"{method} {key}", error))
            raise raised from None
