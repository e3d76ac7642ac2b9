"""The region client, a rank's side: finds the scheduler's process, maps the rows, and notices when it ends.

::

    joining --> ready --> lost --> closed
       |          '----------------^
       '--> refused (also: no answer in time; ``reason`` says why)

``start`` returns at once; a thread does the rest and only changes ``poll()``'s answer. ``close`` belongs to the
thread that drives the worker, after it has let its copies end and dropped every buffer made from ``view``.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvtiers._failures import logged_boundary
from kvtiers.api import StartError
from kvtiers.api.units import waitable
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.region.connection import Connection
from kvtiers.region.handshake import (
    HANDSHAKE_VERSION,
    SETTLED,
    SPEAKS,
    HandshakeError,
    Kind,
    Message,
    Welcome,
    decode_progress,
    decode_welcome,
    encode_message,
    encode_pinned,
    socket_name,
)
from kvtiers.region.memfd import Mapping, detach_in_children, map_memory, prefer_huge_pages, require_linux
from kvtiers.region.region import AnonymousRegion

__all__ = ["JoinState", "JoinStatus", "RegionJoin"]

_log = logging.getLogger("kvtiers.region")
_FIRST_DELAY, _LONGEST_DELAY = 0.005, 0.02  # the engine's start waits for the ranks
_STOP_SECONDS = 10.0

JoinState: TypeAlias = Literal["joining", "ready", "refused", "lost", "closed"]


@dataclass(frozen=True, slots=True)
class JoinStatus:
    """The state of a rank. ``populated_rows`` grows until ``prefault_ended``; pinning in pieces can follow it.

    ``memory_is_short``: there is no memory for the rows after the populated ones, which are therefore never used.
    """

    state: JoinState
    reason: str
    populated_rows: int
    prefault_ended: bool
    memory_is_short: bool = False


class RegionJoin:
    """One rank's part in a region. Made by ``start``, or by ``in_process`` for an anonymous region."""

    def __init__(self, engine_id: str, layout: CacheLayout, rank: int, *, core_dumps: bool = False) -> None:
        self.engine_id = engine_id
        self.layout = layout
        self.rank = rank
        self.num_rows = 0
        self._core_dumps = core_dumps
        self._where = f"rank {rank} of engine {engine_id!r}"
        self._status = JoinStatus("joining", "", 0, prefault_ended=False)
        self._changed = threading.Condition()
        self._mapping: Mapping | None = None
        self._view: memoryview | None = None
        self._connection: Connection | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._leaving = False
        self._pinned: int | None = None
        self._pinned_said: int | None = None
        for sock in (self._wake_reader, self._wake_writer):
            sock.setblocking(False)

    @classmethod
    def start(cls, engine_id: str, layout: CacheLayout, rank: int, *, start_deadline: float = 60.0) -> "RegionJoin":
        """Begin to join the region of this engine id and return at once. It may not exist yet."""
        join = cls(engine_id, layout, rank)
        join.begin(start_deadline)
        return join

    @classmethod
    def in_process(cls, region: AnonymousRegion, layout: CacheLayout, rank: int) -> "RegionJoin":
        """Join an anonymous region of this process: ready, or refused, at once."""
        join = cls(region.engine_id, layout, rank)
        differences = region.layout.differences(layout)
        if differences:
            join._end("refused", f"its cache layout is not the region's: {'; '.join(differences)}")
        else:
            join.num_rows = region.num_rows
            join._view = region.view
            join._set(JoinStatus("ready", "", region.num_rows, prefault_ended=True))
        return join

    def begin(self, start_deadline: float) -> None:
        """Begin to join, once, and return at once: a thread does the rest. No other process sees the rank before."""
        thread = threading.Thread(
            target=self._run, args=(time.monotonic() + start_deadline, start_deadline), name="kvtiers-join", daemon=True
        )
        detach_in_children(self)
        thread.start()
        self._thread = thread

    # What the worker asks.

    @property
    def state(self) -> JoinState:
        """The current state of this rank."""
        return self._status.state

    @property
    def reason(self) -> str:
        """The reason for the state, or ""."""
        return self._status.reason

    @property
    def populated_rows(self) -> int:
        """Rows, from the first, whose memory is there already."""
        return self._status.populated_rows

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next."""
        return self.layout.row_stride

    @property
    def view(self) -> memoryview:
        """All rows, flat, writable, format "B". ValueError unless the state is ready or lost."""
        if self._view is None:
            raise ValueError(f"{self._where} has no memory: it is {self.state} {self.reason}".rstrip())
        return self._view

    def poll(self) -> JoinStatus:
        """Return the state of this rank. Never blocks."""
        return self._status

    def wait_change(self, seen: JoinStatus, timeout: float) -> JoinStatus:
        """Block until the status is another one than ``seen``, for at most so many seconds; return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._status != seen, waitable(timeout))
            return self._status

    def wait(self, timeout: float) -> None:
        """Block until this rank is ready; StartError in one line if it will not be, or is not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.state != "joining", waitable(timeout))
            status = self._status
        if status.state == "joining":
            raise StartError(f"{self._where}: no scheduler let it in within {timeout:.3g} s")
        if status.state != "ready":
            raise StartError(f"{self._where}: {status.reason or status.state}")

    def pinned(self, rows: int) -> None:
        """Report to the region's owner that this rank has pinned so many rows, and pins on. Any thread; never waits."""
        self._pinned = rows
        self._wake()

    def settle(self) -> None:
        """Notify the region's owner that this rank has pinned all rows, or pins no more. Any thread, never blocks."""
        self.pinned(SETTLED)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; or this rank is closed
            self._wake_writer.send(b"x")

    def close(self) -> None:
        """Unmap the region and notify its owner. A buffer still in use keeps the memory mapped, with a warning."""
        if self.state == "closed":
            return
        self._leaving = True
        self._wake()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        self._view = None
        unmapped = self._mapping is None or self._mapping.close()
        if not unmapped:
            _log.warning("%s: a buffer made from its view is still in use; its memory stays mapped", self._where)
        if self._connection is not None:
            if unmapped and self._connection.open:
                self._connection.send(encode_message(Kind.GOODBYE))
            self._connection.close()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
        self._end("closed", "")

    def detach(self) -> None:
        """Close everything in a forked child, where this rank counts as closed. The mapping does the same."""
        self._changed = threading.Condition()  # another thread may have held the lock at the fork
        if self._connection is not None:
            self._connection.detach()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
        self._end("closed", "this process was forked from the rank's")

    # The joining thread.

    def _set(self, status: JoinStatus) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def _end(self, state: JoinState, reason: str) -> None:
        self._set(dataclasses.replace(self._status, state=state, reason=reason, prefault_ended=True))

    def _run(self, deadline: float, seconds: float) -> None:
        with logged_boundary(_log, "%s: the joining thread ended", self._where) as joining:
            try:
                self._join(deadline, seconds)
            except (StartError, HandshakeError) as error:
                self._give_up(str(error))
        if joining.error:  # what waits for this rank must get the reason
            self._give_up(f"its joining thread ended: {joining.error}")

    def _join(self, deadline: float, seconds: float) -> None:
        require_linux()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, lambda _: None)
        while self._connect(deadline, seconds):
            if self._converse(deadline, seconds):
                return

    def _give_up(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.close()
        _log.warning("%s: offloading stays off: %s", self._where, reason)  # nothing else may ever ask for the reason
        self._end("lost" if self._mapping else "refused", reason)

    def _connect(self, deadline: float, seconds: float) -> bool:
        """Connect, retrying until the socket exists; False if closed meanwhile. StartError at the deadline."""
        delay = _FIRST_DELAY
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect(socket_name(self.engine_id, os.geteuid()))
            except OSError as error:
                sock.close()
                if error.errno not in {errno.ECONNREFUSED, errno.EAGAIN}:
                    raise StartError(f"cannot reach the scheduler's process: {error}") from None
            else:
                self._connection = Connection(sock, self._selector, self._on_socket)
                return True
            if time.monotonic() >= deadline:
                raise StartError(
                    f"no scheduler answered within {seconds:.3g} s; is it started with this engine id, on this "
                    "machine, as this user, in the same container (network namespace)?"
                )
            if self._selector.select(delay):
                return False
            delay = min(2 * delay, _LONGEST_DELAY)

    def _converse(self, deadline: float, seconds: float) -> bool:
        """Exchange messages until either side closes; False if the scheduler closed before it admitted this rank."""
        connection = self._connection
        assert connection is not None
        if connection.uid != os.geteuid():
            raise StartError(
                f"process {connection.pid} of user id {connection.uid} answers in the scheduler's place, and this rank "
                f"runs as {os.geteuid()}; run both as one user, or choose another engine id if it is a stranger"
            )
        with contextlib.suppress(ProcessLookupError):  # the end of the stream shows it too
            connection.watch_exit(lambda _: connection.hang_up())
        hello = {"rank": self.rank, "layout": json.loads(self.layout.to_json()), "speaks": SPEAKS}
        connection.send(encode_message(Kind.HELLO, json.dumps(hello).encode()))
        while connection.open:
            joining = self.state == "joining"
            ready = self._selector.select(max(0.0, deadline - time.monotonic()) if joining else None)
            if joining and not ready:
                raise StartError(f"the scheduler's process {connection.pid} did not answer within {seconds:.3g} s")
            for key, events in ready:
                if key.fileobj is self._wake_reader and self._is_woken_to_leave(connection):
                    return True
                key.data(events)
        connection.close()
        if self.state == "joining":
            return False
        reason = f"the scheduler's process {connection.pid} has ended or closed the region"
        _log.warning("%s: %s", self._where, reason)
        self._end("lost", reason)
        return True

    def _is_woken_to_leave(self, connection: Connection) -> bool:
        if self._leaving:
            return True
        self._wake_reader.recv(4096)
        rows = self._pinned
        if rows is not None and rows != self._pinned_said and self.state == "ready":
            self._pinned_said = rows
            connection.send(encode_pinned(rows))
        return False

    def _on_socket(self, events: int) -> None:
        connection = self._connection
        assert connection is not None
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if not connection.open or not events & selectors.EVENT_READ:
            return
        try:
            messages, fds = connection.receive()
        except EOFError:
            connection.hang_up()
            return
        try:
            for message in messages:
                self._take(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, message: Message, fds: list[int]) -> None:
        if message.kind == Kind.REFUSED:
            raise StartError(f"refused by the scheduler's process: {message.body.decode(errors='replace')}")
        if message.version != HANDSHAKE_VERSION:
            raise StartError(
                f"the scheduler's process speaks version {message.version} of the handshake, this rank "
                f"{HANDSHAKE_VERSION}; install the same kvtiers for both"
            )
        if message.kind == Kind.WELCOME and fds:
            self._map(decode_welcome(message.body), fds[0])
        elif message.kind == Kind.PROGRESS:
            self._set(JoinStatus("ready", "", *decode_progress(message.body)))

    def _map(self, welcome: Welcome, fd: int) -> None:
        used = welcome.num_rows * welcome.row_stride
        if welcome.row_stride != self.layout.row_stride or not used <= welcome.map_bytes <= os.fstat(fd).st_size:
            raise StartError(f"the scheduler's process offers memory of another shape: {welcome}")
        self._mapping = map_memory(fd, welcome.map_bytes, used, core_dumps=self._core_dumps)
        prefer_huge_pages(self._mapping)  # as the pre-fault program did: what it got is mapped as it lies
        self._view = self._mapping.view
        self.num_rows = welcome.num_rows
        self._set(JoinStatus("ready", "", welcome.populated_rows, welcome.prefault_ended, welcome.memory_is_short))
