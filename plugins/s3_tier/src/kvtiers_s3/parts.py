"""Large values in parts: written as one upload, read as ranges, several parts at a time.

An upload that fails is aborted, so that its parts are not paid for. Those of a process that was killed are aborted by a
later one, when they are a day old, and by the bucket's lifecycle rule if it has one.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from kvtiers_s3.bucket import Bucket
from kvtiers_s3.client.base import ValueClient, read_into
from kvtiers_s3.connection import Connection
from kvtiers_s3.failures import S3Error, failure

__all__ = ["Parts"]

_log = logging.getLogger("kvtiers.s3")
_ABANDONED = timedelta(days=1)
_T = TypeVar("_T")


class Parts:
    """Moves values that are larger than a part, by threads of its own, for which the caller's thread waits."""

    def __init__(self, connection: Connection, client: ValueClient, bucket: Bucket) -> None:
        self._connection = connection
        self._client = client
        self._bucket = bucket
        self._size = connection.config.part_size
        self._pool = ThreadPoolExecutor(connection.config.connections, thread_name_prefix="kvtiers-s3-part")

    def read(self, key: str, dst: memoryview) -> bool:
        """Fill ``dst`` from an object of its length; False: there is none."""
        total = len(dst)

        def read_part(start: int) -> str | None:
            with dst[start : start + self._size] as part:
                return read_into(self._client, key, part, start, total)

        etags = self._each(read_part, range(0, total, self._size))
        if None in etags:
            return False
        if len(set(etags)) > 1:
            raise failure(f"GET {key}", 0, "Replaced")
        return True

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Write an object in one upload. False, and nothing is changed, if ``only_new`` and there is one already."""
        # Asked before the parts are sent, and again by the last request, where the server looks at its condition.
        if only_new and self._client.size(key) is not None:
            return False
        where = {"Bucket": self._connection.config.bucket, "Key": key}
        with self._bucket.asking(f"PUT {key}"):
            where["UploadId"] = self._s3.create_multipart_upload(**where, **self._connection.put_options)["UploadId"]
        done = False
        try:
            parts = self._send(where, src)
            done = self._complete(where, parts, only_new=only_new)
        finally:
            if not done:
                with suppress(S3Error):  # what it failed with is said already
                    self._bucket.abort(key, where["UploadId"])
        self._connection.requests.count_bytes(written=len(src) if done else 0)
        return done

    def start_clean_up(self, prefix: str, age: timedelta = _ABANDONED) -> None:
        """Abort, in the background, uploads under this prefix that are this old and never ended."""
        self._pool.submit(self._clean_up, prefix, datetime.now(UTC) - age)

    def _clean_up(self, prefix: str, before: datetime) -> None:
        try:
            for upload in self._bucket.uploads(prefix):
                if upload.started <= before:
                    self._bucket.abort(upload.key, upload.upload_id)
        except S3Error as error:
            _log.info("uploads that killed processes left are not cleaned up: %s", error)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    @property
    def _s3(self) -> Any:
        return self._connection.boto3_client(attempts=1)

    def _send(self, where: dict[str, str], src: memoryview) -> Sequence[dict[str, Any]]:
        def send(start: int) -> dict[str, Any]:
            number = start // self._size + 1
            with src[start : start + self._size] as part, self._bucket.asking(f"PUT {where['Key']} part {number}"):
                answer = self._s3.upload_part(**where, PartNumber=number, Body=bytes(part))
            checksums = {name: text for name, text in answer.items() if name.startswith("Checksum")}
            checksums.pop("ChecksumType", None)
            return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

        return self._each(send, range(0, len(src), self._size))

    def _complete(self, where: dict[str, str], parts: Sequence[dict[str, Any]], *, only_new: bool) -> bool:
        condition = {"IfNoneMatch": "*"} if only_new else {}
        with self._bucket.asking(f"PUT {where['Key']}"):
            try:
                self._s3.complete_multipart_upload(**where, MultipartUpload={"Parts": parts}, **condition)
            except ClientError as error:
                if only_new and error.response["ResponseMetadata"]["HTTPStatusCode"] == 412:
                    return False
                raise
        return True

    def _each(self, work: Callable[[int], _T], starts: Sequence[int]) -> list[_T]:
        """Do the work for each part; when all have ended, return their results or raise the first error.

        The parts' threads use the caller's buffer, so none may be left running.
        """
        futures = [self._pool.submit(work, start) for start in starts]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
