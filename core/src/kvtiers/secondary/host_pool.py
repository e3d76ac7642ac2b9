"""The host pool: one tier's work, spread over several tier hosts (``io: process`` with ``processes`` above 1).

A job is cut among the hosts so that those that get a part have equally many values in flight: one that lags behind gets
none. A job too small to be cut goes to the host with the fewest. A job keeps its id in each host, and is one job for
its sender:

==========  =====================================================================================
a job is    when
==========  =====================================================================================
started     its first part is
failed      a part has, and no other can still succeed; until then its request waits for those
released    nothing touches the rows of any part
done        all parts are: a status for each value, in the job's order
==========  =====================================================================================

A question goes to one host. The tier is open while one of its hosts is. Engine's thread, but for ``wait_open`` and
``open_state``, which ask the hosts and change nothing here.
"""

import itertools
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvtiers.api import OffloadKey
from kvtiers.host.messages import (
    Event,
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
from kvtiers.secondary.host_client import BUMPED

__all__ = ["HostPool", "PooledHost"]

_LEAST_VALUES, _LEAST_BYTES = 16, 4 * 2**20  # a part that has fewer of both ends sooner than it could be shared out
_POLL_SECONDS = 0.005
_LOOK_SECONDS = 0.025  # how often hosts without work are polled: each client polls its own a little more often


@dataclass(slots=True, eq=False)
class PooledHost:
    """One host of a pool, by its name in the log."""

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


@dataclass(slots=True, eq=False)
class _Part:
    """One host's part of a job: ``count`` values from ``start`` on."""

    start: int
    count: int
    has_failed: bool = False
    is_released: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    """A job in flight. ``parts``: those that have not ended; the other fields sum up those that have."""

    statuses: bytearray
    parts: dict[PooledHost, _Part] = field(default_factory=dict)
    is_started: bool = False
    has_failed: bool = False
    is_released: bool = False
    nbytes: int = 0
    seconds: float = 0.0
    retries: int = 0
    error: str = ""


class HostPool:
    """A ``StoreBackend`` over several. ``value_bytes``: of the largest value; ``shared_figures``: as in TierConfig."""

    def __init__(self, hosts: Sequence[PooledHost], value_bytes: int, shared_figures: Collection[str] = ()) -> None:
        self._hosts = hosts
        self._least_values = min(_LEAST_VALUES, -(-_LEAST_BYTES // value_bytes))
        self._shared_figures = shared_figures
        self._jobs: dict[int, _Job] = {}
        self._asked: dict[int, PooledHost] = {}
        """The host of each unanswered question, the oldest question first."""
        self._events: list[Event] = []
        self._turns = itertools.count(1)
        self._look_at = 0.0
        self._epoch: str | None = None
        self._is_open = False

    # -- the backend

    def wait_open(self, timeout: float) -> str:
        """Wait until each store is open or has said why it is not; return "" if one is open."""
        until = time.monotonic() + timeout
        errors = [host.backend.wait_open(max(_POLL_SECONDS, until - time.monotonic())) for host in self._hosts]
        return min(errors, key=bool)

    def open_state(self) -> str | None:
        """Return "" if one host's store is open, None while it may yet be, else why it is not. From any thread."""
        states = [host.backend.open_state() for host in self._hosts]
        if "" in states:
            return ""
        return None if None in states else states[0]

    def send_job(self, job: StoreJob) -> bool:
        """Send a job, or its parts; False if no host has room. A part that finds none has failed."""
        hosts = sorted(self._usable(), key=lambda host: (host.values, host.turn))
        parts = _cut(len(job.keys), [host.values for host in hosts], self._least_values)
        if len(parts) > 1:
            sent = {host: part for host, part in zip(hosts, parts, strict=False) if self._send(host, job, part)}
        else:
            taker = next((host for host in hosts if self._send(host, job, parts[0])), None)  # a stopped one fills up
            sent = {taker: parts[0]} if taker is not None else {}
        if sent:
            self._jobs[job.job_id] = _Job(bytearray([Status.FAILED]) * len(job.keys), sent)
        return bool(sent)

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

    def abandon(self, job_id: int) -> None:
        """Give up the job in each host that still has a part; one that does not end its part in time is killed."""
        for host in self._hosts_of(job_id):
            host.backend.abandon(job_id)

    def release(self, job_id: int) -> None:
        """Detach a load from its rows in each host that still has a part, if the host can."""
        for host in self._hosts_of(job_id):
            host.backend.release(job_id)

    def flush(self) -> None:
        """Send what the step has collected."""
        for host in self._hosts:
            host.backend.flush()

    def poll(self) -> Sequence[Event]:
        """Return the events that have come from all hosts."""
        now = time.monotonic()
        if not (self._jobs or self._asked) and now < self._look_at:
            return ()
        self._look_at = now + _LOOK_SECONDS
        for host in self._hosts:
            was_open = host.error == ""
            for event in host.backend.poll():
                self._take(host, event)
            if was_open and host.error and self._is_open:
                # What failed with it may have opened the breaker, and says nothing of the others: try them now.
                self._events.append(Opened(epoch=self._epoch or ""))
        events, self._events = self._events, []
        return events

    def restart(self, reason: str) -> None:
        """Restart the host with the oldest unanswered question."""
        for host in itertools.islice(self._asked.values(), 1):
            host.backend.restart(reason)

    def log(self, level: int, text: str) -> None:
        """Write a line to the log, on a thread of its own."""
        self._hosts[0].backend.log(level, text)

    def stats(self) -> dict[str, float]:
        """Return the hosts' figures, added up, but for those of the store itself: these are of a host that is open."""
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
        until = time.monotonic() + timeout
        while True:
            drained = [host.backend.drain(0.0) for host in self._hosts]  # all of them are to be listened to
            if all(drained) or time.monotonic() >= until:
                return all(drained)
            time.sleep(_POLL_SECONDS)

    def close(self, timeout: float) -> None:
        """Ask all hosts to end."""
        for host in self._hosts:
            host.backend.close(timeout)

    # -- inside: jobs out

    def _open_hosts(self) -> list[PooledHost]:
        return [host for host in self._hosts if host.error == ""]

    def _usable(self) -> list[PooledHost]:
        """Return the hosts that are open; before any has said so, those that may be: they keep what they are given."""
        return self._open_hosts() or [host for host in self._hosts if host.error is None]

    def _hosts_of(self, job_id: int) -> Sequence[PooledHost]:
        job = self._jobs.get(job_id)
        return list(job.parts) if job is not None else ()

    def _send(self, host: PooledHost, job: StoreJob, part: _Part) -> bool:
        if part.count < len(job.keys):
            values = slice(part.start, part.start + part.count)
            job = job._replace(keys=job.keys[values], rows=job.rows[values], overwrites=job.overwrites[values])
        if not host.backend.send_job(job):
            return False
        host.values += part.count
        host.turn = next(self._turns)
        return True

    # -- inside: events in

    def _take(self, host: PooledHost, event: Event) -> None:
        match event:
            case JobDone(job_id):
                self._end_part(host, self._jobs[job_id], event)
            case JobStarted(job_id):
                job = self._jobs[job_id]
                if not job.is_started:
                    job.is_started = True
                    self._events.append(event)
            case JobFailed(job_id, error):
                job = self._jobs[job_id]
                job.parts[host].has_failed = True
                job.error = job.error or error
                self._report(job_id, job)
            case JobReleased(job_id):
                job = self._jobs[job_id]
                job.parts[host].is_released = True
                self._report(job_id, job)
            case Probed(probe_id):
                del self._asked[probe_id]
                host.questions -= 1
                self._events.append(event)
            case Opened():
                self._take_opening(host, event)

    def _end_part(self, host: PooledHost, job: _Job, event: JobDone) -> None:
        part = job.parts.pop(host)
        host.values -= part.count
        job.statuses[part.start : part.start + part.count] = event.statuses
        job.nbytes += event.nbytes
        job.seconds = max(job.seconds, event.seconds)  # they ran side by side
        job.retries += event.retries
        job.error = job.error or event.error
        if job.parts:
            self._report(event.job_id, job)
            return
        del self._jobs[event.job_id]
        self._events.append(JobDone(event.job_id, bytes(job.statuses), job.nbytes, job.seconds, job.retries, job.error))

    def _report(self, job_id: int, job: _Job) -> None:
        """Report a job, once each, as failed or as released, if all parts that have not ended are."""
        parts = job.parts.values()
        if not job.has_failed and all(part.has_failed for part in parts):
            job.has_failed = True
            self._events.append(JobFailed(job_id, job.error))
        if not job.is_released and all(part.is_released for part in parts):
            job.is_released = True
            self._events.append(JobReleased(job_id))

    def _take_opening(self, host: PooledHost, event: Opened) -> None:
        error = event.error
        if not error and self._epoch not in {None, event.epoch}:
            error = BUMPED
        elif not error:
            self._epoch = event.epoch
        host.error = error
        was_open, self._is_open = self._is_open, bool(self._open_hosts())
        if self._is_open and not was_open:
            self._events.append(event)
        elif not self._is_open and (was_open or all(other.error for other in self._hosts)):
            self._events.append(Opened(error))
        for line in self._changes():
            self.log(logging.WARNING, line)

    def _changes(self) -> Iterator[str]:
        """Yield log lines about single hosts, each once; the line for a tier without any host is the tier's."""
        for host in self._hosts:
            if host.error and self._is_open and not host.outage_logged:
                host.outage_logged = True
                yield f"{host.name}: out of use: {host.error}; the tier goes on with its other hosts"
            elif host.error == "" and host.outage_logged:
                host.outage_logged = False
                yield f"{host.name}: back in use"


def _cut(count: int, loads: Sequence[int], least: int) -> list[_Part]:
    """Cut ``count`` values into a part for each of the first hosts, by what they have in flight, fewest first.

    Those that get a part then have equally many; one that would get fewer than ``least`` gets none.
    """
    for hosts in range(len(loads), 1, -1):
        total = sum(loads[:hosts]) + count
        levels = [total * (number + 1) // hosts - total * number // hosts for number in range(hosts)]
        counts = [level - load for level, load in zip(levels, loads, strict=False)]
        if min(counts) >= least:
            starts = itertools.accumulate(counts, initial=0)
            return [_Part(start, values) for start, values in zip(starts, counts, strict=False)]
    return [_Part(0, count)]
