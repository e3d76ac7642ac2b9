"""KV events of the whole stack: descriptions of chunks in vLLM's own hashes, and the events for vLLM's own publisher.

    publisher               fed by                            a stream of
    kvtiers' (``events:``)   core, on a thread of its own      the primary and the tiers alone
    vLLM's own               ``VllmEvents``, in each step      vLLM's GPU cache, the primary and the tiers

Both name blocks by vLLM's own hashes, also those of requests with an adapter or a salt, whose chunks have other keys
here: so a router that has seen a block in the GPU cache finds it below. vLLM's own translation of an offloading
manager's events is not used: it keeps the tokens of each chunk that a tier has stored for good.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvtiers.api import TierConfig
from kvtiers.config import EventsConfig, OffloadConfig
from kvtiers.kv_events.chunk_table import ChunkTable
from kvtiers.kv_events.naming import PRIMARY, EventNaming, event_groups, place_of
from kvtiers.kv_events.wire import Stored, Wire
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.types import ChunkBlocks, OffloadEvent
from kvtiers_vllm.stack.keys import GroupKeys, RequestKeys

__all__ = ["ChunkDescriber", "VllmEvents"]

_MOST_WAITING = 1 << 17  # keys of changes that vLLM has not taken
_FIELDS = {kind: set(kind.__struct_fields__) for kind in (BlockStored, BlockRemoved)}  # of this release


class ChunkDescriber:
    """Describes the chunks of vLLM's requests, but those of sliding windows. ``groups``: by vLLM's number of each."""

    def __init__(self, layout: CacheLayout, groups: Mapping[int, GroupKeys]) -> None:
        self._groups = groups
        self._tokens = [group.tokens_per_block for group in layout.groups]

    def chunks(self, request: Any, keys: RequestKeys, shown: Sequence[bytes]) -> list[ChunkBlocks]:
        """Describe those of these chunks whose place is known. ``request``: vLLM's own; ``shown``: vLLM's keys."""
        found = []
        adapter = getattr(request.lora_request, "lora_name", None)
        for key in shown:
            place = keys.place(key)
            if place is None:
                continue
            group = self._groups[int.from_bytes(key[-4:], "big")]
            every, size = group.hashes_per_block, self._tokens[group.index]
            blocks = group.hashes_per_chunk // every
            hashes = request.block_hashes[place * group.hashes_per_chunk : (place + 1) * group.hashes_per_chunk]
            parent = request.block_hashes[place * group.hashes_per_chunk - 1] if place else None
            first = place * blocks * size
            found.append(
                ChunkBlocks(
                    keys.of(key),
                    hashes[every - 1 :: every],  # as vLLM names a block of several hashes
                    parent,
                    request.all_token_ids[first : first + blocks * size],
                    adapter,
                    _extra_keys(request, range(first, first + blocks * size, size)),
                )
            )
        return found


def _extra_keys(request: Any, starts: range) -> list[tuple[Any, ...] | None] | None:
    """Return what enters the hashes of these blocks besides tokens; None: nothing does."""
    special = (request.lora_request, request.cache_salt, request.mm_features, getattr(request, "prompt_embeds", None))
    if all(each is None or (isinstance(each, list | str) and not each) for each in special):
        return None
    from vllm.v1.core import kv_cache_utils

    found = [
        kv_cache_utils.generate_block_hash_extra_keys(request, start, start + starts.step, 0)[0] for start in starts
    ]
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)  # earlier releases have no tags
    extra: list[tuple[Any, ...] | None] | None = untagged(found)
    return extra


class VllmEvents:
    """What vLLM's own publisher is given: the ``EventSide`` of a manager. Engine's thread alone."""

    def __init__(self, config: OffloadConfig, layout: CacheLayout, naming: EventNaming) -> None:
        self._config = config.events or EventsConfig()
        self._places = {"": PRIMARY}
        for tier in config.secondary:
            self.add_tier(tier)
        short = os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") != "0"
        wire = Wire("int" if short else "bytes", "map", naming.rank)
        self._table = ChunkTable(wire, event_groups(layout, naming), self._places, tokens=True)
        self._waiting: deque[OffloadEvent] = deque()
        self._keys = 0
        self._emptied: list[msgspec.Struct] = []
        self.dropped = 0
        """Chunks whose events were dropped, since vLLM did not take them."""

    def add_tier(self, tier: TierConfig) -> None:
        """Use what the config says of a tier."""
        self._places[tier.tier_name] = place_of(tier, self._config)

    def describe(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Take descriptions of chunks whose events may follow."""
        self._table.describe(chunks)

    def take(self, changes: Sequence[OffloadEvent]) -> None:
        """Take what has changed in a step."""
        self._waiting.extend(changes)
        self._keys += sum(len(change.keys) for change in changes)
        while self._keys > _MOST_WAITING:
            oldest = self._waiting.popleft()
            self._keys -= len(oldest.keys)
            self.dropped += len(oldest.keys)

    def cleared(self) -> None:
        """Take that nothing is in the primary any more; the GPU cache is vLLM's own, so no event clears all."""
        self._emptied += [*self._take_waiting(), *self._table.empty_primary()]
        self._table.clear()

    def events(self) -> list[Any]:
        """Return vLLM's events of what has changed since the last call."""
        emptied, self._emptied = self._emptied, []
        return [_as_vllms(event) for event in (*emptied, *self._take_waiting())]

    def report(self) -> Mapping[str, Any]:
        """Return what was dropped."""
        return {"dropped_chunks": self.dropped}

    def close(self, timeout: float) -> None:
        """Do nothing: the publisher is vLLM's."""

    def _take_waiting(self) -> Iterator[msgspec.Struct]:
        self._keys = 0
        while self._waiting:
            yield from self._table.events(self._waiting.popleft())


def _as_vllms(event: msgspec.Struct) -> Any:
    """Return vLLM's own object for an event, as far as its release has fields for it."""
    kind = BlockStored if isinstance(event, Stored) else BlockRemoved
    return kind(**{name: value for name, value in msgspec.structs.asdict(event).items() if name in _FIELDS[kind]})
