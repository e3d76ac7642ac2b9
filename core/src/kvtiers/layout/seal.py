"""The seal: the last 64 bytes of every value, by which damage and mix-ups are found.

::

    0   8   magic "kvtSEAL" and a line feed
    8   4   format number, little endian, like all numbers here
    12  4   zeros
    16  8   length of the whole value, seal included
    24  8   length of the payload
    32  8   layout id: the first 8 bytes of the fingerprint
    40  16  xxh3_128 over (storage name || payload), as ``digest()`` gives it
    56  8   zeros

No clock and no counter: sealing the same bytes under the same name twice writes the same value. The seal finds
accidents; it is no protection against an attacker who can write to the store.

Which seal the values of a store have is chosen when the store is opened (``Seal``): this one, or the encrypted one of
``encryption/seal.py``.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

import xxhash

from kvtiers.api import OffloadKey
from kvtiers.layout.cache_layout import SEAL_BYTES
from kvtiers.layout.storage_name import StorageNames, ValueName

__all__ = [
    "SEAL_FORMAT",
    "SEAL_FORMATS",
    "PayloadHash",
    "PlainSeal",
    "Seal",
    "SealVerdict",
    "check_value",
    "read_seal",
    "seal_format",
    "seal_parts",
    "seal_value",
]

SEAL_FORMATS = (1,)
"""The numbers of plain seals, in the order of their releases; encrypted ones share the count (``encryption/seal``)."""
SEAL_FORMAT = SEAL_FORMATS[-1]
_MAGIC = b"kvtSEAL\n"
_SEAL = struct.Struct("<8sI4xQQ8s16s8x")
assert _SEAL.size == SEAL_BYTES


class SealVerdict(Enum):
    """The result of checking a value's seal. Everything but OK is a miss."""

    OK = "ok"
    FOREIGN = "foreign"
    """Not damaged, but of another format or layout: not for us to judge or to delete."""
    CORRUPT = "corrupt"
    """The bytes are not those that were stored under this name."""


class Seal(ABC):
    """How the values of one store are named, sealed and checked. Used by several threads at once.

    ``writes_beside``: values are sealed in bounce buffers, never in the row. ``reads_beside``: they are checked there,
    since a check changes them; what is written from there is the whole value, payload included.
    """

    writes_beside: bool
    reads_beside: bool

    @abstractmethod
    def names(self, names: StorageNames, keys: Sequence[OffloadKey]) -> Sequence[StorageNames]:
        """Return the names of these keys' values in the store: first those that are written, then one that is read.

        A key without a name in the first ones (``has_name``) is of a tenant whose own key cannot be read.
        """

    @abstractmethod
    def seal(self, name: ValueName, payload: Sequence[memoryview], value: memoryview) -> None:
        """Seal a payload, wherever its parts lie, for this name; ``value``: memory of the whole value's length.

        Written is what follows the payload, and, with ``reads_beside``, the payload in its stored form, too.
        """

    @abstractmethod
    def check(self, name: ValueName, value: memoryview, payload_bytes: int, hashed: bytes | None = None) -> SealVerdict:
        """Return whether ``value`` is what was sealed for this name; its payload is the engine's then.

        ``hashed``: the payload's ``PayloadHash``, if it is known.
        """


class PayloadHash:
    """The seal's hash over the payload of one value, which may come in pieces, from its start to its end."""

    def __init__(self, name: str) -> None:
        self._state = xxhash.xxh3_128(name.encode())

    def update(self, piece: memoryview) -> None:
        """Take in what comes next."""
        self._state.update(piece)

    def digest(self) -> bytes:
        """Return the hash of what has come."""
        return self._state.digest()


def _digest(payload: Sequence[memoryview], name: str) -> bytes:
    whole = PayloadHash(name)
    for part in payload:
        whole.update(part)
    return whole.digest()


