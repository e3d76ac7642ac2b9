"""The region's accept thread: admits ranks, watches their processes, and carries out the pre-faulting.

It alone uses the connections, their pidfds and the pre-fault program. It writes the region's state, which ranks read,
and the ``RankTable``, which any thread may read. While a rank pins rows, it looks at that rank's desk now and then.
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
from dataclasses import asdict
from typing import Any

from kvtiers._failures import logged_boundary
from kvtiers.layout.cache_layout import CacheLayout, ModelIdentity
from kvtiers.region.early_memory import LentMemory
from kvtiers.region.handshake import FORMAT, Kind, peer_credentials, peer_pidfd
from kvtiers.region.memfd import detach_in_children
from kvtiers.region.prefault import STOP_SECONDS, Prefault
from kvtiers.region.ranks import RankTable
from kvtiers.region.state import FIRST_LOOK, LONGEST_LOOK, Desk, Progress, RegionState

__all__ = ["AcceptThread"]

_log = logging.getLogger("kvtiers.region")
_DIFFERENCES_SHOWN = 5
_MORE_HELLO_BYTES = 64 << 10  # that a rank's HELLO may have beside twice the scheduler's own layout
_STOP_SECONDS = STOP_SECONDS + 1.0  # the pre-faulting's end, and its own
_PAUSE_SECONDS = 0.005  # after each process that is not let in: one that connects in a loop must cost little


class _Peer:
    """A connected process; ``rank``: once it is admitted, ``pidfd``: readable when it has ended."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock: socket.socket | None = sock
        self.pid, self.uid = peer_credentials(sock)
        self.rank: int | None = None
        self.pidfd: int | None = None


