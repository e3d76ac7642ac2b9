"""Offload keys: what names a chunk before any store does.

An offload key is ``block_hash || group`` as plain ``bytes``: the chained hash of the chunk's last block (any
length of at least one byte), then the KV group's index, 4 bytes, big endian, unsigned. Plain bytes, so that
millions of keys cost the garbage collector nothing.
"""

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["OffloadKey", "block_hash_of", "count_in_group", "group_of", "make_offload_key"]

OffloadKey: TypeAlias = bytes

_GROUP_BYTES = 4


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


def count_in_group(keys: Iterable[OffloadKey], group: int) -> int:
    """Return how many of these keys are of this KV group."""
    return [key[-_GROUP_BYTES:] for key in keys].count(group.to_bytes(_GROUP_BYTES, "big"))
