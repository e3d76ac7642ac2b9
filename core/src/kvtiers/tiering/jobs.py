"""The job table: transfer jobs between the primary and the tiers, and what their ends mean for rows and requests.

The ledger has the jobs' states (``ledger.py``). While a job runs its rows are pinned (a store) or not yet readable (a
promotion). When it has failed in use its requests go on at once, and its rows are in quarantine; they are released when
it is gone. After a reset of the cache a job still holds its rows; its result has no other effect. Engine's thread.
"""

import itertools
import logging
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtiers.api import JobResult, OffloadKey, TransferJob
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.secondary.tier_jobs import JobFailed, TierEvent, good_keys, moved, without
from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.ledger import Ledger, LedgerEntry
from kvtiers.tiering.load_prices import LoadPrices
from kvtiers.tiering.provenance import Provenance
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tier_slot import Reservation, TierSlot
from kvtiers.types import OffloadEvent

__all__ = ["JobTable", "OnEnd", "Running", "TieringOptions"]

_log = logging.getLogger("kvtiers.tiering")


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
class Running(LedgerEntry):
    """A submitted job. ``state`` is the request that it was submitted for; ``generation`` that of the cache then."""

    rows: Sequence[int]
    reserved: Reservation
    state: RequestState
    on_end: OnEnd
    generation: int
    ticket: int
    """Of a promotion, in its tier's ``rate``."""
    positions: Sequence[int]
    """Of a promotion, each chunk's first token in its prompt."""


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
        self.ledger: Ledger[Running] = Ledger(clock)
        self.events: list[OffloadEvent] = []
        """What the tiers have stored, and were found to be without, since these were last taken."""
        self._job_rows = max(1, options.job_bytes // max(1, primary.row_stride))
        self._generation = 0

    @property
    def job_rows(self) -> int:
        """The most chunks of one job."""
        return self._job_rows

    @property
    def running(self) -> int:
        """Jobs in flight that have not failed in use."""
        return len(self.ledger.jobs) - self.ledger.failed_in_use

    @property
    def newest(self) -> int:
        """The number of the newest job in flight, 0 if there is none."""
        return next(reversed(self.ledger.jobs), 0)

    def has_store_until(self, job_id: int) -> bool:
        """Return whether a store with this number or a smaller one is in flight, and has not failed in use."""
        jobs = itertools.takewhile(lambda running: running.job.job_id <= job_id, self.ledger.jobs.values())
        return any(not (running.job.is_promotion or running.failed_in_use) for running in jobs)

    def has_jobs_of(self, slot: TierSlot) -> bool:
        """Return whether the tier has a job in flight, or one that has failed in use."""
        return any(running.slot is slot for running in self.ledger.jobs.values())

    def has_given_up(self, reserved: Reservation) -> bool:
        """Return whether the job for which these rows were reserved has failed in use."""
        jobs = self.ledger.jobs.values() if self.ledger.failed_in_use else ()
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
            job = TransferJob(
                self.ledger.next_id(), some_keys, chunk_ids, promotion, state.context, keep_damaged=slot.read_only
            )
            ticket = slot.rate.begins(now) if promotion else 0
            own = reserved if len(some_rows) == len(rows) else reserved.split(len(some_rows))
            some = positions[start : start + self._job_rows]
            running = Running(job, slot, now, some_rows, own, state, on_end, self._generation, ticket, some)
            if not self.ledger.begin(running, slot.submit):
                self._finish(running, JobResult(job.job_id, success=False))

    def cancel_loads(self, slot: TierSlot) -> int:
        """Make misses of all loads of a tier; their rows stay in quarantine until it releases them."""
        loads = self.ledger.give_up([running for running in self._running(slot) if running.job.is_promotion])
        chunks = sum(len(running.rows) for running in loads)
        slot.metrics.cancelled_loads += chunks
        self._fail(slot, loads, "are cancelled, since it is switched off")
        for running in loads:
            slot.cancel(running.job.job_id)
        return chunks

    def poll(self) -> None:
        """Handle all tiers' events, in their order; at last fail overdue jobs."""
        for slot in self._slots:
            if events := slot.poll():
                self._handle(slot, events)
        if expired := self.ledger.expire():
            self._expire(expired)

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
        for running, event in self.ledger.take(slot, events):
            if isinstance(event, JobFailed):
                failed[running] = event.error
            elif isinstance(event, JobResult):  # nothing is released here before: a load keeps its rows to its end
                self._fail_together(slot, failed)
                has_ended = True
                self._finish(running, event)
        self._fail_together(slot, failed)
        if has_ended:
            slot.rate.look_ends(self._clock())
        if slot.retired:
            self._fail(slot, self.ledger.give_up(self._running(slot)), "were given up")

    def _fail_together(self, slot: TierSlot, failed: dict[Running, str]) -> None:
        if failed:
            error = next(filter(None, failed.values()), "")
            self._fail(slot, list(failed), f"failed ({error})" if error else "failed")
            failed.clear()

    def _running(self, slot: TierSlot) -> list[Running]:
        return [job for job in self.ledger.jobs.values() if job.slot is slot and not job.failed_in_use]

    def _finish(self, running: Running, result: JobResult) -> None:
        """End a job that is gone: release its rows."""
        job, metrics = running.job, running.slot.metrics
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
        job, slot = running.job, running.slot
        now = self._clock()
        complete = len(good) == len(job.keys)
        landed = self._primary.complete_write(
            running.rows, complete, () if complete else set(good), protects=not running.state.is_prefetch
        )
        running.count(result, good, now)
        if good:
            self._provenance.read(slot, good)
            self._price(running, good, moved(result)[1])
            running.on_end(slot, landed, ())
        if not complete:
            lost = without(job.keys, good)
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
        job, slot = running.job, running.slot
        failed = without(job.keys, good)
        running.count(result, good, self._clock())
        if overtaken:
            return
        if good:
            self._provenance.written(slot, good, moved(result)[0])
            if self._primary.records_events:
                self.events.append(OffloadEvent(good, removed=False, tier=slot.name))
        running.on_end(slot, good, failed)

    def _expire(self, expired: Iterable[Running]) -> None:
        of_slots: defaultdict[TierSlot, list[Running]] = defaultdict(list)
        for running in expired:
            of_slots[running.slot].append(running)
            if running.job.is_promotion:  # at least that slow: it must not look fast to the next request
                now = self._clock()
                running.slot.rate.add(len(running.rows), now - running.submitted, now)
        for slot, jobs in of_slots.items():
            self._fail(slot, jobs, f"did not end within {slot.options.deadline:g}s")

    def _fail(self, slot: TierSlot, jobs: Sequence[Running], why: str) -> None:
        """Fail jobs, which have failed in use, for the requests that wait."""
        if not jobs:
            return
        metrics = slot.metrics
        promoted = stored = 0
        for running in jobs:
            job, rows = running.job, running.rows
            if running.state.trace is not None:
                self._trace(running, 0, 0, why)
            slot.rate.drop(running.ticket)
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
