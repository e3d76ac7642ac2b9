"""Loads: the chunks of a hit are pinned, copied into the request's blocks, and unpinned.

::

    nothing --lookup--> pinned --start--> loading --all workers have reported--> loaded, or to be computed
                          |  ^
                          '--'  the next lookup, start of less, preemption, the request's end: unpinned

A chunk that is on its way to the GPU for one request is not loaded for another meanwhile: that one waits, and finds it
in the engine's prefix cache. A request whose load has failed gets no further hits: it computes.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from kvtiers.api import OffloadKey
from kvtiers.scheduler.engine import BlockHolder, EngineRequest
from kvtiers.scheduler.geometry import Geometry, in_prefix_order
from kvtiers.scheduler.options import SchedulerOptions
from kvtiers.scheduler.request_state import Hit, RequestState
from kvtiers.scheduler.transfers import JobsInFlight, LoadOutcome
from kvtiers.tiering.manager import TieringManager
from kvtiers.types import PromptGroup, Reach

__all__ = ["Loads"]

_log = logging.getLogger("kvtiers.scheduler")


class Loads:
    """The hits that are pinned and the loads in flight."""

    def __init__(
        self,
        manager: TieringManager,
        geometry: Geometry,
        blocks: BlockHolder,
        jobs: JobsInFlight,
        options: SchedulerOptions,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._blocks = blocks
        self._jobs = jobs
        self._options = options
        self._arriving: Counter[OffloadKey] = Counter()  # on their way to the GPU
        self._claimed: dict[OffloadKey, RequestState] = {}  # in this step, by the request that has pinned them
        self._outcomes: list[LoadOutcome] = []
        self._generation = 0

    def lookup(self, request: EngineRequest, tracked: RequestState, computed: int) -> int | None:
        """Return how many tokens after ``computed`` can be loaded, and pin them; None: ask in the next step."""
        if tracked.loading is not None:
            return None
        if tracked.hit is None or tracked.hit.start != computed:
            self.unpin(tracked)
            if not self._search_and_pin(request, tracked, computed):
                return None
        if tracked.hit is None:
            return 0
        self._claimed.update(dict.fromkeys(tracked.hit.plan.keys, tracked))
        return tracked.hit.end - tracked.hit.start

    def start(self, request: EngineRequest, tracked: RequestState, tokens: int) -> int:
        """Begin to load the first ``tokens`` of the pinned hit; return how many that are. The rest is unpinned."""
        hit = tracked.hit
        if hit is None:
            return 0
        end = self._geometry.floor(hit.start + tokens)
        if end < hit.end:
            self.unpin(tracked)
            # The windows before this end are others than those that were pinned.
            reach = self._reach(request, tracked, hit.start, end)
            if reach.waits or not reach.tokens:
                return 0
            end = hit.start + reach.tokens
            self._pin(self._keys(request, tracked, hit.start, end), tracked, hit.start, end)
            hit = tracked.hit
        if hit is None:
            return 0
        blocks, firsts = self._blocks_of(request, hit)
        if blocks is None:
            _log.warning(
                "request %s: nothing is loaded, since not all of its blocks are allocated", tracked.context.request_id
            )
            self.unpin(tracked)
            return 0
        self._unclaim(tracked)
        tracked.hit = None
        tracked.yielded = False
        self._submit(tracked, hit, blocks, firsts)
        return hit.end - hit.start

    def unpin(self, tracked: RequestState) -> None:
        """Unpin the hit of the request's last lookup, if it is still pinned."""
        if tracked.hit is not None:
            self._unclaim(tracked)
            self._manager.complete_load(tracked.hit.plan)
            tracked.hit = None

    def end_step(self) -> None:
        """Forget which requests go first: each asks again in the next step."""
        self._claimed.clear()

    def take_outcomes(self) -> list[LoadOutcome]:
        """Return the loads that have ended since the last call, except those that no request waits for any more."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def reset(self) -> None:
        """Fail all loads in flight: their KV has been retired."""
        self._generation += 1

    # -- inside

    def _search_and_pin(self, request: EngineRequest, tracked: RequestState, computed: int) -> bool:
        """Pin the loadable chunks after ``computed``, perhaps none; False: no answer yet, or they are not ready."""
        wanted = self._wanted_end(request, tracked, computed)
        reach = self._reach(request, tracked, computed, wanted)
        if reach.waits:
            return False
        if reach.tokens >= max(1, self._options.min_load_tokens):
            end = computed + reach.tokens
            keys = self._keys(request, tracked, computed, end)
            if self._goes_first(keys, tracked):
                return False
            self._pin(keys, tracked, computed, end)
        return True

    def _reach(self, request: EngineRequest, tracked: RequestState, start: int, end: int) -> Reach:
        """Return how much of the tokens from ``start`` to ``end`` is present in all groups."""
        if (waits := self._manager.waits_on(request.context, start, end)) is not None:
            return waits
        per_chunk = self._geometry.blocks_per_chunk
        groups = [
            PromptGroup(tracked.chunk_keys(request, group.index, per_chunk), group.reach or 0)
            for group in self._geometry.groups
        ]
        return self._manager.reach(groups, request.context, start, end, self._geometry.load_step)

    def _wanted_end(self, request: EngineRequest, tracked: RequestState, computed: int) -> int:
        """Return where a load that starts at ``computed`` should end: one token is left to compute."""
        limit = tracked.limits.max_load_tokens
        end = request.num_tokens - 1 if limit is None else min(request.num_tokens - 1, computed + limit)
        if not tracked.may_load or computed % self._geometry.load_step:
            return 0
        end = self._geometry.floor(end)
        return end if end - computed >= self._options.min_load_tokens else 0

    def _keys(self, request: EngineRequest, tracked: RequestState, start: int, end: int) -> list[OffloadKey]:
        geometry = self._geometry
        parts = []
        for group in geometry.groups:
            chunks = geometry.chunks_of(geometry.blocks_between(group, start, end))
            keys = tracked.chunk_keys(request, group.index, geometry.blocks_per_chunk)
            parts.append((group, chunks, keys[chunks.start : chunks.stop]))
        return in_prefix_order(parts)

    def _goes_first(self, keys: Sequence[OffloadKey], tracked: RequestState) -> bool:
        """Return whether another request loads one of these chunks, so that this one should wait for it."""
        if not self._options.prefix_caching:
            return False
        if not self._arriving.keys().isdisjoint(keys):
            return True
        # Another one has pinned them in this step and will probably load them. It may not get blocks, though, so it is
        # given way once, not for ever.
        if tracked.yielded or self._claimed.keys().isdisjoint(keys):
            return False
        tracked.yielded = True
        return True

    def _pin(self, keys: list[OffloadKey], tracked: RequestState, start: int, end: int) -> None:
        plan = self._manager.prepare_load(keys, tracked.context)
        tracked.hit = None if plan is None else Hit(plan, start, end)

    def _unclaim(self, tracked: RequestState) -> None:
        if tracked.hit is not None:
            for key in tracked.hit.plan.keys:
                if self._claimed.get(key) is tracked:
                    del self._claimed[key]

    def _blocks_of(self, request: EngineRequest, hit: Hit) -> tuple[list[Sequence[int]] | None, list[int]]:
        """Return, by group, the blocks to load into and the index of the first; None if some are not there."""
        blocks, firsts = [], []
        for group in self._geometry.groups:
            wanted = self._geometry.blocks_between(group, hit.start, hit.end)
            ids = request.block_ids[group.index][wanted.start : wanted.stop]
            if len(ids) != len(wanted) or self._options.null_block in ids:
                return None, []
            blocks.append(ids)
            firsts.append(wanted.start)
        return blocks, firsts

    def _submit(self, tracked: RequestState, hit: Hit, blocks: Sequence[Sequence[int]], firsts: Sequence[int]) -> None:
        plan, generation = hit.plan, self._generation
        spec = self._geometry.spec(blocks, firsts)
        held = spec.block_ids.tolist()

        def ended(job_id: int, success: bool) -> None:
            self._manager.complete_load(plan, success)
            self._blocks.release(held)
            self._arriving.subtract(plan.keys)
            for key in plan.keys:
                if not self._arriving[key]:
                    del self._arriving[key]
            if tracked.loading == job_id:
                tracked.may_load = success
                self._loaded(tracked, hit, success=success and generation == self._generation)

        self._blocks.hold(held)
        self._arriving.update(plan.keys)
        tracked.loading = self._jobs.load(spec, self._geometry.chunk_ids(plan.keys, plan.chunk_ids), ended)

    def _loaded(self, tracked: RequestState, hit: Hit, *, success: bool) -> None:
        tracked.loading = None
        if success:
            tracked.loaded = range(hit.start, hit.end)
            for group in self._geometry.windowed:
                blocks = self._geometry.blocks_between(group, hit.start, hit.end)
                first = blocks.start * group.tokens_per_block if blocks else hit.end
                before = tracked.unloaded.get(group.index, range(hit.start, first))
                tracked.unloaded[group.index] = range(before.start, max(before.stop, first))
        self._outcomes.append(LoadOutcome(tracked.context.request_id, success, hit.start, hit.end))
