"""Offload keys: the names of chunks inside the engine, from which stores' names are derived.

An offload key is ``block_hash || group`` as plain ``bytes``: the chained hash of the chunk's last block (any
length from 1 to 65,531 bytes), then the KV group's index, 4 bytes, big endian, unsigned. Plain bytes, so that
millions of keys cost the garbage collector nothing.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ["OffloadKey", "block_hash_of", "count_in_group", "first_misfit", "group_of", "make_offload_key"]

OffloadKey: TypeAlias = bytes

_GROUP_BYTES = 4
_LONGEST = 65_535  # the wire to a tier's host has two bytes for a key's length


def make_offload_key(block_hash: bytes, group: int) -> OffloadKey:
    """Return the key of the chunk that ends with the block of this chained hash, in this KV group."""
    if not block_hash:
        raise ValueError("a block hash needs at least one byte")
    return block_hash + group.to_bytes(_GROUP_BYTES, "big")


def block_hash_of(key: OffloadKey) -> bytes:
    """Return the chained block hash in this key."""
    return key[:-_GROUP_BYTES]


def group_of(key: OffloadKey) -> int:
    """Return the KV group's index in this key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def first_misfit(keys: Sequence[OffloadKey]) -> int | None:
    """Return the index of the first key of a length that no chunk's key has; None if there is none."""
    lengths = set(map(len, keys))
    if not lengths or (min(lengths) > _GROUP_BYTES and max(lengths) <= _LONGEST):
        return None
    return next(i for i, key in enumerate(keys) if not _GROUP_BYTES < len(key) <= _LONGEST)


def count_in_group(keys: Iterable[OffloadKey], group: int) -> int:
    """Return how many of these keys are of this KV group."""
    return [key[-_GROUP_BYTES:] for key in keys].count(group.to_bytes(_GROUP_BYTES, "big"))
