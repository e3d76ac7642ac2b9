"""Jobs between the primary and the tiers, from submission to the release of their rows.

=========  =================================================================================
state      meaning
=========  =================================================================================
running    submitted; its rows are pinned (a store) or not yet readable (a promotion)
failed     given up at its deadline: told at once; its rows stay in quarantine, since the tier
           may still touch them
(gone)     the tier has reported: the rows are released
=========  =================================================================================

Everything here runs on the engine's thread. Both clocks of a deadline are the engine's own: until the job is reported
as started, and from then on.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.api import JobResult, OffloadKey, TransferJob
from kvtiers.primary.chunks import CPUPrimaryTier
from kvtiers.tiering.requests import RequestState
from kvtiers.tiering.tiers import TierSlot

__all__ = ["JobTable", "RunningJob", "TieringOptions"]

_log = logging.getLogger("kvtiers.tiering")
_SCAN_SECONDS = 0.05  # how often deadlines are looked at
_UNREAD_KEYS = 1 << 18  # keys remembered as stored and not read yet


@dataclass(frozen=True, slots=True)
class TieringOptions:
    """Bounds of the tiering manager; shares are of all rows, each rounded up to at least one row.

    ``load_wait`` None: wait for a promotion as long as computing the chunks would take.
    """

    lookup_wait: float = 0.020
    load_wait: float | None = None
    store_reserve: float = 0.10
    all_tiers: float = 0.50
    one_tier: float = 0.25
    clean_reserve: float = 0.05
    job_bytes: int = 64 * 2**20


@dataclass(slots=True, eq=False)
class RunningJob:
    """A submitted job. ``state`` is the request that it was submitted for."""

    job: TransferJob
    slot: TierSlot
    rows: list[int]
    state: RequestState
    submitted: float
    started: float | None = None
    failed: bool = False


class JobTable:
    """All jobs in flight, and the rows that they hold."""

    def __init__(
        self, primary: CPUPrimaryTier, slots: Sequence[TierSlot], options: TieringOptions, clock: Callable[[], float]
    ) -> None:
        self._primary = primary
        self._slots = slots
        self._clock = clock
        self._jobs: dict[int, RunningJob] = {}
        self._ids = itertools.count(1)
        self._job_rows = max(1, options.job_bytes // primary.row_stride)
        self._all_rows = max(1, round(options.all_tiers * primary.num_rows))
        self._tier_rows = max(1, round(options.one_tier * primary.num_rows))
        self._pinned = 0
        self._failed = 0
        self._next_scan = 0.0
        self._origin: dict[OffloadKey, TierSlot] = {}
        self._unread: list[dict[OffloadKey, int]] = [{} for _ in slots]
        self.on_tier_has: Callable[[TierSlot, Sequence[OffloadKey]], None] = lambda _slot, _keys: None

    @property
    def running(self) -> int:
        """Jobs whose result somebody waits for."""
        return len(self._jobs) - self._failed

    def room(self, slot: TierSlot) -> int:
        """Rows that this tier may still pin under the budgets."""
        return max(0, min(self._tier_rows - slot.pinned, self._all_rows - self._pinned))

    def hold(self, slot: TierSlot, rows: int) -> None:
        """Take ``rows`` (negative: give back) from the budgets of this tier and of all tiers."""
        slot.pinned += rows
        slot.metrics.pinned_rows = slot.pinned
        self._pinned += rows

    def submit(
        self, slot: TierSlot, keys: Sequence[OffloadKey], rows: list[int], state: RequestState, *, promotion: bool
    ) -> None:
        """Hand chunks to a tier, in jobs of bounded size. Their rows are already in the budgets."""
        for start in range(0, len(keys), self._job_rows):
            some_rows = rows[start : start + self._job_rows]
            chunk_ids = np.asarray(some_rows, np.int32).data
            some_keys = keys[start : start + self._job_rows]
            job = TransferJob(next(self._ids), some_keys, chunk_ids, promotion, state.context)
            running = RunningJob(job, slot, some_rows, state, self._clock())
            self._jobs[job.job_id] = running
            slot.metrics.running_jobs += 1
            if promotion:
                slot.loading_chunks += len(some_keys)
            if not slot.submit(job):
                self._finish(running, JobResult(job.job_id, success=False))

    def poll(self) -> None:
        """Take all tiers' news: starts first, then results, then what is overdue."""
        for slot in self._slots:
            started = slot.started_jobs()
            if started:
                self._note_starts(slot, started)
            for job_id in slot.failed_jobs():
                running = self._jobs.get(job_id)
                if running is not None and running.slot is slot and not running.failed:
                    self._give_up(running, "failed", tell=False)
            for result in slot.finished_jobs():
                self._accept(slot, result)
                if slot.retired:
                    self._give_up_all(slot)
                    break
        if self._jobs:
            now = self._clock()
            if now >= self._next_scan:
                self._next_scan = now + _SCAN_SECONDS
                self._expire(now)

    def served(self, keys: Sequence[OffloadKey]) -> list[TierSlot]:
        """Return, for those of the keys that a tier brought and nobody has read before, that tier. Asked once a key."""
        if not self._origin:
            return []
        origin = self._origin
        return [origin.pop(key) for key in keys if key in origin]

    def forget_origins(self) -> None:
        """After a reset nothing that is resident came from a tier."""
        self._origin.clear()

    def _note_starts(self, slot: TierSlot, started: Sequence[int]) -> None:
        now = self._clock()
        for job_id in started:
            running = self._jobs.get(job_id)
            if running is not None and running.slot is slot and running.started is None:
                running.started = now

    def _accept(self, slot: TierSlot, result: JobResult) -> None:
        running = self._jobs.get(result.job_id)
        if running is None or running.slot is not slot:
            slot.retire(f"it reported job {result.job_id}, which it does not have (or reported before)")
        elif result.successful_keys is not None and not set(result.successful_keys) <= set(running.job.keys):
            slot.retire(f"its result of job {result.job_id} names keys that are not of the job")
        else:
            self._finish(running, result)

    def _finish(self, running: RunningJob, result: JobResult) -> None:
        job, slot = running.job, running.slot
        del self._jobs[job.job_id]
        if running.failed:
            self._failed -= 1
            slot.metrics.quarantined_rows -= len(running.rows)
        else:
            slot.metrics.running_jobs -= 1
            if job.is_promotion:
                slot.loading_chunks -= len(running.rows)
        self.hold(slot, -len(running.rows))
        if job.is_promotion:
            self._finish_promotion(running, result)
        else:
            self._finish_store(running, result)

    def _finish_promotion(self, running: RunningJob, result: JobResult) -> None:
        job, metrics = running.job, running.slot.metrics
        if running.failed:
            self._primary.complete_write(running.rows, success=False)
            return
        good: Collection[OffloadKey] = job.keys if result.success else set(result.successful_keys or ())
        landed = self._primary.complete_write(running.rows, result.success, good)
        unread = self._unread[running.slot.index]
        for key in landed:
            self._origin[key] = running.slot
            metrics.unread_bytes -= unread.pop(key, 0)
        self.on_tier_has(running.slot, landed)
        seconds = self._clock() - running.submitted
        metrics.promotion_latency.observe(seconds)
        if good:
            running.slot.measure(len(good), result.seconds or seconds)
            metrics.loaded_chunks += len(good)
            metrics.loaded_bytes += result.nbytes
            metrics.load_seconds += result.seconds
        if len(good) < len(job.keys):
            metrics.failed_loads += len(job.keys) - len(good)
            running.state.given_up.update(key for key in job.keys if key not in good)

    def _finish_store(self, running: RunningJob, result: JobResult) -> None:
        job, metrics = running.job, running.slot.metrics
        self._primary.complete_read(running.rows)
        if running.failed:
            return
        good = job.keys if result.success else list(result.successful_keys or ())
        if good:
            metrics.cascade_latency.observe(self._clock() - running.submitted)
            metrics.stored_chunks += len(good)
            metrics.stored_bytes += result.nbytes
            metrics.store_seconds += result.seconds
            self._note_unread(running.slot, good, result.nbytes)
            self.on_tier_has(running.slot, good)
        metrics.failed_stores += len(job.keys) - len(good)

    def _note_unread(self, slot: TierSlot, keys: Sequence[OffloadKey], nbytes: int) -> None:
        unread = self._unread[slot.index]
        share = nbytes // len(keys)
        if share and len(unread) < _UNREAD_KEYS:
            unread.update(dict.fromkeys(keys, share))
            slot.metrics.unread_bytes += share * len(keys)

    def _expire(self, now: float) -> None:
        for running in list(self._jobs.values()):
            begun = running.submitted if running.started is None else running.started
            if not running.failed and now - begun > running.slot.options.deadline:
                self._give_up(running, f"did not end within {running.slot.options.deadline:g}s")
                running.slot.metrics.expired_jobs += 1

    def _give_up_all(self, slot: TierSlot) -> None:
        for running in list(self._jobs.values()):
            if running.slot is slot and not running.failed:
                self._give_up(running, "was given up")

    def _give_up(self, running: RunningJob, why: str, *, tell: bool = True) -> None:
        """Fail a job for all who wait for it; its rows stay where they are until the tier has let go of them."""
        job, slot = running.job, running.slot
        running.failed = True
        self._failed += 1
        slot.metrics.running_jobs -= 1
        slot.metrics.quarantined_rows += len(running.rows)
        if job.is_promotion:
            slot.loading_chunks -= len(running.rows)
            slot.metrics.failed_loads += len(job.keys)
            self._primary.abandon(running.rows)
            running.state.given_up.update(job.keys)
        else:
            slot.metrics.failed_stores += len(job.keys)
        _log.warning(
            "%s: %s job %d of %d chunks %s; %s, its rows are held until the tier lets go of them",
            slot.name,
            "promotion" if job.is_promotion else "store",
            job.job_id,
            len(job.keys),
            why,
            "counted as misses" if job.is_promotion else "dropped",
        )
        if tell:
            slot.abandon(job.job_id)
