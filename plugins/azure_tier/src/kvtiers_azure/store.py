"""The store of the tier type ``azure``: a blob a value, by obstore."""

import urllib.error
import urllib.request
from collections.abc import Iterable
from ssl import SSLError, create_default_context
from urllib.parse import quote

from kvtiers.api import Finding
from kvtiers_azure.access import account_of, open_obstore
from kvtiers_azure.config import AzureConfig
from kvtiers_azure.failures import FAILURES
from kvtiers_objectstore.obstore_bucket import ObstoreBucket, ObstoreParts
from kvtiers_objectstore.obstore_client import ObstoreClient
from kvtiers_objectstore.parts import Parts
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.store import Access, ObjectStore

__all__ = ["AzureStore"]

_PAGE = 5000
_DELETED_AT_ONCE = 256  # Azure's bound on one batch


class AzureStore(ObjectStore):
    """Values as blobs in a container."""

    def __init__(self, config: AzureConfig, *, read_only: bool = False) -> None:
        self._config = config
        account = account_of(config)
        self._endpoint = account.endpoint
        requests = Requests(config.put_price, config.get_price)
        attributes = {"Storage-Class": config.access_tier} if config.access_tier != "account" else None
        client = ObstoreClient(open_obstore(config), requests, FAILURES, attributes)
        parts = ObstoreParts(
            client, FAILURES, part_size=config.part_size, connections=config.connections, label="azure"
        )
        bucket = (
            SignedContainer(config, client, parts, requests)
            if account.sas
            else ObstoreBucket(client, parts, requests, page=_PAGE, deleted_at_once=_DELETED_AT_ONCE)
        )
        super().__init__(config, Access(client, parts, bucket, requests), read_only=read_only)

    def _where(self) -> str:
        return f"container {self._config.container!r} at {self._endpoint}"

    def _settings(self) -> Iterable[Finding]:
        yield Finding("ok", f"{self._where()}, values by {self._client.name}")
        prefix = f" --prefix {self._config.prefix}" if self._config.prefix else ""
        yield Finding(
            "ok",
            "whether a rule removes old values is not shown to who reads and writes blobs; "
            f"'kvtiers-azure lifecycle --days N --container {self._config.container}{prefix}' prints one",
        )


class SignedContainer(ObstoreBucket):
    """The container by a shared access signature, one blob a delete: obstore has batches only, which may refuse one."""

    def __init__(self, config: AzureConfig, client: ObstoreClient, parts: Parts, requests: Requests) -> None:
        super().__init__(client, parts, requests, page=_PAGE, deleted_at_once=1)
        self._config = config
        uses_tls = account_of(config).endpoint.startswith("https://")
        self._tls = create_default_context(cafile=config.ca_file) if uses_tls else None

    def _delete_one(self, key: str) -> None:
        account = account_of(self._config)
        url = f"{account.endpoint}/{self._config.container}/{quote(key)}?{account.sas}"
        request = urllib.request.Request(url, method="DELETE")  # noqa: S310 -- http or https, as the options are checked
        try:
            urllib.request.urlopen(request, timeout=self._config.timeout, context=self._tls).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            with error:
                code = FAILURES.code_of(error.read().decode("utf-8", "replace"))
            if error.code != 404 or code in FAILURES.absent_place:
                raise self._client.count(FAILURES.failure(f"DELETE {key}", error.code, code)) from None
        except OSError as error:
            raise self._client.count(FAILURES.failure(f"DELETE {key}", 0, _cause(error))) from None


def _cause(error: OSError) -> str:
    match getattr(error, "reason", error):
        case TimeoutError():
            return "Timeout"
        case SSLError():
            return "Certificate"
    return "NoConnection"
