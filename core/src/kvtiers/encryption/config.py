"""The config of encryption: the sources of the live keys. No option has a key itself, so no dump of a config does."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from kvtiers.api import Duration, StrictModel, TierConfig
from kvtiers.api.units import RESOLVED

__all__ = ["EncryptionConfig", "KeySource", "dump_sources", "encryption_of", "load_sources", "refuse_key"]


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAY_BE_A_KEY = re.compile(r"[A-Za-z0-9+/_-]{43}=?|[0-9A-Fa-f]{64}")
_SOURCES = "{file: PATH}, {env: NAME} or {command: [PROGRAM, ...]}"


class KeySource(StrictModel):
    """The place of one key of 32 bytes: exactly one of ``file``, ``env`` and ``command``."""

    file: str | None = Field(
        default=None, min_length=1, description="file with the key: 32 bytes as base64, or the bytes themselves"
    )
    env: str | None = Field(default=None, description="environment variable with the key, as base64")
    command: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="program, as of a KMS, and its arguments: prints the key; has the namespace in KVTIERS_NAMESPACE",
    )
    # Two commands have to end before the engine takes their tier host for hung, after 30 s.
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


class EncryptionConfig(StrictModel):
    """The live keys of the config's namespace: what is written has ``key``, what is read has either."""

    key: KeySource = Field(description="where the key is from that values are sealed and named with")
    previous: KeySource | None = Field(
        default=None, description="where a second key is from, whose values are still read; while keys are rotated"
    )

    @field_validator("key", "previous", mode="before")
    @classmethod
    def _is_no_key(cls, value: object) -> object:
        return refuse_key(value, _SOURCES)


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
