"""A ``ChunkStore`` as a tier: the engine's side. It keeps verdicts, the breaker and the counts, and moves no byte.

Everything here runs on the engine's thread and only posts to, and polls, the backend in which the store's I/O runs.
"""

import logging
import time
from collections.abc import Callable, Sequence

from kvtiers.api import JobResult, LookupResult, OffloadKey, SecondaryTierManager, TierConfig, TierRequest, TransferJob
from kvtiers.rows.names import StorageNames
from kvtiers.secondary.health import Breaker, BreakerState
from kvtiers.secondary.lookups import TierLookups
from kvtiers.secondary.protocol import (
    Event,
    JobDone,
    JobFailed,
    JobStarted,
    Opened,
    Probed,
    Status,
    StoreBackend,
    StoreJob,
)

__all__ = ["ChunkStoreTier"]

_log = logging.getLogger("kvtiers.secondary")
_PROBE_KEY = b"\x00" * 8  # any key will do: the breaker's probe asks whether the store answers, not what
_PROBE_ID = 0


class ChunkStoreTier(SecondaryTierManager):
    """Drives one store through its backend. ``is_available`` while it is open and its breaker is closed."""

    def __init__(self, config: TierConfig, backend: StoreBackend, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = config.tier_name
        self._backend = backend
        self._clock = clock
        self._deadline = config.deadline
        self._store_queue = config.store_queue
        self._breaker = Breaker(config.breaker, clock)
        self._lookups = TierLookups(config.exists_ttl, clock, self._send_probe)
        self._open = False
        self._jobs: dict[int, TransferJob] = {}
        self._storing = 0
        self._probe_until: float | None = None
        self._started: list[int] = []
        self._failed: list[int] = []
        self._finished: list[JobResult] = []
        self._counts = dict.fromkeys(
            ("seal_failures", "retries", "dropped_full", "dropped_queue", "already_present", "errors", "missing"), 0
        )
        self.open_error = ""

    # -- the contract

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:  # noqa: ARG002 -- a store answers all requests alike
        """Answer from what is known; what is not is asked at the end of the step."""
        return self._lookups.ask(keys)

    def submit_store(self, job: TransferJob) -> None:
        """Queue a store; a full queue drops it."""
        if self._storing + len(job.keys) > self._store_queue:
            self._counts["dropped_queue"] += len(job.keys)
            self._finished.append(JobResult(job.job_id, success=False))
            return
        self._storing += len(job.keys)
        self._submit(job)

    def submit_load(self, job: TransferJob) -> None:
        """Queue a load."""
        self._submit(job)

    def get_started_jobs(self) -> Sequence[int]:
        """Return the jobs that the backend has begun."""
        self._take_news()
        started, self._started = self._started, []
        return started

    def get_failed_jobs(self) -> Sequence[int]:
        """Return the jobs that failed while something may still touch their rows."""
        failed, self._failed = self._failed, []
        return failed

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return the jobs that have ended."""
        finished, self._finished = self._finished, []
        return finished

    def is_available(self) -> bool:
        """Say whether the store is open and its breaker closed."""
        return self._open and self._breaker.state is BreakerState.CLOSED

    def abandon_job(self, job_id: int) -> None:
        """Count an overdue job against the breaker; the backend sees to it that its rows come free."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        if job.is_promotion:
            self._lookups.lost(job.keys)
        self._note_error("a job did not end in time")
        self._backend.abandon(job_id)

    def on_schedule_end(self) -> None:
        """Send the step's questions, and the breaker's probe when it is due."""
        self._lookups.flush()
        if self._open and self._breaker.wants_probe():
            self._probe_until = self._clock() + self._deadline
            if not self._backend.send_probe(_PROBE_ID, [_PROBE_KEY], is_prefix=False):
                self._end_probe(ok=False)
        elif self._probe_until is not None and self._clock() > self._probe_until:
            self._end_probe(ok=False)
        self._backend.flush()

    def drain(self, timeout: float) -> bool:
        """Let all jobs end; drop what has not begun within ``timeout`` seconds."""
        return self._backend.drain(timeout)

    def close(self) -> None:
        """Close the store."""
        self._backend.close(5.0)

    # -- beyond the contract, for core

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the store is open; return "" then, else why it is not."""
        return self._backend.wait_open(timeout)

    def set_names(self, names: StorageNames) -> None:
        """Use other names from now on; nothing that was known of the tier holds for them."""
        self._lookups.clear()
        self._backend.set_names(names)

    def stats(self) -> dict[str, float]:
        """Return the tier's own figures."""
        return (
            self._backend.stats()
            | self._counts
            | {
                "breaker_state": int(self._breaker.state),
                "breaker_opened": self._breaker.opened,
                "open": int(self._open),
                "storing_chunks": self._storing,
            }
        )

    # -- inside

    def _submit(self, job: TransferJob) -> None:
        self._jobs[job.job_id] = job
        rows = job.chunk_ids.tolist()
        if not self._backend.send_job(StoreJob(job.job_id, job.is_promotion, job.keys, rows)):
            self._counts["dropped_queue"] += len(job.keys)
            self._end(job, JobResult(job.job_id, success=False))

    def _send_probe(self, probe_id: int, keys: Sequence[OffloadKey], is_prefix: bool) -> bool:
        return self._backend.send_probe(probe_id, keys, is_prefix=is_prefix)

    def _take_news(self) -> None:
        for event in self._backend.poll():
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case JobStarted(job_id):
                self._started.append(job_id)
            case JobDone():
                self._job_done(event)
            case JobFailed(job_id, error):
                self._failed.append(job_id)
                self._note_error(error)
            case Probed(probe_id, answers, error):
                self._probed(probe_id, answers, error)
            case Opened(error):
                self._opened(error)

    def _opened(self, error: str) -> None:
        self._open = not error
        self.open_error = error
        if error:
            self._breaker.trip()
            _log.warning("%s: cannot be opened: %s; the engine goes on without it", self._name, error)

    def _probed(self, probe_id: int, answers: bytes, error: str) -> None:
        if probe_id == _PROBE_ID:
            self._end_probe(ok=not error)
        elif error:
            self._lookups.failed(probe_id)
            self._note_error(error)
        else:
            self._lookups.answered(probe_id, answers)
            self._breaker.record(ok=True)

    def _end_probe(self, *, ok: bool) -> None:
        if self._probe_until is not None:
            self._probe_until = None
            self._breaker.probed(ok=ok)
            if ok:
                _log.warning("%s: answers again; back in use", self._name)
                self._lookups.clear()

    def _job_done(self, event: JobDone) -> None:
        job = self._jobs.get(event.job_id)
        if job is None:
            return
        counts, statuses = self._counts, event.statuses
        counts["retries"] += event.retries
        good = statuses.count(Status.DONE) + statuses.count(Status.PRESENT)
        result = JobResult(job.job_id, good == len(job.keys), None, event.nbytes, event.seconds)
        if not result.success:
            counts["seal_failures"] += statuses.count(Status.CORRUPT)
            counts["missing"] += statuses.count(Status.MISSING)
            counts["dropped_full"] += statuses.count(Status.DROPPED)
            done = [key for key, status in zip(job.keys, statuses, strict=True) if status in _GOOD]
            result = JobResult(
                job.job_id, success=False, successful_keys=done, nbytes=event.nbytes, seconds=event.seconds
            )
        counts["already_present"] += statuses.count(Status.PRESENT)
        if damaged := statuses.count(Status.CORRUPT):
            _log.warning("%s: %d values of job %d are damaged; counted as misses", self._name, damaged, job.job_id)
        if Status.FAILED in statuses:
            self._note_error(event.error)
        else:
            self._breaker.record(ok=True)
        self._end(job, result)

    def _end(self, job: TransferJob, result: JobResult) -> None:
        del self._jobs[job.job_id]
        if not job.is_promotion:
            self._storing -= len(job.keys)
        good = job.keys if result.success else result.successful_keys or ()
        if not job.is_promotion:
            self._lookups.stored(good)
        elif not result.success:
            fine = set(good)
            self._lookups.lost(key for key in job.keys if key not in fine)
        self._finished.append(result)

    def _note_error(self, error: str) -> None:
        self._counts["errors"] += 1
        was = self._breaker.state
        self._breaker.record(ok=False)
        if was is not self._breaker.state:
            _log.warning("%s: taken out of use after %s; it is probed until it answers", self._name, error or "errors")


_GOOD = frozenset({Status.DONE, Status.PRESENT})
