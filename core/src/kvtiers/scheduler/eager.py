"""Eager stores: every full chunk is stored as soon as it is computed.

A request that hits another one's blocks in the engine's prefix cache reports them as computed, perhaps before their
store has landed. Such a chunk is not offered again while its last block is in flight as the last block of a
chunk: hashes are chained, so that block stands for the chunk's whole prefix. Afterwards the manager finds the chunk by
its key. The set has blocks and not hashes: two blocks of equal content are two, and either may outlive the other.
"""

from collections.abc import Collection

from kvtiers.scheduler.engine import BlockHolder, EngineRequest
from kvtiers.scheduler.geometry import Geometry
from kvtiers.scheduler.options import SchedulerOptions
from kvtiers.scheduler.request_state import RequestState
from kvtiers.scheduler.stores import BlockIds, StoreChunk, Stores
from kvtiers.scheduler.transfers import JobsInFlight
from kvtiers.tiering.manager import TieringManager

__all__ = ["EagerStores"]


class EagerStores(Stores):
    """Stores chunks as they are computed. The blocks of a store are held until all workers have reported it."""

    def __init__(
        self,
        manager: TieringManager,
        geometry: Geometry,
        jobs: JobsInFlight,
        options: SchedulerOptions,
        blocks: BlockHolder,
    ) -> None:
        super().__init__(manager, geometry, jobs, options)
        self._blocks = blocks
        self._job_of: dict[int, int] = {}  # last block of a chunk -> the job that stores it

    @property
    def in_flight(self) -> Collection[int]:
        """The blocks that end a chunk whose store not all workers have reported yet."""
        return self._job_of.keys()

    def on_computed(self, request: EngineRequest, tracked: RequestState) -> None:
        """Offer the chunks that are full now."""
        wanted = end = self.storable_end(request, tracked)
        if not end:
            return
        if tracked.refused and not self._offer(
            request, tracked, min(end, tracked.offered + self.geometry.longest_chunk)
        ):
            tracked.refused = wanted  # there is still no room for even one
            return
        while end > tracked.offered and not self._offer(request, tracked, end):
            # No room for all of them: the head of a prefix is worth more than its tail. What is left over is offered
            # again when the next chunk is full.
            end = (tracked.offered + end) // 2
        tracked.refused = wanted if tracked.offered < wanted else 0

    def on_finished(self, request: EngineRequest, tracked: RequestState) -> None:
        """Offer the full chunks that were not stored yet, a last time."""
        if tracked.refused:
            # With the chunks that are there already, so that the tail does not take their rows.
            tracked.store_again()
        self.on_computed(request, tracked)

    def end_step(self) -> None:
        """Do nothing: every chunk was offered when it was computed."""

    def reset(self, *, new_weights: bool) -> None:  # noqa: ARG002 -- what blocks hold is known by their requests here
        """Offer every chunk again. Blocks of in-flight stores stay held; the results of those stores are ignored."""
        self._job_of.clear()

    def _offer(self, request: EngineRequest, tracked: RequestState, end: int) -> bool:
        """Offer the chunks up to ``end``; return whether there was room."""
        chunks = {chunk.key: chunk for chunk in self.chunks(request, tracked, end) if self._is_new(chunk, tracked)}
        if chunks:
            plan = self.manager.prepare_store(list(chunks), tracked.context)
            if plan is None:
                return False
            if plan.keys:
                job_id, stored, blocks = self.submit(plan, chunks, self._ended)
                self._blocks.hold(blocks)
                self._job_of.update((chunk.blocks[-1], job_id) for chunk in stored)
            else:
                self.manager.complete_store(plan)
        tracked.offered = end
        return True

    def _is_new(self, chunk: StoreChunk, tracked: RequestState) -> bool:
        if tracked.whole:
            return True  # a tier wants every chunk offered; the manager finds those that are present or in flight
        start = chunk.end - self.geometry.groups[chunk.group].tokens_per_chunk
        return start not in tracked.loaded and chunk.blocks[-1] not in self._job_of

    def _ended(self, job_id: int, _success: bool, blocks: BlockIds) -> None:
        self._blocks.release(blocks)
        for block in blocks:
            # After a reset the block may belong to a newer job already.
            if self._job_of.get(block) == job_id:
                del self._job_of[block]
