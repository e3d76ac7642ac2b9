"""The offload scheduler: which GPU blocks to store and which prefix to load, step by step.

::

    add_request --> lookup --> start_load --> report --> on_computed ... --> finish_request
                     | None: ask again                    stores every full chunk as soon as it is computed
                     '-- in the next step

Engine's thread only. The manager's lock is taken with a step's first ``lookup``, ``start_load`` or ``on_computed`` and
given back by ``end_step``; the other calls may also come between steps.
"""

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvtiers.api import ConfigError, OffloadKey, make_offload_key
from kvtiers.base import BlockSpec, LoadPlan, OffloadPolicy, StorePlan, TransferResult
from kvtiers.rows.layout import CacheLayout
from kvtiers.scheduler.engine import BlockHolder, EngineRequest, OffloadManager
from kvtiers.scheduler.transfers import JobInFlight, JobsInFlight, LoadOutcome, StepTransfers

__all__ = ["OffloadScheduler"]

_log = logging.getLogger("kvtiers.scheduler")


@dataclass(slots=True, eq=False)
class _Tracked:
    """What is remembered of a request between two calls.

    ``keys``: by group, the keys of its full chunks, as far as they were needed. ``hit``: the pinned chunks of the last
    lookup, which cover the tokens from ``start`` to ``end``. ``loaded``: tokens that came from the cache, so that their
    chunks need not be offered. ``offered``: how far, in tokens, the chunks were.
    """

    whole: bool
    keys: list[list[OffloadKey]]
    hit: LoadPlan | None = None
    start: int = 0
    end: int = 0
    loaded: range = field(default=range(0))
    offered: int = 0