class AcceptThread:
    """Serves one region until ``stop``. ``state`` and ``desks``, one for each rank, are its own from now on."""

    def __init__(
        self,
        listener: socket.socket,
        memfd: int,
        layout: CacheLayout,
        state: RegionState,
        desks: Sequence[Desk],
        ranks: RankTable,
        start_prefault: Callable[[], Prefault] | None,
        start_deadline: float,
        lender: LentMemory | None = None,
    ) -> None:
        self._listener = listener
        self._memfd = memfd
        self._layout = layout
        self._state = state
        self._num_rows, self._row_stride, _ = state.shape
        self._desks = desks
        self._ranks = ranks
        self._lender = lender
        self._start_prefault = start_prefault
        self._prefault: Prefault | None = None
        self._started = time.monotonic()
        self._start_deadline = start_deadline
        self._has_warned = False
        self._look_after = FIRST_LOOK
        self._stopping = False
        self._last_refusal = ""
        self._longest_hello = 2 * len(layout.to_json()) + _MORE_HELLO_BYTES
        self._peers: set[_Peer] = set()
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
            self._close()
            raise

    def want_rows(self, rows: int) -> None:
        """Request that this many rows, from the first, be populated. From any thread; never blocks."""
        self._wanted_rows = max(self._wanted_rows, rows)
        self._notify()

    def stop(self) -> None:
        """Disconnect all ranks, end pre-faulting and the thread; returns when they have ended."""
        self._stopping = True
        self._notify()
        self._thread.join(_STOP_SECONDS)

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; or the thread has ended by itself
            self._wake_writer.send(b"x")

    def detach(self) -> None:
        """Close everything in a forked child. Nothing is unregistered: the parent's epoll is the same one."""
        self._close_descriptors()
        for page in (self._state, *self._desks):
            page.detach()
        if self._prefault is not None:
            self._prefault.detach()

    def _close(self) -> None:
        if self._prefault is not None:
            self._prefault.stop()
        self._close_descriptors()
        for page in (self._state, *self._desks):
            page.close()

    def _close_descriptors(self) -> None:
        for closable in (self._selector, self._listener, self._wake_reader, self._wake_writer):
            closable.close()
        for peer in self._peers:
            if peer.sock is not None:
                peer.sock.close()
            if peer.pidfd is not None:
                os.close(peer.pidfd)
        self._peers.clear()

    def _run(self) -> None:
        try:
            with logged_boundary(_log, "the region's accept thread ended") as serving:
                self._serve()
            if serving.error:  # what waits for ranks must get the reason
                self._ranks.break_off(f"the thread that serves its ranks ended: {serving.error}")
        finally:
            self._close()

    def _serve(self) -> None:
        self._watch(self._wake_reader, self._woken)
        self._watch(self._listener, self._accept)
        self._begin_prefault()
        while not self._stopping:
            due = [self._look_after] if self._ranks.pins else []
            if not self._has_warned:
                due.append(max(0.0, self._started + self._start_deadline - time.monotonic()))
            for key, _ in self._selector.select(min(due, default=None)):
                key.data()
            self._look_at_desks()
            if not self._has_warned and time.monotonic() >= self._started + self._start_deadline:
                self._has_warned = True
                text = self._ranks.describe_missing(self._ranks.missing, self._start_deadline)
                _log.warning("offloading stays off: %s", text)

    def _watch(self, source: Any, callback: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _woken(self) -> None:
        self._wake_reader.recv(4096)
        if self._prefault is not None:
            self._prefault.want(self._wanted_rows * self._row_stride)

    def _look_at_desks(self) -> None:
        self._look_after = min(2 * self._look_after, LONGEST_LOOK)
        for peer in self._peers:
            if peer.rank is not None and peer.sock is not None:
                pinned = self._desks[peer.rank].pinned
                if pinned is not None and self._ranks.pinned(peer.rank, pinned):
                    self._look_after = FIRST_LOOK

    # Ranks come.

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                self._say_refused(f"a connection cannot be accepted: {error}")
            return
        peer = _Peer(sock)
        self._peers.add(peer)
        self._watch(sock, lambda: self._receive(peer))
        if peer.uid != os.geteuid():
            self._refuse(
                peer,
                f"a process of user id {peer.uid} connects, and the engine's scheduler runs as {os.geteuid()}; "
                "scheduler and workers must be of one user",
                ours=False,
            )

    def _receive(self, peer: _Peer) -> None:
        if peer.sock is None:  # its end was seen a moment before
            return
        try:
            message = peer.sock.recv(self._longest_hello)  # of a longer one the rest is cut off
        except (BlockingIOError, ConnectionResetError):  # reported once: what was sent before, or the end, comes next
            return
        except OSError:
            message = b""
        kind = message[0] if message else None
        if peer.rank is None and kind == Kind.HELLO:
            self._admit(peer, message[1:])
        elif peer.rank is None and kind is None:  # it only looked whether the name is in use
            self._forget(peer)
            time.sleep(_PAUSE_SECONDS)
        elif peer.rank is None:
            self._refuse(peer, "it does not begin with a HELLO")
        else:
            told = "has left" if kind == Kind.GOODBYE else "is no longer connected"
            _log.log(logging.INFO if kind else logging.WARNING, "rank %d (process %d) %s", peer.rank, peer.pid, told)
            self._lose(peer, has_gone=kind == Kind.GOODBYE)

    def _admit(self, peer: _Peer, body: bytes) -> None:
        assert peer.sock is not None
        try:
            hello = json.loads(body)
            rank = int(hello["rank"])
            reason = self._objection(rank, hello)
            if not reason:
                peer.pidfd = peer_pidfd(peer.sock)
                reason = self._tell_lender(rank, peer)
        except ProcessLookupError:  # it has ended in the meantime
            self._forget(peer)
            return
        except Exception as error:  # noqa: BLE001 -- whatever a peer sends, it must not end this thread
            self._refuse(peer, f"its HELLO cannot be read: {error!r:.200}; install the same kvtiers for both")
            return
        if reason:
            self._refuse(peer, reason, rank=rank)
            return
        if peer.pidfd is not None:
            self._watch(peer.pidfd, lambda: self._on_exit(peer))
        else:
            unwatched = "rank %d: process %d cannot be watched; if it dies, its rows stay leased"
            _log.warning(unwatched, rank, peer.pid)
        peer.rank = rank
        self._desks[rank].pinned = None
        self._look_after = FIRST_LOOK
        if self._ranks.missing == [rank] and "join" not in self.timings:
            self._has_warned = True  # there is nothing left to warn of
            self.timings["join"] = seconds = time.monotonic() - self._started  # there once ``wait_all`` returns
            _log.info("all %d ranks have joined after %.3f s", self._ranks.world_size, seconds)
        self._ranks.join(rank, peer.pid)  # before the WELCOME: a rank that is ready has joined
        try:
            fds = [self._memfd, self._state.fd, self._desks[rank].fd]
            socket.send_fds(peer.sock, [Kind.WELCOME.message()], fds)
        except OSError:  # it has hung up, and never had the memory
            self._lose(peer, has_gone=True)

    def _tell_lender(self, rank: int, peer: _Peer) -> str:
        """Let who lends the memory watch this rank's process; return why it cannot have the memory, "" if it can."""
        if self._lender is None:
            return ""
        if peer.pidfd is None:
            return "its process cannot be watched, and memory of a pool is lent to no other"
        try:
            self._lender.watch(rank, peer.pidfd)
        except OSError as error:
            os.close(peer.pidfd)
            peer.pidfd = None
            return f"the pool's keeper cannot be told of it: {error}"
        return ""

    def _objection(self, rank: int, hello: dict[str, Any]) -> str:
        """Return why this HELLO's rank is refused, "" if it is not."""
        if hello["format"] != FORMAT:
            return f"its format is {hello['format']!r:.20}, the scheduler's {FORMAT}; install the same kvtiers for both"
        layout = hello["layout"]
        if isinstance(layout, dict) and layout.get("model") == asdict(ModelIdentity("")):
            layout["model"] = asdict(self._layout.model)  # a rank needs no name of the model whose KV it copies
        if differences := self._layout.differences_in(layout):
            shown = "; ".join(differences[:_DIFFERENCES_SHOWN])
            more = len(differences) - _DIFFERENCES_SHOWN
            return (
                f"its cache layout is not the scheduler's (here: scheduler, there: rank): {shown}"
                f"{f'; and {more} more' if more > 0 else ''}"
            )
        if not 0 <= rank < self._ranks.world_size:
            return f"there is no such rank: expected 0 to {self._ranks.world_size - 1}"
        if (occupant := self._ranks.occupant(rank)) is not None:
            return f"process {occupant} has joined as this rank already; each worker needs a rank of its own"
        return ""

    def _refuse(self, peer: _Peer, reason: str, *, rank: int | None = None, ours: bool = True) -> None:
        """Send a process away. ``ours``: it is of this engine, so that waiting for it is in vain."""
        assert peer.sock is not None
        with contextlib.suppress(OSError):  # it has hung up
            peer.sock.send(Kind.REFUSED.message(reason.encode(errors="replace")))
        self._forget(peer)
        if ours:
            self._ranks.refuse(rank, reason)
        self._say_refused(f"refused {'a rank' if rank is None else f'rank {rank}'}: {reason}")

    def _say_refused(self, text: str) -> None:
        _log.log(logging.DEBUG if text == self._last_refusal else logging.WARNING, "%s", text)
        self._last_refusal = text
        time.sleep(_PAUSE_SECONDS)

    # Ranks go.

    def _lose(self, peer: _Peer, *, has_gone: bool) -> None:
        """Handle the end of a rank's connection; until it has gone its process is watched, as it may touch its rows."""
        assert peer.rank is not None
        if peer.sock is not None:
            self._hang_up(peer)
            self._ranks.lose(peer.rank)
        if has_gone:
            self._forget(peer)
            if self._lender is not None:
                self._lender.unwatch(peer.rank)
            self._ranks.forget(peer.rank)

    def _hang_up(self, peer: _Peer) -> None:
        if peer.sock is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()
            peer.sock = None

    def _forget(self, peer: _Peer) -> None:
        self._hang_up(peer)
        if peer.pidfd is not None:
            self._selector.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None
        self._peers.discard(peer)

    def _on_exit(self, peer: _Peer) -> None:
        if peer.pidfd is not None:  # else it said goodbye a moment before
            _log.warning("rank %s (process %d) has ended", peer.rank, peer.pid)
            self._lose(peer, has_gone=True)

    # Pre-faulting.

    def _begin_prefault(self) -> None:
        try:
            self._prefault = None if self._start_prefault is None else self._start_prefault()
        except OSError as error:
            _log.warning("cannot start the pre-fault program, so rows are slower at their first use: %s", error)
            self._ranks.end_prefault(0, "")
        if self._prefault is None:
            if self._lender is not None:  # its memory is populated
                self.populated_rows = self._num_rows
                self._ranks.end_prefault(self._num_rows, "")
            self._state.progress = Progress(self.populated_rows, prefault_ended=True)
            return
        self._watch(self._prefault, self._on_prefault)
        self._prefault.want(self._wanted_rows * self._row_stride)

    def _on_prefault(self) -> None:
        prefault = self._prefault
        assert prefault is not None
        descriptor = prefault.fileno()
        prefault.read()
        self.populated_rows = min(prefault.populated // self._row_stride, self._num_rows)
        if prefault.ended:
            self._selector.unregister(descriptor)
            self.timings |= {"prefault": prefault.seconds, "populated_rows": self.populated_rows}
            rows = f"{self.populated_rows} of {self._num_rows} rows"
            if prefault.error:
                text = "pre-faulting failed after %s, and no row after these is used any more: %s; %s"
                _log.error(text, rows, prefault.error, "lower primary.capacity, or make room")
            elif prefault.remark:
                text = "pre-faulting ended early, after %s; the other rows are slower at their first use: %s"
                _log.warning(text, rows, prefault.remark)
            else:
                _log.info("pre-faulted %s in %.3f s (%s)", rows, prefault.seconds, prefault.method)
            self._ranks.end_prefault(self.populated_rows, prefault.error)
        # After the line: whoever sees that memory is short finds in the log why.
        is_short = prefault.ended and bool(prefault.error)
        self._state.progress = Progress(self.populated_rows, prefault.ended, is_short)
