"""The store of the tier type ``azure``: a blob a value, by obstore."""

import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from ssl import SSLError
from urllib.parse import quote

from kvtiers.api import Finding
from kvtiers_azure.access import account_of, open_obstore, route_of
from kvtiers_azure.config import AzureConfig
from kvtiers_azure.failures import FAILURES
from kvtiers_objectstore.failures import Failures
from kvtiers_objectstore.obstore_bucket import ObstoreBucket, ObstoreParts
from kvtiers_objectstore.obstore_client import ObstoreClient
from kvtiers_objectstore.parts import Parts
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.route import Route
from kvtiers_objectstore.store import Access, ObjectStore

__all__ = ["AzureStore"]

_PAGE = 5000
_DELETED_AT_ONCE = 256  # Azure's bound on one batch


class AzureStore(ObjectStore):
    """Values as blobs in a container."""

    def __init__(self, config: AzureConfig, *, read_only: bool = False) -> None:
        self._config = config
        self._route = route = route_of(config)
        failures = replace(FAILURES, proxy=route.shown_proxy)
        requests = Requests(config.put_price, config.get_price)
        attributes = {"Storage-Class": config.access_tier} if config.access_tier != "account" else None
        client = ObstoreClient(open_obstore(config, route), requests, failures, attributes)
        parts = ObstoreParts(
            client, failures, part_size=config.part_size, connections=config.connections, label="azure"
        )
        bucket = (
            SignedContainer(config, route, failures, client, parts, requests)
            if account_of(config).sas
            else ObstoreBucket(client, parts, requests, page=_PAGE, deleted_at_once=_DELETED_AT_ONCE)
        )
        super().__init__(config, Access(client, parts, bucket, requests), read_only=read_only)

    def where(self) -> str:
        """Return which container this is and where, as the start of a line."""
        return f"container {self._config.container!r} at {self._route.endpoint}"

    def settings(self) -> Iterable[Finding]:
        """Say which container is used and how it is reached."""
        yield Finding("ok", f"{self.where()}, values by {self._client.name}")
        yield Finding("ok", f"all requests but those for tokens go {self._route}")
        prefix = f" --prefix {self._config.prefix}" if self._config.prefix else ""
        yield Finding(
            "ok",
            "whether a rule removes old values is not shown to who reads and writes blobs; "
            f"'kvtiers-azure lifecycle --days N --container {self._config.container}{prefix}' prints one",
        )


class SignedContainer(ObstoreBucket):
    """The container by a shared access signature, one blob a delete: obstore has batches only, which may refuse one."""

    def __init__(
        self,
        config: AzureConfig,
        route: Route,
        failures: Failures,
        client: ObstoreClient,
        parts: Parts,
        requests: Requests,
    ) -> None:
        super().__init__(client, parts, requests, page=_PAGE, deleted_at_once=1)
        self._config = config
        self._route, self._failures = route, failures

    def delete_one(self, key: str) -> None:
        account = account_of(self._config)
        url = f"{account.endpoint}/{self._config.container}/{quote(key)}?{account.sas}"
        request = urllib.request.Request(url, method="DELETE")  # noqa: S310 -- http or https, as the options are checked
        try:
            self._route.open(request, timeout=self._config.timeout).close()
        except urllib.error.HTTPError as error:
            with error:
                code = self._failures.code_of(error.read().decode("utf-8", "replace"))
            if error.code != 404 or code in self._failures.absent_place:
                raise self._client.count(self._failures.failure(f"DELETE {key}", error.code, code)) from None
        except OSError as error:
            raise self._client.count(self._failures.failure(f"DELETE {key}", 0, _cause(error))) from None


def _cause(error: OSError) -> str:
    match getattr(error, "reason", error):
        case TimeoutError():
            return "Timeout"
        case SSLError():
            return "Certificate"
    return "NoConnection"
