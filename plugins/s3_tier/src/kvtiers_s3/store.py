"""The store of the tier type ``s3``: obstore or boto3 for values, boto3 for the bucket's own operations."""

from collections.abc import Iterable
from importlib.util import find_spec

from kvtiers.api import ConfigError, Finding
from kvtiers_objectstore.failures import ObjectStoreError
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.store import Access, ObjectStore
from kvtiers_objectstore.values import ValueClient
from kvtiers_s3.bucket import Bucket
from kvtiers_s3.config import S3Config
from kvtiers_s3.connection import Connection
from kvtiers_s3.parts import UploadParts

__all__ = ["S3Store", "open_client"]


class S3Store(ObjectStore):
    """Values as objects in a bucket of S3's.

    ``value_bytes``: the largest value's length; values that are moved in parts may leave uploads to clean up.
    """

    _parts: UploadParts
    _bucket: Bucket

    def __init__(self, config: S3Config, *, value_bytes: int = 0, read_only: bool = False) -> None:
        requests = Requests(config.put_price, config.get_price)
        self._connection = Connection(config, requests)
        client = open_client(self._connection)
        bucket = Bucket(self._connection)
        parts = UploadParts(self._connection, client, bucket)
        super().__init__(config, Access(client, parts, bucket, requests), read_only=read_only)
        if value_bytes > config.part_size and not read_only:
            parts.start_clean_up(self._prefix)

    def close(self) -> None:
        """End the threads and the connections."""
        super().close()
        self._connection.close()

    def where(self) -> str:
        """Return which bucket this is and where, as the start of a line."""
        connection = self._connection
        return f"bucket {connection.config.bucket!r} at {connection.endpoint}, region {connection.region}"

    def more_of(self, _error: ObjectStoreError) -> str:
        """Return the region that the bucket names, if it is another one than configured."""
        region = self._bucket.region()
        return f" (it says {region!r})" if region and region != self._connection.region else ""

    def settings(self) -> Iterable[Finding]:
        """Examine the bucket's settings."""
        # Imported here: only `kvtiers check` asks.
        from kvtiers_s3.diagnosis import bucket_findings

        style = "virtual-host" if self._connection.is_virtual else "path"
        yield Finding("ok", f"{self.where()}, {style} addressing, values by {self._client.name}")
        yield Finding("ok", f"all requests go to {self._connection.route.endpoint} {self._connection.route}")
        yield from bucket_findings(self._bucket, self._prefix)


def open_client(connection: Connection) -> ValueClient:
    """Return the client that the options want; ConfigError if it is not installed."""
    wanted = connection.config.client
    # Each is imported only where it is chosen: the other one may not be installed, and costs a host some MB.
    if wanted != "boto3" and find_spec("obstore") is not None:
        from kvtiers_objectstore.obstore_client import ObstoreClient

        storage_class = connection.config.storage_class
        attributes = {"Storage-Class": storage_class} if storage_class else None
        return ObstoreClient(connection.obstore(), connection.requests, connection.failures, attributes)
    if wanted == "obstore":
        raise ConfigError("client 'obstore' is not installed; pip install obstore, or set 'client: boto3'")
    from kvtiers_s3.boto3_client import Boto3Client

    return Boto3Client(connection)
