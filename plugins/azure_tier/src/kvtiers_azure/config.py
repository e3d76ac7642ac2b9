"""Options of the tier type ``azure``."""

import contextlib
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvtiers.api import Duration, Secret, Size, TierConfig

__all__ = ["AzureConfig"]

_PART = re.compile(r"[A-Za-z0-9!_.*'()-]+")
_CONTAINER = re.compile(r"[a-z0-9](?!.*--)[a-z0-9-]{1,61}[a-z0-9]|\$root")
_OF_ACCOUNT = re.compile(r"(?:^|;)\s*AccountName\s*=\s*([^;\s]+)", re.IGNORECASE)
_LEAST_PART = 1 << 20
_MOST_PART = 4000 << 20  # Azure's own bound on a block


class AzureConfig(TierConfig):
    """The options of an ``azure`` tier."""

    threads: int = Field(default=32, ge=1, le=256, description="transfers at the same time, in each tier host")

    container: str = Field(description="the container; it must exist")
    account: str = Field(default="", description="the storage account; default: that of the connection string")
    prefix: str = Field(default="", description="what all names start with, without the '/' at its end")
    endpoint: str = Field(
        default="", description="URL of the blob service; default: https://ACCOUNT.blob.core.windows.net"
    )
    emulator: bool = Field(default=False, description="Azurite with its well-known account, at 127.0.0.1:10000")

    connection_string: Secret | None = Field(default=None, description="connection string of the account")
    account_key: Secret | None = Field(default=None, description="a key of the account")
    sas: Secret | None = Field(default=None, description="shared access signature, of the container or the account")
    identity: Literal["auto", "managed", "workload", "service-principal", "azure-cli"] = Field(
        default="auto", description="Entra ID identity where no key and no sas is given; auto: by AZURE_* variables"
    )
    tenant: str = Field(default="", description="tenant of a service principal or workload; default: AZURE_TENANT_ID")
    client_id: str = Field(default="", description="client id of the identity; default: AZURE_CLIENT_ID")
    client_secret: Secret | None = Field(default=None, description="secret of a service principal")
    token_file: Path | None = Field(default=None, description="file with a workload's token; default: AKS's own")
    authority: str = Field(default="", description="who gives out tokens; default: https://login.microsoftonline.com")
    ca_file: Path | None = Field(default=None, description="certificates (PEM) of a private authority")

    access_tier: Literal["account", "Hot", "Cool", "Cold"] = Field(
        default="account", description="access tier of the blobs; account: the account's own setting"
    )
    conditional_put: bool = Field(default=False, description="never write over a blob of the same length")

    connections: int = Field(
        default=32, ge=1, le=1024, description="connections kept, and parts moved at a time, in each tier host"
    )
    timeout: Duration = Field(default=10.0, gt=0, description="longest time of one request, body included")
    connect_timeout: Duration = Field(default=3.0, gt=0, description="longest time to establish a connection")
    part_size: Size = Field(
        default=16 << 20, ge=_LEAST_PART, le=_MOST_PART, description="larger values are moved in parts of this size"
    )
    put_price: float = Field(default=0.0065, ge=0, description="US dollars for 1,000 write and list operations")
    get_price: float = Field(default=0.0005, ge=0, description="US dollars for 1,000 read operations")

    @property
    def place(self) -> str:
        """The account's endpoint, or the account, the container and the prefix."""
        account = self.endpoint or self.account or ("emulator" if self.emulator else "")
        if not account and self.connection_string is not None:
            with contextlib.suppress(OSError, UnicodeDecodeError):  # a file that was readable when it was checked
                named = _OF_ACCOUNT.search(self.connection_string.reveal())
                account = named[1] if named else ""
        return f"{account} {self.container}/{self.prefix}" if account else ""

    @field_validator("container")
    @classmethod
    def _is_a_container(cls, container: str) -> str:
        if not _CONTAINER.fullmatch(container):
            raise ValueError("expected 3 to 63 of a-z, 0-9 and single '-', with a letter or digit at both ends")
        return container

    @field_validator("prefix")
    @classmethod
    def _is_a_prefix(cls, prefix: str) -> str:
        parts = prefix.split("/") if prefix else []
        if not all(_PART.fullmatch(part) and set(part) != {"."} for part in parts):
            raise ValueError("expected parts of letters, digits and !_.*'()- with '/' between them, none at the ends")
        return prefix

    @field_validator("endpoint", "authority")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://[^/?#\s]+(/[^/?#\s]*)?/?", url):
            raise ValueError("expected 'https://HOST' or 'http://HOST', with ':PORT' and, of an emulator, '/ACCOUNT'")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _fits_together(self) -> "AzureConfig":
        given = [name for name in ("connection_string", "account_key", "sas") if getattr(self, name) is not None]
        given += ["identity"] if self.identity != "auto" else []
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are several sources of credentials: give one")
        if self.emulator and given:
            raise ValueError(f"an emulator has its well-known key, and {given[0]} is another: give one")
        if not (self.account or self.connection_string is not None or self.emulator):
            raise ValueError("account is missing; only a connection_string or an emulator says it, too")
        if (self.client_secret is not None) != (self.identity == "service-principal"):
            raise ValueError("client_secret and 'identity: service-principal' go together, with tenant and client_id")
        if self.identity == "service-principal" and not (self.tenant and self.client_id):
            raise ValueError("a service principal needs tenant, client_id and client_secret")
        if self.token_file is not None and self.identity != "workload":
            raise ValueError("token_file needs 'identity: workload'")
        if self.timeout > self.deadline:
            raise ValueError(f"timeout ({self.timeout:g} s) is longer than the tier's deadline ({self.deadline:g} s)")
        return self
