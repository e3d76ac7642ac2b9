"""The region's accept thread: admits ranks, watches their processes, and reports the progress of pre-faulting to them.

It owns the connections, their pidfds and the pre-fault program; all of them are used on this thread alone. It writes
the ``RankTable``, which any thread may read.
"""

import contextlib
import errno
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvtiers._failures import logged_boundary
from kvtiers.layout.cache_layout import CacheLayout, ModelIdentity
from kvtiers.region.connection import AcceptRate, Connection, Refusals
from kvtiers.region.handshake import (
    HANDSHAKE_VERSION,
    OTHER_RELEASE,
    SPEAKS,
    HandshakeError,
    Kind,
    Message,
    Welcome,
    decode_pinned,
    encode_message,
    encode_progress,
)
from kvtiers.region.memfd import detach_in_children
from kvtiers.region.prefault import Prefault
from kvtiers.region.ranks import RankTable

__all__ = ["AcceptThread"]

_log = logging.getLogger("kvtiers.region")
_DIFFERENCES_SHOWN = 5
_HELLO_BYTES = 64 << 10  # that a rank's HELLO may have beside twice the scheduler's own layout
_STOP_SECONDS = 10.0
_PAUSE_SECONDS = 0.5


class AcceptThread:
    """Serves one region until ``stop``."""

    def __init__(
        self,
        listener: socket.socket,
        memfd: int,
        layout: CacheLayout,
        welcome: Welcome,
        ranks: RankTable,
        start_prefault: Callable[[], Prefault] | None,
        start_deadline: float,
    ) -> None:
        self._listener = listener
        self._memfd = memfd
        self._layout = layout
        self._welcome = welcome
        self._ranks = ranks
        self._start_prefault = start_prefault
        self._prefault: Prefault | None = None
        self._started = time.monotonic()
        self._start_deadline = start_deadline
        self._warned = False
        self._stopping = False
        self._refusals = Refusals()
        self._accept_rate = AcceptRate()
        self._listen_again: float | None = None
        self._longest_hello = 2 * len(layout.to_json()) + _HELLO_BYTES
        self._connections: set[Connection] = set()
        self._behind: set[Connection] = set()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for sock in (self._wake_reader, self._wake_writer):
            sock.setblocking(False)  # a thread that wakes this one never waits for it
        self._selector = selectors.DefaultSelector()
        self._wanted_rows = 0
        self.populated_rows = 0
        self.timings: dict[str, float] = {}
        """Seconds until all ranks had joined (``join``) and until pre-faulting ended (``prefault``)."""
        self._thread = threading.Thread(target=self._run, name="kvtiers-accept", daemon=True)
        detach_in_children(self)

    def start(self) -> None:
        """Begin to serve. RuntimeError, with everything closed, if no thread can be started."""
        try:
            self._thread.start()
        except RuntimeError:
            self._close_all()
            raise

    def want_rows(self, rows: int) -> None:
        """Request that this many rows, from the first, be populated. From any thread; never blocks."""
        self._wanted_rows = max(self._wanted_rows, rows)
        self._wake()

    def stop(self) -> None:
        """Disconnect all ranks, end pre-faulting and the thread; returns when they have ended."""
        self._stopping = True
        self._wake()
        self._thread.join(_STOP_SECONDS)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; or the thread has ended by itself
            self._wake_writer.send(b"x")

    def _woken(self) -> None:
        self._wake_reader.recv(4096)
        if self._prefault is not None:
            self._prefault.want(self._wanted_rows * self._welcome.row_stride)

    def detach(self) -> None:
        """Close everything in a forked child. Nothing is unregistered: the parent's epoll is the same one."""
        self._stopping = True
        self._selector.close()
        for sock in (self._listener, self._wake_reader, self._wake_writer):
            sock.close()
        for connection in self._connections:
            connection.detach()
        if self._prefault is not None:
            self._prefault.detach()

    def _run(self) -> None:
        try:
            with logged_boundary(_log, "the region's accept thread ended") as serving:
                self._serve()
            if serving.error:  # what waits for ranks must get the reason
                self._ranks.break_off(f"the thread that serves its ranks ended: {serving.error}")
        finally:
            self._close_all()

    def _serve(self) -> None:
        self._selector.register(self._wake_reader, selectors.EVENT_READ, lambda _: self._woken())
        self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())
        self._begin_prefault()
        while not self._stopping:
            for key, events in self._selector.select(self._time_to_wait()):
                key.data(events)
            self._listen_after_pause()
            if self._time_to_warning() == 0.0:
                self._warned = True
                text = self._ranks.describe_missing(self._ranks.missing, self._start_deadline)
                _log.warning("offloading stays off: %s", text)

    def _time_to_wait(self) -> float | None:
        due = [self._time_to_warning()]
        if self._listen_again is not None:
            due.append(max(0.0, self._listen_again - time.monotonic()))
        return min((seconds for seconds in due if seconds is not None), default=None)

    def _listen_after_pause(self) -> None:
        if self._listen_again is not None and time.monotonic() >= self._listen_again:
            self._listen_again = None
            self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())

    def _pause_listening(self, seconds: float) -> None:
        if seconds and self._listen_again is None:
            self._selector.unregister(self._listener)
            self._listen_again = time.monotonic() + seconds

    def _time_to_warning(self) -> float | None:
        if self._warned or self._ranks.all_joined:
            return None
        return max(0.0, self._started + self._start_deadline - time.monotonic())

    def _close_all(self) -> None:
        if self._prefault is not None:
            self._prefault.stop()
        for connection in self._connections:
            connection.close()
        for sock in (self._listener, self._wake_reader, self._wake_writer):
            sock.close()
        self._selector.close()

    # Ranks come.

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                if self._refusals.should_log():
                    _log.warning("cannot accept a rank's connection: %s%s", error, self._refusals.take_unlogged())
                self._pause_listening(_PAUSE_SECONDS)  # the listener stays readable: this thread would spin
            return
        self._pause_listening(self._accept_rate.accepted(at_start=not self._ranks.all_joined))
        connection = Connection(sock, self._selector, lambda events: self._on_socket(connection, events))
        self._connections.add(connection)
        if connection.uid != os.geteuid():
            self._refuse(
                connection,
                f"process {connection.pid} runs as user id {connection.uid}, the engine's scheduler as "
                f"{os.geteuid()}; scheduler and workers must be of one user",
                ours=False,
            )

    def _on_socket(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
            if connection in self._behind and not connection.busy:
                self._behind.discard(connection)
                connection.send(encode_progress(*self._progress()))
        if not connection.open or not events & selectors.EVENT_READ:
            return
        try:
            messages, fds = connection.receive()
        except (EOFError, HandshakeError) as error:
            level = logging.DEBUG if connection.rank is None else logging.WARNING
            _log.log(level, "rank %s (process %d) is no longer connected: %s", connection.rank, connection.pid, error)
            self._lose(connection)
            return
        for fd in fds:  # unexpected: a rank sends none
            os.close(fd)
        for message in messages:
            if connection.open:
                self._take(connection, message)

    def _take(self, connection: Connection, message: Message) -> None:
        if message.version != HANDSHAKE_VERSION:
            self._refuse(
                connection,
                f"it speaks version {message.version} of the handshake, the scheduler {HANDSHAKE_VERSION}; "
                "install the same kvtiers for both",
            )
        elif message.kind == Kind.HELLO and connection.rank is None:
            self._admit(connection, message.body)
        elif message.kind == Kind.PINNED and connection.rank is not None:
            self._ranks.pinned(connection.rank, decode_pinned(message.body))
        elif message.kind == Kind.GOODBYE and connection.rank is not None:
            _log.info("rank %d (process %d) has left", connection.rank, connection.pid)
            self._lose(connection)
            self._forget(connection)
        elif connection.rank is None:  # it could go on like this for ever
            self._refuse(connection, f"it does not begin with a HELLO, but with a message of kind {message.kind}")

    def _admit(self, connection: Connection, body: bytes) -> None:
        if len(body) > self._longest_hello:  # before anything is made of it, which takes time of the engine's
            self._refuse(
                connection, f"its HELLO has {len(body)} bytes, expected at most {self._longest_hello}: not this layout"
            )
            return
        try:
            hello = json.loads(body)
            rank, differences = int(hello["rank"]), self._differences(hello["layout"])
        except Exception as error:  # noqa: BLE001 -- whatever a peer sends, it must not end this thread
            self._refuse(connection, f"its layout cannot be read: {error!r:.200}; install the same kvtiers for both")
            return
        reason = OTHER_RELEASE if hello.get("speaks") != SPEAKS else self._objection(rank, differences)
        if reason:
            self._refuse(connection, reason, rank=rank)
            return
        try:
            watched = connection.watch_exit(lambda _: self._on_exit(connection))
        except OSError:  # it has ended in the meantime
            self._lose(connection)
            return
        if not watched:
            unwatched = "rank %d: process %d cannot be watched; if it dies, its rows stay leased"
            _log.warning(unwatched, rank, connection.pid)
        connection.rank = rank
        if self._ranks.missing == [rank]:
            self._note_all_joined()  # first: ``timings`` has the time once ``wait_all`` returns
        self._ranks.join(rank, connection.pid)  # before the WELCOME: a rank that is ready has joined
        self._welcome_rank(connection)

    def _note_all_joined(self) -> None:
        if "join" not in self.timings:
            self._warned = True  # there is nothing left to warn of
            self.timings["join"] = time.monotonic() - self._started
            _log.info("all %d ranks have joined after %.3f s", self._ranks.world_size, self.timings["join"])

    def _welcome_rank(self, connection: Connection) -> None:
        rows, ended, short = self._progress()
        welcome = replace(self._welcome, populated_rows=rows, prefault_ended=ended, memory_is_short=short)
        try:
            connection.hand_over(encode_message(Kind.WELCOME, json.dumps(asdict(welcome)).encode()), self._memfd)
        except OSError:  # it has hung up, and never had the memory
            self._lose(connection)
            self._forget(connection)

    def _differences(self, layout: Any) -> list[str]:
        if isinstance(layout, dict) and layout.get("model") == asdict(ModelIdentity("")):
            layout["model"] = asdict(self._layout.model)  # a rank needs no name of the model whose KV it copies
        return self._layout.differences_in(layout)

    def _objection(self, rank: int, differences: Sequence[str]) -> str:
        if differences:
            shown = "; ".join(differences[:_DIFFERENCES_SHOWN])
            more = len(differences) - _DIFFERENCES_SHOWN
            return (
                f"its cache layout is not the scheduler's (here: scheduler, there: rank): {shown}"
                f"{f'; and {more} more' if more > 0 else ''}"
            )
        if not 0 <= rank < self._ranks.world_size:
            return f"there is no such rank: expected 0 to {self._ranks.world_size - 1}"
        occupant = self._ranks.occupant(rank)
        if occupant is not None:
            return f"process {occupant} has joined as this rank already; each worker needs a rank of its own"
        return ""

    def _refuse(self, connection: Connection, reason: str, *, rank: int | None = None, ours: bool = True) -> None:
        said = self._refusals.should_log()
        if said:
            who = "a rank" if rank is None else f"rank {rank}"
            _log.warning("refused %s: %s%s", who, reason, self._refusals.take_unlogged())
        if said or ours:
            connection.send(encode_message(Kind.REFUSED, reason.encode()))
        self._lose(connection)
        self._ranks.refuse(rank, reason, ours=ours)
        if self._ranks.all_joined:
            self._pause_listening(self._refusals.pause())

    # Ranks go.

    def _lose(self, connection: Connection) -> None:
        """Handle the end of a connection. The rank's process is still watched: it may yet touch its rows."""
        connection.hang_up()
        self._behind.discard(connection)
        if connection.rank is None:
            connection.close()
            self._connections.discard(connection)
            return
        self._ranks.lose(connection.rank)

    def _forget(self, connection: Connection) -> None:
        """Forget a rank whose connection has ended and which cannot touch a row any more."""
        connection.close()
        self._connections.discard(connection)
        if connection.rank is not None:
            self._ranks.forget(connection.rank)

    def _on_exit(self, connection: Connection) -> None:
        if not connection.watched:  # it said goodbye a moment before
            return
        if connection.open:
            _log.warning("rank %s (process %d) has ended", connection.rank, connection.pid)
            self._lose(connection)
        self._forget(connection)

    # Pre-faulting.

    def _begin_prefault(self) -> None:
        if self._start_prefault is None:
            return
        try:
            self._prefault = self._start_prefault()
        except OSError as error:
            _log.warning("cannot start the pre-fault program, so rows are slower at their first use: %s", error)
            self._ranks.end_prefault(0, "")
            return
        self._selector.register(self._prefault, selectors.EVENT_READ, lambda _: self._on_prefault())
        self._prefault.want(self._wanted_rows * self._welcome.row_stride)

    def _progress(self) -> tuple[int, bool, bool]:
        if self._prefault is None:
            return self.populated_rows, True, False
        return self.populated_rows, self._prefault.ended, self._prefault.ended and bool(self._prefault.error)

    def _on_prefault(self) -> None:
        prefault = self._prefault
        assert prefault is not None
        descriptor = prefault.fileno()
        prefault.read()
        self.populated_rows = prefault.populated // self._welcome.row_stride
        if prefault.ended:
            self._selector.unregister(descriptor)
            self._end_prefault(prefault)
        for connection in self._connections:
            if connection.rank is None or not connection.open:
                continue
            if connection.busy:
                self._behind.add(connection)  # it gets the newest figure when it reads again
            else:
                connection.send(encode_progress(*self._progress()))

    def _end_prefault(self, prefault: Prefault) -> None:
        self.populated_rows = min(self.populated_rows, self._welcome.num_rows)
        self.timings |= {"prefault": prefault.seconds, "populated_rows": self.populated_rows}
        rows = f"{self.populated_rows} of {self._welcome.num_rows} rows"
        if prefault.error:
            _log.error(
                "pre-faulting failed after %s, and no row after these is used any more: %s; lower primary.capacity, "
                "or make room",
                rows,
                prefault.error,
            )
        elif prefault.remark:
            _log.warning(
                "pre-faulting ended early, after %s; the other rows are slower at their first use: %s",
                rows,
                prefault.remark,
            )
        else:
            _log.info("pre-faulted %s in %.3f s (%s)", rows, prefault.seconds, prefault.method)
        self._ranks.end_prefault(self.populated_rows, prefault.error)
