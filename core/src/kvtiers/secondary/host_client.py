"""The host client: one tier's connection to its tier host, seen from the engine (``io: process``).

It keeps the jobs and questions that the host has (``tier_jobs.py``), and accepts nothing else: a host that reports
what it was not asked for breaks the protocol, and is killed.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence

from kvtiers.api import OffloadKey
from kvtiers.host import wire
from kvtiers.host.messages import (
    Abandon,
    Event,
    JobDone,
    JobFailed,
    JobReleased,
    JobStarted,
    Limits,
    Names,
    Opened,
    Probe,
    Probed,
    Release,
    Status,
    StoreJob,
)
from kvtiers.host.wire import ProtocolError
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.host_connection import HostConnection
from kvtiers.secondary.supervisor import HostLife
from kvtiers.secondary.tier_jobs import JobPart

__all__ = ["BUMPED", "HostClient"]

BUMPED = "its namespace was bumped while this engine ran, which holds KV from before; restart the engine"

_log = logging.getLogger("kvtiers.secondary")
_EVENTS_PER_POLL = 2048
_POLL_SECONDS = 0.005
_GONE = "its host ended"
_UNOPENED = "its store has neither opened nor said why not"
_LEAST_OPEN_SECONDS = 30.0  # a busy machine loads a client library slowly
_ENDS = {
    True: frozenset({Status.MISSING, Status.DONE, Status.CORRUPT, Status.FAILED}),
    False: frozenset({Status.DONE, Status.FAILED, Status.DROPPED, Status.PRESENT, Status.REFUSED, Status.NO_ROOM}),
}
"""What can become of a value of a load, and of a store."""


class HostClient:
    """A ``StoreBackend``; engine's thread, but for ``wait_open`` and ``open_state``.

    These two poll the connection, so what it reports may be handled on another thread: all that is remembered of jobs
    and questions changes under the connection's lock alone. The events wait for the engine's thread.
    """

    def __init__(
        self,
        link: HostConnection,
        names: StorageNames,
        *,
        deadline: float,
        grace: float,
        longest_pause: float = 0.0,
        is_awaited: bool = False,
    ) -> None:
        self._link = link
        link.tier = self
        self.names = names
        self.limits: Limits | None = None
        self._grace = grace
        self._is_awaited = is_awaited
        self._open_within = max(_LEAST_OPEN_SECONDS, deadline + grace)
        self._reopen_within = longest_pause + self._open_within
        self._events: deque[Event] = deque()
        self.parts: dict[int, JobPart] = {}
        self._in_flight = 0
        """Parts that the host has and has not ended."""
        self._loads = 0
        self._probes: dict[int, int] = {}
        self._stats: dict[str, float] = {}
        self._open_error: str | None = None
        self._look_at = 0.0
        self._look_seconds = link.launcher.pace.look_seconds
        self._epoch: str | None = None

    # -- the backend

    def wait_open(self, timeout: float) -> str:
        """Wait until the store is open, polling: for a caller at start, before the engine's thread polls."""
        until = time.monotonic() + timeout
        while self._open_error is None and time.monotonic() < until:
            self._link.poll()
            time.sleep(_POLL_SECONDS)
        if self._open_error is None:
            return self._link.host.trouble or "not opened yet"
        return self._open_error

    def open_state(self) -> str | None:
        """Return "" if the store is open, why it is not, or None while it has said neither. From any thread."""
        self._link.poll()
        return self._open_error if self._open_error is not None else self._link.host.trouble or None

    def send_job(self, part: JobPart) -> bool:
        """Send a job, or a part of it."""
        job = part.message
        message = wire.encode(job)
        with self._link.lock:  # a thread that polls meanwhile finds the job, and may end it
            if not self._link.send(message):
                return False
            self.parts[job.job_id] = part
            self._in_flight += 1
            self._loads += job.is_load
        return True

    def send_probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bool:
        """Send a question."""
        message = wire.encode(Probe(probe_id, keys, is_prefix))
        with self._link.lock:
            if not self._link.send(message):
                return False
            self._probes[probe_id] = len(keys)
        return True

    def set_names(self, names: StorageNames) -> None:
        """Send other names, in order with the jobs; a host that is not there gets them when it is."""
        self.names = names
        if self._link.connected and not self._link.send(wire.encode(Names(names.prefix, names.layout_id))):
            self._link.kill("it cannot be sent the names of the new weights, since it does not read")

    def set_limits(self, limits: Limits) -> None:
        """Send other limits; a host that is not there gets them when it is, and one that does not read may go on."""
        self.limits = limits
        self._link.send(wire.encode(limits))

    def abandon(self, job_id: int) -> None:
        """Drop the job if it has not begun; kill the host if it does not end the job in time."""
        if self._part(job_id) is not None and self._link.connected:
            self._link.send(wire.encode(Abandon(job_id)))
            self._kill_unless_done(job_id)

    def expect_end(self) -> None:
        """Log nothing of the host's being killed from now on."""
        self._link.host.expected_to_end = True

    def release(self, job_id: int) -> None:
        """Detach a job from its memory, if the host can."""
        with self._link.lock:
            part = self._part(job_id)
            if part is not None and not part.to_release:
                part.to_release = self._link.send(wire.encode(Release(job_id)))

    def flush(self) -> None:
        """Send what the step has collected."""
        if self._link.outbox:
            self._link.flush()

    def poll(self) -> Sequence[Event]:
        """Return the events that have come."""
        now, events = time.monotonic(), self._events
        if now < self._look_at and not (self._loads or self._probes or events or self._is_awaited):
            return ()
        self._look_at = now - now % self._look_seconds + self._look_seconds
        with self._link.lock:  # another thread may poll, too: it must not add events to a list already returned
            self._link.poll()
            if len(events) > _EVENTS_PER_POLL:
                return [events.popleft() for _ in range(_EVENTS_PER_POLL)]
            self._events = deque()
        return events

    def restart(self, reason: str) -> None:
        """Kill the host and start another one."""
        self._link.kill(reason)

    def stats(self) -> dict[str, float]:
        """Return the store's last figures, and those of the host itself."""
        own = {"host_starts": self._link.host.started, "hosts": 1, "hosts_open": int(self._open_error == "")}
        return self._stats | own

    def drain(self, timeout: float) -> bool:
        """Wait for all jobs to end; blocks, so only at shutdown. What is left is dropped with the host."""
        until = time.monotonic() + timeout
        while True:
            before = self._in_flight
            self._link.poll()
            if self._in_flight < before:
                continue  # a poll takes a bounded number of results: there may be more
            if not self._in_flight or self._link.life is None or time.monotonic() >= until:
                return not self._in_flight
            time.sleep(_POLL_SECONDS)

    def close(self, timeout: float) -> None:
        """Ask the host to end."""
        self._link.end(timeout)

    # -- for the link

    def on_started(self, life: HostLife) -> None:
        """Start the clock of a new host process: it is killed unless it reports in time whether the store is open."""
        self._link.launcher.kill_after(life, _UNOPENED, self._open_within)

    def take(self, event: Event) -> None:
        """Handle an event of this tier; ProtocolError if the host has no reason to report it."""
        match event:
            case JobDone():  # first, as most are
                self._take_result(event)
            case Opened(error):
                event = self._of_one_epoch(event)
                self._open_error = event.error
                if self._link.life is not None:
                    self._link.life.cancel_kill(_UNOPENED)
                    if error:  # the host tries again, and says what comes of that
                        self._link.launcher.kill_after(self._link.life, _UNOPENED, self._reopen_within)
            case JobStarted(job_id):
                self._take_start(job_id)
            case JobFailed(job_id):
                self._take_failure(job_id)
            case JobReleased():
                self._take_release(event)
            case Probed(probe_id, answers):
                if len(answers) > self._probes.pop(probe_id, -1):
                    raise ProtocolError(f"{len(answers)} answers to question {probe_id}, which did not ask for them")
        self._events.append(event)

    def take_stats(self, figures: dict[str, float]) -> None:
        """Record the host's figures."""
        self._stats = figures

    def lost(self) -> None:
        """Fail all jobs: the host is gone, or being killed. Their rows stay in use until it has been reaped."""
        self._open_error = _GONE
        self._events.append(Opened(_GONE))
        for job_id, part in self._unended():
            if not part.failed_in_use:
                part.failed_in_use = True
                self._events.append(JobFailed(job_id, _GONE))
        self._events.extend(Probed(probe_id, b"", _GONE) for probe_id in self._probes)
        self._probes.clear()

    def on_reaped(self) -> None:
        """End all jobs: the host process has been reaped, so none of them can touch rows any more."""
        for job_id, part in self._unended():
            part.has_ended = True
            self._events.append(JobDone(job_id, bytes([Status.FAILED]) * len(part.message.keys), 0, 0.0, error=_GONE))
        self._in_flight = self._loads = 0

    # -- inside

    def _of_one_epoch(self, event: Opened) -> Opened:
        """Refuse another epoch than the first: what the engine's memory holds must not be stored under a later one."""
        if event.error:
            return event
        if self._epoch is None:
            self._epoch = event.epoch
        if event.epoch == self._epoch:
            return event
        _log.warning("%s: %s", self._link.host.name, BUMPED)
        return Opened(BUMPED)

    def _unended(self) -> list[tuple[int, JobPart]]:
        return [(job_id, part) for job_id, part in list(self.parts.items()) if not part.has_ended]

    def _part(self, job_id: int) -> JobPart | None:
        part = self.parts.get(job_id)
        return part if part is not None and not part.has_ended else None

    def _reported(self, job_id: int) -> JobPart:
        part = self.parts.get(job_id)
        if part is None or part.has_ended:
            raise ProtocolError(f"job {job_id} is reported, which it does not have")
        return part

    def _take_start(self, job_id: int) -> None:
        part = self._reported(job_id)
        if part.is_started:
            raise ProtocolError(f"job {job_id} is reported as started twice")
        part.is_started = True

    def _take_failure(self, job_id: int) -> None:
        part = self._reported(job_id)
        if part.failed_in_use:
            raise ProtocolError(f"job {job_id} is reported as failed twice")
        part.failed_in_use = True
        self._kill_unless_done(job_id)

    def _take_release(self, event: JobReleased) -> None:
        part = self._reported(event.job_id)
        if not part.to_release or part.is_released:
            raise ProtocolError(f"job {event.job_id} is reported as released, which was not asked for")
        self._check_statuses(event, part.message)
        part.is_released = True

    def _kill_unless_done(self, job_id: int) -> None:
        """Kill the host unless it releases the rows of this failed job in time."""
        if self._link.life is not None:
            self._link.launcher.kill_after(self._link.life, _overdue(job_id), self._grace)

    @staticmethod
    def _check_statuses(event: JobDone | JobReleased, job: StoreJob) -> None:
        if len(event.statuses) != len(job.keys) or not _ENDS[job.is_load].issuperset(event.statuses):
            raise ProtocolError(f"the result of job {event.job_id} does not fit its {len(job.keys)} chunks")

    def _take_result(self, event: JobDone) -> None:
        part = self._reported(event.job_id)
        job = part.message
        self._check_statuses(event, job)
        if not (math.isfinite(event.seconds) and event.seconds >= 0):
            raise ProtocolError(f"job {event.job_id} took {event.seconds} seconds")
        part.has_ended = True
        self._in_flight -= 1
        self._loads -= job.is_load
        if self._link.life is not None and self._link.life.kill_at:
            self._link.life.cancel_kill(_overdue(event.job_id))


def _overdue(job_id: int) -> str:
    return f"job {job_id} did not end"
