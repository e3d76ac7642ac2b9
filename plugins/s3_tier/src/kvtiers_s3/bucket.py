"""The bucket's own operations, by boto3: listing, deleting, uploads in parts, and its settings."""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from botocore.exceptions import BotoCoreError, ClientError

from kvtiers_s3.boto3_errors import translated
from kvtiers_s3.connection import Connection

__all__ = ["Bucket", "Upload"]

_DELETED_AT_ONCE = 1000
_ATTEMPTS = 3  # no request waits for these calls, and core does not retry them
# Servers that have no DeleteObjects, or want a header for it that boto3 no longer sends.
_ONE_BY_ONE = {"NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidRequest", "MalformedXML"}


class Upload(NamedTuple):
    """An upload in parts that has not ended."""

    key: str
    upload_id: str
    started: datetime


class Bucket:
    """The bucket of one store. Keys are whole keys, the prefix included."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._name = connection.config.bucket

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime]]:
        """Yield key, length and time of the last write of every object under this prefix, a page after the other."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=prefix)
        with self.asking(f"LIST {prefix}"):
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield entry["Key"], entry["Size"], entry["LastModified"]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete these objects; one that is absent is no error."""
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            some = keys[start : start + _DELETED_AT_ONCE]
            if len(some) == 1 or not self._deleted_at_once(some):
                for key in some:
                    with self.asking(f"DELETE {key}"):
                        self._client.delete_object(Bucket=self._name, Key=key)

    def _deleted_at_once(self, keys: Sequence[str]) -> bool:
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        with self.asking(f"DELETE of {len(keys)} objects"):
            try:
                errors = self._client.delete_objects(Bucket=self._name, Delete=wanted).get("Errors", ())
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in _ONE_BY_ONE:
                    return False
                raise
            if errors:
                raise ClientError({"Error": errors[0], "ResponseMetadata": {}}, "DeleteObjects")
        return True

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the uploads in parts under this prefix that were begun and not ended."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._name, Prefix=prefix)
        with self.asking(f"LIST of uploads under {prefix}"):
            for page in pages:
                for entry in page.get("Uploads", ()):
                    yield Upload(entry["Key"], entry["UploadId"], entry["Initiated"])

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload, which deletes its parts."""
        with self.asking(f"DELETE of an upload of {key}"):
            self._client.abort_multipart_upload(Bucket=self._name, Key=key, UploadId=upload_id)

    def lifecycle(self) -> Sequence[dict[str, Any]]:
        """Return the bucket's lifecycle rules."""
        with self.asking("GET of the bucket's lifecycle rules"):
            try:
                rules = self._client.get_bucket_lifecycle_configuration(Bucket=self._name)["Rules"]
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") == "NoSuchLifecycleConfiguration":
                    return []
                raise
            return list(rules)

    def is_versioned(self) -> bool:
        """Return whether the bucket keeps what is replaced and deleted."""
        with self.asking("GET of the bucket's versioning"):
            return bool(self._client.get_bucket_versioning(Bucket=self._name).get("Status") == "Enabled")

    def region(self) -> str:
        """Return the region that the server says the bucket is in; empty: it does not say."""
        with contextlib.suppress(BotoCoreError):
            try:
                answer = self._client.head_bucket(Bucket=self._name)
            except ClientError as error:
                answer = error.response
            headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            return str(headers.get("x-amz-bucket-region", ""))
        return ""

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Translate what boto3 raises, and count it."""
        try:
            yield
        except (ClientError, BotoCoreError, OSError) as error:
            raised = translated(self._connection.failures, what, error)
            self._connection.requests.count_failed(raised)
            raise raised from None

    @property
    def _client(self) -> Any:
        return self._connection.boto3_client(attempts=_ATTEMPTS)
