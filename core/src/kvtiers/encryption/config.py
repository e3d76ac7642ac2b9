"""The config of encryption: the sources of the live keys. No option has a key itself, so no dump of a config does.

Requests without a tenant have the keys at the top, and so have tenants that are not under ``tenants``, unless it has
``"*"``, which says where each of these has its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from kvtiers.api import Duration, StrictModel, TierConfig
from kvtiers.api.config import EACH_OTHER_TENANT
from kvtiers.api.keys import TENANT
from kvtiers.api.units import RESOLVED

__all__ = [
    "EncryptionConfig", "KeySource", "TenantKeys", "dump_sources", "encryption_of", "load_sources", "may_be_a_key",
    "refuse_key",
]  # fmt: skip


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAY_BE_A_KEY = re.compile(r"[A-Za-z0-9+/_-]{43}=?|[0-9A-Fa-f]{64}")
_SOURCES = "{file: PATH}, {env: NAME} or {command: [PROGRAM, ...]}"
_LONGEST_TENANT = 60  # with a namespace of one character
_NAME = "{tenant}"


class KeySource(StrictModel):
    """The place of one key of 32 bytes: exactly one of ``file``, ``env`` and ``command``."""

    file: str | None = Field(
        default=None, min_length=1, description="file with the key: 32 bytes as base64, or the bytes themselves"
    )
    env: str | None = Field(default=None, description="environment variable with the key, as base64")
    command: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="program, as of a KMS, and its arguments: prints the key; has the namespace in KVTIERS_NAMESPACE "
        "and the tenant in KVTIERS_TENANT",
    )
    # The namespace's two, then 5 s for those of tenants, have to end before the engine takes their tier host for hung,
    # after 30 s.
    timeout: Duration = Field(
        default=10.0, gt=0, le=10, description="longest time that the command may take; 10s at most"
    )

    @field_validator("file", "env", "command", mode="before")
    @classmethod
    def _is_no_key(cls, value: object, info: ValidationInfo) -> object:
        # A key that was written here by mistake must not stand in the line about it.
        if info.field_name == "command" and not isinstance(value, list | tuple | None):
            raise ValueError("expected a list: a program and its arguments")
        if isinstance(value, str) and _MAY_BE_A_KEY.fullmatch(value):
            raise ValueError("this looks like the key itself; expected where it is from")
        if info.field_name == "env" and isinstance(value, str) and not _VARIABLE.fullmatch(value):
            raise ValueError("expected the name of an environment variable")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> "KeySource":
        given = [name for name in ("file", "env", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of 'file', 'env' and 'command', got {' and '.join(given) or 'none'}")
        return self

    def in_words(self) -> str:
        """Return where the key is from, without arguments of a command, which may be secrets."""
        if self.file is not None:
            return f"file {self.file}"
        return f"variable {self.env}" if self.env is not None else f"command {(self.command or ('',))[0]}"

    def of_tenant(self, tenant: str) -> "KeySource":
        """Return the source of one tenant of those that ``"*"`` stands for; the name is one that may stand in names."""
        assert self.file is not None, "'*' has files alone"
        return self.model_copy(update={"file": self.file.replace(_NAME, tenant)})

    @property
    def folder(self) -> Path:
        """The folder that has the files of all tenants, or their folders, of a source that ``"*"`` has."""
        assert self.file is not None, "'*' has files alone"
        return Path(self.file.partition(_NAME)[0] + "_").parent


class TenantKeys(StrictModel):
    """The live keys of one tenant: what is written has ``key``, what is read has either."""

    key: KeySource = Field(description="where the key is from that values are sealed and named with")
    previous: KeySource | None = Field(
        default=None, description="where a second key is from, whose values are still read; while keys are rotated"
    )

    @field_validator("key", "previous", mode="before")
    @classmethod
    def _is_no_key(cls, value: object) -> object:
        return refuse_key(value, _SOURCES)

    @property
    def runs_a_command(self) -> bool:
        """Return whether a program has to be run for one of them."""
        return any(source is not None and source.command is not None for source in (self.key, self.previous))

    def of_tenant(self, tenant: str) -> "TenantKeys":
        """Return the sources of one tenant of those that ``"*"`` stands for."""
        previous = None if self.previous is None else self.previous.of_tenant(tenant)
        return self.model_copy(update={"key": self.key.of_tenant(tenant), "previous": previous})


class EncryptionConfig(TenantKeys):
    """The live keys of the config's namespace, and those of tenants that have keys of their own."""

    tenants: dict[str, TenantKeys] = Field(
        default_factory=dict,
        description="tenants with keys of their own, each as here: 'key', and 'previous' while it is rotated; '*': of "
        "each other tenant: a file, with '{tenant}' in its path",
    )

    @field_validator("tenants", mode="before")
    @classmethod
    def _have_no_key(cls, tenants: object) -> object:
        tenants = refuse_key(tenants, "a mapping of tenants, each with 'key'")
        for name, sources in tenants.items() if isinstance(tenants, Mapping) else ():
            if may_be_a_key(str(name)):
                raise ValueError("a name here looks like a key; expected tenants, each with 'key'")
            refuse_key(sources, f"a mapping with 'key' for {str(name)!r}")
        return tenants

    @field_validator("tenants")
    @classmethod
    def _differ(cls, tenants: dict[str, TenantKeys]) -> dict[str, TenantKeys]:
        others = tenants.get(EACH_OTHER_TENANT)
        for source in () if others is None else (others.key, others.previous):
            if source is not None and _NAME not in (source.file or ""):
                raise ValueError(f"'*': expected a file with {_NAME!r} in its path: each tenant has its own")
        return tenants

    def of(self, tenant: str) -> TenantKeys:
        """Return where a tenant's keys come from; "": those of requests without one."""
        if tenant in self.tenants or not self.has_own(tenant):
            return self.tenants.get(tenant, self)
        return self.tenants[EACH_OTHER_TENANT].of_tenant(tenant)

    def has_own(self, tenant: str) -> bool:
        """Return whether a tenant has keys of its own, listed or by ``"*"``."""
        return tenant in self.tenants or (bool(tenant) and self.others_have_own)

    @property
    def others_have_own(self) -> bool:
        """Return whether tenants that are not listed have keys of their own."""
        return EACH_OTHER_TENANT in self.tenants

    @property
    def listed(self) -> list[str]:
        """The tenants that are named here."""
        return [tenant for tenant in self.tenants if tenant != EACH_OTHER_TENANT]

    @property
    def has_two_keys(self) -> bool:
        """Return whether anywhere two keys live, so that values are to be carried over."""
        return any(sources.previous is not None for sources in (self, *self.tenants.values()))


def may_be_a_key(name: str) -> bool:
    """Return whether what stands in the place of a tenant's name is rather a key, written there by mistake."""
    return bool(_MAY_BE_A_KEY.fullmatch(name)) and not (TENANT.fullmatch(name) and len(name) <= _LONGEST_TENANT)


def refuse_key(value: object, expected: str) -> object:
    """Return what was written in the place of a mapping if it is one; it is not shown else, as it may be a key."""
    if value is None or isinstance(value, Mapping | BaseModel):
        return value
    raise ValueError(f"expected {expected}")


def encryption_of(tier: TierConfig, encryption: EncryptionConfig | None) -> EncryptionConfig | None:
    """Return the encryption of a tier's values; None if they are stored in clear."""
    return encryption if tier.encrypt else None


def dump_sources(encryption: EncryptionConfig) -> dict[str, Any]:
    """Return where the keys come from, as JSON values for ``load_sources`` in another process; no key is read."""
    return encryption.model_dump(mode="json", exclude_none=True, context={RESOLVED: True})


def load_sources(data: dict[str, Any]) -> EncryptionConfig:
    """Rebuild a config from ``dump_sources``: no variable is read again, no unit is asked for."""
    return EncryptionConfig.model_validate(data, context={RESOLVED: True})
