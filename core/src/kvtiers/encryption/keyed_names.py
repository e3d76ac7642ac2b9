"""Keyed names: storage names that show nothing about a prompt, and cannot be computed from a guess, without the key.

``{prefix}k{key id, 8 hex}{AES-256-SIV of the token, 80 hex}``, where the token is a part of the SHA-256 of the offload
key without its tenant (``keys.token_of``), and the prefix, in which the tenant stands, is authenticated. AES-SIV is
deterministic: all who have the key use the same name, so presence, listing and deletion work as with plain names. With
the key, and only with it, a name gives the token back, so a new key's name can be made of an old one's (``kvtiers store
rekey``); an HMAC would not allow that. A keyed name is shorter than the longest plain one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtiers.api import OffloadKey
from kvtiers.encryption.keys import SealingKey, token_of
from kvtiers.layout.storage_name import KEYED, StorageNames

__all__ = ["KeyedNames"]


@dataclass(frozen=True, slots=True)
class KeyedNames(StorageNames):
    """The names of one model's encrypted values. ``key``: their names and their seals are made with it."""

    key: SealingKey

    @classmethod
    def of(cls, names: StorageNames, key: SealingKey) -> "KeyedNames":
        """Return the names under this key for the values that have these names without one."""
        return cls(names.prefix, names.layout_id, key)

    def of_epoch(self, epoch: str) -> "KeyedNames":
        """Return the names after a bump of the namespace."""
        return KeyedNames.of(StorageNames(self.prefix, self.layout_id).of_epoch(epoch), self.key)

    def name(self, key: OffloadKey) -> str:
        """Return the storage name of the value with this key."""
        prefix, rest = self.split(key)
        return self.of_token(token_of(rest), prefix)

    def names(self, keys: Iterable[OffloadKey]) -> list[str]:
        """Return the storage names of these keys, in order."""
        return [self.name(key) for key in keys]

    def of_token(self, token: bytes, prefix: str) -> str:
        """Return the storage name, with this prefix, of the value whose key has this token."""
        return f"{prefix}{KEYED}{self.key.id}{self.key.hide(token, prefix).hex()}"
