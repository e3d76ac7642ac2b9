"""Storage names: the one place where a value's name in a store is built or taken apart.

``{namespace}[/t-{tenant}]/{model slug}-{fingerprint, 24 hex}/{key hex}``, lower case. Parts whose first character is
``_`` are core's own; ``t-{tenant}`` stands in the names of keys that have a tenant, and the key behind it has none.
Names of encrypted values end in ``k{key id, 8 hex}{80 hex}`` (``encryption/keyed_names.py``), which is format 2.
Those of long keys, below, are format 3: no engine known has such keys, callers of ``open_client`` may.

Namespace and slug have at most 64 characters each, and a key of more than 47 bytes (a block hash of more than 43)
stands in a name as ``h{its SHA-256}{its group}``: so a name has at most 64 + 1 + 64 + 1 + 24 + 1 + 94 = 249 characters,
and fits where keys may have 250, as in memcached. vLLM's block hashes, of up to 32 bytes, give 227. A tenant takes its
characters from the namespace's: together they have at most 61.

Two keys never have one name: a short key stands in its name as it is, and a seal binds a value to its name alone. The
``h``, which is no hex digit, keeps the name of a long key apart from that of the short key that is this very hash.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvtiers.api import ConfigError, OffloadKey
from kvtiers.api.keys import TENANT, tenant_of, without_tenant
from kvtiers.layout.cache_layout import CacheLayout

__all__ = [
    "KEYED",
    "ParsedName",
    "StorageNames",
    "ValueName",
    "check_namespace",
    "check_tenant",
    "model_slug",
    "parse_name",
]

NAME_FORMAT = 1
KEYED_NAME_FORMAT = 2
HASHED_NAME_FORMAT = 3
KEYED = "k"
"""The first character of the last part of a keyed name: no hex digit."""
_HASHED = "h"  # that of the name of a long key, which has a hash of it
_FINGERPRINT_HEX = 24
_LAYOUT_ID_HEX = 16
_SLUG_LENGTH = 64
_LONGEST_KEY = 47
_GROUP_BYTES = 4
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_WITH_TENANT = 61  # characters of a namespace and a tenant: "/t-" is the rest of 64
_NAME = re.compile(
    r"(?P<namespace>[a-z0-9][a-z0-9._-]{0,63})/(?:t-(?P<tenant>[a-z0-9._-]+)/)?"
    rf"(?P<model>[a-z0-9][a-z0-9._-]*)-(?P<fingerprint>[0-9a-f]{{{_FINGERPRINT_HEX}}})/"
    rf"(?:(?P<key>(?:[0-9a-f]{{2}})+)|{_HASHED}(?P<hashed>[0-9a-f]{{72}})"
    rf"|{KEYED}(?P<key_id>[0-9a-f]{{8}})(?P<hidden>[0-9a-f]{{80}}))"
)


def check_namespace(namespace: str) -> str:
    """Return the namespace if it can stand in a storage name, else raise ConfigError."""
    if not _NAMESPACE.fullmatch(namespace) or namespace.startswith("t-") or ".." in namespace:
        raise ConfigError(
            f"namespace {namespace!r} cannot be used; expected 1 to 64 of a-z 0-9 . _ -, first a letter or digit, "
            "no '..', not starting with 't-'"
        )
    return namespace


def check_tenant(tenant: str, namespace: str = "") -> str:
    """Return the tenant if it can stand in a storage name behind this namespace, else raise ConfigError."""
    if not TENANT.fullmatch(tenant) or ".." in tenant:
        raise ConfigError(
            f"tenant {tenant[:80]!r} cannot be used; expected 1 to 64 of a-z 0-9 . _ -, first a letter or digit, "
            "no '..'"
        )
    if len(namespace) + len(tenant) > _WITH_TENANT:
        raise ConfigError(
            f"tenant {tenant!r} cannot be used: it has {len(tenant)} characters, the namespace {len(namespace)}; "
            f"expected at most {_WITH_TENANT} together"
        )
    return tenant


def model_slug(name: str) -> str:
    """Return the model's name as a part of a storage name. Two may share one: their fingerprints differ."""
    slug = re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip(".-")
    return re.sub(r"\.{2,}", ".", slug)[:_SLUG_LENGTH].strip(".-") or "model"


@dataclass(slots=True)  # not frozen: that costs as much as the rest of making one, for each value
class ValueName:
    """What a value is sealed for: its storage name (``text``), and the layout id that stands in its seal."""

    text: str
    layout_id: bytes


