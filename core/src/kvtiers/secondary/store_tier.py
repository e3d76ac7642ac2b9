"""The store tier: a ``ChunkStore`` seen as a tier by the engine. It keeps verdicts, breaker and counts, moves no byte.

Everything here runs on the engine's thread and only posts to, and polls, the backend in which the store's I/O runs.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvtiers.api import JobResult, LookupResult, OffloadKey, TierConfig, TierRequest, TransferJob
from kvtiers.host.messages import (
    JobDone,
    JobFailed,
    JobReleased,
    JobStarted,
    Opened,
    Probed,
    Status,
    StoreJob,
)
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.backend import StoreBackend
from kvtiers.secondary.breaker import Breaker, BreakerState
from kvtiers.secondary.full_watch import FullWatch
from kvtiers.secondary.host_client import BUMPED
from kvtiers.secondary.inflight_jobs import InflightJobs
from kvtiers.secondary.presence_cache import PresenceCache, SuspectKeys
from kvtiers.secondary.tier_events import EventTier, TierEvent

__all__ = ["ChunkStoreTier"]

_PROBE_KEY = b"\x00" * 8  # any key will do: the breaker's probe asks whether the store answers, not what
_FIRST_PROBE_ID = 1 << 62  # apart from those of the lookups
_CLOSE_SECONDS = 3.0
_TRIED_AGAIN = (
    "its lookups miss until it is back. It is tried again by itself; 'kvtiers check' with its config says more"
)
_MOST_ASKED_AHEAD = 64  # questions in flight; the others that are allowed are for lookups


class ChunkStoreTier(EventTier):
    """Drives one store through its backend. ``is_available`` while it is open and its breaker is closed."""

    def __init__(self, config: TierConfig, backend: StoreBackend, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = config.tier_name
        self._backend = backend
        self._clock = clock
        self._deadline = config.deadline
        self._breaker = Breaker(config.breaker, clock)
        self._lookups = PresenceCache(config.exists_ttl, config.deadline, clock, self._send_probe)
        self._jobs = InflightJobs(config.store_queue)
        self._doubted = SuspectKeys()
        self._full = FullWatch(self._name, config.when_full, clock)
        self._open = False
        self._has_heard = False
        """The backend's first report has been handled: until then ``open_state`` asks the backend itself."""
        self._open_error = ""
        self._warned_of = ""
        """Why it is out of use, as last written to the log."""
        self._warning = threading.Lock()
        self._probe_ids = itertools.count(_FIRST_PROBE_ID)
        self._probe_id = 0
        self._probe_until: float | None = None
        self._events: list[TierEvent] = []
        self._dropped: dict[int, TransferJob] = {}
        """Jobs dropped at the engine's shutdown: nothing more of them is begun."""
        self._dropped_results: list[JobResult] = []

    # -- the contract

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:  # noqa: ARG002 -- a store answers all requests alike
        """Answer from the presence cache; unknown chunks are asked for at the end of the step."""
        return self._lookups.ask(keys)

    def submit_store(self, job: TransferJob) -> None:
        """Queue a store, as far as there is room in the store queue; the rest of it is dropped and counted."""
        self._submit(job, self._jobs.room)

    def submit_load(self, job: TransferJob) -> None:
        """Queue a load."""
        self._submit(job, len(job.keys))

    def poll(self) -> Sequence[TierEvent]:
        """Return what has become of the jobs."""
        self._handle_events()
        events, self._events = self._events, []
        return events

    def is_available(self) -> bool:
        """Return whether the store is open and its breaker closed."""
        return self._open and self._breaker.state is BreakerState.CLOSED

    def abandon_job(self, job_id: int) -> None:
        """Count an overdue job against the breaker; the backend makes sure that its rows are released."""
        if self._fail(job_id, "a job did not end in time"):
            self._backend.abandon(job_id)

    def release_job(self, job_id: int) -> None:
        """Detach a load that takes too long for its request from its rows; not a failure of the store.

        A JobReleased follows when its rows are free, if that comes before its result.
        """
        if self._jobs.release(job_id):
            self._backend.release(job_id)

    def drop_jobs(self, job_ids: Sequence[int]) -> None:
        """Begin nothing more of these jobs, since the engine ends; not a failure of the store. ``drain`` logs them."""
        for job_id in job_ids:
            job = self._jobs.fail(job_id)
            if job is not None:
                self._dropped[job_id] = job
                self._backend.abandon(job_id)

    def on_schedule_end(self) -> None:
        """Send the step's questions, and the breaker's probe when it is due."""
        if self._lookups.at_work:
            self._lookups.flush()
            for _ in range(self._lookups.give_up_overdue()):
                self._note_error("a lookup was not answered in time")
        if self._breaker.state is not BreakerState.CLOSED or self._probe_until is not None:
            self._probe_when_due()
        self._backend.flush()

    def drain(self, timeout: float) -> bool:
        """Let all jobs end; drop what has not begun within ``timeout`` seconds, and log how much was not done."""
        unfinished = self._jobs.unfinished() | self._dropped
        self._handle_events()
        self._backend.drain(timeout)
        while self._handle_events():  # a poll returns a bounded number
            pass
        ended = [event for event in self._events if isinstance(event, JobResult)]
        results = {result.job_id: result for result in (*ended, *self._dropped_results)}
        if dropped := self._jobs.note_dropped(unfinished, results.values()):
            self._backend.log(logging.WARNING, f"{self._name}: shutdown within {timeout:.3g}s dropped {dropped}")
        return not self._jobs

    def close(self) -> None:
        """Close the store."""
        self._backend.close(_CLOSE_SECONDS)

    # -- beyond the contract, for core

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the store is open; return "" then, else why it is not."""
        return self._backend.wait_open(timeout)

    def open_state(self) -> str | None:
        """Return "" if the store is open, why it is not, or None while it has said neither. From any thread."""
        return self._open_error if self._has_heard else self._backend.open_state()

    def warn_unusable(self, error: str) -> None:
        """Log that the tier is out of use and why, once until it is open. From any thread."""
        with self._warning:
            warned, self._warned_of = self._warned_of, error
        if not warned:
            # A bumped namespace stays bumped: no later try opens it for this engine.
            outlook = "its lookups miss" if error == BUMPED else _TRIED_AGAIN
            self.log(logging.WARNING, f"{self._name}: out of use: {error}; {outlook}")

    def log(self, level: int, text: str) -> None:
        """Write a line to the log, on another thread than the engine's. ``text`` begins with the tier's name."""
        self._backend.log(level, text)

    def ask_ahead(self, keys: Sequence[OffloadKey]) -> None:
        """Ask at once about a prefix that will be looked up soon, and send whatever else is to be asked."""
        if self._lookups.open_probes < _MOST_ASKED_AHEAD:
            self._lookups.ask(keys)
            self._lookups.flush()
            self._backend.flush()

    def set_names(self, names: StorageNames) -> None:
        """Use other names from now on; no verdict of the old names holds for them."""
        self._lookups.clear()
        self._doubted.clear()
        self._jobs.new_names()
        self._backend.set_names(names)

    def stats(self) -> dict[str, float]:
        """Return the tier's own figures."""
        return (
            self._backend.stats()
            | self._jobs.counts
            | {
                "breaker_state": int(self._breaker.state),
                "breaker_opened": self._breaker.opened,
                "open": int(self._open if self._has_heard else self._backend.open_state() == ""),
                "full": int(self._full.is_full),
                "open_probes": self._lookups.open_probes,
                "lookup_questions": self._lookups.questions,
                "lookup_seconds": self._lookups.seconds,
                "storing_chunks": self._jobs.storing,
            }
        )

    # -- inside: jobs and questions out

    def _submit(self, job: TransferJob, room: int) -> None:
        keys = job.keys[:room]
        self._jobs.begin(job, len(keys))
        overwrites = self._doubted.among(keys) if self._doubted.keys and not job.is_promotion else b""
        store_job = StoreJob(job.job_id, job.is_promotion, keys, job.chunk_ids[: len(keys)].tolist(), overwrites)
        if not keys or not self._backend.send_job(store_job):
            self._events.append(self._jobs.refuse(job.job_id))
            if job.is_promotion:
                self._lookups.lost(job.keys)

    def _send_probe(self, probe_id: int, keys: Sequence[OffloadKey], is_prefix: bool) -> bool:
        return self._backend.send_probe(probe_id, keys, is_prefix=is_prefix)

    def _probe_when_due(self) -> None:
        now = self._clock()
        if self._open and self._breaker.wants_probe():
            self._probe_id = next(self._probe_ids)
            self._probe_until = now + self._deadline
            if not self._backend.send_probe(self._probe_id, [_PROBE_KEY], is_prefix=False):
                self._end_probe(ok=False)
        elif self._probe_until is not None and now > self._probe_until:
            self._end_probe(ok=False)
            self._backend.restart(f"it has not answered for {self._deadline:g}s")

    # -- inside: events in

    def _handle_events(self) -> bool:
        """Handle the events of one poll; return whether there were any."""
        events = self._backend.poll()
        for event in events:
            match event:
                case JobDone():
                    self._job_done(event)
                case JobStarted() | JobReleased():
                    self._events.append(event)
                case JobFailed(job_id, error):
                    if self._fail(job_id, error):
                        self._events.append(event)
                case Probed(probe_id, answers, error):
                    self._probed(probe_id, answers, error)
                case Opened(error):
                    self._opened(error)
        return bool(events)

    def _opened(self, error: str) -> None:
        self._open = not error
        self._open_error = error
        self._has_heard = True
        if not error:
            self._breaker.probe_soon()
            self._warned_of = ""
        else:
            self._breaker.trip()
            self._probe_until = None
            self.warn_unusable(error)

    def _probed(self, probe_id: int, answers: bytes, error: str) -> None:
        if probe_id == self._probe_id:
            self._end_probe(ok=not error)
        elif error:
            self._lookups.failed(probe_id)
            self._note_error(error)
        else:
            self._lookups.answered(probe_id, answers)
            self._breaker.record(ok=True)

    def _end_probe(self, *, ok: bool) -> None:
        if self._probe_until is None:
            return
        self._probe_until = None
        self._breaker.probed(ok=ok)
        if ok:
            self._lookups.clear()
            self._backend.log(logging.WARNING, f"{self._name}: answers again; back in use")

    def _fail(self, job_id: int, error: str) -> bool:
        """Count a job in flight as failed; what it was to load is a miss. False: it had failed before."""
        job = self._jobs.fail(job_id)
        if job is None:
            return False
        if job.is_promotion and self._jobs.has_current_names(job_id):
            self._lookups.lost(job.keys)
        self._note_error(error)
        return True

    def _job_done(self, event: JobDone) -> None:
        ended = self._jobs.end(event)
        if ended is None:
            return
        if event.job_id in self._dropped:
            self._dropped_results.append(ended.result)
        if ended.damaged:
            self._backend.log(
                logging.WARNING,
                f"{self._name}: {ended.damaged} of {len(ended.job.keys)} values are damaged; counted as misses",
            )
        if not ended.job.is_promotion and (
            line := self._full.stored(event.statuses.count(Status.DONE), event.statuses.count(Status.DROPPED))
        ):
            self.log(logging.WARNING, line)
        # A job reported as failed is counted already, whatever became of it later.
        if not (ended.failed_before or ended.was_released):
            if ended.has_failed:
                self._note_error(event.error)
            else:
                self._breaker.record(ok=True)
        if ended.has_current_names:
            if self._doubted.keys or not ended.result.success:
                self._doubted.note(ended.job.keys, event.statuses, is_load=ended.job.is_promotion)
            self._learn(ended.job, ended.result)
        self._events.append(ended.result)

    def _learn(self, job: TransferJob, result: JobResult) -> None:
        good = job.keys if result.success else result.successful_keys or ()
        if not job.is_promotion:
            self._lookups.stored(good)
        elif not result.success:
            fine = set(good)
            self._lookups.lost(key for key in job.keys if key not in fine)

    def _note_error(self, error: str) -> None:
        self._jobs.counts["errors"] += 1
        was = self._breaker.state
        self._breaker.record(ok=False)
        if was is not self._breaker.state:
            text = f"{self._name}: taken out of use after {error or 'errors'}; it is probed until it answers"
            self._backend.log(logging.WARNING, text)
