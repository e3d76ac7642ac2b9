"""The store of the tier type ``s3``: an object a value, in one bucket, for many processes and machines at once."""

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec

from kvtiers.api import ChunkStore, ConfigError, Finding, StoreEntry, TierUnavailable
from kvtiers_s3.bucket import Bucket
from kvtiers_s3.client.base import ValueClient, read_into
from kvtiers_s3.config import S3Config
from kvtiers_s3.connection import Connection
from kvtiers_s3.failures import S3BusyError, S3Error
from kvtiers_s3.parts import Parts
from kvtiers_s3.requests import Requests

__all__ = ["S3Store", "open_client"]

_NO_OBJECT = "_kvtiers/absent"


class S3Store(ChunkStore):
    """Values as objects under one prefix. Opening it makes one request, for an object that is not there.

    ``value_bytes``: the largest value's length; values that are moved in parts may leave uploads to clean up.
    """

    transient_errors = (S3BusyError,)
    exists_per_call = 1

    def __init__(self, config: S3Config, *, value_bytes: int = 0, read_only: bool = False) -> None:
        self._config = config
        self._read_only = read_only
        self._prefix = f"{config.prefix}/" if config.prefix else ""
        self._requests = Requests(config.put_price, config.get_price)
        self._connection = Connection(config, self._requests)
        self._client = open_client(self._connection)
        self._bucket = Bucket(self._connection)
        self._parts = Parts(self._connection, self._client, self._bucket)
        try:
            # Not a HEAD: its answers have no body, and so do not say what is wrong.
            read_into(self._client, self._prefix + _NO_OBJECT, memoryview(b""), 0, 0)
        except S3BusyError as error:
            self.close()
            raise TierUnavailable(f"{self._where()}: {error}") from None
        except S3Error as error:
            region = self._bucket.region()
            self.close()
            more = f" (it says {region!r})" if region and region != self._connection.region else ""
            raise ConfigError(f"{self._where()}: {error}{more}") from None
        if value_bytes > config.part_size and not read_only:
            self._parts.start_clean_up(self._prefix)

    def read_into(self, name: str, dst: memoryview) -> bool:
        """Read the object, a large one in ranges."""
        key = self._prefix + name
        if len(dst) > self._config.part_size:
            return self._parts.read(key, dst)
        return read_into(self._client, key, dst, 0, len(dst)) is not None

    def reads_in_pieces(self, nbytes: int) -> bool:
        """Return whether a value is read in pieces: large ones are read in parallel ranges, straight into the row."""
        return nbytes <= self._config.part_size

    def read_pieces(self, name: str, nbytes: int) -> Iterable[bytes | memoryview] | None:
        """Read the object in one request."""
        body = self._client.get(self._prefix + name, 0, nbytes, nbytes)
        return None if body is None else body.pieces

    def write(self, name: str, src: memoryview) -> None:
        """Put the object, a large one as an upload in parts. StoreFull when a quota is used up."""
        self._expect_writable()
        key = self._prefix + name
        put = self._parts.write if len(src) > self._config.part_size else self._client.write
        only_new = self._config.conditional_put
        # One of another length would be a miss for ever: it is no reason to leave it there.
        if not put(key, src, only_new=only_new) and self._client.size(key) != len(src):
            put(key, src, only_new=False)

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Ask for the head of each object."""
        return [self._client.size(self._prefix + name) is not None for name in names]

    def delete(self, names: Sequence[str]) -> None:
        """Delete the objects, up to 1,000 in one request."""
        self._expect_writable()
        self._bucket.delete([self._prefix + name for name in names])

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """List the objects, 1,000 in one request; ``modified`` is when a value was written."""
        for key, nbytes, modified in self._bucket.objects(self._prefix + prefix):
            yield StoreEntry(key.removeprefix(self._prefix), nbytes, modified.timestamp())

    def diagnose(self, value_bytes: int) -> Sequence[Finding]:
        """Examine the bucket's rules, and the cost of a request compared with the bytes that it moves."""
        # Imported here: only `kvtiers check` asks.
        from kvtiers_s3.diagnosis import bucket_findings, speed_findings

        style = "virtual-host" if self._connection.is_virtual else "path"
        findings = [Finding("ok", f"{self._where()}, {style} addressing, values by {self._client.name}")]
        findings += bucket_findings(self._bucket, self._prefix)
        if not self._read_only:
            findings += speed_findings(self, value_bytes)
        return findings

    def stats(self) -> Mapping[str, float]:
        """Return the requests by kind, the bytes, and what the requests cost."""
        return self._requests.figures()

    def close(self) -> None:
        """End the threads and the connections."""
        self._parts.close()
        self._client.close()
        self._connection.close()

    def _where(self) -> str:
        connection = self._connection
        return f"bucket {self._config.bucket!r} at {connection.endpoint or 'AWS'}, region {connection.region}"

    def _expect_writable(self) -> None:
        if self._read_only:
            raise PermissionError(errno.EROFS, "this tier is read-only", self._config.bucket)


def open_client(connection: Connection) -> ValueClient:
    """Return the client that the options want; ConfigError if it is not installed."""
    wanted = connection.config.client
    # Each is imported only where it is chosen: the other one may not be installed, and costs a host some MB.
    if wanted != "boto3" and find_spec("obstore") is not None:
        from kvtiers_s3.client.obstore import ObstoreClient

        return ObstoreClient(connection)
    if wanted == "obstore":
        raise ConfigError("client 'obstore' is not installed; pip install obstore, or set 'client: boto3'")
    from kvtiers_s3.client.boto3 import Boto3Client

    return Boto3Client(connection)
