"""The keeper of a pool: the process that holds the memory, writes its index, and lends each part to an engine.

Here is what it hears and tells: its socket, its peers and their messages, and the loop. Who has which part, and who may
have one, is in ``lending.py``; what is done with the memory itself, in ``keeper_memory.py``. One thread does everything
but hashing.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtiers.api import StartError
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.pool.descriptor_store import DescriptorStore, descriptor_store
from kvtiers.pool.keeper_memory import KeeperMemory
from kvtiers.pool.kept import KeptMemory
from kvtiers.pool.lending import UNUSABLE, Lending
from kvtiers.pool.listening import listen
from kvtiers.pool.messages import (
    POOL_FORMAT,
    Clear,
    Cleared,
    Figures,
    Goodbye,
    Hello,
    Publish,
    Refused,
    Rename,
    Request,
    Status,
    Unwatch,
    Watch,
    Welcome,
    decode_request,
    receive,
    send,
)
from kvtiers.pool.peer import Peer, is_readable
from kvtiers.region.handshake import peer_credentials, peer_pidfd
from kvtiers.region.memfd import HugePages, prefer_node

__all__ = ["Keeper", "serve"]

_log = logging.getLogger("kvtiers.pool")
HANDOVER_SECONDS = 2.0  # engines look for their next keeper more often, but for one whose interpreter is held
_LOOK_SECONDS = 0.01  # how often a loan that nobody is known to hold is looked at
_PAUSE_SECONDS = 0.005
_READ = selectors.EVENT_READ


class Keeper:
    """Serves one pool until ``stop``. ``size``: bytes for rows, made and populated unless an engine brings some.

    ``parts``: how many engines there may be at a time. ``handover``: how many seconds an engine that has the memory of
    the keeper before this one has to bring it.
    ``store``: has the memory of a keeper before this one, and is given this one's. ``look_seconds``: from one look at a
    loan that nobody is known to hold to the next.
    """

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        parts: int = 1,
        *,
        huge_pages: HugePages = "off",
        handover: float = HANDOVER_SECONDS,
        store: DescriptorStore | None = None,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._listener = listener
        self._handover = handover
        self._look_seconds = look_seconds
        self._memory = KeeperMemory(size, parts, huge_pages, KeptMemory(store or DescriptorStore()), self._wake)
        self._peers: list[Peer] = []
        """Who is connected."""
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._lending = Lending(self._memory, self._selector, self._hear_out)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)

    def stop(self) -> None:
        """End ``serve`` soon. From any thread, or a signal's handler."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"x")

    def serve(self) -> None:
        """Serve until ``stop``; StartError if there is no memory for the pool."""
        self._selector.register(self._wake_reader, _READ, lambda: self._wake_reader.recv(4096))
        self._selector.register(self._listener, _READ, self._accept)
        memory = self._memory
        try:
            self._lending.take_back()
            memory_from = time.monotonic() + self._handover
            while not self._stopping:
                due = [self._look_seconds] if self._lending.is_ending else []
                if memory.rows is None and memory.prefault is None:
                    if (left := memory_from - time.monotonic()) <= 0:
                        self._lending.make_memory()
                        continue
                    due.append(left)
                for key, _ in self._selector.select(min(due, default=None)):
                    key.data()
                self._lending.reclaim()
                memory.end_checks()
                self._admit_next()
        finally:
            self._close()

    def _close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._lending.close()
        self._memory.close()
        for closable in (self._selector, self._wake_reader, self._wake_writer):
            closable.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone, or there is no descriptor to be had: the next look is as soon as there is one
            time.sleep(_PAUSE_SECONDS)
            return
        sock.setblocking(False)
        pid, uid = peer_credentials(sock)
        peer = Peer(self._selector, pid, sock)
        self._selector.register(sock, _READ, lambda: self._hear(peer))
        self._peers.append(peer)
        if uid != os.geteuid():
            self._refuse(peer, f"the pool's keeper runs as user id {os.geteuid()}, this process as {uid}")

    def _hear(self, peer: Peer) -> None:
        if peer.sock is None:  # its end was seen a moment before
            return
        fds: list[int] = []
        try:
            data, fds = receive(peer.sock)
            if data:
                self._do(peer, decode_request(data), fds)
            else:
                self._hang_up(peer)
        except BlockingIOError:
            return
        except UNUSABLE as error:
            self._refuse(peer, f"what it sent cannot be used: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _hear_out(self, peer: Peer) -> None:
        """Take all that a peer has sent, and close its connection; its processes are watched on."""
        while peer.sock is not None and is_readable(peer.sock):
            self._hear(peer)
        self._hang_up(peer)

    def _do(self, peer: Peer, message: Request, fds: list[int]) -> None:
        lending, has_part = self._lending, self._lending.has_part(peer)
        match message:
            case Hello(other) | Status(other) | Clear(other) if other != POOL_FORMAT:
                why = f"format {other} is asked for, the keeper's is {POOL_FORMAT}; run the same kvtiers in both"
                self._refuse(peer, why)
            case Status():
                peer.tell(Figures(self.figures()))
            case Clear():
                self._clear(peer)
            case Hello() if peer.hello is None:
                self._greet(peer, message, fds)
            case Goodbye() if peer.hello is not None:
                lending.unwatch(peer, -1)
            case Watch(rank) if has_part and len(fds) == 1:
                lending.watch(peer, rank, fds.pop())
            case Unwatch(rank) if has_part:
                lending.unwatch(peer, rank)
            case Publish(rows, editions, keys) if has_part:
                self._memory.publish(peer.part, rows, editions, keys)
            case Rename(prefix) if has_part and (arena := self._memory.arena_of(peer.part)) is not None:
                arena.rename(peer.part, prefix)
            case _:
                self._refuse(peer, "it sent a message out of place")

    def _greet(self, peer: Peer, hello: Hello, fds: Sequence[int]) -> None:
        peer.hello, peer.layout = hello, CacheLayout.from_json(hello.layout)
        assert peer.sock is not None
        try:
            pidfd = peer_pidfd(peer.sock)
        except ProcessLookupError:  # it has ended already
            self._hang_up(peer)
            return
        if pidfd is None:
            self._refuse(peer, "its process cannot be watched from here: Linux 6.5, or one PID namespace, is needed")
            return
        self._lending.watch(peer, -1, pidfd)
        if not hello.holds:
            return
        if why := self._lending.take_over(peer, fds):
            self._refuse(peer, why)
        else:
            self._welcome(peer, ())

    def _waiting(self) -> list[Peer]:
        """Return the engines that have no part yet, the first one first."""
        return [peer for peer in self._peers if peer.hello is not None and not self._lending.has_part(peer)]

    def _admit_next(self) -> None:
        for peer in self._waiting():
            assert peer.layout is not None
            wait = self._lending.why_wait(peer.layout)
            if wait is None:
                self._admit(peer)
            elif wait != peer.told:
                peer.told = wait
                peer.tell(wait)

    def _admit(self, peer: Peer) -> None:
        with contextlib.ExitStack() as closing:
            try:
                fds = closing.enter_context(self._lending.lend(peer))
            except StartError as error:
                self._refuse(peer, str(error))
                return
            except UNUSABLE as error:
                self._refuse(peer, f"its layout cannot be used: {error}")
                return
            self._welcome(peer, fds)

    def _welcome(self, peer: Peer, fds: Sequence[int]) -> None:
        arena = self._memory.arena_of(peer.part)
        assert arena is not None
        assert peer.sock is not None
        try:
            shape = arena.shape
            send(peer.sock, Welcome(shape.nbytes, shape.row_stride, peer.part, shape.parts), fds)
        except OSError:  # it has given up, and never had the memory by this connection
            if fds:
                self._lending.withdraw(peer)
            self._hang_up(peer)

    def _refuse(self, peer: Peer, reason: str) -> None:
        _log.warning("pool: refused %s: %s", peer.name, reason)
        peer.tell(Refused(reason))
        self._hang_up(peer)

    def _hang_up(self, peer: Peer) -> None:
        """Close a process's connection. One that has a part is watched on, until it and its ranks have ended."""
        peer.hang_up()
        if peer in self._peers:
            self._peers.remove(peer)
        if not self._lending.has_part(peer):
            peer.close()

    def _clear(self, peer: Peer) -> None:
        """Forget all chunks, unless an engine may have them: it alone can forget its own."""
        if holders := self._lending.holders():
            self._refuse(peer, f"an engine has its memory ({holders}); end it, or clear it there ('kvtiers ctl clear')")
            return
        if self._memory.rows is None:  # an engine may be about to bring it
            self._refuse(peer, "it has no memory yet; ask again in a moment")
            return
        chunks = self._memory.clear()
        _log.info("pool: %s has had %d chunks forgotten", peer.name, chunks)
        peer.tell(Cleared(chunks))

    def figures(self) -> dict[str, Any]:
        """Return what ``kvtiers pool status`` shows."""
        waiting = [peer.pid for peer in self._waiting()]
        return self._lending.figures() | {"waiting": waiting, "engines": self._lending.admitted}


def serve(
    path: Path, size: int, parts: int = 1, *, huge_pages: HugePages = "off", numa_node: int | None = None
) -> None:
    """Serve a pool at this path until SIGTERM or SIGINT; StartError, in one line, if it cannot be.

    ``numa_node``: from which memory is taken first that is made.
    """
    store = descriptor_store(os.environ)
    listener = listen(path)
    if numa_node is not None and (trouble := prefer_node(numa_node)):  # what populates the memory inherits it
        _log.warning("pool: %s", trouble)
    _log.info("pool: serves at %s", path)
    place = path.stat()
    keeper = Keeper(listener, size, parts, huge_pages=huge_pages, store=store)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    with contextlib.suppress(OSError):
        os.nice(5)  # hashing gives way to engines
    store.is_ready()
    try:
        keeper.serve()
    finally:
        with contextlib.suppress(OSError):  # before another keeper can take the place
            if os.path.samestat(path.stat(), place):
                path.unlink()
        listener.close()
