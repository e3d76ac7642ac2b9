"""The encrypted seal: the last 64 bytes of a value whose payload is encrypted, and whose writer had the key.

::

    0   8   magic "kvtSEAL" and a line feed
    8   4   format number 2, little endian, like all numbers here
    12  4   bytes behind the payload: zeros and this seal
    16  8   length of the whole value, seal included
    24  8   layout id: the first 8 bytes of the fingerprint
    32  4   id of the key (``keys.py``)
    36  12  nonce, random
    48  16  tag of AES-256-GCM over the payload, and over (the first 36 bytes here || storage name) as additional data

So a value is accepted only if these very bytes were sealed under this very name, for this layout, at this length, by a
process that had the key. Each bit of a value counts: the zeros behind the payload are compared. A value of another
format, a plainly sealed one among them, is foreign and never accepted.

``EncryptedSeal`` is how the mover of a store's values uses it.
"""

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.encryption.first_use_keys import FirstUseKeys
from kvtiers.encryption.keyed_names import KeyedName, KeyedNames
from kvtiers.encryption.keys import NONCE_BYTES, KeyRing, SealingKey
from kvtiers.layout.cache_layout import SEAL_BYTES
from kvtiers.layout.seal import Seal, SealVerdict
from kvtiers.layout.storage_name import StorageNames, ValueName

__all__ = [
    "ENCRYPTED_SEAL_FORMAT",
    "ENCRYPTED_SEAL_FORMATS",
    "EncryptedSeal",
    "SealFields",
    "decrypt_value",
    "encrypt_value",
    "read_encrypted_seal",
]

ENCRYPTED_SEAL_FORMATS = (2,)
"""The numbers of encrypted seals, in the order of their releases; plain ones share the count (``layout/seal``)."""
ENCRYPTED_SEAL_FORMAT = ENCRYPTED_SEAL_FORMATS[-1]
_MAGIC = b"kvtSEAL\n"
_HEADER = struct.Struct("<8sIIQ8s4s")
_TAG_AT = _HEADER.size + NONCE_BYTES
assert _TAG_AT + 16 == SEAL_BYTES


class SealFields(NamedTuple):
    """What a seal states; nothing of it is certain before ``decrypt_value``. ``key_id``: 8 hex digits."""

    payload_bytes: int
    layout_id: bytes
    key_id: str


def encrypt_value(
    payload: Sequence[memoryview], value: memoryview, name: str, layout_id: bytes, key: SealingKey, nonce: bytes = b""
) -> None:
    """Write a payload, wherever its parts lie, into ``value`` (1-D, writable, bytes), encrypted, with zeros and seal.

    ``value`` is as long as the value, which has room for the seal. A payload in one part may lie where it is written
    to. ``nonce``: for tests.
    """
    payload_bytes, seal_at = sum(map(len, payload)), len(value) - SEAL_BYTES
    nonce = nonce or os.urandom(NONCE_BYTES)
    header = _HEADER.pack(
        _MAGIC, ENCRYPTED_SEAL_FORMAT, len(value) - payload_bytes, len(value), layout_id, bytes.fromhex(key.id)
    )
    encryptor = key.encryptor(name, nonce)
    encryptor.authenticate_additional_data(header + name.encode())
    at = 0
    for part in payload:
        at += encryptor.update_into(part, value[at:])
    encryptor.finalize()
    assert at == payload_bytes, "GCM keeps nothing back"
    value[payload_bytes:seal_at] = bytes(seal_at - payload_bytes)
    value[seal_at:] = header + nonce + encryptor.tag


def decrypt_value(value: memoryview, payload_bytes: int, name: str, layout_id: bytes, key: SealingKey) -> SealVerdict:
    """Decrypt the payload of ``value`` in its place, and return whether it is what was sealed under this name.

    After any other verdict than OK its bytes are not to be used for anything.
    """
    seal_at = len(value) - SEAL_BYTES
    magic, number, behind, length, layout, key_id = _HEADER.unpack_from(value, seal_at)
    if magic != _MAGIC:
        return SealVerdict.CORRUPT
    if number != ENCRYPTED_SEAL_FORMAT or layout != layout_id:
        return SealVerdict.FOREIGN
    if length != len(value) or behind != len(value) - payload_bytes or key_id.hex() != key.id:
        return SealVerdict.CORRUPT
    if value[payload_bytes:seal_at] != bytes(seal_at - payload_bytes):
        return SealVerdict.CORRUPT
    header, nonce, tag = (bytes(value[seal_at + a : seal_at + b]) for a, b in _FIELDS)
    decryptor = key.decryptor(name, nonce, tag)
    decryptor.authenticate_additional_data(header + name.encode())
    decryptor.update_into(value[:payload_bytes], value)
    try:
        decryptor.finalize()
    except Exception as error:
        if key.is_refusal(error):
            return SealVerdict.CORRUPT
        raise
    return SealVerdict.OK


_FIELDS = ((0, _HEADER.size), (_HEADER.size, _TAG_AT), (_TAG_AT, SEAL_BYTES))


def read_encrypted_seal(value: memoryview) -> SealFields | None:
    """Return what the seal at the end of ``value`` states, or None where there is no seal of this format."""
    if len(value) < SEAL_BYTES:
        return None
    magic, number, behind, length, layout, key_id = _HEADER.unpack_from(value, len(value) - SEAL_BYTES)
    if magic != _MAGIC or number != ENCRYPTED_SEAL_FORMAT or length != len(value) or not SEAL_BYTES <= behind <= length:
        return None
    return SealFields(length - behind, layout, key_id.hex())


class EncryptedSeal(Seal):
    """The seal of encrypted values. ``epoch``: as of a ``PlainSeal``. ``ring``: the live keys.

    ``first_use``: reads the keys of tenants that are not listed, where these have some.
    """

    # The row has the payload in clear, for the engine and for other tiers; what is read is decrypted before its tag is
    # compared.
    writes_beside = reads_beside = True

    def __init__(self, epoch: str, ring: KeyRing, first_use: FirstUseKeys | None = None) -> None:
        self._epoch = epoch
        self._ring = ring
        self._first_use = first_use

    def names(self, names: StorageNames, keys: Sequence[OffloadKey]) -> Sequence[StorageNames]:
        """Return the keyed names in this epoch, under the current keys and, while any is rotated, the previous ones."""
        ring = self._ring if self._first_use is None else self._first_use.ring_of(keys)
        return KeyedNames.of_ring(names.of_epoch(self._epoch), ring)

    def seal(self, name: ValueName, payload: Sequence[memoryview], value: memoryview) -> None:
        """Write the whole value, encrypted."""
        assert isinstance(name, KeyedName), "it is of other names than this seal's"
        encrypt_value(payload, value, name.text, name.layout_id, name.key)

    def check(
        self,
        name: ValueName,
        value: memoryview,
        payload_bytes: int,
        hashed: bytes | None = None,  # noqa: ARG002
    ) -> SealVerdict:
        """Decrypt the payload in its place. ``hashed`` is of no use: the tag is over what is stored."""
        assert isinstance(name, KeyedName), "it is of other names than this seal's"
        return decrypt_value(value, payload_bytes, name.text, name.layout_id, name.key)
