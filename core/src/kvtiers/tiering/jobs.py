"""The job table: transfer jobs between the primary and the tiers, from submission to the release of their rows.

=========  =================================================================================
state      meaning
=========  =================================================================================
running    submitted; its rows are pinned (a store) or not yet readable (a promotion)
failed     given up at its deadline, or reported as failed by the tier: its requests go on at
in use     once; its rows stay in quarantine, since the tier may still touch them
(gone)     the tier has reported: the rows are released
=========  =================================================================================

Everything here runs on the engine's thread. Both clocks of a deadline are the engine's own: until the job is reported
as started, and from then on. After a reset of the cache a job still holds its rows; its result has no other effect.
"""

import itertools
import logging
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtiers.api import JobResult, OffloadKey, TransferJob
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.secondary.tier_jobs import (
    JobFailed,
    JobReleased,
    JobStarted,
    TierEvent,
    good_keys,
    is_of,
    moved,
    without,
)
from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.load_prices import LoadPrices
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import Reservation, TierSlot
from kvtiers.types import OffloadEvent

__all__ = ["JobTable", "OnEnd", "Running", "TieringOptions"]

_log = logging.getLogger("kvtiers.tiering")
_SCAN_SECONDS = 0.05  # how often deadlines are looked at


@dataclass(frozen=True, slots=True)
class TieringOptions:
    """Bounds of the tiering manager; shares are of all rows, at least one row each.

    ``load_wait`` None: wait for a promotion as long as computing the chunks would take; ``prior_seconds_per_token``:
    what a token of a prompt takes, until the engine has computed one; ``estimated_seconds_per_token``: the engine's own
    estimate of that, 0 without one. ``job_bytes``: larger jobs cost the engine's thread less, smaller ones come free
    sooner.
    """

    lookup_wait: float = 0.020
    load_wait: float | None = None
    store_reserve: float = 0.10
    all_tiers: float = 0.50
    one_tier: float = 0.25
    clean_reserve: float = 0.05
    job_bytes: int = 128 * 2**20
    prior_seconds_per_token: float = 0.0
    estimated_seconds_per_token: float = 0.0

    def prefill_cost(self) -> PrefillCost:
        """Return what computing is taken to cost, of which nothing is measured yet."""
        return PrefillCost(self.prior_seconds_per_token, self.estimated_seconds_per_token)


OnEnd: TypeAlias = Callable[[TierSlot, Sequence[OffloadKey], Sequence[OffloadKey]], None]
"""Takes a tier, the keys of a job that it has moved, and those of a store that it has not."""


@dataclass(slots=True, eq=False)
class Running:
    """A submitted job. ``state`` is the request that it was submitted for; ``generation`` that of the cache then."""

    job: TransferJob
    slot: TierSlot
    rows: Sequence[int]
    reserved: Reservation
    state: RequestState
    on_end: OnEnd
    generation: int
    submitted: float
    ticket: int = 0
    """Of a promotion, in its tier's ``rate``."""
    positions: Sequence[int] = ()
    """Of a promotion, each chunk's first token in its prompt."""
    started: float | None = None
    failed_in_use: bool = False


