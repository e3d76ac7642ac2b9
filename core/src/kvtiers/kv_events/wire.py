"""The wire format of KV events: vLLM's own, in both of its encodings.

A batch is an array of a time, its events, and the data-parallel rank. An event is a map with its name under ``type``,
as vLLM 0.30 to 0.33 encode it, or an array of its name and its fields in this order, as earlier releases did. Decoders
of both ignore what they have no field for. The names and the order of the fields are vLLM's
(``vllm/distributed/kv_events.py``); ``ownership`` is the tier's name there, too.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

__all__ = ["END_OF_REPLAY", "Stored", "Wire", "sequence_bytes"]

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends the answer to a request for a replay."""
_BARE: dict[str, Any] = {"token_ids": (), "block_size": 0, "lora_id": None, "medium": None, "lora_name": None}
_INT_HASH = (1 << 64) - 1


def sequence_bytes(number: int) -> bytes:
    """Return a batch's sequence number as a message carries it."""
    return number.to_bytes(8, "big")


class _Batch(msgspec.Struct, array_like=True, gc=False):
    """A batch. All three fields are always written: Dynamo's decoder wants as many."""

    ts: float
    events: list[Any]
    data_parallel_rank: int = 0


class _Event(msgspec.Struct, omit_defaults=True, gc=False):
    """The base of events."""


class Stored(_Event, tag="BlockStored"):
    """Blocks that are there from now on. Without tokens: ``token_ids`` is empty and ``block_size`` 0."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _Removed(_Event, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _Cleared(_Event, tag="AllBlocksCleared"):
    pass


class _StoredArray(Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_Event, tag="BlockRemoved", array_like=True):
    """No field follows the group: Dynamo's decoder has the kind of the group's cache in the next place."""

    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


_NOT_IN_ARRAY = set(_Removed.__struct_fields__) - set(_RemovedArray.__struct_fields__)


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class Wire:
    """Makes and encodes events. ``hashes``, ``encoding``: as the config has them. One thread."""

    def __init__(self, hashes: Literal["int", "bytes"], encoding: Literal["map", "array"], rank: int = 0) -> None:
        is_map = encoding == "map"
        self.removals_name_places = is_map
        """Whether removals say more of a place than its medium."""
        self._short = hashes == "int"
        self._stored: type[Stored] = Stored if is_map else _StoredArray
        self._removed: type[_Removed | _RemovedArray] = _Removed if is_map else _RemovedArray
        self._cleared: type[_Cleared] = _Cleared if is_map else _ClearedArray
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def hash_of(self, block_hash: bytes) -> int | bytes:
        """Return a block's hash as events name it."""
        return int.from_bytes(block_hash, "big") & _INT_HASH if self._short else block_hash

    def stored(self, hashes: list[int | bytes], parent: int | bytes | None, **fields: Any) -> Stored:
        """Return an event of blocks that are there from now on; ``fields``: as ``Stored`` has them."""
        all_fields: dict[str, Any] = _BARE | fields
        return self._stored(hashes, parent, **all_fields)

    def removed(self, hashes: list[int | bytes], **fields: Any) -> msgspec.Struct:
        """Return an event of blocks that are there no longer; ``fields``: as ``Stored`` has them, of the place."""
        if not self.removals_name_places:
            fields = {name: value for name, value in fields.items() if name not in _NOT_IN_ARRAY}
        return self._removed(hashes, **fields)

    def cleared(self) -> msgspec.Struct:
        """Return the event that nothing is anywhere any more."""
        return self._cleared()

    def encode(self, timestamp: float, events: Sequence[msgspec.Struct]) -> bytes:
        """Return a batch's bytes. ``timestamp``: by ``time.time``."""
        return self._encoder.encode(_Batch(timestamp, list(events), self._rank))
