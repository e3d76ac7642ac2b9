"""The way into an account: where it is, who asks, and obstore's store for a container."""

import base64
import binascii
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtiers.api import ConfigError, Secret
from kvtiers_azure.config import AzureConfig
from kvtiers_objectstore.connecting import NO_RETRIES, client_options, making_a_client
from kvtiers_objectstore.route import Route, find_route

if TYPE_CHECKING:
    from obstore.store import AzureConfig as ObstoreConfig
    from obstore.store import AzureCredential

__all__ = ["Account", "account_of", "open_obstore", "route_of"]

# Azurite's account and key, which its documentation gives: no secret.
_EMULATOR = "devstoreaccount1"
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_EMULATOR_URL = "http://127.0.0.1:10000"
_IDENTITIES = {
    "managed": "managed_identity",
    "workload": "workload_identity",
    "service-principal": "client_secret",
    "azure-cli": "azure_cli",
    "auto": "auto",
}
# obstore asks again when five minutes or less are left, so that what it holds is never older than one.
_ACCEPTED_FOR = timedelta(minutes=6)


class Account(NamedTuple):
    """A storage account: its name, the URL of its blob service, and a key or a signature where it has one."""

    name: str
    endpoint: str
    key: str = ""
    sas: str = ""


def account_of(config: AzureConfig) -> Account:
    """Return the account that the options name, with the key as it is now; ConfigError for what cannot be used."""
    if config.emulator:
        return Account(_EMULATOR, config.endpoint or f"{_EMULATOR_URL}/{_EMULATOR}", key=_EMULATOR_KEY)
    given = _settings(config.connection_string)
    name = config.account or given.get("accountname", "")
    if not name and "blobendpoint" not in given:
        raise ConfigError("connection_string has neither AccountName nor BlobEndpoint; copy it as the portal shows it")
    key = config.account_key.reveal() if config.account_key else given.get("accountkey", "")
    sas = config.sas.reveal() if config.sas else given.get("sharedaccesssignature", "")
    _expect_base64(key)
    protocol = given.get("defaultendpointsprotocol", "https")
    suffix = given.get("endpointsuffix", "core.windows.net")
    endpoint = config.endpoint or given.get("blobendpoint", "") or f"{protocol}://{name}.blob.{suffix}"
    return Account(name or endpoint.partition("://")[2].partition(".")[0], endpoint.rstrip("/"), key, sas.lstrip("?"))


def _settings(connection_string: Secret | None) -> dict[str, str]:
    if connection_string is None:
        return {}
    pairs = [part.partition("=") for part in connection_string.reveal().strip().split(";") if part]
    found = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if found.get("usedevelopmentstorage", "").lower() == "true":
        return {"accountname": _EMULATOR, "accountkey": _EMULATOR_KEY, "blobendpoint": f"{_EMULATOR_URL}/{_EMULATOR}"}
    return found


def _expect_base64(key: str) -> None:
    try:
        base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("the account key is not base64; copy it as the portal shows it") from None


def route_of(config: AzureConfig) -> Route:
    """Return the way to the account's endpoint."""
    return find_route(account_of(config).endpoint, ("ca_file", config.ca_file))


def open_obstore(config: AzureConfig, route: Route) -> Any:
    """Return obstore's store for the container; it never retries by itself."""
    from obstore.store import AzureStore

    account = account_of(config)
    has_keys = bool(account.key or account.sas)
    with making_a_client("credentials cannot be obtained"):
        return AzureStore(
            config.container,
            config=_identity(config, account, has_keys=has_keys),
            client_options=client_options(config, route, "kvtiers-azure", other_hosts=not has_keys),
            retry_config=NO_RETRIES,
            # By this, keys in files are read again.
            credential_provider=(lambda: _issue(config)) if has_keys else None,
        )


def _identity(config: AzureConfig, account: Account, *, has_keys: bool) -> "ObstoreConfig":
    # Without these obstore would take its own from the environment.
    options: ObstoreConfig = {
        "account_name": account.name,
        "endpoint": account.endpoint,
        "use_emulator": False,
        "skip_signature": False,
        "use_fabric_endpoint": False,
    }
    if has_keys:
        return options
    options["credential_type"] = _IDENTITIES[config.identity]
    if config.client_id:
        options["client_id"] = config.client_id
    if config.tenant:
        options["tenant_id"] = config.tenant
    if config.client_secret is not None:
        options["client_secret"] = config.client_secret.reveal()
    if config.authority:
        options["authority_host"] = config.authority
    if config.token_file is not None:
        options["federated_token_file"] = str(config.token_file)
    return options


def _issue(config: AzureConfig) -> "AzureCredential":
    account = account_of(config)
    until = datetime.now(UTC) + _ACCEPTED_FOR
    if account.sas:
        return {"sas_token": account.sas, "expires_at": until}
    return {"access_key": account.key, "expires_at": until}