def seal_value(value: memoryview, payload_bytes: int, name: str, layout_id: bytes) -> None:
    """Zero the gap behind the payload and write the seal into the last 64 bytes of ``value`` (1-D, writable, bytes)."""
    seal_parts([value[:payload_bytes]], value[payload_bytes:], name, layout_id)


def seal_parts(payload: Sequence[memoryview], rest: memoryview, name: str, layout_id: bytes) -> None:
    """Write zeros and the seal into ``rest``, which makes a value behind the payload, wherever its parts lie."""
    seal_at = len(rest) - SEAL_BYTES
    if seal_at:
        rest[:seal_at] = bytes(seal_at)
    payload_bytes, digest = sum(map(len, payload)), _digest(payload, name)
    # Not pack_into, which writes zeros first: another tier's host may be reading the seal that it has just written.
    rest[seal_at:] = _SEAL.pack(_MAGIC, SEAL_FORMAT, payload_bytes + len(rest), payload_bytes, layout_id, digest)


def check_value(
    value: memoryview, payload_bytes: int, name: str, layout_id: bytes, hashed: bytes | None = None
) -> SealVerdict:
    """Return whether ``value`` is what ``seal_value`` left under this name.

    Reads the payload once, or not at all where ``hashed`` is its hash (``PayloadHash.digest``).
    """
    rest = value[payload_bytes:]
    magic, number, length, stated_bytes, layout, digest = _SEAL.unpack_from(rest, len(rest) - SEAL_BYTES)
    if magic != _MAGIC:
        return SealVerdict.CORRUPT
    if number != SEAL_FORMAT or layout != layout_id:
        return SealVerdict.FOREIGN
    if length != len(value) or stated_bytes != payload_bytes:
        return SealVerdict.CORRUPT
    found = _digest([value[:payload_bytes]], name) if hashed is None else hashed
    return SealVerdict.OK if found == digest else SealVerdict.CORRUPT


class PlainSeal(Seal):
    """The seal of values in clear. ``epoch``: the namespace's, in this store; it enters names and seals.

    An epoch is one store's own. In the row its seal would collide with the one that another tier's host is writing
    there, and one of the two would store the other's.
    """

    reads_beside = False

    def __init__(self, epoch: str = "") -> None:
        self._epoch = epoch
        self.writes_beside = bool(epoch)

    def names(self, names: StorageNames, keys: Sequence[OffloadKey]) -> Sequence[StorageNames]:  # noqa: ARG002
        """Return the plain names in this epoch."""
        return [names.of_epoch(self._epoch)]

    def seal(self, name: ValueName, payload: Sequence[memoryview], value: memoryview) -> None:
        """Write zeros and the seal behind the payload."""
        seal_parts(payload, value[sum(map(len, payload)) :], name.text, name.layout_id)

    def check(self, name: ValueName, value: memoryview, payload_bytes: int, hashed: bytes | None = None) -> SealVerdict:
        """Compare the seal with the payload's hash."""
        return check_value(value, payload_bytes, name.text, name.layout_id, hashed)


def read_seal(value: memoryview) -> tuple[int, bytes] | None:
    """Return (payload bytes, layout id) as the seal states them, or None where there is no seal of this format."""
    if len(value) < SEAL_BYTES:
        return None
    magic, number, length, payload, layout, _ = _SEAL.unpack_from(value, len(value) - SEAL_BYTES)
    if magic != _MAGIC or number != SEAL_FORMAT or length != len(value) or payload > length - SEAL_BYTES:
        return None
    return payload, layout


def seal_format(value: memoryview) -> int | None:
    """Return the format number of the seal at the end of ``value``, plain or encrypted; None where there is no seal.

    Every format of a seal has its magic and its number in these places.
    """
    if len(value) < SEAL_BYTES:
        return None
    magic, number, *_ = _SEAL.unpack_from(value, len(value) - SEAL_BYTES)
    return int(number) if magic == _MAGIC else None
