"""The ledger: the jobs that the tiers of a manager or a client have, and the check of what they report of these.

=============  ===========================================================================================
a job is       from
=============  ===========================================================================================
running        ``begin``
failed in use  its deadline, its tier's report, or ``give_up``: who waits for it goes on, its tier may still
               touch its rows. Its deadline still runs after a report, so that its tier is notified of it
gone           its result, or the refusal of its tier to take it
=============  ===========================================================================================

**Rows are free again only when their job is gone.** A client's memory beside the rows is free on ``JobReleased``,
too. A tier that reports a result of no job that it has is retired, and its jobs are never gone. A deadline has two
clocks, both the engine's own: until the tier reports the job as started, and from then on.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from kvtiers.api import JobResult, OffloadKey, TransferJob
from kvtiers.secondary.tier_jobs import NO_RESULTS, JobFailed, JobReleased, JobStarted, TierEvent, is_of, moved
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["Ledger", "LedgerEntry", "LedgerEvent"]

_SCAN_SECONDS = 0.05  # how often deadlines are looked at

LedgerEvent: TypeAlias = JobFailed | JobReleased | JobResult


@dataclass(slots=True, eq=False)
class LedgerEntry:
    """A job that a tier has. ``submitted``, ``started``: when, by the ledger's clock.

    ``num_rows``: 0 for a removal. The job's own buffer of rows is the tier's, which may have released it.
    ``is_given_up``: by its deadline or ``give_up``; no deadline runs any more.
    """

    job: TransferJob
    slot: TierSlot
    submitted: float
    started: float | None = field(default=None, init=False)
    failed_in_use: bool = field(default=False, init=False)
    is_given_up: bool = field(default=False, init=False)
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        """Count the rows, before the tier has the job."""
        self.num_rows = len(self.job.chunk_ids)

    def count(self, result: JobResult, good: Sequence[OffloadKey], now: float) -> None:
        """Count what was moved, ``good``, and what was not; a removal, which has no rows, moves nothing."""
        metrics, (nbytes, seconds) = self.slot.metrics, moved(result) if good else (0, 0.0)
        if self.job.is_promotion:
            metrics.failed_loads += len(self.job.keys) - len(good)
            metrics.loaded_chunks += len(good)
            metrics.loaded_bytes += nbytes
            metrics.load_seconds += seconds
            metrics.loads += bool(good)
        elif self.num_rows:
            metrics.failed_stores += len(self.job.keys) - len(good)
            metrics.stored_chunks += len(good)
            metrics.stored_bytes += nbytes
            metrics.store_seconds += seconds
        if good and self.num_rows:
            latency = metrics.promotion_latency if self.job.is_promotion else metrics.cascade_latency
            latency.observe(now - self.submitted)


_Entry = TypeVar("_Entry", bound=LedgerEntry)


class Ledger(Generic[_Entry]):
    """The jobs in flight, by id. Used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.jobs: dict[int, _Entry] = {}
        """Oldest first, with those that have failed in use."""
        self.failed_in_use = 0
        self._clock = clock
        self._ids = itertools.count(1)
        self._next_scan = -math.inf

    def next_id(self) -> int:
        """Return an id that no job has had."""
        return next(self._ids)

    def begin(self, entry: _Entry, submit: Callable[[TransferJob], bool]) -> bool:
        """Hand a job to its tier; False: the tier has not taken it, and never touches its rows."""
        self.jobs[entry.job.job_id] = entry  # before: a tier may report it at once
        entry.slot.metrics.running_jobs += 1
        if submit(entry.job):
            return True
        self._end(entry)
        return False

    def take(self, slot: TierSlot, events: Iterable[TierEvent]) -> Iterator[tuple[_Entry, LedgerEvent]]:
        """Yield what a tier has reported of its jobs: failures, releases, and results, whose jobs are gone then."""
        for event in events:
            if not isinstance(event, NO_RESULTS):
                entry, problem = self._check(slot, event)
                if entry is None or problem:
                    slot.retire(problem)
                    return
                self._end(entry)
            elif (entry := self._entry(slot, event.job_id)) is None:
                continue
            elif isinstance(event, JobStarted):
                entry.started = self._clock() if entry.started is None else entry.started
                continue
            elif isinstance(event, JobFailed):
                if entry.failed_in_use:
                    continue
                self._fail(entry)
            yield entry, event

    def expire(self) -> Sequence[_Entry]:
        """Give up the jobs that are past their deadlines, and notify their tiers; looks every 50 ms.

        Return those that had not failed in use before.
        """
        if not self.jobs or (now := self._clock()) < self._next_scan:
            return ()
        self._next_scan = now + _SCAN_SECONDS
        overdue = [entry for entry in self.jobs.values() if not entry.is_given_up and _is_overdue(entry, now)]
        expired = self.give_up(overdue)
        for entry in overdue:
            entry.slot.metrics.expired_jobs += 1
            entry.slot.abandon(entry.job.job_id)
        return expired

    def give_up(self, entries: Sequence[_Entry]) -> Sequence[_Entry]:
        """Make jobs fail in use: their rows are in quarantine until they are gone. Return those that had not failed."""
        running = [entry for entry in entries if not entry.failed_in_use]
        for entry in running:
            self._fail(entry)
        for entry in entries:
            entry.is_given_up = True
        return running

    def _fail(self, entry: _Entry) -> None:
        entry.failed_in_use = True
        self.failed_in_use += 1
        entry.slot.metrics.running_jobs -= 1
        entry.slot.metrics.quarantined_rows += entry.num_rows

    def _check(self, slot: TierSlot, result: object) -> tuple[_Entry | None, str]:
        """Return the job that a result is of, and what is wrong with the result, "" if nothing is."""
        kind = type(result).__name__
        try:
            if not isinstance(result, JobResult):
                return None, f"it reported a {kind}, which is no JobResult"
            if (entry := self._entry(slot, result.job_id)) is None:
                return None, f"it reported job {result.job_id!r}, which it does not have (or reported before)"
            if not is_of(entry.job, result):
                return entry, f"its result of job {entry.job.job_id} is unreadable, or names keys that are not of it"
        except Exception:  # noqa: BLE001 -- a plugin made it: whatever is read of it may raise, its id's repr, too
            return None, f"it reported a {kind} that is unreadable"
        return entry, ""

    def _entry(self, slot: TierSlot, job_id: object) -> _Entry | None:
        try:
            entry = self.jobs.get(job_id)  # type: ignore[call-overload]
        except Exception:  # noqa: BLE001 -- as above: no id at all
            return None
        return entry if entry is not None and entry.slot is slot else None

    def _end(self, entry: _Entry) -> None:
        del self.jobs[entry.job.job_id]
        metrics = entry.slot.metrics
        if entry.failed_in_use:
            self.failed_in_use -= 1
            metrics.quarantined_rows -= entry.num_rows
        else:
            metrics.running_jobs -= 1


def _is_overdue(entry: LedgerEntry, now: float) -> bool:
    begun = entry.submitted if entry.started is None else entry.started
    return now - begun > entry.slot.options.deadline
