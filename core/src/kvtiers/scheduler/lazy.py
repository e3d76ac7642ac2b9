"""Lazy stores: a chunk is stored when its blocks are about to be reused; a chunk that is never evicted costs nothing.

Computed chunks are only noted by their blocks. Once a step the next free blocks are examined: twice as many
as a step allocates on average, so that a step's blocks are safe before the step. Those that
still hold a noted chunk are stored; then they are the first to be reused, without loss.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.scheduler.engine import EngineRequest, FreeQueue
from kvtiers.scheduler.geometry import Geometry
from kvtiers.scheduler.options import SchedulerOptions
from kvtiers.scheduler.request_state import RequestState
from kvtiers.scheduler.stores import BlockIds, StoreChunk, Stores
from kvtiers.scheduler.transfers import JobsInFlight
from kvtiers.tiering.manager import TieringManager
from kvtiers.types import RequestContext, StorePlan

__all__ = ["LazyStores"]

_DEMAND_WEIGHT = 0.2  # of the newest step in the running average
_COVER = 2  # demands: one is handed out while the next one is being copied


class _Noted(NamedTuple):
    """A chunk and what its blocks held when it was computed."""

    chunk: StoreChunk
    hashes: tuple[bytes, ...]


class LazyStores(Stores):
    """Stores chunks that are about to be lost. Tiers that want whole requests get no more than the others."""

    def __init__(
        self,
        manager: TieringManager,
        geometry: Geometry,
        jobs: JobsInFlight,
        options: SchedulerOptions,
        queue: FreeQueue,
    ) -> None:
        super().__init__(manager, geometry, jobs, options)
        self._queue = queue
        self._noted: dict[int, _Noted] = {}  # never more than the engine has blocks
        self._offered: set[OffloadKey] = set()  # of the blocks looked at last, or in flight
        self._in_flight: set[OffloadKey] = set()
        self._allocated = queue.allocated
        self._demand = 0.0
        self._batches = itertools.count(1)

    def on_computed(self, request: EngineRequest, tracked: RequestState) -> None:
        """Note the chunks that are full now by their blocks."""
        end = self.storable_end(request, tracked)
        if not end:
            return
        for chunk in self.chunks(request, tracked, end):
            hashes = request.block_hashes[chunk.group][chunk.first_block : chunk.first_block + len(chunk.blocks)]
            self._noted.update(dict.fromkeys(chunk.blocks, _Noted(chunk, tuple(hashes))))
        tracked.offered = end

    def on_finished(self, request: EngineRequest, tracked: RequestState) -> None:
        """Record the full chunks that were not recorded yet."""
        self.on_computed(request, tracked)

    def end_step(self) -> None:
        """Store the chunks in the free blocks that are reused next."""
        chunks = self._endangered(self._cover())
        if chunks:
            context = RequestContext(f"kvtiers-lazy-{next(self._batches)}")
            self.manager.on_new_request(context)
            self._store(chunks, context)
            self.manager.on_request_finished(context)

    def reset(self, *, new_weights: bool) -> None:
        """Offer every chunk again, unless it is of old weights."""
        self._offered.clear()
        self._in_flight.clear()
        if new_weights:
            self._noted.clear()

    def _cover(self) -> int:
        """Return how many of the next free blocks must be safe to reuse."""
        allocated = self._queue.allocated
        latest, self._allocated = allocated - self._allocated, allocated
        if latest:  # a pause does not make the next step smaller
            self._demand = self._demand + _DEMAND_WEIGHT * (latest - self._demand) if self._demand else latest
        return round(_COVER * max(self._demand, latest))

    def _endangered(self, count: int) -> list[StoreChunk]:
        """Return the chunks whose blocks are reused next and that were not offered yet, in the order of that reuse."""
        offered, found = set(self._in_flight), {}
        for block in self._queue.next_free(count) if count else ():
            noted = self._noted.get(block)
            if noted is None:
                continue
            key = noted.chunk.key
            if key in self._offered:
                offered.add(key)
            elif key not in found and self._is_intact(noted):
                found[key] = noted.chunk
        # A block that left the end of the queue, because a request hit it, is examined again when it returns.
        self._offered = offered
        return list(found.values())

    def _is_intact(self, noted: _Noted) -> bool:
        return all(
            self._queue.hash_of(block) == held for block, held in zip(noted.chunk.blocks, noted.hashes, strict=True)
        )

    def _store(self, chunks: list[StoreChunk], context: RequestContext) -> None:
        """Offer as many of the chunks as there is room for; if not all, those whose blocks are reused first."""
        plan = None
        while chunks and plan is None:
            # Of a prefix the tail goes first: head first, as the manager wants its keys, is the other way round.
            plan = self.manager.prepare_store([chunk.key for chunk in reversed(chunks)], context)
            if plan is None:
                chunks = chunks[: len(chunks) // 2]
        if plan is not None:
            self._offered.update(chunk.key for chunk in chunks)
            self._begin(plan, {chunk.key: chunk for chunk in chunks})

    def _begin(self, plan: StorePlan, offered: Mapping[OffloadKey, StoreChunk]) -> None:
        if not plan.keys:
            self.manager.complete_store(plan)
            return

        def ended(_job_id: int, _success: bool, blocks: BlockIds) -> None:
            self._in_flight.difference_update(plan.keys)
            self._queue.put_back(blocks[::-1])

        _, _, blocks = self.submit(plan, offered, ended)
        self._queue.hold(blocks)
        self._in_flight.update(plan.keys)
