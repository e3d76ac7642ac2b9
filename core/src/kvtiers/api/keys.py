"""Offload keys: the names of chunks inside the engine, from which stores' names are derived.

An offload key is plain ``bytes``, so that millions of keys cost the garbage collector nothing::

    block hash | tenant | length of the tenant, 1 byte | group, 3 bytes, big endian

The block hash is the chained hash of the chunk's last block, of any length from 1 to 65,531 bytes. The tenant, in
ASCII, is there only in keys of a request that has one: without it, a key is the hash and the group in four bytes. As
the tenant is a part of each key, the same tokens of two tenants are two chunks wherever keys are compared, and the
tenant's part of a storage name can be made from the key alone.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = [
    "TENANT",
    "OffloadKey",
    "block_hash_of",
    "count_in_group",
    "first_misfit",
    "group_of",
    "key_ending",
    "make_offload_key",
    "tenant_of",
    "with_tenant",
    "without_tenant",
]

OffloadKey: TypeAlias = bytes

TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""What a tenant's name is, but that it has no ``..``."""

_GROUP_BYTES = 4  # the tenant's length among them
_LONGEST = 65_535  # the wire to a tier's host has two bytes for a key's length


def make_offload_key(block_hash: bytes, group: int, tenant: str = "") -> OffloadKey:
    """Return the key of the chunk that ends with the block of this chained hash, in this KV group, of this tenant."""
    if not block_hash:
        raise ValueError("a block hash needs at least one byte")
    return block_hash + key_ending(group, tenant)


def key_ending(group: int, tenant: str = "") -> bytes:
    """Return what follows the block hash in the keys of this group, below 2^24, and tenant; OverflowError if too large.

    ``tenant``: a name that ``kvtiers.tenants`` accepts, or "" for none.
    """
    if not tenant:
        return b"\0" + group.to_bytes(3, "big")
    return tenant.encode("ascii") + bytes([len(tenant)]) + group.to_bytes(3, "big")


def block_hash_of(key: OffloadKey) -> bytes:
    """Return the chained block hash in this key."""
    return key[: -_GROUP_BYTES - key[-_GROUP_BYTES]]


def group_of(key: OffloadKey) -> int:
    """Return the KV group's index in this key."""
    return int.from_bytes(key[-3:], "big")


def tenant_of(key: OffloadKey) -> str:
    """Return the tenant in this key; "" if there is none."""
    length = key[-_GROUP_BYTES] if len(key) > _GROUP_BYTES else 0
    if not length or len(key) <= _GROUP_BYTES + length:
        return ""
    return key[-_GROUP_BYTES - length : -_GROUP_BYTES].decode("ascii", "replace")


def without_tenant(key: OffloadKey) -> OffloadKey:
    """Return the key of the same tokens of a request that has no tenant."""
    length = key[-_GROUP_BYTES]
    return key[: -_GROUP_BYTES - length] + b"\0" + key[-3:] if length else key


def with_tenant(key: OffloadKey, tenant: str) -> OffloadKey:
    """Return the key of the same tokens, of a request without a tenant, for this one."""
    return key[:-_GROUP_BYTES] + key_ending(group_of(key), tenant) if tenant else key


def first_misfit(keys: Sequence[OffloadKey]) -> int | None:
    """Return the index of the first key of a length that no chunk's key has; None if there is none."""
    lengths = set(map(len, keys))
    if not lengths or (min(lengths) > _GROUP_BYTES and max(lengths) <= _LONGEST):
        return None
    return next(i for i, key in enumerate(keys) if not _GROUP_BYTES < len(key) <= _LONGEST)


def count_in_group(keys: Iterable[OffloadKey], group: int) -> int:
    """Return how many of these keys are of this KV group."""
    return [key[-3:] for key in keys].count(group.to_bytes(3, "big"))
