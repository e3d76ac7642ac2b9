"""The live keys of a namespace: what is derived from each, and the ciphers made of it.

::

    master key (32 bytes, from its source)
      HKDF-SHA256, salt "kvtiers encryption 1", info: what it is for, a zero, the scope
        "id"    4 bytes    the key's id: stands in names and seals, so that the right key is found at once
        "seal"  32 bytes   HMAC-SHA256 of it over a value's name: the AES-256-GCM key of that one value
        "name"  64 bytes   AES-256-SIV key of names

The scope is the namespace, so one master key may serve several. A tenant's own key is derived in the same way, so an
engine that has it as that tenant's and one that has it as its only key make the same names and seals.

A key for each name means that nonces, which are random, have to differ only among the values that one name ever has: no
count of values wears a key out. (One key for all values would be at the bound of NIST SP 800-38D, 2^32 of them, after
some days of a large cluster.)

Nothing here prints a key. ``cryptography`` is imported with the first key.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kvtiers.api import ConfigError, OffloadKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext

__all__ = ["INSTALL", "KEY_BYTES", "TOKEN_BYTES", "KeyRing", "SealingKey", "load_library", "token_of"]

KEY_BYTES = 32
TOKEN_BYTES = 24
KEY_ID_BYTES = 4
NONCE_BYTES = 12
_ANY_TOKEN = bytes(TOKEN_BYTES)
_SALT = b"kvtiers encryption 1"
INSTALL = "encryption needs the library 'cryptography': pip install 'kvtiers[encryption]'"


@lru_cache(maxsize=1)
def load_library() -> SimpleNamespace:
    """Import what is used of ``cryptography``; ConfigError, one line, if it is not there."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise ConfigError(f"{INSTALL} ({error})") from None
    return SimpleNamespace(
        InvalidTag=InvalidTag, hashes=hashes, Cipher=Cipher, AES=algorithms.AES, GCM=modes.GCM, AESSIV=AESSIV, HKDF=HKDF
    )


def token_of(key: OffloadKey) -> bytes:
    """Return what a keyed name hides: the first 24 bytes of the SHA-256 of an offload key."""
    return hashlib.sha256(key).digest()[:TOKEN_BYTES]


class SealingKey:
    """One live key, for one scope. Used by several threads at once. ``id``: 8 hex digits."""

    __slots__ = ("_library", "_of_names", "_of_seals", "id")

    def __init__(self, master: bytes, scope: str) -> None:
        assert len(master) == KEY_BYTES, "its source has seen to that"
        self._library = load_library()
        self.id = self._derive(master, "id", scope, KEY_ID_BYTES).hex()
        self._of_seals = self._derive(master, "seal", scope, 32)
        self._of_names = self._library.AESSIV(self._derive(master, "name", scope, 64))

    def __repr__(self) -> str:
        return f"SealingKey({self.id})"

    def __reduce__(self) -> str:
        raise TypeError("a key is not to be copied out of its process")

    def _derive(self, master: bytes, what: str, scope: str, nbytes: int) -> bytes:
        library = self._library
        info = f"{what}\0{scope}".encode()
        derived: bytes = library.HKDF(library.hashes.SHA256(), nbytes, _SALT, info).derive(master)
        return derived

    def encryptor(self, name: str, nonce: bytes) -> "AEADEncryptionContext":
        """Return the cipher that encrypts the value of this name; ``nonce``: 12 bytes, never used before for it."""
        return self._cipher(name, nonce, None).encryptor()  # type: ignore[no-any-return]

    def decryptor(self, name: str, nonce: bytes, tag: bytes) -> "AEADDecryptionContext":
        """Return the cipher that decrypts the value of this name, and whose ``finalize`` raises if it is another."""
        return self._cipher(name, nonce, tag).decryptor()  # type: ignore[no-any-return]

    def is_refusal(self, error: Exception) -> bool:
        """Return whether a decryptor or a name has been refused: other bytes, or another key."""
        return isinstance(error, self._library.InvalidTag)

    def hide(self, token: bytes, prefix: str) -> bytes:
        """Return what stands for a token in names with this prefix: always the same, and 40 bytes long."""
        hidden: bytes = self._of_names.encrypt(token, [prefix.encode()])
        return hidden

    def reveal(self, hidden: bytes, prefix: str) -> bytes | None:
        """Return the token that ``hide`` was given; None if this key has hidden none so."""
        try:
            token: bytes = self._of_names.decrypt(hidden, [prefix.encode()])
        except self._library.InvalidTag:
            return None
        return token

    def is_same(self, other: "SealingKey") -> bool:
        """Return whether both are made of the same master key, for the same scope."""
        return self.id == other.id and self.hide(_ANY_TOKEN, "") == other.hide(_ANY_TOKEN, "")

    def _cipher(self, name: str, nonce: bytes, tag: bytes | None) -> "SimpleNamespace":
        library = self._library
        of_value = hmac.digest(self._of_seals, name.encode(), "sha256")
        cipher: SimpleNamespace = library.Cipher(library.AES(of_value), library.GCM(nonce, tag))
        return cipher


