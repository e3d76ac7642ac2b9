"""The store of the tier type ``gcs``: an object a value, by obstore, which speaks the service's XML API."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtiers.api import Finding
from kvtiers_gcs.config import GcsConfig
from kvtiers_gcs.credentials import Tokens
from kvtiers_gcs.failures import FAILURES
from kvtiers_objectstore.connecting import NO_RETRIES, client_options, read_certificates
from kvtiers_objectstore.obstore_bucket import ObstoreBucket, ObstoreParts
from kvtiers_objectstore.obstore_client import ObstoreClient
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.store import Access, ObjectStore

if TYPE_CHECKING:
    from obstore.store import GCSStore

__all__ = ["GcsStore", "open_obstore"]

_SERVICE = "https://storage.googleapis.com"
_PAGE = 1000


class GcsStore(ObjectStore):
    """Values as objects in a bucket of Google Cloud Storage."""

    def __init__(self, config: GcsConfig, *, read_only: bool = False) -> None:
        self._config = config
        self._endpoint = config.endpoint or _SERVICE
        self._tokens = Tokens(config)
        requests = Requests(config.put_price, config.get_price)
        attributes = {"Storage-Class": config.storage_class} if config.storage_class != "bucket" else None
        client = ObstoreClient(open_obstore(config, self._tokens), requests, FAILURES, attributes)
        parts = ObstoreParts(client, FAILURES, part_size=config.part_size, connections=config.connections, label="gcs")
        bucket = ObstoreBucket(client, parts, requests, page=_PAGE, deleted_at_once=1)
        super().__init__(config, Access(client, parts, bucket, requests), read_only=read_only)

    def _where(self) -> str:
        return f"bucket {self._config.bucket!r} at {self._endpoint}"

    def _settings(self) -> Iterable[Finding]:
        # Imported here: only `kvtiers check` asks.
        from kvtiers_gcs.bucket_settings import settings_findings

        yield Finding("ok", f"{self._where()}, values by {self._client.name}")
        yield from settings_findings(self._config, self._endpoint, lambda: self._tokens()["token"], self._prefix)


def open_obstore(config: GcsConfig, tokens: Tokens) -> "GCSStore":
    """Return obstore's store for the bucket; it never retries by itself."""
    from obstore.store import GCSStore

    endpoint = config.endpoint or _SERVICE
    return GCSStore(
        config.bucket,
        # Without these obstore would take its own from the environment.
        config={"base_url": endpoint, "skip_signature": False},
        client_options=client_options(config, endpoint, "kvtiers-gcs", read_certificates(config.ca_file)),
        retry_config=NO_RETRIES,
        credential_provider=tokens,
    )
