"""The engine's end of the connection to one tier host, across restarts of the host's process.

Never waits for the host: messages go into a bounded outbox and out as far as the socket takes them. Called on the
engine's thread, and, as long as a tier has not reported whether its store is open, also on threads that ask for that
(the start line's, ``wait_ready``'s, the status's): one at a time, by ``lock``. When a host ends, its jobs have failed
in use at once; they are done, and their rows free, when the process has been reaped: from then on nothing can touch
them.

===========  =========================================================================================
state        leaves it when
===========  =========================================================================================
no life      the launcher has started one: to connected
connected    EOF, a message that makes no sense, or it is killed: to lost
lost         the process has been reaped: to no life
===========  =========================================================================================
"""

import logging
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvtiers.host import wire
from kvtiers.host.messages import SAY_ONCE, Close, Event, Limits, LogLine, Names, Opened, Report, Stats
from kvtiers.host.wire import MAX_REPORT_BYTES, FrameReader, ProtocolError
from kvtiers.layout.storage_name import StorageNames
from kvtiers.region.memfd import detach_in_children
from kvtiers.secondary.supervisor import HostLauncher, HostLife, HostProcess

__all__ = ["HostConnection", "LinkedTier"]

_log = logging.getLogger("kvtiers.secondary")
_OUTBOX_BYTES = 4 * 2**20
_BYTES_AT_ONCE = 1 << 16  # the allocator would map a larger buffer for each read
_UNASKED_AT_FIRST, _UNASKED_PER_SECOND = 500, 200  # messages that answer nothing; a host sends a quarter of it
_UNASKED_AT_ONCE = 10_000
"""What may wait for an engine that was idle for long: up to 9,000 short lines in the socket, a thousand in the host."""


class LinkedTier(Protocol):
    """The callbacks of the connection to the tier whose host it is."""

    names: StorageNames
    limits: Limits | None
    """Those that have changed since the config was read; None: none has."""

    def on_started(self, life: HostLife) -> None:
        """Handle the start of a new host process."""

    def take(self, event: Event) -> None:
        """Handle an event; ProtocolError if the host has no reason to report it."""

    def take_stats(self, figures: dict[str, float]) -> None:
        """Record the store's figures."""

    def lost(self) -> None:
        """Handle the loss of the host: it is gone, or being killed."""

    def on_reaped(self) -> None:
        """Handle the end of the host: its process has been reaped."""