class KeyRing:
    """The live keys of one scope. ``current``: what is written has it; ``previous``: is read, too.

    ``tenants``: those that have keys of their own, and with ``others_have_own`` all others, too. Until they are added
    such a tenant has none: it never gets the namespace's. ``where``: of these keys in the config, for the line that
    refuses them.
    """

    __slots__ = ("_others_have_own", "_tenants", "current", "has_two", "missing", "previous")

    def __init__(
        self,
        current: SealingKey,
        previous: SealingKey | None = None,
        *,
        where: str = "encryption",
        tenants: Iterable[str] = (),
        others_have_own: bool = False,
    ) -> None:
        if previous is not None and previous.id == current.id:
            raise ConfigError(f"{where}: 'key' and 'previous' are the same key; leave 'previous' out, or correct one")
        self.current = current
        self.previous = previous
        self._tenants: dict[str, KeyRing | None] = dict.fromkeys(tenants)
        self._others_have_own = others_have_own
        self.missing = set(self._tenants)
        """The tenants whose keys have not been added."""
        self.has_two = previous is not None
        """Whether there is a previous key, here or of a tenant."""

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(key.id for key in self.all)})"

    def of(self, tenant: str) -> "KeyRing | None":
        """Return the live keys of a tenant ("": of none); None: it has keys of its own, which are not there."""
        return self._tenants.get(tenant, None if tenant and self._others_have_own else self)

    def is_listed(self, tenant: str) -> bool:
        """Return whether this is a tenant of ``tenants``, or none."""
        return not tenant or tenant in self._tenants

    def with_tenants(self, rings: "Mapping[str, KeyRing | None]") -> "KeyRing":
        """Return these keys with those of more tenants, which are missing where there are none."""
        ring = KeyRing(self.current, self.previous, others_have_own=self._others_have_own)
        # Before the keys, which ``add`` may put in meanwhile: a tenant must not be neither there nor missing.
        ring.missing = self.missing | {tenant for tenant, own in rings.items() if own is None}
        ring._tenants = {**self._tenants, **rings}
        ring.has_two = self.has_two or any(own is not None and own.previous is not None for own in rings.values())
        return ring

    def add(self, tenant: str, ring: "KeyRing") -> str:
        """Use these keys for a tenant from now on; return whose key it has, in words, if that is another's, too.

        One thread at a time; others may use the ring meanwhile.
        """
        self.has_two = self.has_two or ring.previous is not None
        self._tenants[tenant] = ring
        self.missing.discard(tenant)
        return self.owner_of(ring.current, besides=tenant)

    def owner_of(self, key: SealingKey, *, besides: str) -> str:
        """Return in words who writes with this key, other than the tenant ``besides``; "": there is none."""
        if key.is_same(self.current):
            return "requests without a tenant"
        rings = self.of_tenants.items()
        return next((f"tenant {other!r}" for other, own in rings if other != besides and own.current.is_same(key)), "")

    @property
    def ids(self) -> list[str]:
        """The ids of all live keys, those of tenants among them."""
        return [key.id for ring in (self, *self.of_tenants.values()) for key in ring.all]

    @property
    def of_tenants(self) -> "dict[str, KeyRing]":
        """The keys of tenants that have been added, by tenant."""
        return {tenant: ring for tenant, ring in [*self._tenants.items()] if ring is not None}

    @property
    def all(self) -> tuple[SealingKey, ...]:
        """The live keys, the current one first."""
        return (self.current,) if self.previous is None else (self.current, self.previous)

    def find(self, key_id: str) -> SealingKey | None:
        """Return the live key of this id, if there is one."""
        return next((key for key in self.all if key.id == key_id), None)

    def in_words(self) -> str:
        """Return the keys' ids, for the log."""
        more = f", and {self.previous.id} is read" if self.previous is not None else ""
        return f"key {self.current.id}{more}"
