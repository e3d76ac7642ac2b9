"""The base of eager and lazy stores: which chunks of a request may be stored, and a store's job."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.scheduler.engine import EngineRequest
from kvtiers.scheduler.geometry import Geometry
from kvtiers.scheduler.options import SchedulerOptions
from kvtiers.scheduler.request_state import RequestState
from kvtiers.scheduler.transfers import JobsInFlight
from kvtiers.tiering.manager import TieringManager
from kvtiers.types import StorePlan

__all__ = ["BlockIds", "StoreChunk", "Stores"]

BlockIds = Sequence[int]


class StoreChunk(NamedTuple):
    """A full chunk in GPU memory: where in its request it ends (in tokens) and begins (in blocks), and its blocks."""

    end: int
    group: int
    key: OffloadKey
    first_block: int
    blocks: tuple[int, ...]


class Stores(ABC):
    """One store policy. Is notified of computed chunks; adds store jobs to the step."""

    def __init__(
        self, manager: TieringManager, geometry: Geometry, jobs: JobsInFlight, options: SchedulerOptions
    ) -> None:
        self.manager = manager
        self.geometry = geometry
        self.jobs = jobs
        self.options = options

    @abstractmethod
    def on_computed(self, request: EngineRequest, tracked: RequestState) -> None:
        """Record that ``tracked.computed`` has grown."""

    @abstractmethod
    def on_finished(self, request: EngineRequest, tracked: RequestState) -> None:
        """Handle a request's end; its blocks may be freed afterwards."""

    @abstractmethod
    def end_step(self) -> None:
        """Do the policy's work of each step."""

    @abstractmethod
    def reset(self, *, new_weights: bool) -> None:
        """Record that nothing is stored any more; with new weights also what the GPU holds is not to be stored."""

    def storable_end(self, request: EngineRequest, tracked: RequestState) -> int:
        """Return up to which token the request's chunks may be stored now."""
        end = tracked.computed
        if tracked.outdated or end < self.options.min_offload_tokens:
            return 0
        if self.options.prompt_only:
            end = min(end, tracked.prompt_tokens)
        if tracked.limits.max_offload_tokens is not None:
            end = min(end, tracked.limits.max_offload_tokens)
        if end // self.geometry.chunk_step <= max(tracked.offered, tracked.refused) // self.geometry.chunk_step:
            return 0  # the usual step: no chunk has become full
        per_chunk = self.geometry.blocks_per_chunk
        for group in self.geometry.groups:
            keys = tracked.chunk_keys(request, group.index, per_chunk)
            known = min(len(keys), len(request.block_ids[group.index]) // per_chunk)
            end = min(end, (known + 1) * group.tokens_per_chunk - 1)
        return end

    def chunks(self, request: EngineRequest, tracked: RequestState, end: int) -> list[StoreChunk]:
        """Return the full chunks that end after ``tracked.offered``, up to ``end``, in the order of the prefix.

        Chunks are left out that have a block without KV: the request does not have it any more, or never loaded it.
        """
        per_chunk = self.geometry.blocks_per_chunk
        found = []
        for group in self.geometry.groups:
            step = group.tokens_per_chunk
            keys, ids = tracked.keys[group.index], request.block_ids[group.index]
            empty = tracked.unloaded.get(group.index, range(0))
            for chunk in range(tracked.offered // step, end // step):
                first = chunk * per_chunk
                blocks = tuple(ids[first : first + per_chunk])
                is_whole = chunk * step >= empty.stop or (chunk + 1) * step <= empty.start
                if is_whole and self.options.null_block not in blocks:
                    found.append(StoreChunk((chunk + 1) * step, group.index, keys[chunk], first, blocks))
        if len(self.geometry.groups) > 1:
            found.sort()
        return found

    def submit(
        self, plan: StorePlan, offered: Mapping[OffloadKey, StoreChunk], ended: Callable[[int, bool, BlockIds], None]
    ) -> tuple[int, list[StoreChunk], list[int]]:
        """Add a plan's job to the step; return its id, its chunks, and all of their blocks.

        ``ended`` is called with the id, the success, and the blocks, after the plan was completed.
        """
        chunks = [offered[key] for key in plan.keys]
        of_groups = [[chunk for chunk in chunks if chunk.group == group.index] for group in self.geometry.groups]
        blocks = [[block for chunk in of_group for block in chunk.blocks] for of_group in of_groups]
        spec = self.geometry.spec(blocks, [of_group[0].first_block if of_group else 0 for of_group in of_groups])
        all_blocks = spec.block_ids.tolist()

        def complete(job_id: int, success: bool) -> None:
            self.manager.complete_store(plan, success)
            ended(job_id, success, all_blocks)

        job_id = self.jobs.store(spec, self.geometry.chunk_ids(plan.keys, plan.chunk_ids), complete)
        return job_id, chunks, all_blocks
