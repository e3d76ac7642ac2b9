"""The tiering manager: what an engine's scheduler talks to.

::

    load   lookup -> promotion -> secondary/chunk_store_tier -> host -> primary/chunks -> gpu/worker
    store  gpu/worker -> primary/chunks -> cascade -> secondary/chunk_store_tier -> host

One thread at a time: the caller holds ``manager.lock`` from its first call of a step to ``on_schedule_end``; a call
between steps takes it briefly. ``stats``, ``wait_ready`` and ``shutdown`` need no lock and may come from any thread.
No call here waits for I/O, and after the start nothing raises into the engine's step: a call that does not fit (a plan
completed twice) is counted as ``misuse`` and ignored.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kvtiers.api import LookupResult, OffloadKey
from kvtiers.base import LoadPlan, OffloadEvent, OffloadPolicy, PrefixHits, RequestContext, StorePlan
from kvtiers.metrics import EngineMetrics, freeze
from kvtiers.primary.chunks import CPUPrimaryTier
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.lookup import Lookups
from kvtiers.tiering.promotion import Promotions
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tiers import TierSlot

__all__ = ["EngineSide", "TieringManager"]

_log = logging.getLogger("kvtiers.tiering")
_MAX_EVENTS = 100_000  # kept for a caller of take_events; the oldest are dropped
_NO_HITS = PrefixHits(0, 0, unresolved=False)


class EngineSide(Protocol):
    """What the manager needs of whoever built it: the region, the ranks, the tiers' life."""

    def ready(self) -> bool:
        """Say whether all ranks have joined. Never blocks; takes the region's news."""

    def dma_may_run(self) -> bool:
        """Say whether a rank that was lost may still write into rows."""

    def wait_ready(self, timeout: float) -> None:
        """Block until all ranks have joined and all required tiers are open; StartError names who is missing."""

    def new_weights(self, version: str) -> None:
        """Make all later keys and values those of other weights."""

    def tier_stats(self, name: str) -> dict[str, float]:
        """Return a tier's own figures."""

    def close_tiers(self, timeout: float) -> None:
        """Drain and close the tiers within ``timeout`` seconds."""

    def close_region(self) -> None:
        """Let go of the region, after all who use it."""


class _Plan:
    """A plan in flight: its rows are leased until it is completed."""

    __slots__ = ("keys", "rows", "state")

    def __init__(self, keys: Sequence[OffloadKey], rows: list[int], state: RequestState) -> None:
        self.keys = keys
        self.rows = rows
        self.state = state


