"""The host pool: one tier's work, done in one tier host or spread over several, or on threads of this process.

A job is cut among the hosts so that those that get a part have equally many values in flight: one that lags behind gets
none. A job too small to be cut goes to the host with the fewest. A job keeps its id in each host, and is one job for
its sender:

=============  ==================================================================================
a job is       when
=============  ==================================================================================
started        its first part is
failed in use  a part has failed, and no other can still succeed; until then its request waits
released       nothing writes into the memory of any part
done           all parts are: a status for each value, in the job's order
=============  ==================================================================================

A question goes to one host. The tier is open while one of its hosts is. Engine's thread, but for ``wait_open`` and
``open_state``, which ask the hosts and change nothing here.
"""

import itertools
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvtiers.api import OffloadKey, TransferJob
from kvtiers.host.messages import Event, JobDone, JobFailed, JobReleased, JobStarted, Limits, Opened, Probed
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.host_client import BUMPED
from kvtiers.secondary.supervisor import USUAL_PACE
from kvtiers.secondary.tier_jobs import InflightJob, JobPart

__all__ = ["HostPool", "PoolEvent", "PooledHost", "StoreBackend"]

_log = logging.getLogger("kvtiers.secondary")
_LEAST_VALUES, _LEAST_BYTES = 16, 4 * 2**20  # a part that has fewer of both ends sooner than it could be shared out
_POLL_SECONDS = 0.005
_LOOK_SECONDS = 0.025  # how often hosts without work are polled: each client polls its own a little more often

PoolEvent: TypeAlias = tuple[InflightJob | None, Event]
"""An event and the job that it is about: of a job that has ended its JobDone, all parts summed up in the job."""


class StoreBackend(Protocol):
    """The I/O of one store, seen from the engine's thread. No method blocks but ``wait_open``, ``drain``, ``close``.

    ``parts``: those of jobs in flight that it was given, by job id. The pool removes one when it handles its JobDone.
    """

    parts: dict[int, JobPart]

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the store is open; return "" then, else why it is not."""

    def open_state(self) -> str | None:
        """Return "" if the store is open, why it is not, or None while it has said neither. From any thread."""

    def send_job(self, part: JobPart) -> bool:
        """Start a job, or a part of it, under the names current now, and keep it in ``parts``; False: no room."""

    def send_probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bool:
        """Ask which of the keys the store has; of a prefix only as far as it is present. False: no room."""

    def set_names(self, names: StorageNames) -> None:
        """Use other names (another fingerprint) for all that is sent from now on."""

    def set_limits(self, limits: Limits) -> None:
        """Use these limits from now on, in each life of a host."""

    def abandon(self, job_id: int) -> None:
        """Give this job up: no request waits for it any more. Its JobDone must still follow."""

    def expect_end(self) -> None:
        """Log nothing of a host that has to be killed from now on: jobs were dropped, since the engine ends."""

    def release(self, job_id: int) -> None:
        """Detach a job from its memory, if possible: its JobReleased then comes although its calls still run."""

    def flush(self) -> None:
        """Send what was collected since the last call."""

    def poll(self) -> Sequence[Event]:
        """Return new events, of a bounded number of messages."""

    def restart(self, reason: str) -> None:
        """Restart the I/O, if that is possible: the store does not answer any more."""

    def stats(self) -> dict[str, float]:
        """Return the store's own figures, as of its last report."""

    def drain(self, timeout: float) -> bool:
        """Wait until all jobs have ended; False if some have not within ``timeout`` seconds."""

    def close(self, timeout: float) -> None:
        """Stop all I/O; what has not ended within ``timeout`` seconds is dropped."""


@dataclass(slots=True, eq=False)
class PooledHost:
    """One host of a pool, or the threads of this process that do its work, by its name in the log."""

    name: str
    backend: StoreBackend
    error: str | None = None
    """"" while its store is open, None before its first report, else why the store is not open."""
    outage_logged: bool = False
    """The log line that says that it is out of use has been written."""
    values: int = 0
    """On their way."""
    questions: int = 0
    turn: int = 0
    """When it was last given a job."""