class HostConnection:
    """The connection to one host.

    ``lock``: held by each method, and by the tier while it changes what it remembers of the host; never while waiting.
    ``tier``: set before the host is started. ``said_once``: the lines of the log, of all hosts, that come once.
    """

    tier: LinkedTier

    def __init__(
        self,
        launcher: HostLauncher,
        host: HostProcess,
        said_once: deque[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.launcher = launcher
        self.host = host
        self._said_once = said_once
        self.life: HostLife | None = None
        """The life that jobs are sent to, also when it is lost, until it has been reaped."""
        self._lost = False
        self.lock = threading.RLock()
        self._reader = FrameReader(MAX_REPORT_BYTES)
        self._incoming = select.poll()
        self.outbox = bytearray()
        """What the socket has not taken yet."""
        self._unasked_left, self._unasked_at = 0.0, 0.0
        """A token bucket of messages that answer nothing, and when it was last filled up."""
        self._ending = False
        detach_in_children(self)

    @property
    def connected(self) -> bool:
        """There is a running host."""
        return self.life is not None and not self._lost

    def send(self, message: bytes) -> bool:
        """Put a message into the outbox; False if it is full or there is no host."""
        with self.lock:
            if not self.connected or len(self.outbox) + len(message) > _OUTBOX_BYTES:
                return False
            self.outbox += message
            return True

    def flush(self) -> None:
        """Send what the socket takes."""
        with self.lock:
            while self.outbox and self.life is not None and not self._lost:
                try:
                    sent = self.life.connection.send(self.outbox)
                except BlockingIOError:
                    return
                except OSError:  # it is gone; what it has said before is still to be read, up to the EOF
                    self.outbox.clear()
                    return
                del self.outbox[:sent]

    def waitable(self) -> tuple[int, int] | None:
        """Return the descriptor, and the events of ``select.poll``, to wait with until there is something to poll."""
        with self.lock:
            if self.life is None or self._lost:
                return None
            return self.life.connection.fileno(), select.POLLIN | (select.POLLOUT if self.outbox else 0)

    def poll(self) -> None:
        """Handle new messages of the host and changes of its process, a bounded number."""
        with self.lock:
            if self.life is None:
                if not self.host.lives:
                    return
                self._connect(self.host.lives.popleft())
            if self.outbox:
                self.flush()
            if self.life is not None and not self._lost:
                self._receive(self.life)
            if self._lost and self.life is not None and self.life.status is not None:
                self.life = None
                self.tier.on_reaped()

    def kill(self, reason: str) -> None:
        """Kill the host, and count it as lost from now on."""
        with self.lock:
            if self.life is not None and not self._lost:
                self.launcher.kill(self.host, self.life, reason)
                self._lose()

    def end(self, seconds: float) -> None:
        """Ask the host to end within so many seconds; one that has sent no message yet is not waited for."""
        with self.lock:
            if self._ending:
                return
            self.poll()
            self._ending = self.host.ending = True
            if self.life is not None and not self.life.has_reported:
                self.launcher.discard(self.life)
            else:
                self.send(wire.encode(Close(seconds)))
                self.flush()

    def detach(self) -> None:
        """Close the connections: after the end, and in a forked child, where they would hide the engine's end."""
        for life in (*self.host.lives, *([self.life] if self.life is not None else [])):
            life.detach()

    def _connect(self, life: HostLife) -> None:
        self.life = life
        self._lost = False
        self._reader = FrameReader(MAX_REPORT_BYTES)
        self._incoming = select.poll()
        self._incoming.register(life.connection, select.POLLIN)
        self._unasked_left, self._unasked_at = _UNASKED_AT_FIRST, life.started
        tier = self.tier
        self.send(wire.encode(Names(tier.names.prefix, tier.names.layout_id)))  # they may have changed since its HELLO
        if tier.limits is not None:
            self.send(wire.encode(tier.limits))
        tier.on_started(life)
        if self._ending:
            self.launcher.discard(life)

    def _receive(self, life: HostLife) -> None:
        try:
            left = self.launcher.pace.frames_per_poll
            if self._reader.waiting:
                left -= self._take_messages(left)
                if not left:
                    return  # what comes faster than it is taken stays in the socket, and holds the host up
            data = self._read(life) if self._incoming.poll(0) else None
            if data:
                life.has_reported = True
                self._reader.feed(data)
                left -= self._take_messages(left)
            if life.kill_at and left and len(data or b"") < _BYTES_AT_ONCE:
                self.launcher.all_read(life)
        except ProtocolError as error:
            self.kill(f"it does not keep to the protocol: {error}")
            return
        if data == b"" or (data is None and life.status is not None) or life.being_killed:
            self._lose()

    def _read(self, life: HostLife) -> bytes | None:
        """Return what has come, b"" at its end, None for nothing: at three times the cost of asking first."""
        try:
            return life.connection.recv(_BYTES_AT_ONCE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _take_messages(self, most: int) -> int:
        messages = self._reader.messages(most)
        for message in messages:
            self._take(wire.decode_report(message))
        return len(messages)

    def _take(self, report: Report) -> None:
        if isinstance(report, LogLine | Stats | Opened):
            self._count_unasked()
        match report:
            case LogLine(level, text):
                self._log_line(level, text)
            case Stats(figures):
                self.tier.take_stats(figures)
            case _:
                self.tier.take(report)

    def _log_line(self, level: int, text: str) -> None:
        if level & SAY_ONCE and text in self._said_once:
            return
        _log.log(level & ~SAY_ONCE, "%s", text)
        if level & SAY_ONCE:
            self._said_once.append(text)

    def _count_unasked(self) -> None:
        now = self._clock()
        earned = _UNASKED_PER_SECOND * (now - self._unasked_at)
        self._unasked_left = min(_UNASKED_AT_ONCE, self._unasked_left + earned) - 1
        self._unasked_at = now
        if self._unasked_left < 0:
            raise ProtocolError("it floods the engine with unsolicited messages")

    def _lose(self) -> None:
        if self.life is None or self._lost:
            return
        self._lost = True
        self.life.read_at = math.inf
        self.life.connection.close()
        self.outbox.clear()
        if not self.life.being_killed:
            self.launcher.kill_after(self.life, "it has closed its connection", self.launcher.pace.last_seconds)
        self.tier.lost()