@dataclass(frozen=True, slots=True)
class StorageNames:
    """The names of one model's values: ``prefix`` (ends with ``/``), and the layout id that stands in their seals."""

    prefix: str
    layout_id: bytes

    @classmethod
    def of_layout(cls, namespace: str, layout: CacheLayout) -> "StorageNames":
        """Return the names for this layout's values in this namespace."""
        digest = layout.fingerprint
        prefix = f"{check_namespace(namespace)}/{model_slug(layout.model.name)}-{digest[:_FINGERPRINT_HEX]}/"
        return cls(prefix, bytes.fromhex(digest[:_LAYOUT_ID_HEX]))

    @property
    def namespace(self) -> str:
        """The first part of every name."""
        return self.prefix.partition("/")[0]

    @property
    def fingerprint(self) -> str:
        """The fingerprint as it stands in every name: its first 24 hex digits."""
        return self.prefix[-_FINGERPRINT_HEX - 1 : -1]

    @property
    def model(self) -> str:
        """The model's name as it stands in every name (``model_slug``)."""
        return self.prefix.rstrip("/").rpartition("/")[2][: -_FINGERPRINT_HEX - 1]

    def of_epoch(self, epoch: str) -> "StorageNames":
        """Return the names after a bump of the namespace (``namespace_epoch``); "" is before the first one."""
        if not epoch:
            return self
        digest = hashlib.sha256(f"{self.prefix}{epoch}".encode()).hexdigest()
        prefix = f"{self.prefix[: -_FINGERPRINT_HEX - 1]}{digest[:_FINGERPRINT_HEX]}/"
        return StorageNames(prefix, bytes.fromhex(digest[:_LAYOUT_ID_HEX]))

    def name(self, key: OffloadKey) -> str:
        """Return the storage name of the value with this key."""
        prefix, rest = self.split(key)
        return prefix + _in_name(rest)

    def has_name(self, key: OffloadKey) -> bool:  # noqa: ARG002 -- for names that not all keys have
        """Return whether the value with this key has a name here."""
        return True

    def split(self, key: OffloadKey) -> tuple[str, OffloadKey]:
        """Return what the name of this key's value begins with, its tenant included, and the key without that."""
        if len(key) > _GROUP_BYTES and key[-_GROUP_BYTES]:
            prefix = _prefix_of_tenant(self.prefix, tenant_of(key))
            if prefix:
                return prefix, without_tenant(key)
        return self.prefix, key

    def names(self, keys: Iterable[OffloadKey]) -> list[str]:
        """Return the storage names of these keys, in order."""
        prefix = self.prefix
        return [
            prefix + key.hex() if _GROUP_BYTES < len(key) <= _LONGEST_KEY and not key[-_GROUP_BYTES] else self.name(key)
            for key in keys
        ]

    def value_names(self, keys: Iterable[OffloadKey]) -> Sequence[ValueName]:
        """Return what the values with these keys are sealed for, in order."""
        return [ValueName(name, self.layout_id) for name in self.names(keys)]


@lru_cache(1024)
def _prefix_of_tenant(prefix: str, tenant: str) -> str:
    """Return the prefix of a tenant's names; "" for what is no tenant: such a key stands in its name as it is."""
    namespace, _, rest = prefix.partition("/")
    try:
        return f"{namespace}/t-{check_tenant(tenant)}/{rest}"
    except ConfigError:
        return ""


def _in_name(key: OffloadKey) -> str:
    return key.hex() if len(key) <= _LONGEST_KEY else _short(key)


def _short(key: OffloadKey) -> str:
    return f"{_HASHED}{hashlib.sha256(key).hexdigest()}{key[-_GROUP_BYTES:].hex()}"


@dataclass(frozen=True, slots=True)
class ParsedName:
    """A storage name taken apart. ``fingerprint``: its first 24 hex digits. ``key``: what stands for it in the name.

    ``key_id``: of a keyed name, the id of the key that it is made with; "" of a plain one. ``is_hashed``: a long key is
    hashed in its name, which does not give it back.
    """

    namespace: str
    tenant: str
    model: str
    fingerprint: str
    key: OffloadKey
    key_id: str = ""
    is_hashed: bool = False

    @property
    def layout_id(self) -> bytes:
        """The layout id in the seal of a value of this name."""
        return bytes.fromhex(self.fingerprint[:_LAYOUT_ID_HEX])


def parse_name(name: str) -> ParsedName | None:
    """Take a storage name apart; None if it is not one of ours (another format, core's own, something else)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return ParsedName(
        namespace=match["namespace"],
        tenant=match["tenant"] or "",
        model=match["model"],
        fingerprint=match["fingerprint"],
        key=bytes.fromhex(match["key"] or match["hashed"] or match["hidden"]),
        key_id=match["key_id"] or "",
        is_hashed=match["hashed"] is not None,
    )