class HostPool:
    """The hosts of one tier. ``value_bytes``: of the largest value; ``shared_figures``: as in TierPlugin.

    ``is_awaited``: a poll looks at all hosts also when they have no work.
    """

    def __init__(
        self,
        hosts: Sequence[PooledHost],
        value_bytes: int = 1,
        shared_figures: Collection[str] = (),
        is_awaited: bool = False,
        look_seconds: float = _LOOK_SECONDS,
        close_seconds: float = USUAL_PACE.close_seconds,
    ) -> None:
        self._close_seconds = close_seconds
        self._hosts = hosts
        self._only = hosts[0].backend if len(hosts) == 1 else None
        self._least_values = min(_LEAST_VALUES, -(-_LEAST_BYTES // value_bytes))
        self._shared_figures = shared_figures
        self._is_awaited = is_awaited
        self.in_flight = 0
        """Jobs that have not ended."""
        self._asked: dict[int, PooledHost] = {}
        """The host of each unanswered question, the oldest question first."""
        self._events: list[PoolEvent] = []
        self._turns = itertools.count(1)
        self._look_at = 0.0
        self._look_seconds = look_seconds
        self._epoch: str | None = None
        self._is_open = False

    # -- jobs

    def send_job(self, job: InflightJob, overwrites: bytes = b"") -> bool:
        """Send a job, or its parts; False if no host has room. A part that finds none has failed."""
        if self._only is not None:
            host = self._hosts[0]
            is_sent = not host.error and self._send(host, job, 0, len(job.keys), overwrites)
        else:
            is_sent = self._send_to_several(job, overwrites)
        self.in_flight += is_sent
        return is_sent

    def job(self, job_id: int) -> InflightJob | None:
        """Return a job in flight."""
        parts = (host.backend.parts.get(job_id) for host in self._hosts)
        return next((part.of for part in parts if part is not None), None)

    def jobs(self) -> dict[int, TransferJob]:
        """Return all jobs in flight by id."""
        return {job_id: part.of.job for host in self._hosts for job_id, part in host.backend.parts.items()}

    def expect_end(self) -> None:
        """Log nothing of hosts that have to be killed from now on: jobs were dropped, since the engine ends."""
        for host in self._hosts:
            host.backend.expect_end()

    def abandon(self, job_id: int) -> None:
        """Give up the job in each host that still has a part; one that does not end its part in time is killed."""
        for host in self._hosts:
            if job_id in host.backend.parts:
                host.backend.abandon(job_id)

    def release(self, job_id: int) -> None:
        """Detach the job from its memory in each host that still has a part, if the host can."""
        for host in self._hosts:
            if job_id in host.backend.parts:
                host.backend.release(job_id)

    def kill(self, job_id: int, reason: str) -> None:
        """Kill each host that has not released its part of the job, so that nothing touches its memory soon."""
        for host in self._hosts:
            if (part := host.backend.parts.get(job_id)) is not None and not part.is_released:
                host.backend.restart(reason)

    # -- questions, names, and the step

    def send_probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bool:
        """Ask the host with the fewest unanswered questions."""
        for host in sorted(self._usable(), key=lambda host: (host.questions, host.values)):
            if host.backend.send_probe(probe_id, keys, is_prefix=is_prefix):
                host.questions += 1
                self._asked[probe_id] = host
                return True
        return False

    def set_names(self, names: StorageNames) -> None:
        """Send other names to all hosts, in order with the jobs of each."""
        for host in self._hosts:
            host.backend.set_names(names)

    def set_limits(self, limits: Limits) -> None:
        """Use these limits in each host from now on."""
        for host in self._hosts:
            host.backend.set_limits(limits)

    def flush(self) -> None:
        """Send what the step has collected."""
        for host in self._hosts:
            host.backend.flush()

    def poll(self) -> Sequence[PoolEvent]:
        """Return the events that have come from all hosts."""
        if self._only is None:
            now = time.monotonic()
            if not (self.in_flight or self._asked or self._is_awaited) and now < self._look_at:
                return ()
            self._look_at = now + self._look_seconds
        for host in self._hosts:
            if reported := host.backend.poll():
                was_open = host.error == ""
                for event in reported:
                    self._take(host, event)
                if was_open and host.error and self._is_open:
                    # What failed with it may have opened the breaker, and says nothing of the others: try them now.
                    self._events.append((None, Opened(epoch=self._epoch or "")))
        events, self._events = self._events, []
        return events

    # -- life

    def wait_open(self, timeout: float) -> str:
        """Wait until each store is open or has said why it is not; return "" if one is open. From any thread."""
        until = time.monotonic() + timeout
        errors = [host.backend.wait_open(max(_POLL_SECONDS, until - time.monotonic())) for host in self._hosts]
        return min(errors, key=bool)

    def open_state(self) -> str | None:
        """Return "" if one host's store is open, None while it may yet be, else why it is not. From any thread."""
        states = [host.backend.open_state() for host in self._hosts]
        if "" in states:
            return ""
        return None if None in states else states[0]

    def restart(self, reason: str) -> None:
        """Restart the host with the oldest unanswered question."""
        for host in itertools.islice(self._asked.values(), 1):
            host.backend.restart(reason)

    def stats(self) -> dict[str, float]:
        """Return the sums of the hosts' figures. Those of the store itself (``shared_figures``) are one open host's."""
        if self._only is not None:
            return self._only.stats()
        total: dict[str, float] = {}
        for host in sorted(self._hosts, key=lambda host: host.error != ""):
            for name, figure in host.backend.stats().items():
                if name not in self._shared_figures:
                    total[name] = total.get(name, 0) + figure
                else:
                    total.setdefault(name, figure)
        return total | {"hosts_open": len(self._open_hosts())}

    def drain(self, timeout: float) -> bool:
        """Wait for all jobs to end; blocks, so only at shutdown."""
        if self._only is not None:
            return self._only.drain(timeout)
        until = time.monotonic() + timeout
        while True:
            drained = [host.backend.drain(0.0) for host in self._hosts]  # all of them are to be listened to
            if all(drained) or time.monotonic() >= until:
                return all(drained)
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Ask all hosts to end; they have ``close_seconds`` to close their stores."""
        for host in self._hosts:
            host.backend.close(self._close_seconds)

    # -- inside: jobs out

    def _open_hosts(self) -> list[PooledHost]:
        return [host for host in self._hosts if host.error == ""]

    def _usable(self) -> list[PooledHost]:
        """Return the hosts that are open; before any has said so, those that may be: they keep what they are given."""
        return self._open_hosts() or [host for host in self._hosts if host.error is None]

    def _send_to_several(self, job: InflightJob, overwrites: bytes) -> bool:
        hosts = sorted(self._usable(), key=lambda host: (host.values, host.turn))
        counts = _cut(len(job.keys), [host.values for host in hosts], self._least_values)
        if len(counts) == 1:  # to the first that has room: a stopped one fills up
            return any(self._send(host, job, 0, len(job.keys), overwrites) for host in hosts)
        starts = itertools.accumulate(counts, initial=0)
        sent = 0
        for host, start, count in zip(hosts, starts, counts, strict=False):
            sent += self._send(host, job, start, count, overwrites)
        return sent > 0

    def _send(self, host: PooledHost, job: InflightJob, start: int, count: int, overwrites: bytes) -> bool:
        part = JobPart(job, job.message(start, count, overwrites), start)
        if not host.backend.send_job(part):
            return False
        job.parts.append(part)
        host.values += count
        host.turn = next(self._turns)
        return True

    # -- inside: events in

    def _take(self, host: PooledHost, event: Event) -> None:
        if isinstance(event, Opened):
            self._take_opening(host, event)
        elif isinstance(event, Probed):
            if self._asked.pop(event.probe_id, None) is not None:
                host.questions -= 1
            self._events.append((None, event))
        elif (part := host.backend.parts.get(event.job_id)) is not None:
            if isinstance(event, JobDone):
                self._end_part(host, part, event)
            elif not isinstance(event, JobStarted):
                self._fail_or_release(part, event)
            elif not part.of.is_started:
                part.of.is_started = True
                self._events.append((part.of, event))

    def _end_part(self, host: PooledHost, part: JobPart, event: JobDone) -> None:
        job = part.of
        del host.backend.parts[event.job_id]
        host.values -= len(part.message.keys)
        if job.end_part(part, event):
            self.in_flight -= 1
            self._events.append((job, event))
        else:
            self._report(job)

    def _fail_or_release(self, part: JobPart, event: JobFailed | JobReleased) -> None:
        job = part.of
        if isinstance(event, JobFailed):
            part.failed_in_use = True
            job.error = job.error or event.error
        else:
            part.is_released = True
            job.take_statuses(part, event.statuses)
        self._report(job)

    def _report(self, job: InflightJob) -> None:
        """Report a job, once each, as failed or as released, if all parts that have not ended are."""
        if not job.failed_in_use and all(part.failed_in_use for part in job.parts):
            job.failed_in_use = True
            self._events.append((job, JobFailed(job.job.job_id, job.error)))
        if not job.is_released and all(part.is_released for part in job.parts):
            job.is_released = True
            self._events.append((job, JobReleased(job.job.job_id, bytes(job.statuses))))

    def _take_opening(self, host: PooledHost, event: Opened) -> None:
        error = event.error
        if not error and self._epoch not in {None, event.epoch}:
            error = BUMPED
        elif not error:
            self._epoch = event.epoch
        host.error = error
        was_open, self._is_open = self._is_open, bool(self._open_hosts())
        if self._is_open and not was_open:
            self._events.append((None, event))
        elif not self._is_open and (was_open or all(other.error for other in self._hosts)):
            self._events.append((None, Opened(error)))
        for line in self._changes():
            _log.warning("%s", line)

    def _changes(self) -> Iterator[str]:
        """Yield log lines about single hosts, each once; the line for a tier without any host is the tier's."""
        for host in self._hosts:
            if host.error and self._is_open and not host.outage_logged:
                host.outage_logged = True
                yield f"{host.name}: out of use: {host.error}; the tier goes on with its other hosts"
            elif host.error == "" and host.outage_logged:
                host.outage_logged = False
                yield f"{host.name}: back in use"


def _cut(count: int, loads: Sequence[int], least: int) -> list[int]:
    """Cut ``count`` values into a share for each of the first hosts, by what they have in flight, fewest first.

    Those that get a share then have equally many; one that would get fewer than ``least`` gets none.
    """
    for hosts in range(len(loads), 1, -1):
        total = sum(loads[:hosts]) + count
        levels = [total * (number + 1) // hosts - total * number // hosts for number in range(hosts)]
        counts = [level - load for level, load in zip(levels, loads, strict=False)]
        if min(counts) >= least:
            return counts
    return [count]
