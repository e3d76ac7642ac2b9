"""The keeper of a pool: the process that holds the memory, writes its index, and lends each part to an engine.

::

    no memory --> free --> lent --> reclaiming --> checking --> free       each part

    reclaiming  its engine's connection has ended; processes that had the part have not yet
    checking    all of them have; each of its rows that an entry counts for is hashed again

A keeper whose memory was kept by the service manager begins with reclaiming: whoever had a part may have it still.

Who had the memory is told by the kernel: each loan is a descriptor of its own of the rows, with a lock on it that is
there as long as any process has it open or mapped, ranks and tier hosts alike. A GPU's copies may go on a little
longer, until the last descriptor of a dead rank is closed: so ranks, and the engine, are also watched by pidfd.

One thread does everything but hashing. What is done with the memory itself, in ``keeper_memory.py``.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtiers.api import KvtiersError, StartError
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.pool.descriptor_store import DescriptorStore, descriptor_store
from kvtiers.pool.keeper_memory import KeeperMemory
from kvtiers.pool.kept import KeptMemory
from kvtiers.pool.listening import listen
from kvtiers.pool.memory import MOST_PARTS
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
    Wait,
    Watch,
    Welcome,
    decode_request,
    receive,
    send,
)
from kvtiers.pool.peer import Peer, are_of_one_process, is_readable, pid_of
from kvtiers.region.handshake import peer_credentials, peer_pidfd, process_name
from kvtiers.region.memfd import HugePages, prefer_node

__all__ = ["Keeper", "serve"]

_log = logging.getLogger("kvtiers.pool")
HANDOVER_SECONDS = 2.0  # engines look for their next keeper more often, but for one whose interpreter is held
_OTHER_MEMORY = "this keeper has other memory by now"
_LOOK_SECONDS = 0.01  # how often a loan that nobody is known to hold is looked at
_UNUSABLE = (
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    MemoryError,
    OSError,
    struct.error,
    KvtiersError,
)
"""What a message, or what was kept, may raise, whatever is in it. It must not end the keeper."""
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
        self._engines: dict[int, Peer] = {}
        """By part: who has it, or had it, and is not known to have it no longer."""
        self._admitted = 0
        self._peers: list[Peer] = []
        self._stopping = False
        self._selector = selectors.DefaultSelector()
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
            self._take_back()
            memory_from = time.monotonic() + self._handover
            while not self._stopping:
                due = [self._look_seconds] if any(engine.has_left for engine in self._engines.values()) else []
                if memory.rows is None and memory.prefault is None:
                    if (left := memory_from - time.monotonic()) <= 0:
                        self._make_memory()
                        continue
                    due.append(left)
                for key, _ in self._selector.select(min(due, default=None)):
                    key.data()
                self._reclaim()
                memory.end_checks()
                self._admit_next()
        finally:
            self._close()

    def _close(self) -> None:
        for peer in list(self._peers):
            self._forget(peer)
        self._memory.close()
        for closable in (self._selector, self._wake_reader, self._wake_writer):
            closable.close()

    # The memory comes.

    def _make_memory(self) -> None:
        self._memory.make()
        if (prefault := self._memory.prefault) is not None:
            fd = prefault.fileno()
            self._selector.register(fd, _READ, lambda: self._memory.populate() and self._selector.unregister(fd))

    def _take_back(self) -> None:
        """Take the memory that the service manager has kept; let it go, in one line, where it cannot be used."""
        memory = self._memory
        try:
            if (kept := memory.kept.found()) is not None:
                memory.take_back(kept)
                known = {part for part, _ in kept.processes if part < MOST_PARTS}
                for part in known | set(range(memory.parts)):  # its engine, or somebody unknown, may have it still
                    self._await(part, {rank: fd for (of, rank), fd in kept.processes.items() if of == part})
                memory.kept.close()
                return
        except _UNUSABLE as error:
            _log.warning("pool: the memory that the service manager has kept is let go: %s", error)
            self._engines.clear()
            for peer in list(self._peers):
                self._forget(peer)
            memory.drop()
        memory.kept.let_go()

    def _await(self, part: int, pidfds: Mapping[int, int]) -> None:
        """Take it that an engine of another keeper may have this part. ``pidfds``: the caller's, of its processes."""
        before = Peer(self._selector, pid_of(pidfds[-1]) if -1 in pidfds else 0)
        before.part = part
        self._peers.append(before)
        for rank, pidfd in pidfds.items():
            self._watch_process(before, rank, os.dup(pidfd))
        self._engines[part] = before

    def _find_holders(self) -> None:
        """Take it that an engine of another keeper has each part that is lent, nobody knows to whom."""
        rows = self._memory.rows
        for part in range(MOST_PARTS):  # it may have other memory in mind: of more parts than are asked for now
            if rows is not None and part not in self._engines and rows.is_lent(part):
                self._await(part, {})

    def _adopt(self, part: int, prefix: str, layout: CacheLayout, fds: Sequence[int]) -> str:
        """Take over what an engine brings back of another keeper; return why not, "" if it is done."""
        if len(fds) != 3:
            return "it brings no memory"
        memory, before = self._memory, list(self._memory.arenas)
        self._find_holders()
        if memory.has(fds[0]) and part in self._engines:
            self._hear_out(self._engines[part])
            arena = memory.take_arena(layout, fds[1:])
        elif self._engines or memory.arenas:  # it has been lent
            return _OTHER_MEMORY
        else:  # made a moment ago, or about to be: that of an engine is worth more
            if memory.prefault is not None:
                self._selector.unregister(memory.prefault.fileno())
            arena = memory.adopt(layout, fds)
        self._find_holders()
        for other in arena.parts if arena not in before else ():
            if other != part and other not in self._engines:
                memory.begin_check(other)  # its engine has ended while there was no keeper
        if not 0 <= part < memory.parts or memory.arena_of(part) not in {None, arena}:
            return "it brings a part that there is not"
        arena.rename(part, prefix)
        return ""

    def _hear_out(self, peer: Peer) -> None:
        """Take all that a peer has sent, and close its connection; its processes are watched on."""
        while peer.sock is not None and is_readable(peer.sock):
            self._hear(peer)
        self._hang_up(peer)

    # Engines come.

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
        except _UNUSABLE as error:
            self._refuse(peer, f"what it sent cannot be used: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _do(self, peer: Peer, message: Request, fds: list[int]) -> None:
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
                self._unwatch(peer, -1)
            case Watch(rank) if self._has_part(peer) and len(fds) == 1:
                self._watch_process(peer, rank, fds.pop())
            case Unwatch(rank) if self._has_part(peer):
                self._unwatch(peer, rank)
            case Publish(rows, editions, keys) if self._has_part(peer):
                self._memory.publish(peer.part, rows, editions, keys)
            case Rename(prefix) if self._has_part(peer) and (arena := self._memory.arena_of(peer.part)) is not None:
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
        self._watch_process(peer, -1, pidfd)
        if not hello.holds:
            return
        if why := self._adopt(hello.part, hello.prefix, peer.layout, fds[:3]):
            self._refuse(peer, why)
            return
        for rank, pidfd in zip(hello.watched, fds[3:], strict=False):
            self._watch_process(peer, rank, os.dup(pidfd))
        self._take_part(peer, hello.part)
        self._welcome(peer, ())

    def _has_part(self, peer: Peer) -> bool:
        return self._engines.get(peer.part) is peer

    def _waiting(self) -> list[Peer]:
        """Return the engines that have no part yet, the first one first."""
        return [peer for peer in self._peers if peer.hello is not None and not self._has_part(peer)]

    def _admit_next(self) -> None:
        for peer in self._waiting():
            self._find_holders()
            wait = self._why_wait(peer)
            if wait is None:
                self._admit(peer)
            elif wait != peer.told:
                peer.told = wait
                peer.tell(wait)

    def _why_wait(self, peer: Peer) -> Wait | None:
        """Return what an engine waits for; None if it can have a part, or be refused."""
        memory, engines = self._memory, list(self._engines.values())
        assert peer.layout is not None
        if memory.rows is None:
            return Wait("it is not populated yet", ends=True)
        if self._parts_for(peer.layout):
            return None
        if self._parts_for(peer.layout, soon=True):
            for holder in engines:
                if holder.is_leaving:
                    return Wait(f"{holder.name} has its memory", ends=True)
            return Wait("its rows are being checked", ends=True)
        has = f"{', '.join(engine.name for engine in engines)} {'has' if len(engines) == 1 else 'have'}"
        rest = "" if len(engines) >= memory.parts else "; what is free is of models at work"
        return Wait(f"{has} its memory{rest}", ends=False)

    def _parts_for(self, layout: CacheLayout, *, soon: bool = False) -> list[int]:
        """Return the parts that an engine of this layout may have, or may have soon, as far as is known.

        Those of its arena that no engine has, and those of arenas of which no engine has any: what else is in an arena
        is read by its engines. While an engine has a part of an arena that it is still to bring, that may be any of the
        others', and a part that is in no arena may be in it.
        """
        memory, own = self._memory, self._memory.arena_for(layout)
        engines = {part: engine for part, engine in self._engines.items() if not (soon and engine.is_leaving)}
        at_work = {memory.arena_of(part) for part in engines}
        free = [part for part in range(memory.parts) if part not in engines and (soon or not memory.is_checking(part))]
        arenas = {part: memory.arena_of(part) for part in free}
        if None in at_work:
            return [part for part, arena in arenas.items() if arena is own and own is not None]
        return [part for part, arena in arenas.items() if arena is own or arena not in at_work]

    def _admit(self, peer: Peer) -> None:
        assert peer.hello is not None
        assert peer.layout is not None
        layout, prefix = peer.layout, peer.hello.prefix
        with contextlib.ExitStack() as closing:
            try:
                part = max(self._parts_for(layout), key=lambda part: self._worth(part, layout, prefix))
                arena = self._memory.give(part, layout, prefix)
                fds = closing.enter_context(arena.lent(part))
            except StartError as error:
                self._refuse(peer, str(error))
                return
            except _UNUSABLE as error:
                self._refuse(peer, f"its layout cannot be used: {error}")
                return
            self._take_part(peer, part)
            _log.info("pool: lent to %s, with %d chunks", peer.name, len(arena.counting(part)))
            self._welcome(peer, fds)

    def _worth(self, part: int, layout: CacheLayout, prefix: str) -> tuple[int, int]:
        """Return what a part is worth to an engine: the chunks that it finds there; others count against it.

        Those of another arena the more, the later its last engine has ended.
        """
        memory, arena = self._memory, self._memory.arena_of(part)
        chunks = len(memory.counting(part))
        if arena is None or arena is memory.arena_for(layout):
            return 1, chunks if arena is not None and arena.prefix(part) == prefix else -chunks
        return -memory.arenas.index(arena), -chunks

    def _take_part(self, peer: Peer, part: int) -> None:
        """Record that this engine has a part, or is about to: the processes that it has named, and no others."""
        before, self._engines[part], peer.part = self._engines.get(part), peer, part
        known = before.pidfds if before is not None else {}
        for rank, pidfd in peer.pidfds.items():
            if rank not in known or not are_of_one_process(known[rank], pidfd):
                self._memory.kept.keep_process(part, rank, pidfd)
        for rank in known.keys() - peer.pidfds.keys():
            self._memory.kept.drop_process(part, rank)
        if before is None or before.hello is None:  # else it is the same engine, by another connection
            self._admitted += 1
        if before is not None:
            self._forget(before)

    def _welcome(self, peer: Peer, fds: Sequence[int]) -> None:
        arena = self._memory.arena_of(peer.part)
        assert arena is not None
        assert peer.sock is not None
        try:
            shape = arena.shape
            send(peer.sock, Welcome(shape.nbytes, shape.row_stride, peer.part, shape.parts), fds)
        except OSError:  # it has given up, and never had the memory by this connection
            if fds:
                for rank in list(peer.pidfds):
                    self._unwatch(peer, rank)
                del self._engines[peer.part]
                self._admitted -= 1
            self._hang_up(peer)

    def _refuse(self, peer: Peer, reason: str) -> None:
        _log.warning("pool: refused %s: %s", peer.name, reason)
        peer.tell(Refused(reason))
        self._hang_up(peer)

    # Engines go.

    def _watch_process(self, peer: Peer, rank: int, pidfd: int) -> None:
        peer.watch(rank, pidfd, lambda: self._on_exit(peer, rank))
        if self._has_part(peer):
            self._memory.kept.keep_process(peer.part, rank, pidfd)

    def _unwatch(self, peer: Peer, rank: int) -> None:
        if peer.unwatch(rank) and self._has_part(peer):
            self._memory.kept.drop_process(peer.part, rank)

    def _on_exit(self, peer: Peer, rank: int) -> None:
        if not peer.has_ended(rank):
            return  # of the process that was this rank before, and seen a moment before
        if rank == -1:
            self._hear_out(peer)  # what it sent before its end is true
        self._unwatch(peer, rank)

    def _hang_up(self, peer: Peer) -> None:
        """Close a process's connection. One that has a part is watched on, until it and its ranks have ended."""
        peer.hang_up()
        if not self._has_part(peer):
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
        peer.close()

    def _reclaim(self) -> None:
        """Take each part back once no process has it, and nothing is under way to it; check what is in it."""
        rows = self._memory.rows
        for part, engine in list(self._engines.items()):
            if engine.has_left and rows is not None and not rows.is_lent(part):
                del self._engines[part]
                _log.info("pool: %s has ended, and all that had its memory", engine.name)
                self._forget(engine)
                self._memory.begin_check(part)

    # Anybody asks.

    def _clear(self, peer: Peer) -> None:
        """Forget all chunks, unless an engine may have them: it alone can forget its own."""
        if self._engines:
            pids = [each["pid"] for engine in self._engines.values() for each in engine.processes()]
            holders = ", ".join(map(process_name, pids)) or "a process that is not watched"
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
        found = self._memory.figures()
        for part, figures in enumerate(found["parts"]):
            figures.update(_figures_of(self._engines.get(part)))
        return found | {"waiting": [peer.pid for peer in self._waiting()], "engines": self._admitted}


def _figures_of(engine: Peer | None) -> dict[str, Any]:
    return {
        "lent": engine is not None,
        "engine": engine.pid if engine is not None else 0,
        "engine_connected": engine is not None and engine.sock is not None,
        "watched": len(engine.pidfds) if engine is not None else 0,
        "processes": engine.processes() if engine is not None else [],
    }


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
