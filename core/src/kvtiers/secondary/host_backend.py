"""``io: process``: the engine's end of a tier host. Runs on the engine's thread and never waits for the host.

Messages go into a bounded outbox and out as far as the socket takes them. When a host ends, its jobs have failed at
once; they are done, and their rows free, when the process has been reaped: from then on nothing can touch them.
"""

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvtiers.api import OffloadKey
from kvtiers.rows.names import StorageNames
from kvtiers.secondary import wire
from kvtiers.secondary.launcher import HostLauncher, HostProcess
from kvtiers.secondary.protocol import Event, JobDone, JobFailed, Opened, Probed, Status, StoreJob
from kvtiers.secondary.wire import Frame, FrameReader, Kind, ProtocolError

__all__ = ["HostBackend", "HostLink"]

_OUTBOX_BYTES = 4 * 2**20
_FRAMES_PER_POLL = 1024
_RECEIVE_BYTES = 1 << 18
_GONE = "its host ended"


class HostLink:
    """The connection to one host, shared by the backends of all tiers that live in it."""

    def __init__(self, launcher: HostLauncher, host: HostProcess) -> None:
        self.launcher = launcher
        self.host = host
        self.tiers: list[HostBackend] = []
        self._socket: socket.socket | None = None
        self._polling = threading.Lock()
        self._reader = FrameReader()
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0

    @property
    def connected(self) -> bool:
        """There is a host to talk to."""
        return self._socket is not None

    def send(self, message: bytes) -> bool:
        """Put a message into the outbox; False if it is full or there is no host."""
        if self._socket is None or self._outbox_bytes + len(message) > _OUTBOX_BYTES:
            return False
        self._outbox.append(message)
        self._outbox_bytes += len(message)
        return True

    def flush(self) -> None:
        """Send what the socket takes."""
        while self._outbox and self._socket is not None:
            message = self._outbox[0]
            try:
                sent = self._socket.send(message)
            except BlockingIOError:
                return
            except OSError:
                self._lost()
                return
            self._outbox_bytes -= sent
            if sent == len(message):
                self._outbox.popleft()
            else:
                self._outbox[0] = message[sent:]

    def poll(self) -> None:
        """Take what the host and the launcher have to say, a bounded amount, and pass it on."""
        if self._polling.acquire(blocking=False):  # at start ``wait_open`` may poll on another thread
            try:
                self._poll()
            finally:
                self._polling.release()

    def close(self) -> None:
        """Let go of the socket; the launcher has ended the host."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _poll(self) -> None:
        self.flush()
        if self._socket is None and self.host.connections and not self._awaits_burial():
            self._socket = self.host.connections.popleft()
            self._reader = FrameReader()
            for index, tier in enumerate(self.tiers):  # they may have changed since its HELLO
                self.send(wire.encode_names(index, tier.names))
        if self._socket is not None:
            self._receive(self._socket)
        if self._socket is None:
            while self.host.reaped:
                self.host.reaped.popleft()
                for tier in self.tiers:
                    tier.buried()
        elif self.host.reaped:
            self._lost()

    def _awaits_burial(self) -> bool:
        return any(tier.has_dead_jobs for tier in self.tiers) or bool(self.host.reaped)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"":
            self._lost()
            return
        try:
            if data:
                self._reader.feed(data)
            for message in self._reader.frames(_FRAMES_PER_POLL):
                self._take(message)
        except (ProtocolError, ValueError, IndexError) as error:
            self.launcher.kill(self.host, f"it does not keep to the protocol: {error}")
            self._lost()

    def _take(self, message: Frame) -> None:
        tier = self.tiers[message.tier]
        if message.kind == Kind.LOG:
            self.launcher.log(message.body[0], str(message.body[1:], "utf-8", "replace"))
        elif message.kind == Kind.STATS:
            tier.take_stats(json.loads(bytes(message.body)))
        else:
            tier.take(wire.decode_event(message))

    def _lost(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._outbox.clear()
        self._outbox_bytes = 0
        self.launcher.kill(self.host, "its connection is gone")
        for tier in self.tiers:
            tier.lost()


class HostBackend:
    """One tier's share of a host."""

    def __init__(self, link: HostLink, names: StorageNames, grace: float) -> None:
        self._link = link
        self._index = len(link.tiers)
        link.tiers.append(self)
        self.names = names
        self._grace = grace
        self._events: deque[Event] = deque()
        self._jobs: dict[int, StoreJob] = {}
        self._dead: dict[int, StoreJob] = {}
        self._probes: dict[int, None] = {}
        self._stats: dict[str, float] = {}
        self._open_error: str | None = None

    # -- the backend

    def wait_open(self, timeout: float) -> str:
        """Wait until the store is open, polling: for a caller at start, when nobody else does."""
        until = time.monotonic() + timeout
        while self._open_error is None and time.monotonic() < until:
            self._link.poll()
            time.sleep(0.005)
        return "not opened yet" if self._open_error is None else self._open_error

    def send_job(self, job: StoreJob) -> bool:
        """Send a job."""
        if not self._link.send(wire.encode_job(self._index, job)):
            return False
        self._jobs[job.job_id] = job
        return True

    def send_probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bool:
        """Send a question."""
        if not self._link.send(wire.encode_probe(self._index, probe_id, keys, is_prefix=is_prefix)):
            return False
        self._probes[probe_id] = None
        return True

    def set_names(self, names: StorageNames) -> None:
        """Send other names, in order with the jobs; a host that is not there gets them in its HELLO."""
        self.names = names
        if self._link.connected and not self._link.send(wire.encode_names(self._index, names)):
            self._link.launcher.kill(self._link.host, "it cannot be told that the weights have changed")

    def abandon(self, job_id: int) -> None:
        """Have the host drop the job if it has not begun, and be killed if it does not end it in time."""
        if job_id in self._jobs:
            self._link.send(wire.encode_abandon(self._index, job_id))
            self._link.launcher.kill_unless_done(self._link.host, job_id, self._grace)

    def flush(self) -> None:
        """Send what the step has collected."""
        self._link.flush()

    def poll(self) -> Sequence[Event]:
        """Take the events that have come."""
        self._link.poll()
        events = list(self._events)
        self._events.clear()
        return events

    def stats(self) -> dict[str, float]:
        """Return the host's last figures."""
        return self._stats

    def drain(self, timeout: float) -> bool:
        """Wait for all jobs to end; blocks, so only at shutdown."""
        until = time.monotonic() + timeout
        while self._jobs and time.monotonic() < until:
            self._link.poll()
            time.sleep(0.002)
        return not self._jobs

    def close(self, timeout: float) -> None:
        """Tell the host to end."""
        self._link.host.ending = True
        self._link.send(wire.frame(Kind.CLOSE, self._index, timeout.hex().encode()))
        self._link.flush()

    # -- for the link

    @property
    def has_dead_jobs(self) -> bool:
        """Jobs of a host that has ended but has not been reaped."""
        return bool(self._dead)

    def take(self, event: Event) -> None:
        """Take in an event of this tier."""
        match event:
            case Opened(error):
                self._open_error = error
            case JobDone(job_id):
                if self._jobs.pop(job_id, None) is None:
                    raise ProtocolError(f"job {job_id} is reported, which it does not have")
                self._link.launcher.job_done(self._link.host, job_id)
            case Probed(probe_id):
                self._probes.pop(probe_id, None)
        self._events.append(event)

    def take_stats(self, figures: dict[str, float]) -> None:
        """Take in the host's figures."""
        self._stats = {name: float(figure) for name, figure in figures.items()}

    def lost(self) -> None:
        """The host is gone or as good as gone: all its jobs have failed, their rows wait for its burial."""
        self._open_error = _GONE
        self._events.append(Opened(_GONE))
        self._events.extend(JobFailed(job_id, _GONE) for job_id in self._jobs)
        self._events.extend(Probed(probe_id, b"", _GONE) for probe_id in self._probes)
        self._dead |= self._jobs
        self._jobs = {}
        self._probes.clear()

    def buried(self) -> None:
        """The process has been reaped: nothing touches the rows of its jobs any more."""
        for job_id, job in self._dead.items():
            self._events.append(JobDone(job_id, bytes([Status.FAILED]) * len(job.keys), 0, 0.0, error=_GONE))
        self._dead = {}