class OffloadScheduler:
    """Decides what is stored (eagerly: as soon as a full chunk is computed) and loaded (the longest prefix).

    One for each engine, over one manager. ``blocks`` keeps GPU blocks in place while a transfer touches them.
    """

    def __init__(self, manager: OffloadManager, layout: CacheLayout, blocks: BlockHolder) -> None:
        for group in layout.groups:
            if group.kind != "full_attention":
                raise ConfigError(
                    f"group {group.name!r} is {group.kind}; the offload scheduler serves full_attention groups alone"
                )
        self._manager = manager
        self._layout = layout
        self._blocks = blocks
        self._groups = range(len(layout.groups))
        self._tokens_per_chunk = [layout.tokens_per_chunk(group) for group in self._groups]
        # A load ends where every group has a whole number of blocks.
        self._load_step = math.lcm(*(group.tokens_per_block for group in layout.groups))
        self._requests: dict[str, _Tracked] = {}
        self._jobs = JobsInFlight(layout.world_size)
        self._transfers = StepTransfers()
        self._in_step = False

    # -- requests

    def add_request(self, request: EngineRequest) -> None:
        """Take note of a request before its first ``lookup``."""
        with self._briefly():
            policy = self._manager.on_new_request(request.context)
        whole = policy is OffloadPolicy.REQUEST_LEVEL
        self._requests[request.context.request_id] = _Tracked(whole, [[] for _ in self._groups])

    def finish_request(self, request: EngineRequest) -> None:
        """Take note that the engine is done with a request. It may free the blocks: those in transfers stay held."""
        tracked = self._requests.pop(request.context.request_id)
        with self._briefly():
            self._drop_hit(tracked)
            self._manager.on_request_finished(request.context)

    # -- loads

    def lookup(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """Return how many tokens after ``computed_tokens`` can be loaded; None: not known yet, ask in the next step.

        ``computed_tokens``: what the engine has in its own prefix cache. At least one token is left to compute. The
        chunks found stay pinned until ``start_load``, the next lookup, or the request's end.
        """
        tracked = self._requests[request.context.request_id]
        self._begin_step()
        if tracked.hit is not None and tracked.start == computed_tokens:
            return tracked.end - tracked.start
        self._drop_hit(tracked)
        end = (request.num_tokens - 1) // self._load_step * self._load_step
        if computed_tokens % self._load_step:
            return 0
        wait = False
        for group in self._groups:
            keys = self._keys(request, tracked, group, computed_tokens, end)
            if not keys:
                return 0
            hits = self._manager.lookup_prefix(keys, request.context)
            wait = wait or bool(hits.pending) or hits.unresolved
            first = computed_tokens // self._tokens_per_chunk[group]
            end = min(end, (first + hits.chunks) * self._tokens_per_chunk[group])
        if wait:
            return None
        tracked.start, tracked.end = computed_tokens, end // self._load_step * self._load_step
        return self._pin(request, tracked)

    def start_load(self, request: EngineRequest, tokens: int) -> int:
        """Start to load the first ``tokens`` of the last lookup's hit; return how many will be loaded.

        The request's blocks for them must be allocated. The rest of the hit is let go. ``report`` tells the end.
        """
        tracked = self._requests[request.context.request_id]
        self._begin_step()
        end = tracked.start + tokens // self._load_step * self._load_step
        if tracked.hit is None or end <= tracked.start:
            self._drop_hit(tracked)
            return 0
        if end < tracked.end:
            self._drop_hit(tracked)
            tracked.end = end
            if not self._pin(request, tracked):
                return 0
        plan, tracked.hit = tracked.hit, None
        spec = self._load_spec(request, tracked)
        outcome = LoadOutcome(request.context.request_id, success=True, start=tracked.start, end=tracked.end)
        held = spec.block_ids.tolist()
        self._blocks.hold(held)
        self._transfers.loads.append(self._jobs.add(plan, held, spec, outcome))
        return tracked.end - tracked.start

    # -- stores

    def on_computed(self, request: EngineRequest, computed_tokens: int) -> None:
        """Store the chunks that are full now: the KV of the request's first ``computed_tokens`` is in its blocks."""
        tracked = self._requests[request.context.request_id]
        self._begin_step()
        end = computed_tokens
        while offers := self._offers(request, tracked, end):
            plan = self._manager.prepare_store(list(offers), request.context)
            if plan is not None:
                self._store(request, offers, plan)
                tracked.offered = end
                return
            # No room for all of them: the head of a prefix is worth more than its tail. What is left over is
            # offered again with the next computed tokens.
            end = (tracked.offered + end) // 2

    def _offers(self, request: EngineRequest, tracked: _Tracked, end: int) -> dict[OffloadKey, tuple[int, int]]:
        """Return key -> (group, chunk) of the full chunks up to token ``end`` that were not offered yet."""
        offers = {}
        for group in self._groups:
            step = self._tokens_per_chunk[group]
            first = tracked.offered // step
            for chunk, key in enumerate(
                self._keys(request, tracked, group, tracked.offered, end // step * step), first
            ):
                if tracked.whole or chunk * step not in tracked.loaded:
                    offers[key] = (group, chunk)
        return offers

    def _store(self, request: EngineRequest, offers: dict[OffloadKey, tuple[int, int]], plan: StorePlan) -> None:
        if not plan.keys:
            self._manager.complete_store(plan)
            return
        per_chunk = self._layout.blocks_per_chunk
        ids: list[int] = []
        sizes, firsts = [0] * len(self._groups), [0] * len(self._groups)
        for group, chunk in map(offers.__getitem__, plan.keys):
            if not sizes[group]:
                firsts[group] = chunk * per_chunk
            sizes[group] += per_chunk
            ids += request.block_ids[group][chunk * per_chunk : (chunk + 1) * per_chunk]
        self._blocks.hold(ids)
        spec = BlockSpec(np.array(ids, np.int64), tuple(sizes), tuple(firsts))
        self._transfers.stores.append(self._jobs.add(plan, ids, spec))

    # -- steps

    def end_step(self, prefill_tokens: int = 0, prefill_seconds: float = 0.0) -> StepTransfers:
        """End the step and return its transfers, for every worker. The last call of every step, also of an idle one.

        ``prefill_tokens``, ``prefill_seconds``: what the engine computed since the last step.
        """
        self._begin_step()
        try:
            self._manager.on_schedule_end(prefill_tokens, prefill_seconds)
        finally:
            self._in_step = False
            self._manager.lock.release()
        transfers, self._transfers = self._transfers, StepTransfers()
        return transfers

    def report(self, results: Iterable[TransferResult], rank: int = 0) -> list[LoadOutcome]:
        """Take what a worker's ``get_finished`` returned; return the loads that have thereby ended on all workers."""
        outcomes: list[LoadOutcome] = []

        def done(job: JobInFlight) -> None:
            if isinstance(job.plan, StorePlan):
                self._manager.complete_store(job.plan, job.success)
            else:
                self._manager.complete_load(job.plan, job.success)
            self._blocks.release(job.held)
            if job.load is not None:
                outcomes.append(self._loaded(job.load._replace(success=job.success)))

        with self._briefly():
            for result in results:
                if not result.success:
                    _log.warning("rank %d: %s", rank, result.error)
                self._jobs.report(result, rank, done)
        return outcomes

    def has_pending_work(self) -> bool:
        """Say whether the engine should keep stepping though it has no request."""
        with self._briefly():
            return bool(self._jobs) or self._manager.has_pending_work()

    # -- inside

    def _loaded(self, outcome: LoadOutcome) -> LoadOutcome:
        tracked = self._requests.get(outcome.request_id)
        if tracked is not None and outcome.success:
            tracked.loaded = range(outcome.start, outcome.end)
        return outcome

    def _keys(self, request: EngineRequest, tracked: _Tracked, group: int, start: int, end: int) -> list[OffloadKey]:
        """Return the keys of the group's full chunks from the one with token ``start`` to the one with ``end`` - 1."""
        keys, per_chunk, step = tracked.keys[group], self._layout.blocks_per_chunk, self._tokens_per_chunk[group]
        last_blocks = request.block_hashes[group][(len(keys) + 1) * per_chunk - 1 :: per_chunk]
        keys += [make_offload_key(block_hash, group) for block_hash in last_blocks]
        return keys[start // step : -(-end // step)]

    def _pin(self, request: EngineRequest, tracked: _Tracked) -> int:
        """Pin the chunks from ``tracked.start`` to ``tracked.end``; return how many tokens that makes."""
        if tracked.end <= tracked.start:
            return 0
        keys = [key for g in self._groups for key in self._keys(request, tracked, g, tracked.start, tracked.end)]
        tracked.hit = self._manager.prepare_load(keys, request.context)
        return tracked.end - tracked.start if tracked.hit else 0

    def _drop_hit(self, tracked: _Tracked) -> None:
        plan, tracked.hit = tracked.hit, None
        if plan is not None:
            self._manager.complete_load(plan)

    def _load_spec(self, request: EngineRequest, tracked: _Tracked) -> BlockSpec:
        ids: list[int] = []
        sizes, firsts = [], []
        for group, spec in enumerate(self._layout.groups):
            first, last = tracked.start // spec.tokens_per_block, tracked.end // spec.tokens_per_block
            ids += request.block_ids[group][first:last]
            sizes.append(last - first)
            firsts.append(first)
        return BlockSpec(np.array(ids, np.int64), tuple(sizes), tuple(firsts))

    def _begin_step(self) -> None:
        if not self._in_step:
            self._manager.lock.acquire()
            self._in_step = True

    @contextlib.contextmanager
    def _briefly(self) -> Iterator[None]:
        """Hold the manager's lock for a call that may come between steps."""
        if self._in_step:
            yield
        else:
            with self._manager.lock:
                yield