class JobTable:
    """All jobs in flight."""

    def __init__(
        self,
        primary: CPUPrimaryTier,
        slots: Sequence[TierSlot],
        provenance: Provenance,
        options: TieringOptions,
        clock: Callable[[], float],
        prices: LoadPrices,
    ) -> None:
        self._primary = primary
        self._prices = prices
        self._slots = slots
        self._provenance = provenance
        self._clock = clock
        self._jobs: dict[int, Running] = {}
        self.events: list[OffloadEvent] = []
        """What the tiers have stored, and were found to be without, since these were last taken."""
        self._ids = itertools.count(1)
        self._job_rows = max(1, options.job_bytes // max(1, primary.row_stride))
        self._failed_in_use = 0
        self._generation = 0
        self._next_scan = -math.inf

    @property
    def job_rows(self) -> int:
        """The most chunks of one job."""
        return self._job_rows

    @property
    def running(self) -> int:
        """Jobs in flight that have not failed in use."""
        return len(self._jobs) - self._failed_in_use

    @property
    def newest(self) -> int:
        """The number of the newest job in flight, 0 if there is none."""
        return next(reversed(self._jobs), 0)

    def has_store_until(self, job_id: int) -> bool:
        """Return whether a store with this number or a smaller one is in flight, and has not failed in use."""
        jobs = itertools.takewhile(lambda running: running.job.job_id <= job_id, self._jobs.values())
        return any(not (running.job.is_promotion or running.failed_in_use) for running in jobs)

    def has_jobs_of(self, slot: TierSlot) -> bool:
        """Return whether the tier has a job in flight, or one that has failed in use."""
        return any(True for _ in self._of(slot))

    def has_given_up(self, reserved: Reservation) -> bool:
        """Return whether the job for which these rows were reserved has failed in use."""
        jobs = self._jobs.values() if self._failed_in_use else ()
        return any(running.failed_in_use and running.reserved is reserved for running in jobs)

    def submit(
        self,
        reserved: Reservation,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        state: RequestState,
        on_end: OnEnd,
        *,
        promotion: bool,
        positions: Sequence[int] = (),
    ) -> None:
        """Hand chunks to the tier that their rows are reserved for, in jobs of bounded size.

        ``positions``: of a promotion, each chunk's first token in its prompt. ``on_end``: called as each job ends or
        fails, unless the cache was reset since.
        """
        slot, now = reserved.slot, self._clock()
        for start in range(0, len(keys), self._job_rows):
            some_rows = rows[start : start + self._job_rows]
            # Copies: a tier that changes its lists must not change ours.
            some_keys = tuple(keys[start : start + self._job_rows])
            chunk_ids = memoryview(array("i", some_rows))
            job = TransferJob(next(self._ids), some_keys, chunk_ids, promotion, state.context)
            ticket = slot.rate.begins(now) if promotion else 0
            own = reserved if len(some_rows) == len(rows) else reserved.split(len(some_rows))
            running = Running(job, slot, some_rows, own, state, on_end, self._generation, now, ticket)
            running.positions = positions[start : start + self._job_rows]
            self._jobs[job.job_id] = running
            slot.metrics.running_jobs += 1
            if not slot.submit(job):
                self._finish(running, JobResult(job.job_id, success=False))

    def cancel_loads(self, slot: TierSlot) -> int:
        """Make misses of all loads of a tier; their rows stay in quarantine until it releases them."""
        loads = [running for running in self._of(slot) if running.job.is_promotion and not running.failed_in_use]
        chunks = sum(len(running.rows) for running in loads)
        slot.metrics.cancelled_loads += chunks
        self._give_up(slot, loads, "are cancelled, since it is switched off", notify=slot.cancel)
        return chunks

    def poll(self) -> None:
        """Handle all tiers' events, in their order; at last fail overdue jobs."""
        for slot in self._slots:
            if events := slot.poll():
                self._handle(slot, events)
        if self._jobs:
            now = self._clock()
            if now >= self._next_scan:
                self._next_scan = now + _SCAN_SECONDS
                self._expire(now)

    def reset(self) -> None:
        """Handle a reset of the cache: from now on the jobs in flight only hold their rows."""
        self._generation += 1
        self.events.clear()

    def take_events(self) -> list[OffloadEvent]:
        """Return what the tiers have stored, or did not have, since the last call or reset, in order."""
        events, self.events = self.events, []
        return events

    # -- inside

    def _handle(self, slot: TierSlot, events: Sequence[TierEvent]) -> None:
        failed: dict[Running, str] = {}  # those that come one after the other: one line in the log
        has_ended = False
        for event in events:
            if isinstance(event, JobFailed):
                running = self._job_of(slot, event.job_id)
                if running is not None and not running.failed_in_use:
                    failed[running] = event.error
                continue
            if failed:
                self._give_up(slot, list(failed), _failed(failed.values()))
                failed.clear()
            if isinstance(event, JobStarted):
                self._start(slot, event.job_id)
            elif not isinstance(event, JobReleased):  # which is not asked for here: a load keeps its rows to its end
                has_ended = True
                self._accept(slot, event)
                if slot.retired:
                    live = [job for job in self._of(slot) if not job.failed_in_use]
                    self._give_up(slot, live, "were given up")
                    break
        if failed:
            self._give_up(slot, list(failed), _failed(failed.values()))
        if has_ended:
            slot.rate.look_ends(self._clock())

    def _start(self, slot: TierSlot, job_id: int) -> None:
        running = self._job_of(slot, job_id)
        if running is not None and running.started is None:
            running.started = self._clock()

    def _job_of(self, slot: TierSlot, job_id: int) -> Running | None:
        try:
            running = self._jobs.get(job_id)
        except TypeError:  # no id at all
            return None
        return running if running is not None and running.slot is slot else None

    def _of(self, slot: TierSlot) -> Iterable[Running]:
        return (running for running in self._jobs.values() if running.slot is slot)

    def _accept(self, slot: TierSlot, result: JobResult) -> None:
        if not isinstance(result, JobResult):
            slot.retire(f"it reported {result!r}, which is no JobResult")
            return
        running = self._job_of(slot, result.job_id)
        if running is None:
            slot.retire(f"it reported job {result.job_id!r}, which it does not have (or reported before)")
        elif not is_of(running.job, result):
            slot.retire(f"its result of job {result.job_id} names keys that are not of the job")
        else:
            self._finish(running, result)

    def _finish(self, running: Running, result: JobResult) -> None:
        """End a job that the tier has reported: release its rows."""
        job, metrics = running.job, running.slot.metrics
        del self._jobs[job.job_id]
        if running.failed_in_use:
            self._failed_in_use -= 1
            metrics.quarantined_rows -= len(running.rows)
        else:
            metrics.running_jobs -= 1
        running.reserved.release()
        good = good_keys(job, result)
        if running.state.trace is not None and not running.failed_in_use:
            self._trace(running, len(good), moved(result)[0] if good else 0)
        overtaken = running.failed_in_use or running.generation != self._generation
        if not job.is_promotion:
            self._primary.complete_read(running.rows)
            if not running.failed_in_use:
                self._stored(running, result, good, overtaken=overtaken)
            return
        if not running.failed_in_use:
            metrics.loading_chunks -= len(running.rows)
            running.slot.rate.ends(running.ticket, len(good), moved(result)[1] if good else 0.0, self._clock())
        if overtaken:
            self._primary.complete_write(running.rows, success=False)
        else:
            self._landed(running, result, good)

    def _trace(self, running: Running, good: int, nbytes: int, failure: str = "") -> None:
        """Have a traced request record a job that has ended."""
        name, seconds = "load" if running.job.is_promotion else "store", self._clock() - running.submitted
        assert running.state.trace is not None
        running.state.trace.job_ended(name, running.slot.name, seconds, len(running.rows), good, nbytes, failure)

    def _landed(self, running: Running, result: JobResult, good: Sequence[OffloadKey]) -> None:
        job, slot, metrics = running.job, running.slot, running.slot.metrics
        now = self._clock()
        nbytes, seconds = moved(result)
        complete = len(good) == len(job.keys)
        landed = self._primary.complete_write(
            running.rows, complete, () if complete else set(good), protects=not running.state.is_prefetch
        )
        if good:
            metrics.promotion_latency.observe(now - running.submitted)
            metrics.loaded_chunks += len(good)
            metrics.loaded_bytes += nbytes
            metrics.load_seconds += seconds
            metrics.loads += 1
            self._provenance.read(slot, good)
            self._price(running, good, seconds)
            running.on_end(slot, landed, ())
        if not complete:
            lost = without(job.keys, good)
            metrics.failed_loads += len(lost)
            self._provenance.forget(lost)
            running.state.lose(slot, lost)
            if self._primary.records_events:
                self.events.append(OffloadEvent(lost, removed=True, tier=slot.name))

    def _price(self, running: Running, good: Sequence[OffloadKey], seconds: float) -> None:
        """Record a load for what it saves; nothing for a request that is over, or has gone over to computing."""
        state = running.state
        if not (state.finished or state.load_over):
            had = good if len(good) == len(running.job.keys) else set(good)
            self._prices.landed(state, running.slot, running.job.keys, running.positions, had, seconds)
            if state.is_prefetch:  # no request takes it
                self._prices.used(state)

    def _stored(self, running: Running, result: JobResult, good: Sequence[OffloadKey], *, overtaken: bool) -> None:
        job, slot, metrics = running.job, running.slot, running.slot.metrics
        failed = without(job.keys, good)
        metrics.failed_stores += len(failed)
        if good:
            nbytes, seconds = moved(result)
            metrics.cascade_latency.observe(self._clock() - running.submitted)
            metrics.stored_chunks += len(good)
            metrics.stored_bytes += nbytes
            metrics.store_seconds += seconds
            if not overtaken:
                self._provenance.written(slot, good, nbytes)
                if self._primary.records_events:
                    self.events.append(OffloadEvent(good, removed=False, tier=slot.name))
        if not overtaken:
            running.on_end(slot, good, failed)

    def _expire(self, now: float) -> None:
        overdue: defaultdict[TierSlot, list[Running]] = defaultdict(list)
        for running in self._jobs.values():
            begun = running.submitted if running.started is None else running.started
            if now - begun > running.slot.options.deadline and not running.failed_in_use:
                overdue[running.slot].append(running)
        for slot, jobs in overdue.items():
            slot.metrics.expired_jobs += len(jobs)
            for running in jobs:
                if running.job.is_promotion:  # at least that slow: it must not look fast to the next request
                    slot.rate.add(len(running.rows), now - running.submitted, now)
            self._give_up(slot, jobs, f"did not end within {slot.options.deadline:g}s", notify=slot.abandon)

    def _give_up(
        self, slot: TierSlot, jobs: Sequence[Running], why: str, *, notify: Callable[[int], object] | None = None
    ) -> None:
        """Fail jobs for the requests that wait; their rows stay in quarantine until the tier releases them."""
        if not jobs:
            return
        metrics = slot.metrics
        promoted = stored = 0
        for running in jobs:
            job, rows = running.job, running.rows
            running.failed_in_use = True
            if running.state.trace is not None:
                self._trace(running, 0, 0, why)
            slot.rate.drop(running.ticket)
            metrics.quarantined_rows += len(rows)
            if job.is_promotion:
                promoted += len(rows)
            else:
                stored += len(rows)
            if running.generation != self._generation:
                continue
            if job.is_promotion:
                self._primary.abandon(rows)
                self._provenance.forget(job.keys)
                running.state.lose(slot, job.keys)
            else:
                running.on_end(slot, (), job.keys)
        self._failed_in_use += len(jobs)
        metrics.running_jobs -= len(jobs)
        metrics.loading_chunks -= promoted
        metrics.failed_loads += promoted
        metrics.failed_stores += stored
        _log.warning(
            "%s: %d jobs, the first of them %d, %s: %d chunks are misses, %d are not stored; their rows are held until "
            "the tier releases them",
            slot.name,
            len(jobs),
            jobs[0].job.job_id,
            why,
            promoted,
            stored,
        )
        if notify is not None:
            for running in jobs:
                notify(running.job.job_id)


def _failed(errors: Iterable[str]) -> str:
    """Return that jobs have failed, and why the first of them did that says so."""
    error = next(filter(None, errors), "")
    return f"failed ({error})" if error else "failed"
