"""The store tier: a ``ChunkStore`` seen as a tier by the engine. It keeps verdicts, breaker and counts, moves no byte.

Everything here runs on the engine's thread and only posts to, and polls, the hosts in which the store's I/O runs. The
jobs in flight are in the hosts' tables (``tier_jobs.py``).
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from kvtiers.api import JobResult, LookupResult, OffloadKey, TierConfig, TierRequest, TransferJob
from kvtiers.api.plugin import WHEN_FULL
from kvtiers.host.messages import JobDone, JobFailed, JobReleased, JobStarted, Limits, Opened, Probed, Status
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.breaker import Breaker, BreakerState
from kvtiers.secondary.host_client import BUMPED
from kvtiers.secondary.host_pool import HostPool
from kvtiers.secondary.presence_cache import PresenceCache, SuspectKeys
from kvtiers.secondary.tier_counts import DropWatch, TierCounts
from kvtiers.secondary.tier_jobs import EventTier, InflightJob, TierEvent, not_done

__all__ = ["ChunkStoreTier"]

_log = logging.getLogger("kvtiers.secondary")
_PROBE_KEY = b"\x00" * 8
"""Any key will do: the breaker's probe asks whether the store answers, not what.

Another one each time: a store of several servers may have lost the one that has this key, and answer for the others.
"""
_FIRST_PROBE_ID = 1 << 62  # apart from those of the lookups
_TRIED_AGAIN = (
    "its lookups miss until it is back. It is tried again by itself; 'kvtiers check' with its config says more"
)
_MOST_ANNOUNCED = 64  # questions in flight; the others that are allowed are for lookups


class ChunkStoreTier(EventTier):
    """Drives one store through its hosts. ``is_available`` while it is open and its breaker is closed.

    ``rows``: of the primary, each of ``row_bytes``; values that wait to be written hold some of them.
    """

    can_delete = True
    is_tended = True

    def __init__(
        self,
        config: TierConfig,
        hosts: HostPool,
        clock: Callable[[], float] = time.monotonic,
        *,
        rows: int = 0,
        row_bytes: int = 0,
        when_full: str = WHEN_FULL,
    ) -> None:
        self._name = config.tier_name
        self._hosts = hosts
        self._clock = clock
        self._deadline = config.deadline
        self._breaker = Breaker(config.breaker, clock)
        self._lookups = PresenceCache(config.exists_ttl, config.deadline, clock, self._send_probe)
        self._counts = TierCounts(config.store_queue, rows, row_bytes, clock)
        self._storing_for: TierRequest | None = None
        """The request that this step's last store is of, whose store may come as several jobs."""
        self._takes_store = False
        self._generation = 0
        """Of the names: that of a job in flight may be an earlier one."""
        self._suspects = SuspectKeys()
        self._full = DropWatch(self._name, "full", "it was full", clock)
        self._refusing = DropWatch(self._name, "refusing", "it refused some", clock)
        self._when_full = when_full
        self._open = False
        self._has_heard = False
        """The hosts' first report has been handled: until then ``open_state`` asks the hosts themselves."""
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
        self._heard_at = clock()
        """When the store last did what it was asked for, or had nothing to do and then was asked."""
        self._is_ending = False
        """It is being closed, or jobs have been dropped: a host that ends, or is killed for it, is not worth a line."""

    # -- the contract

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:  # noqa: ARG002 -- a store answers all requests alike
        """Answer from the presence cache; unknown chunks are asked for at the end of the step."""
        return self._lookups.ask(keys)

    def lacks_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether a lookup of each of these chunks would be a MISS, without asking the store."""
        return self._lookups.lacks_all(keys)

    def submit_store(self, job: TransferJob) -> None:
        """Queue a store, if there is room in the store queue; else all of it is dropped and counted.

        The jobs of a request in a step are one store: all of them are queued, or none. Chunks that the store is known
        to have are not sent: a burst of known prompts, of which the engine computes some because that is sooner, would
        write them all again.
        """
        if self._lookups.has_all(job.keys) and not self._suspects.among(job.keys):
            self._counts.figures["already_present"] += len(job.keys)
            self._events.append(JobResult(job.job_id, success=True))
        elif self._takes(job.context):
            overwrites = self._suspects.among(job.keys) if self._suspects.keys else b""
            self._send(InflightJob(job, self._generation), overwrites)
        else:
            self._counts.drop(len(job.keys))
            self._events.append(JobResult(job.job_id, success=False))

    def submit_load(self, job: TransferJob) -> None:
        """Queue a load."""
        self._send(InflightJob(job, self._generation))

    def submit_delete(self, job: TransferJob) -> None:
        """Queue the removal of these chunks, which count as absent from now on. The job has no rows."""
        self._forget(job.keys)
        self._send(InflightJob(job, self._generation, is_delete=True))

    def poll(self) -> Sequence[TierEvent]:
        """Return what has become of the jobs."""
        self._handle_events()
        events, self._events = self._events, []
        return events

    def is_available(self) -> bool:
        """Return whether the store is open and its breaker closed."""
        return self._open and self._breaker.state is BreakerState.CLOSED

    def abandon_job(self, job_id: int) -> None:
        """Count an overdue job against the breaker; its hosts make sure that its rows are released."""
        job = self._hosts.job(job_id)
        if job is not None and not job.failed_in_use:
            job.failed_in_use = True
            self._note_failed(job, "a job did not end in time")
            self._hosts.abandon(job_id)

    def cancel_job(self, job_id: int) -> None:
        """Begin nothing more of a job that is not wanted any more; its hosts make sure that its rows are released."""
        job = self._hosts.job(job_id)
        if job is not None and not job.failed_in_use:
            job.failed_in_use = True
            self._hosts.abandon(job_id)

    def release_job(self, job_id: int) -> None:
        """Detach a job that takes too long for its request from its memory; not a failure of the store.

        A JobReleased follows when nothing writes there any more, if that comes before its result.
        """
        if (job := self._hosts.job(job_id)) is not None:
            job.to_release = True
            self._hosts.release(job_id)

    def kill_job(self, job_id: int, reason: str) -> None:
        """End whatever still touches the rows of a job, by the end of its hosts; all their jobs fail."""
        self._hosts.kill(job_id, reason)

    def drop_jobs(self, job_ids: Sequence[int]) -> None:
        """Begin nothing more of these jobs, since the engine ends; not a failure of the store. ``drain`` logs them."""
        if job_ids:
            self._is_ending = True
            self._hosts.expect_end()
        for job_id in job_ids:
            job = self._hosts.job(job_id)
            if job is not None and not job.failed_in_use:
                job.failed_in_use = True
                self._dropped[job_id] = job.job
                self._hosts.abandon(job_id)

    def on_schedule_end(self) -> None:
        """Send the step's questions, and the breaker's probe when it is due."""
        self._storing_for = None
        if self._lookups.at_work:
            self._lookups.flush()
            for _ in range(self._lookups.give_up_overdue()):
                self._note_error("a lookup was not answered in time")
        if self._breaker.state is not BreakerState.CLOSED or self._probe_until is not None:
            self._probe_when_due()
        self._hosts.flush()

    def tend(self) -> None:
        """Do what a step does for the tier itself, while no step comes; between any two other calls, from any thread.

        So a breaker's probe is sent and answered, and a host that has ended or opened its store is noticed. What has
        become of jobs waits for ``poll``.
        """
        self._handle_events()
        self.on_schedule_end()

    def drain(self, timeout: float) -> bool:
        """Let all jobs end; drop what has not begun within ``timeout`` seconds, and log how much was not done."""
        unfinished = self._hosts.jobs() | self._dropped
        self._handle_events()
        self._hosts.drain(timeout)
        while self._handle_events():  # a poll returns a bounded number
            pass
        ended = [event for event in self._events if isinstance(event, JobResult)]
        results = {result.job_id: result for result in (*ended, *self._dropped_results)}
        jobs, chunks = not_done(unfinished, results.values())
        self._counts.figures["dropped_shutdown"] += chunks
        if jobs:
            self._hosts.expect_end()
            text = "%s: shutdown within %.3gs dropped %d jobs with %d chunks"
            _log.warning(text, self._name, timeout, jobs, chunks)
        return not self._hosts.in_flight

    def close(self) -> None:
        """Close the store."""
        self._is_ending = True
        self._hosts.close()

    # -- beyond the contract, for core

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the store is open; return "" then, else why it is not."""
        return self._hosts.wait_open(timeout)

    def open_state(self) -> str | None:
        """Return "" if the store is open, why it is not, or None while it has said neither. From any thread."""
        return self._open_error if self._has_heard else self._hosts.open_state()

    def has_spoken(self) -> bool:
        """Return whether a poll has found it open, or why it is not is known. From any thread."""
        return self._has_heard or bool(self._hosts.open_state())

    def warn_unusable(self, error: str) -> None:
        """Log that the tier is out of use and why, once until it is open. From any thread."""
        with self._warning:
            warned, self._warned_of = self._warned_of, error
        if not warned and not self._is_ending:
            # A bumped namespace stays bumped: no later try opens it for this engine.
            outlook = "its lookups miss" if error == BUMPED else _TRIED_AGAIN
            _log.warning("%s: out of use: %s; %s", self._name, error, outlook)

    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Ask at once about chunks that will be looked up soon, and send whatever else is to be asked."""
        if self._lookups.open_probes < _MOST_ANNOUNCED:
            self._lookups.ask(keys)
            self._lookups.flush()
            self._hosts.flush()

    def set_names(self, names: StorageNames) -> None:
        """Use other names from now on; no verdict of the old names holds for them."""
        self._lookups.clear()
        self._suspects.clear()
        self._generation += 1
        self._hosts.set_names(names)

    def set_limits(self, limits: Limits) -> None:
        """Use these limits in each host from now on."""
        self._hosts.set_limits(limits)

    def set_waits(self, exists_ttl: float, store_queue: int | Literal["auto"]) -> None:
        """Use these options from now on: how long an answer is reused, and how many values may wait to be written."""
        self._lookups.set_ttl(exists_ttl)
        self._counts.store_queue = store_queue

    def stats(self) -> dict[str, float]:
        """Return the tier's own figures. From any thread."""
        waiting = self._waiting
        watch = self._full if self._full.holds else self._refusing
        dropping = watch.holds
        return (
            self._hosts.stats()
            | self._counts.figures
            | {
                "breaker_state": int(self._breaker.state),
                "breaker_opened": self._breaker.opened,
                "breaker_seconds": self._breaker.seconds,
                "waiting_calls": waiting,
                "silent_seconds": max(0.0, self._clock() - self._heard_at) if waiting else 0.0,
                "not_taken": watch.dropped if dropping else 0,
                "not_taken_seconds": watch.seconds if dropping else 0.0,
                "taken_meanwhile": watch.written if dropping else 0,
                "open": int(self._open if self._has_heard else self._hosts.open_state() == ""),
                "full": int(self._full.holds),
                "refusing": int(self._refusing.holds),
                "open_probes": self._lookups.open_probes,
                "lookup_questions": self._lookups.questions,
                "lookup_seconds": self._lookups.seconds,
                "storing_chunks": self._counts.storing,
            }
        )

    # -- inside: jobs and questions out

    @property
    def _waiting(self) -> int:
        """Jobs and questions that wait for the store."""
        return self._hosts.in_flight + self._lookups.open_probes + (self._probe_until is not None)

    def _takes(self, request: TierRequest) -> bool:
        if request is not self._storing_for or not request.request_id:
            self._storing_for, self._takes_store = request, self._counts.has_room
        return self._takes_store

    def _send(self, inflight: InflightJob, overwrites: bytes = b"") -> None:
        job = inflight.job
        self._counts.begin(inflight)
        if not self._waiting:
            self._heard_at = self._clock()
        if not job.keys or not self._hosts.send_job(inflight, overwrites):
            self._counts.refuse(inflight)
            self._events.append(JobResult(job.job_id, success=False))
            if job.is_promotion:
                self._lookups.lost(job.keys)

    def _send_probe(self, probe_id: int, keys: Sequence[OffloadKey], is_prefix: bool) -> bool:
        if self._waiting <= 1:  # this one
            self._heard_at = self._clock()
        return self._hosts.send_probe(probe_id, keys, is_prefix=is_prefix)

    def _probe_when_due(self) -> None:
        now = self._clock()
        if self._open and self._breaker.wants_probe():
            if not self._waiting:
                self._heard_at = now
            self._probe_id = next(self._probe_ids)
            self._probe_until = now + self._deadline
            key = _PROBE_KEY + self._probe_id.to_bytes(8, "big")
            if not self._hosts.send_probe(self._probe_id, [key], is_prefix=False):
                self._end_probe(ok=False)
        elif self._probe_until is not None and now > self._probe_until:
            self._end_probe(ok=False)
            self._hosts.restart(f"it has not answered for {self._deadline:g}s")

    # -- inside: events in

    def _handle_events(self) -> bool:
        """Handle the events of one poll; return whether there were any."""
        events = self._hosts.poll()
        for job, event in events:
            if isinstance(event, Probed):
                self._probed(event.probe_id, event.answers, event.error)
            elif isinstance(event, Opened):
                self._opened(event.error)
            elif job is not None:
                self._job_event(job, event)
        return bool(events)

    def _job_event(self, job: InflightJob, event: JobStarted | JobFailed | JobReleased | JobDone) -> None:
        if isinstance(event, JobDone):
            self._job_done(job)
            return
        if isinstance(event, JobFailed):
            self._note_failed(job, event.error)
        self._events.append(event)

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
        if not error:
            self._heard_at = self._clock()
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
            if not self._breaker.relapses:  # else its loads are still to succeed
                _log.warning("%s: answers again; back in use", self._name)

    def _note_failed(self, job: InflightJob, error: str) -> None:
        """Count a job as failed whose result is still to come; what it was to load is a miss."""
        if job.job.is_promotion and job.generation == self._generation:
            self._lookups.lost(job.job.keys)
        self._note_error(error, is_load=job.job.is_promotion)

    def _job_done(self, inflight: InflightJob) -> None:
        job, result, statuses = inflight.job, inflight.result(), inflight.statuses
        if Status.FAILED not in statuses:
            self._heard_at = self._clock()
        damaged = self._counts.end(inflight, success=result.success)
        if job.job_id in self._dropped:
            self._dropped_results.append(result)
        if damaged:
            text = "%s: %d of %d values are damaged; counted as misses"
            _log.warning(text, self._name, damaged, len(job.keys))
        if inflight.is_store:
            self._watch_drops(statuses, inflight.error)
        # A job reported as failed is counted already, whatever became of it later.
        if not (inflight.failed_in_use or inflight.to_release):
            if not result.success and Status.FAILED in statuses:
                self._note_error(inflight.error, is_load=job.is_promotion)
            else:
                self._note_success(is_load=job.is_promotion)
        if inflight.is_delete:
            self._forget(job.keys)
        elif inflight.generation == self._generation:
            if self._suspects.keys or not result.success:
                self._suspects.note(job.keys, statuses, is_load=job.is_promotion)
            self._learn(job, result)
        self._events.append(result)

    def _watch_drops(self, statuses: bytes | bytearray, error: str) -> None:
        written = statuses.count(Status.DONE)
        for line in (
            self._full.stored(written, statuses.count(Status.DROPPED), self._when_full),
            self._refusing.stored(written, statuses.count(Status.REFUSED), error),
        ):
            if line:
                _log.warning("%s", line)

    def _forget(self, keys: Sequence[OffloadKey]) -> None:
        self._lookups.lost(keys)
        self._suspects.deleted(keys)

    def _learn(self, job: TransferJob, result: JobResult) -> None:
        good = job.keys if result.success else result.successful_keys or ()
        if not job.is_promotion:
            self._lookups.stored(good)
        elif not result.success:
            fine = set(good)
            self._lookups.lost(key for key in job.keys if key not in fine)

    def _note_success(self, *, is_load: bool) -> None:
        breaker = self._breaker
        has_relapsed = breaker.relapses > 0
        breaker.record(ok=True, is_load=is_load)
        if has_relapsed and not breaker.relapses:
            _log.warning("%s: its loads succeed again; back in use", self._name)

    def _note_error(self, error: str, *, is_load: bool = False) -> None:
        self._counts.figures["errors"] += 1
        breaker, error = self._breaker, error or "errors"
        was = breaker.state
        breaker.record(ok=False, is_load=is_load)
        if was is breaker.state:
            return
        if not breaker.relapses:
            text = f"taken out of use after {error}; it is probed until it answers"
        elif breaker.relapses == 1:  # the others are not logged: it would be two lines for every few loads, for ever
            text = f"taken out of use again after {error}: it answers questions, but its loads fail; from now on "
            text += "loads are tried now and then, without a line, until one succeeds"
        else:
            return
        _log.warning("%s: %s", self._name, text)