class TieringManager:
    """Joins the primary and the tiers for one engine. See the module's docstring for the rules of calling."""

    def __init__(
        self,
        engine_id: str,
        primary: CPUPrimaryTier,
        slots: Sequence[TierSlot],
        tokens_per_chunk: Sequence[int],
        engine: EngineSide,
        options: TieringOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or TieringOptions()
        self.engine_id = engine_id
        self.lock = threading.Lock()
        self._primary = primary
        self._slots = list(slots)
        self._engine = engine
        self._metrics = EngineMetrics()
        self._jobs = JobTable(primary, self._slots, options, clock)
        self._promotions = Promotions(primary, self._jobs, options)
        self._cascades = Cascades(primary, self._jobs, self._slots, options)
        self._lookups = Lookups(primary, self._promotions, tokens_per_chunk, options, self._metrics, clock)
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self._asked: list[RequestState] = []
        self._parked: set[RequestState] = set()
        self._store_plans: dict[int, _Plan] = {}
        self._load_plans: dict[int, _Plan] = {}
        self._orphans: list[tuple[bool, list[int]]] = []
        self._plan_ids = itertools.count(1)
        self._polled = False
        self._ready = False
        self._events: deque[OffloadEvent] = deque(maxlen=_MAX_EVENTS)
        self._snapshot: dict[str, Any] = {}
        self._take_snapshot()

    # -- requests

    def on_new_request(self, ctx: RequestContext) -> OffloadPolicy:
        """Take note of a request; say which of its chunks should be offered to ``prepare_store``."""
        state = self._state(ctx)
        return OffloadPolicy.REQUEST_LEVEL if state.whole else OffloadPolicy.CHUNK_LEVEL

    def on_request_finished(self, ctx: RequestContext) -> None:
        """Take note that the engine is done with a request: its recency is final; its transfers may still run."""
        state = self._requests.pop(ctx.request_id, None)
        if state is None:
            self._metrics.misuse += 1
            return
        state.finished = True
        self._primary.on_request_finished(ctx.request_id)
        self._promotions.request_finished(state)
        self._close_if_done(state)

    # -- lookups

    def lookup(self, key: OffloadKey, ctx: RequestContext) -> LookupResult:
        """Return where one chunk stands; for window groups, scanned from the right within the known prefix."""
        if not self._begin():
            return LookupResult.MISS
        return self._lookups.single(key, self._state(ctx))

    def lookup_prefix(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> PrefixHits:
        """Return the leading run of one full-attention group's keys that is present, in chunks.

        Pending chunks come into the primary by themselves: ask again in the next step until none is pending and the
        answer is not ``unresolved``. With several groups pass each next one only keys up to the shortest run so far.
        """
        begin = time.perf_counter()
        hits = self._lookup_prefix(keys, self._state(ctx)) if self._begin() and keys else _NO_HITS
        self._metrics.engine_seconds += time.perf_counter() - begin
        return hits

    def _lookup_prefix(self, keys: Sequence[OffloadKey], state: RequestState) -> PrefixHits:
        if state.shortest_tokens is None:
            self._asked.append(state)
        return self._lookups.prefix(keys, state)

    # -- stores

    def prepare_store(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> StorePlan | None:
        """Lease rows for those of the keys that are not in the primary; None: nothing can be stored now."""
        begin = time.perf_counter()
        plan = self._prepare_store(keys, self._state(ctx)) if self._begin() else None
        self._metrics.engine_seconds += time.perf_counter() - begin
        return plan

    def _prepare_store(self, keys: Sequence[OffloadKey], state: RequestState) -> StorePlan | None:
        prepared = self._primary.prepare_store(keys, state.context.request_id)
        if prepared is None:
            self._metrics.refused_stores += len(keys)
            return None
        new, rows, evicted = prepared
        if state.whole and len(new) < len(keys):
            fresh = set(new)
            self._cascades.offered_again([key for key in keys if key not in fresh], state)
            if state.parked:
                self._parked.add(state)
        plan = StorePlan(next(self._plan_ids), new, np.asarray(rows, np.int32), evicted)
        self._store_plans[plan.plan_id] = _Plan(new, rows, state)
        state.open_stores += 1
        return plan

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """Say that all workers have ended this plan's copies; on success the chunks become readable and cascade."""
        begin = time.perf_counter()
        leased = self._store_plans.pop(plan.plan_id, None)
        if leased is None:
            self._metrics.misuse += 1
            return
        state = leased.state
        if success:
            self._make_readable(leased)
        else:
            self._metrics.failed_gpu_stores += len(leased.rows)
            self._fail_store(leased.rows)
        state.open_stores -= 1
        self._close_if_done(state)
        self._metrics.engine_seconds += time.perf_counter() - begin

    def _make_readable(self, leased: _Plan) -> None:
        takers = self._cascades.takers(len(leased.rows))
        readable = self._primary.complete_store(leased.rows, success=True, readers=len(takers))
        self._metrics.stored_chunks += len(readable)
        rows = leased.rows
        if len(readable) < len(rows):  # a reset came between
            row_of = dict(zip(leased.keys, rows, strict=True))
            rows = [row_of[key] for key in readable]
            for slot in takers:
                self._jobs.hold(slot, len(readable) - len(leased.rows))
        if readable:
            self._cascades.stored(readable, rows, takers, leased.state)

    def _fail_store(self, rows: list[int]) -> None:
        if self._engine.dma_may_run():
            self._primary.abandon(rows)
            self._orphans.append((True, rows))
        else:
            self._primary.complete_store(rows, success=False)

    # -- loads

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> LoadPlan | None:
        """Pin readable chunks for a copy to the GPU; None, with nothing pinned, if one of them is not readable."""
        begin = time.perf_counter()
        self._begin()
        state = self._state(ctx)
        rows = self._primary.prepare_load(keys, ctx.request_id)
        if rows is None:
            self._metrics.engine_seconds += time.perf_counter() - begin
            return None
        served = self._jobs.served(keys)
        for slot in served:
            slot.metrics.hits += 1
        self._metrics.primary_hits += len(keys) - len(served)
        self._cascades.read(keys, state)
        plan = LoadPlan(next(self._plan_ids), keys, np.asarray(rows, np.int32))
        self._load_plans[plan.plan_id] = _Plan(keys, rows, state)
        self._metrics.engine_seconds += time.perf_counter() - begin
        return plan

    def complete_load(self, plan: LoadPlan, success: bool = True) -> None:
        """Say that all workers have ended this plan's copies: the chunks are no longer pinned by it."""
        leased = self._load_plans.pop(plan.plan_id, None)
        if leased is None:
            self._metrics.misuse += 1
            return
        if not success and self._engine.dma_may_run():
            self._orphans.append((False, leased.rows))
            return
        self._metrics.loaded_chunks += len(leased.rows)
        self._primary.complete_load(leased.rows)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these chunks as used now, so that they are evicted later. Unknown keys are ignored."""
        self._primary.touch(keys)

    # -- steps

    def on_schedule_end(self, prefill_tokens: int = 0, prefill_seconds: float = 0.0) -> None:
        """End the step: take the tiers' news, submit what the step has collected. The last call of every step.

        ``prefill_tokens``, ``prefill_seconds``: what the engine computed since the last step, for ``load_wait: auto``.
        """
        begin = time.perf_counter()
        self._begin()
        self._lookups.observe_prefill(prefill_tokens, prefill_seconds)
        if self._orphans:
            self._release_orphans()
        if self._parked:
            self._retry_parked()
        if self._promotions:
            self._promotions.submit()
        self._cascades.work_ahead()
        self._primary.release_expired(self._clock())
        for state in self._asked:
            state.shortest_tokens = None
        self._asked.clear()
        for slot in self._slots:
            slot.end_step()
        self._polled = False
        metrics = self._metrics
        metrics.steps += 1
        took = time.perf_counter() - begin
        metrics.engine_seconds += took
        metrics.step_latency.observe(took)
        self._take_snapshot()

    def has_pending_work(self) -> bool:
        """Say whether the engine should keep stepping though it has no request: something of ours is under way."""
        return bool(
            self._jobs.running
            or self._promotions
            or self._parked
            or self._orphans
            or any(slot.has_pending_work() for slot in self._slots)
        )

    def take_events(self) -> list[OffloadEvent]:
        """Return what has become resident or was removed since the last call, oldest first."""
        self._events.extend(self._primary.take_events())
        events = list(self._events)
        self._events.clear()
        return events

    def stats(self) -> dict[str, Any]:
        """Return all figures as of the last ``on_schedule_end``: ``engine``, ``primary``, ``tiers`` by name."""
        return self._snapshot

    # -- life

    def reset_cache(self) -> None:
        """Forget all chunks at once, without waiting: what is in flight ends in quarantine. Tiers keep their values."""
        self._promotions.drop()
        self._primary.reset_cache()
        self._jobs.forget_origins()
        for state in self._parked:
            state.parked.clear()
            self._close_if_done(state)
        self._parked.clear()
        self._metrics.generation += 1

    def set_weights_version(self, version: str) -> None:
        """Retire all KV of the weights so far: a reset, and another fingerprint for all that follows, in one call."""
        self.reset_cache()
        self._engine.new_weights(version)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Block until all ranks have joined; StartError names the missing or refused rank, or the required tier."""
        self._engine.wait_ready(timeout)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Drain the tiers within ``timeout`` seconds, say what was dropped, and release everything."""
        self._engine.close_tiers(timeout)
        self._primary.close()
        self._engine.close_region()

    # -- inside

    def _begin(self) -> bool:
        """Take the news once a step, before anything is decided; say whether all ranks are there."""
        if not self._polled:
            self._polled = True
            self._ready = self._engine.ready()
            self._jobs.poll()
        return self._ready

    def _state(self, ctx: RequestContext) -> RequestState:
        state = self._requests.get(ctx.request_id)
        if state is None:
            slots = [slot for slot in self._slots if ctx.may_load_from(slot.name)]
            state = self._requests[ctx.request_id] = RequestState(ctx, slots)
            state.whole = tuple(slot for slot in self._slots if slot.request_started(ctx))
        return state

    def _retry_parked(self) -> None:
        for state in list(self._parked):
            self._cascades.retry_parked(state)
            if not state.parked:
                self._parked.discard(state)
                self._close_if_done(state)

    def _close_if_done(self, state: RequestState) -> None:
        if state.finished and not state.open_stores and not state.parked:
            for slot in self._slots:
                slot.request_finished(state.context)

    def _release_orphans(self) -> None:
        if not self._engine.dma_may_run():
            for is_store, rows in self._orphans:
                if is_store:
                    self._primary.complete_store(rows, success=False)
                else:
                    self._primary.complete_load(rows)
            self._orphans.clear()

    def _take_snapshot(self) -> None:
        self._snapshot = {
            "engine": freeze(self._metrics),
            "primary": self._primary_figures(),
            "tiers": {
                slot.name: freeze(slot.metrics) | {"own": self._engine.tier_stats(slot.name)} for slot in self._slots
            },
        }

    def _primary_figures(self) -> dict[str, float]:
        primary = self._primary
        return {
            "rows": primary.num_rows,
            "free_rows": primary.free_rows,
            "evictable_rows": primary.evictable,
            "pending_rows": primary.pending_rows,
            "pinned_rows": primary.pinned_rows,
            "protected_rows": primary.protected_rows,
            "quarantined_rows": primary.quarantined_rows,
            "clean_rows": primary.clean_rows,
            "misuse": primary.misuse,
        }
