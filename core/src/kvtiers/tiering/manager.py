"""The tiering manager: the interface of an engine's scheduler to all tiers.

::

    load   residency -> promotion -> secondary/store_tier -> host/process -> primary/tier -> gpu/worker
    store  gpu/worker -> primary/tier -> cascade -> secondary/store_tier -> host/process

One thread at a time: the caller holds ``manager.lock``, from its first call of a step to ``on_schedule_end`` or for
each call alone. ``stats``, ``wait_ready``, ``tend`` and ``shutdown`` are called without it, by any thread.
No call here waits for I/O, and after the start nothing raises into the engine's step: a call that does not fit (a plan
completed twice, a request that is over, a key of a length that none has) is counted as ``misuse`` and ignored.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvtiers.api import OffloadKey, TierConfig, tenant_of
from kvtiers.api.keys import first_misfit
from kvtiers.api.units import waitable
from kvtiers.layout.tenants import Tenants
from kvtiers.metrics import EngineMetrics
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.adopted import Adopted
from kvtiers.tiering.cascade import Cascades
from kvtiers.tiering.command_queue import Command, CommandQueue
from kvtiers.tiering.commands import ChunkCommands, TierCommands, WarmUpCommands
from kvtiers.tiering.engine_side import EngineSide, EventSide, LiveSide, Watchers
from kvtiers.tiering.estimates import PRIOR_BYTES_PER_SECOND
from kvtiers.tiering.jobs import JobTable, TieringOptions
from kvtiers.tiering.load_or_recompute import Waits
from kvtiers.tiering.load_prices import LoadPrices
from kvtiers.tiering.plans import Plans
from kvtiers.tiering.prefetch import Prefetches
from kvtiers.tiering.promotion import Promotions
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.reports import Snapshots
from kvtiers.tiering.requests import RequestState, RequestTable
from kvtiers.tiering.residency import Residency
from kvtiers.tiering.tier_slot import PinBudget, TierSlot
from kvtiers.types import (
    NO_HINTS,
    NO_PARAMS,
    NO_RETENTION,
    ChunkBlocks,
    LoadPlan,
    OffloadPolicy,
    PromptGroup,
    Reach,
    RequestContext,
    Retention,
    StorePlan,
    request_hints,
    retention_of,
)

__all__ = ["EngineSide", "TieringManager"]

_NOTHING = Reach(0, 0, unresolved=False)
_STEP_SECONDS = 1.0  # how long a shutdown waits for a step that another thread is in
_ADOPTED_SECONDS = 0.5  # of steps of an idle engine at a time, for what was there at its start
_LOOK_SECONDS = 0.1  # how often it is looked for promotions that have waited too long to be read
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _timed(
    method: Callable[Concatenate["TieringManager", _P], _R],
) -> Callable[Concatenate["TieringManager", _P], _R]:
    """Count the time that a call takes on the engine's thread, and mark its begin and end for ``Snapshots``."""

    @wraps(method)
    def timed(self: "TieringManager", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        begin = time.perf_counter()
        self._snapshots.turns += 1
        try:
            return method(self, *args, **kwargs)
        finally:
            self._metrics.engine_seconds += time.perf_counter() - begin
            self._snapshots.turns += 1

    return timed


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
        prefix_group: int = 0,
        watchers: Watchers | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._watchers = watchers = watchers or Watchers()
        options = options or TieringOptions()
        self._metrics = metrics = EngineMetrics()
        self.engine_id = engine_id
        self.lock = threading.Lock()
        self.tokens_per_chunk = tuple(tokens_per_chunk)
        self._primary = primary
        self._slots = list(slots)
        self._engine = engine
        self._clock = clock
        self._event_sides = watchers.event_sides
        self.tenants = tenants or Tenants("", is_on=False)
        for slot in self._slots:
            slot.rate.prior = primary.row_stride / PRIOR_BYTES_PER_SECOND
        self._provenance = Provenance(self._slots)
        self._waits = Waits(options, clock, options.prefill_cost())
        prices = LoadPrices(self._waits.cost, prefix_group, tokens_per_chunk[prefix_group])
        self._prices = prices
        self._jobs = JobTable(primary, self._slots, self._provenance, options, clock, prices)
        self._budget = budget = PinBudget(primary.num_rows, options.all_tiers, options.one_tier)
        self._cascades = Cascades(primary, self._jobs, budget, self._slots, options, metrics, clock)
        self._adopted = Adopted(primary, self._cascades, budget, self._jobs.job_rows, self._slots, clock)
        self._promotions = Promotions(primary, self._jobs, budget, self._provenance, options, self._cascades)
        self._residency = Residency(
            primary, budget, self._promotions, self._provenance, self._waits, tokens_per_chunk, metrics
        )
        self._prefetches = self._prefetches_with(budget, options)
        self._prefetching = self._prefetches.all  # at hand: each step looks at it
        self._plans = Plans(primary, self._cascades, self._provenance, engine, metrics, prefix_group)
        self._requests = RequestTable(self._slots, self._count_misuse, watchers.tracing)
        self.commands = CommandQueue()
        self._commanded = self.commands.waiting  # at hand: each step looks at it
        self.live: LiveSide | None = None
        """Of an engine with a config."""
        jobs, provenance, cascades = self._jobs, self._provenance, self._cascades
        self.tier_commands = TierCommands(self._slots, jobs, self._promotions, provenance, cascades, primary.row_stride)
        self.chunk_commands = ChunkCommands(primary, self._slots, jobs, self._plans, provenance, cascades, self._reset)
        self.warm_ups = WarmUpCommands(self.tier_commands, self._prefetches, primary.row_stride)
        self._look_at = -math.inf
        self._tended = -1
        """How many steps had ended at the last ``tend``."""
        self._conditions: list[tuple[float, ...]] = []
        """How the tiers were at the last ``tend`` that did something."""
        self._polled = self._ready = self._closed = False
        self._snapshots = Snapshots(metrics, primary, self._slots, engine.tier_stats, watchers)

    def _prefetches_with(self, budget: PinBudget, options: TieringOptions) -> Prefetches:
        return Prefetches(
            self._primary,
            self._jobs,
            budget,
            self._provenance,
            self._cascades,
            self._slots,
            options,
            self._metrics,
            self._clock,
        )

    # -- requests

    @_timed
    def on_new_request(self, ctx: RequestContext, prompt_tokens: int = 0) -> OffloadPolicy:
        """Register a request; return which of its chunks should be offered to ``prepare_store``.

        ``prompt_tokens``: of its prompt, if they are known: how much waits for the GPU, for ``load_wait: auto``.
        """
        state = self._requests.open(ctx, prompt_tokens)
        self._metrics.refused_tenants = self.tenants.refused
        if ctx.params and (hints := request_hints(ctx.params)) is not NO_HINTS:
            self._primary.hint(ctx.request_id, hints)
        if ctx.params and (retention := retention_of(ctx.params)) is not NO_RETENTION:
            self._retain(state, retention)
        self._waits.came(state)
        return OffloadPolicy.REQUEST_LEVEL if state.whole else OffloadPolicy.CHUNK_LEVEL

    def tenant_of(self, ctx: RequestContext, salt: str = "") -> str | None:
        """Return the tenant that the request's keys are to have, "" for none; None: it may use no tier.

        Counted then, and the log says why. ``salt``: the request's, for ``tenants.salt_separator``.
        """
        tenant = self.tenants.of(ctx.params, salt)
        self._metrics.refused_tenants = self.tenants.refused
        return tenant

    @_timed
    def on_request_finished(self, ctx: RequestContext, output_tokens: int = 0) -> None:
        """Handle a request's end in the engine: its recency is final; its transfers may still run.

        ``output_tokens``: of its answer, if they are known, for an eviction policy that learns.
        """
        state = self._requests.finish(ctx)
        if state is not None:
            if output_tokens > 0:
                hints = request_hints(ctx.params)._replace(output_tokens=output_tokens)
                self._primary.hint(ctx.request_id, hints)
            self._waits.taken_up(state)
            self._primary.on_request_finished(ctx.request_id)
            self._promotions.request_finished(state)
            self._requests.close_if_done(state)

    @_timed
    def on_request_preempted(self, ctx: RequestContext) -> None:
        """Record that the engine has taken a request's blocks away: when it is looked up again, it is decided anew."""
        if (state := self._requests.get(ctx)) is not None:
            state.start_over()

    @property
    def publisher(self) -> EventSide | None:
        """The publisher of KV events (``events`` in the config); None without one."""
        return self._watchers.publisher

    @property
    def wants_descriptions(self) -> bool:
        """Return whether ``describe`` does anything: KV events are made of what happens here."""
        return bool(self._event_sides)

    @_timed
    def describe(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Take what routers need of chunks besides their keys, before they are stored or while they are loaded."""
        for side in self._event_sides:
            side.describe(chunks)

    def add_event_tier(self, tier: TierConfig) -> None:
        """Have KV events say of a tier what the config says of it. Any thread."""
        for side in self._event_sides:
            side.add_tier(tier)

    @property
    def takes_requests(self) -> bool:
        """Return whether ``record_request`` does anything."""
        return self._watchers.recorder is not None or self._watchers.what_if is not None

    @_timed
    def record_request(
        self,
        arrival: float,
        prompt_tokens: int,
        tokens: int,
        block_hashes: Sequence[Sequence[bytes]],
        params: Mapping[str, object] = NO_PARAMS,
    ) -> None:
        """Take a request that ends now, for the trace and the shadow caches (``record``, ``what_if`` in the config).

        ``arrival``: by ``time.time``. ``tokens``: prompt and output. ``block_hashes``: chained, by KV group.
        ``params``: the request's, hints among them.
        """
        recorder, what_if = self._watchers.recorder, self._watchers.what_if
        if recorder is not None:
            recorder.request(arrival, prompt_tokens, tokens, block_hashes, params)
            self._metrics.dropped_records = recorder.dropped
        if what_if is not None:
            what_if.request(arrival, prompt_tokens, max(0, tokens - prompt_tokens), block_hashes, params)

    # -- lookups

    @_timed
    def reach(
        self,
        groups: Sequence[PromptGroup],
        ctx: RequestContext,
        computed: int = 0,
        end: int | None = None,
        step: int | None = None,
    ) -> Reach:
        """Return how much of a prompt can be loaded behind its first ``computed`` tokens, which the engine has.

        ``groups``: the prompt's keys in all KV groups. ``end``: no token from there on is loaded; None: as far as the
        keys go. A load ends there, or at a multiple of ``step`` tokens, by default where each group has whole chunks.
        Pending chunks come into the primary by themselves: ask again in the next step while ``waits``.
        """
        state = self._state_for(groups[0].keys if groups else (), ctx) if self._begin() else None
        if state is None:
            return _NOTHING
        before, began = state.counted, time.monotonic_ns() if state.trace is not None else 0
        reach = self._residency.reach(groups, state, computed, end, step)
        if state.keeps is not None and state.counted > before:
            for group in groups:
                self._keep(group.keys, state.keeps)
        if state.trace is not None:
            state.trace.looked_up(groups, self.tokens_per_chunk, computed, reach, state, began)
        return reach

    @_timed
    def waits_on(self, ctx: RequestContext, computed: int, end: int) -> Reach | None:
        """Return the last answer of ``reach`` if the request waits on for loads or for rows; None: ask ``reach``.

        For ``computed`` and ``end`` as they were then. Some microseconds for any prompt: how much of what was pending
        has come meanwhile is not looked for, but for the first chunk, with which a load may begin, and the last one.
        """
        state = self._requests.get(ctx) if self._begin() else None
        return None if state is None else self._residency.waits_on(state, computed, end)

    @_timed
    def announce(self, groups: Sequence[PromptGroup]) -> None:
        """Ask the tiers at once about a prompt whose ``reach`` will be asked for soon; between any two other calls."""
        if self._ready and not self._closed:
            keys = self._residency.question(groups)
            if first_misfit(keys) is not None:
                self._metrics.misuse += 1
                return
            for slot in self._slots if keys else ():
                slot.announce(keys)

    @_timed
    def hurry(self, ctx: RequestContext) -> bool:
        """Send at once what is asked for a request, and poll the tiers with the next call; False: it awaits no answer.

        For a request that is ``unresolved``, in an engine that has nothing else to do. It may wait for rows instead.
        """
        state = None if self._closed else self._requests.get(ctx)
        if state is None or state.plan is not None:
            return False
        for slot in self._slots:
            slot.announce(())
        self.look_again()
        return True

    @_timed
    def keep(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> None:
        """Name a prompt's chunks, of one KV group, whose request has hints to keep them (``Retention``).

        ``reach`` does so for the prompts that it is about: only an engine that has some of a prompt itself needs it.
        """
        if not self._closed and keys and (retention := retention_of(ctx.params)).ttl:
            self._keep(keys, retention)

    @_timed
    def prefetch(self, keys: Sequence[OffloadKey], ctx: RequestContext | None = None) -> bool:
        """Load those chunks of a known prefix that the primary lacks and a tier has, behind the loads of all requests.

        ``keys``: of one KV group, head first; at most the first 4096. Free rows alone are used. ``ctx``: of the request
        that says which tiers may be loaded from. False: too many prefetches wait, and this one was dropped and counted.
        """
        if self._closed or not (self._slots and keys):
            return False
        tiers = None if ctx is None else [slot.name for slot in self._slots if ctx.may_load_from(slot.name)]
        return self._prefetches.prefix(keys, tiers)

    def look_again(self) -> None:
        """Poll the tiers with the next call, though they were polled in this step: for an engine that waited since."""
        self._polled = False

    # -- stores

    @_timed
    def prepare_store(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> StorePlan | None:
        """Lease rows for those of the keys that are not in the primary; None: nothing can be stored now."""
        state = self._state_for(keys, ctx) if self._begin() else None
        if state is None:
            return None
        plan = self._plans.prepare_store(keys, state)
        if state.parked:
            self._requests.parked.add(state)
        return plan

    @_timed
    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """Complete a plan whose copies all workers have ended; on success the chunks become readable and cascade."""
        state = self._plans.complete_store(plan, success=success)
        if state is not None:
            self._requests.close_if_done(state)

    # -- loads

    @_timed
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> LoadPlan | None:
        """Pin readable chunks for a copy to the GPU; None, with nothing pinned, if one of them is not readable."""
        return self._pin(keys, ctx) if self._begin() else None

    @_timed
    def prepare_part(
        self, runs: Sequence[Sequence[OffloadKey]], ctx: RequestContext
    ) -> tuple[LoadPlan, Sequence[int]] | None:
        """Pin the chunks at the head of each run that are readable, of a load for which others are still on their way.

        Return also how many those are, run by run; None, with nothing pinned, if there are none.
        """
        ready = [self._primary.ready_run(run) for run in runs] if self._begin() else []
        keys = [key for run, chunks in zip(runs, ready, strict=False) for key in run[:chunks]]
        plan = self._pin(keys, ctx) if keys else None
        return None if plan is None else (plan, ready)

    @_timed
    def brought(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, TierSlot]:
        """Return those chunks that a tier has brought into the primary, or brings, and that no request has read yet.

        Each with its tier.
        """
        return self._provenance.brought(keys)

    @_timed
    def complete_load(self, plan: LoadPlan, success: bool = True) -> None:
        """Complete a plan whose copies all workers have ended: it no longer pins its chunks."""
        self._plans.complete_load(plan, success=success)

    def load_was_late(self) -> None:
        """Count a load of which the engine has the first chunks and computes the others."""
        self._metrics.late_loads += 1

    @_timed
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these chunks as used now, so that they are evicted later. Unknown keys are ignored."""
        self._primary.touch(keys)

    # -- steps

    @_timed
    def on_schedule_end(
        self, prefill_tokens: int = 0, prefill_seconds: float = 0.0, prefill_position: float = 0.0
    ) -> None:
        """End the step: poll the tiers, submit what the step has collected. The last call of every step.

        ``prefill_tokens``, ``prefill_seconds``: what the engine computed since the last step, for ``load_wait: auto``.
        ``prefill_position``: how many tokens were before each of those in its prompt, on average, for what loads save.
        """
        if self._closed:
            return
        begin = time.perf_counter()
        self._begin()
        self._waits.step_ends(prefill_tokens, prefill_seconds, prefill_position)
        if self._plans.orphans or self._requests.parked:
            self._plans.release_orphans()
            self._retry_parked()
        if self._promotions:
            self._promotions.submit()
        if self._prefetching and self._ready:
            self._prefetches.advance()
        if self._cascades.works_ahead:
            self._cascades.work_ahead()
        if self._adopted.tiers and self._ready:
            self._adopted.advance()
        if (now := self._clock()) >= self._look_at:
            self._look_around(now)
        if self._primary.events or self._jobs.events:
            self._pass_events_on()
        for slot in self._slots:
            slot.end_step()
        self._waits.questions_sent()
        self._polled = False
        metrics = self._metrics
        metrics.steps += 1
        metrics.step_latency.observe(time.perf_counter() - begin)

    @_timed
    def has_pending_work(self) -> bool:
        """Return whether the engine should keep stepping though it has no request: something waits for work in flight.

        Rows in quarantine do not count: they are released in whatever steps the engine makes.
        """
        if self._closed:
            return False
        return bool(
            self._jobs.running
            or self._promotions
            or self._requests.parked
            or self._commanded
            or (self._prefetching and self._prefetches.has_work())
            or any(slot.has_pending_work() for slot in self._slots)
        )

    def tend(self) -> None:
        """Look after the tiers if no step has ended since the last call. For about one call a second, by any thread.

        An idle engine notices by it that a store answers again. It waits for nothing and does nothing while a step is
        on; a step that begins meanwhile waits for its end, some ten microseconds a tier.
        """
        tended, self._tended = self._tended, self.steps
        if tended == self.steps and self.lock.acquire(blocking=False):
            try:
                self._tend()
            finally:
                self.lock.release()

    @property
    def steps(self) -> int:
        """How many steps have ended so far. Any thread."""
        return self._metrics.steps

    @property
    def is_ready(self) -> bool:
        """Whether the last step found all ranks there and, with ``prefault: all``, all memory pinned. Any thread."""
        return self._ready

    def fingerprint(self) -> str:
        """Return the fingerprint of the current weights, as it stands in the names of values. Any thread."""
        return self._engine.fingerprint()

    def tiers_have_spoken(self) -> bool:
        """Return whether each tier is open, or has reported why it is not. Any thread."""
        return all(slot.has_spoken() for slot in self._slots)

    @_timed
    def take_lost_ranks(self) -> Collection[int]:
        """Return the ranks that were lost since the last call, or before and are not back: their transfers have failed.

        Complete the plans that they took part in, once the other ranks have ended: the rows stay untouched until
        nothing of a lost rank can write into them.
        """
        self._begin()
        return self._engine.take_lost_ranks()

    def stats(self) -> dict[str, Any]:
        """Return all figures of one moment between two calls: ``engine``, ``primary``, ``tiers`` by name.

        A tier's ``own`` figures are asked for after it. With shadow caches also ``what_if``, at most some seconds old.
        """
        return self._snapshots.data()

    # -- life

    @_timed
    def reset_cache(self) -> None:
        """Forget all chunks at once, without waiting: what is in flight ends in quarantine. Tiers keep their values."""
        if not self._closed:
            self._reset()

    def set_bounds(self, options: TieringOptions) -> None:
        """Use other bounds of waits and of rows from now on."""
        self._waits.set_options(options)
        self._budget.set_shares(self._primary.num_rows, options.all_tiers, options.one_tier)
        self._promotions.set_store_reserve(options.store_reserve)
        self._prefetches.set_store_reserve(options.store_reserve)

    @_timed
    def set_weights_version(self, version: str) -> None:
        """Retire all KV of the weights so far: a reset, and another fingerprint for all that follows, in one call."""
        if self._closed:
            return
        self._reset()
        self._cascades.retire_keys()
        self._provenance.retire_keys()
        self._requests.retire_keys()
        self._prefetches.retire_keys()
        self._engine.new_weights(version)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Block until all ranks have joined; StartError names the missing or refused rank, or the required tier."""
        self._engine.wait_ready(waitable(timeout))

    def shutdown(self, timeout: float = 30.0) -> None:
        """Drain the tiers within ``timeout`` seconds, log what was dropped, and release everything.

        Calls that come later are answered as if nothing were there.
        """
        timeout = waitable(timeout)
        stepping = not self.lock.acquire(timeout=_STEP_SECONDS)
        closed, self._closed = self._closed, True
        for slot in self._slots:
            slot.leave()
        if not stepping:
            self._prefetches.shut_down()
            self.lock.release()
        if not closed:
            self._engine.close_tiers(self._watchers.close(timeout))
            self._primary.close()
            self._engine.close_region()

    # -- inside

    def _pin(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> LoadPlan | None:
        state = self._requests.get(ctx)
        plan = None if state is None else self._plans.prepare_load(keys, state)
        if plan is not None and state is not None and state.landed:
            self._prices.used(state)
        return plan

    def _begin(self) -> bool:
        """Poll the region and the tiers once a step, before any decision; return whether all ranks have joined."""
        if self._closed:
            return False
        if not self._polled:
            self._polled = True
            self._ready = self._engine.ready()
            self._primary.poll()
            self._jobs.poll()
            if self._commanded:
                self.commands.run()
        return self._ready

    def _tend(self) -> None:
        if self._closed:
            return
        now = self._clock()
        self._primary.poll()
        self._primary.release_expired(now)
        if self._primary.events:
            self._pass_events_on()
        for slot in self._slots:
            slot.tend(now)
        if not self._commanded and any(slot.may_have_room(now) for slot in self._slots):
            self.commands.post(Command(self._offer_again))
        self._adopted.look()
        if not self._commanded and self._adopted.is_due(now):
            self.commands.post(Command(partial(self._steps_until, now + _ADOPTED_SECONDS)))
        conditions, self._conditions = self._conditions, [slot.condition() for slot in self._slots]
        if conditions and conditions != self._conditions:
            self.commands.post(Command(dict))  # an empty step: vLLM publishes figures in its steps alone

    def _offer_again(self) -> dict[str, Any]:
        """Offer each tier the last chunk that it did not store: so an idle engine notices that a full one has room."""
        now = self._clock()
        for slot in self._slots:
            if slot.may_have_room(now):
                self._cascades.hand_on(slot, slot.take_not_stored(now))
        return {}

    def _steps_until(self, until: float) -> dict[str, Any] | None:
        """Keep an idle engine stepping for a moment, while there is something to do for what was there at the start."""
        return None if self._adopted.tiers and self._clock() < until else {}

    def _retain(self, state: RequestState, retention: Retention) -> None:
        if retention.priority == "low":
            self._primary.brings_low(state.context.request_id)
        else:
            state.keeps = retention

    def _keep(self, keys: Sequence[OffloadKey], retention: Retention) -> None:
        self._primary.keep(keys, retention.ttl, high=retention.priority == "high")

    def _look_around(self, now: float) -> None:
        """Do the periodic work that not every step needs."""
        self._look_at = now + _LOOK_SECONDS
        self._primary.release_expired(now)
        self._adopted.look()
        for slot in self._slots:
            slot.watch_speed(now)

    def _state_for(self, keys: Sequence[OffloadKey], ctx: RequestContext) -> RequestState | None:
        """Return the state of a request; None if it is over, or names a tenant whose keys these are not: misuse."""
        state = self._requests.get(ctx)
        if state is not None and state.tenant and keys and (len(keys[0]) < 4 or tenant_of(keys[0]) != state.tenant):
            self._count_misuse()
            return None
        return state

    def _reset(self) -> None:
        self._promotions.drop()
        self._primary.reset_cache()
        self._cascades.reset()
        self._adopted.reset()
        self._jobs.reset()
        self._provenance.reset()
        for state in self._requests.parked:
            state.parked.clear()
            self._requests.close_if_done(state)
        self._requests.parked.clear()
        self._requests.forget_answers()
        self._primary.take_events()  # the chunks that they name are gone
        for side in self._event_sides:
            side.cleared()
        self._metrics.generation += 1

    def _retry_parked(self) -> None:
        for state in list(self._requests.parked):
            self._cascades.retry_parked(state)
            if not state.parked:
                self._requests.parked.discard(state)
                self._requests.close_if_done(state)

    def _pass_events_on(self) -> None:
        events = self._primary.take_events() + self._jobs.take_events()
        for side in self._event_sides:
            side.take(events)

    def _count_misuse(self) -> None:
        self._metrics.misuse += 1
