"""Large values in parts: uploads by boto3, which can abort what a killed process left.

An upload that fails is aborted, so that its parts are not paid for. Those of a process that was killed are aborted by a
later one, when they are a day old, and by the bucket's lifecycle rule if it has one.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import ClientError

from kvtiers_objectstore.failures import ObjectStoreError
from kvtiers_objectstore.parts import Parts
from kvtiers_objectstore.values import ValueClient
from kvtiers_s3.bucket import Bucket
from kvtiers_s3.connection import Connection

__all__ = ["UploadParts"]

_log = logging.getLogger("kvtiers.s3")
_ABANDONED = timedelta(days=1)


class UploadParts(Parts):
    """Large values, by boto3's requests for uploads and either client's for ranges."""

    def __init__(self, connection: Connection, client: ValueClient, bucket: Bucket) -> None:
        config, failures = connection.config, connection.failures
        super().__init__(client, failures, part_size=config.part_size, connections=config.connections, label="s3")
        self._connection = connection
        self._bucket = bucket

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
                with suppress(ObjectStoreError):  # what it failed with is said already
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
        except ObjectStoreError as error:
            _log.info("uploads that killed processes left are not cleaned up: %s", error)

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

        return self.each(send, range(0, len(src), self._size))

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
