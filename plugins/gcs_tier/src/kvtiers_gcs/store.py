"""The store of the tier type ``gcs``: an object a value, by obstore, which speaks the service's XML API."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtiers.api import Finding
from kvtiers_gcs.config import GcsConfig
from kvtiers_gcs.credentials import Tokens
from kvtiers_gcs.failures import FAILURES
from kvtiers_objectstore.connecting import NO_RETRIES, client_options, making_a_client
from kvtiers_objectstore.obstore_bucket import ObstoreBucket, ObstoreParts
from kvtiers_objectstore.obstore_client import ObstoreClient
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.route import Route, find_route
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
        self._route = find_route(config.endpoint or _SERVICE, ("ca_file", config.ca_file))
        self._failures = replace(FAILURES, proxy=self._route.shown_proxy)
        self._tokens = Tokens(config)
        requests = Requests(config.put_price, config.get_price)
        attributes = {"Storage-Class": config.storage_class} if config.storage_class != "bucket" else None
        failures = self._failures
        client = ObstoreClient(open_obstore(config, self._route, self._tokens), requests, failures, attributes)
        parts = ObstoreParts(client, failures, part_size=config.part_size, connections=config.connections, label="gcs")
        bucket = ObstoreBucket(client, parts, requests, page=_PAGE, deleted_at_once=1)
        super().__init__(config, Access(client, parts, bucket, requests), read_only=read_only)

    def where(self) -> str:
        """Return which bucket this is and where, as the start of a line."""
        return f"bucket {self._config.bucket!r} at {self._route.endpoint}"

    def settings(self) -> Iterable[Finding]:
        """Examine the bucket's settings."""
        # Imported here: only `kvtiers check` asks.
        from kvtiers_gcs.bucket_settings import settings_findings

        yield Finding("ok", f"{self.where()}, values by {self._client.name}")
        yield Finding("ok", f"all requests but those for tokens go {self._route}")
        yield from settings_findings(
            self._config, self._route, self._failures, lambda: self._tokens()["token"], self._prefix
        )


def open_obstore(config: GcsConfig, route: Route, tokens: Tokens) -> "GCSStore":
    """Return obstore's store for the bucket; it never retries by itself."""
    from obstore.store import GCSStore

    with making_a_client():
        return GCSStore(
            config.bucket,
            # Without these obstore would take its own from the environment.
            config={"base_url": route.endpoint, "skip_signature": False},
            client_options=client_options(config, route, "kvtiers-gcs"),
            retry_config=NO_RETRIES,
            credential_provider=tokens,
        )
