"""Keyed names: storage names that show nothing about a prompt, and cannot be computed from a guess, without the key.

``{prefix}k{key id, 8 hex}{AES-256-SIV of the token, 80 hex}``, where the token is a part of the SHA-256 of the offload
key without its tenant (``keys.token_of``), and the prefix, in which the tenant stands, is authenticated. AES-SIV is
deterministic: all who have the key use the same name, so presence, listing and deletion work as with plain names. With
the key, and only with it, a name gives the token back, so a new key's name can be made of an old one's (``kvtiers store
rekey``); an HMAC would not allow that. A keyed name is shorter than the longest plain one.

The key is that of the tenant in the offload key, where it has one of its own, else the namespace's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtiers.api import OffloadKey, tenant_of
from kvtiers.encryption.keys import KeyRing, SealingKey, token_of
from kvtiers.layout.storage_name import KEYED, StorageNames, ValueName

__all__ = ["KeyedName", "KeyedNames"]


@dataclass(slots=True)
class KeyedName(ValueName):
    """What an encrypted value is sealed for, and the key that names and encrypts it."""

    key: SealingKey


@dataclass(frozen=True, slots=True)
class KeyedNames(StorageNames):
    """The names of one model's encrypted values. ``ring``: names and seals are made with its current keys.

    ``are_previous``: with its previous ones instead, which not all tenants have (``key_of``).
    """

    ring: KeyRing
    are_previous: bool = False

    @classmethod
    def of(cls, names: StorageNames, key: SealingKey) -> "KeyedNames":
        """Return the names under this key for the values that have these names without one."""
        return cls(names.prefix, names.layout_id, KeyRing(key))

    @classmethod
    def of_ring(cls, names: StorageNames, ring: KeyRing) -> "list[KeyedNames]":
        """Return the names under the live keys: first those that are written, then those that are read only."""
        generations = (False, True) if ring.has_two else (False,)
        return [cls(names.prefix, names.layout_id, ring, are_previous) for are_previous in generations]

    @property
    def key(self) -> SealingKey:
        """The key of values without a tenant that are written."""
        return self.ring.current

    def of_epoch(self, epoch: str) -> "KeyedNames":
        """Return the names after a bump of the namespace."""
        names = StorageNames(self.prefix, self.layout_id).of_epoch(epoch)
        return KeyedNames(names.prefix, names.layout_id, self.ring, self.are_previous)

    def key_of(self, key: OffloadKey) -> SealingKey | None:
        """Return what the value with this key is named and sealed with; None: there is no such key, so no name."""
        ring = self.ring.of(tenant_of(key))
        if ring is None:
            return None
        return ring.previous if self.are_previous else ring.current

    def has_name(self, key: OffloadKey) -> bool:
        """Return whether the value with this key has a name here."""
        return self.key_of(key) is not None

    def name(self, key: OffloadKey) -> str:
        """Return the storage name of the value with this key. Ask ``has_name`` first."""
        return self._value_name(key).text

    def names(self, keys: Iterable[OffloadKey]) -> list[str]:
        """Return the storage names of these keys, in order."""
        return [self.name(key) for key in keys]

    def value_names(self, keys: Iterable[OffloadKey]) -> Sequence[KeyedName]:
        """Return what the values with these keys are sealed for and with, in order. Ask ``has_name`` first."""
        return [self._value_name(key) for key in keys]

    def _value_name(self, key: OffloadKey) -> KeyedName:
        sealing = self.key_of(key)
        assert sealing is not None, "a value without a key has no name"
        prefix, rest = self.split(key)
        return KeyedName(_name(sealing, token_of(rest), prefix), self.layout_id, sealing)

    def of_token(self, token: bytes, prefix: str) -> str:
        """Return the storage name under ``key``, with this prefix, of the value whose key has this token."""
        return _name(self.key, token, prefix)


def _name(key: SealingKey, token: bytes, prefix: str) -> str:
    return f"{prefix}{KEYED}{key.id}{key.hide(token, prefix).hex()}"
