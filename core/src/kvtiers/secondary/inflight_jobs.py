"""The in-flight jobs of a store tier, and the counts of those that have ended. Engine's thread."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvtiers.api import JobResult, TransferJob
from kvtiers.host.messages import JobDone, Status
from kvtiers.secondary.tier_events import not_done

__all__ = ["EndedJob", "InflightJobs"]

_GOOD = frozenset({Status.DONE, Status.PRESENT})


@dataclass(slots=True)
class _Open:
    """A job in flight. ``sent``: its first so many chunks were handed over. ``generation``: of its names.

    ``failed_in_use``: it was reported as failed while something may still touch its rows.
    """

    job: TransferJob
    sent: int
    generation: int
    failed_in_use: bool = False
    to_release: bool = False


class EndedJob(NamedTuple):
    """A job that has ended. ``failed_before``: it had been reported, or given up, as failed before.

    ``was_released``: it was to be detached from its rows, so what it did not do is no failure of the store.
    """

    job: TransferJob
    result: JobResult
    failed_before: bool
    was_released: bool
    has_failed: bool
    has_current_names: bool
    damaged: int


class InflightJobs:
    """One tier's jobs and counts. ``store_queue``: the most chunks that may be on their way into the store."""

    def __init__(self, store_queue: int) -> None:
        self._store_queue = store_queue
        self._open: dict[int, _Open] = {}
        self._generation = 0
        self.storing = 0
        """Chunks on their way into the store."""
        self.counts = dict.fromkeys(
            (
                "seal_failures",
                "retries",
                "dropped_full",
                "dropped_queue",
                "dropped_shutdown",
                "already_present",
                "errors",
                "missing",
            ),
            0,
        )

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def room(self) -> int:
        """Chunks that the store queue has room for."""
        return max(0, self._store_queue - self.storing)

    def new_names(self) -> None:
        """Start a new generation of names: those of the jobs in flight are no longer current."""
        self._generation += 1

    def has_current_names(self, job_id: int) -> bool:
        """Return whether this job, which is in flight, was sent under the current names."""
        return self._open[job_id].generation == self._generation

    def begin(self, job: TransferJob, sent: int) -> None:
        """Record a job of which the first ``sent`` chunks are handed over; the others are dropped."""
        self._open[job.job_id] = _Open(job, sent, self._generation)
        self.counts["dropped_queue"] += len(job.keys) - sent
        if not job.is_promotion:
            self.storing += sent

    def refuse(self, job_id: int) -> JobResult:
        """End a job that the backend did not accept; return its result."""
        begun = self._forget(job_id)
        if not begun.job.is_promotion:
            self.counts["dropped_queue"] += begun.sent
        return JobResult(job_id, success=False)

    def fail(self, job_id: int) -> TransferJob | None:
        """Record that a job has failed though its result is still to come; None: it had before, or is unknown."""
        begun = self._open.get(job_id)
        if begun is None or begun.failed_in_use:
            return None
        begun.failed_in_use = True
        return begun.job

    def release(self, job_id: int) -> bool:
        """Record that a job is to be detached from its rows; False if there is no such job."""
        begun = self._open.get(job_id)
        if begun is None:
            return False
        begun.to_release = True
        return True

    def end(self, event: JobDone) -> EndedJob | None:
        """Record a job's end; None if there is no such job."""
        if event.job_id not in self._open:
            return None
        begun = self._forget(event.job_id)
        job, statuses, counts = begun.job, event.statuses, self.counts
        result = _result(job, event)
        damaged, has_failed = 0, False
        counts["retries"] += event.retries
        counts["already_present"] += statuses.count(Status.PRESENT)
        if not result.success:
            damaged, has_failed = statuses.count(Status.CORRUPT), Status.FAILED in statuses
            counts["seal_failures"] += damaged
            counts["missing"] += statuses.count(Status.MISSING)
            counts["dropped_full"] += statuses.count(Status.DROPPED)
        return EndedJob(
            job,
            result,
            failed_before=begun.failed_in_use,
            was_released=begun.to_release,
            has_failed=has_failed,
            has_current_names=begun.generation == self._generation,
            damaged=damaged,
        )

    def unfinished(self) -> dict[int, TransferJob]:
        """Return the jobs in flight by id."""
        return {job_id: begun.job for job_id, begun in self._open.items()}

    def note_dropped(self, unfinished: Mapping[int, TransferJob], results: Iterable[JobResult]) -> str:
        """Count what of the ``unfinished`` jobs was not done before the shutdown; return it as text, "" for none."""
        jobs, chunks = not_done(unfinished, results)
        self.counts["dropped_shutdown"] += chunks
        return f"{jobs} jobs with {chunks} chunks" if jobs else ""

    def _forget(self, job_id: int) -> _Open:
        begun = self._open.pop(job_id)
        if not begun.job.is_promotion:
            self.storing -= begun.sent
        return begun


def _result(job: TransferJob, event: JobDone) -> JobResult:
    statuses = event.statuses
    if len(statuses) == len(job.keys) and _GOOD.issuperset(statuses):
        return JobResult(job.job_id, success=True, nbytes=event.nbytes, seconds=event.seconds)
    done = [key for key, status in zip(job.keys, statuses, strict=False) if status in _GOOD]
    return JobResult(job.job_id, success=False, successful_keys=done, nbytes=event.nbytes, seconds=event.seconds)
