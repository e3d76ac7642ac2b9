"""The keeper of a pool: the process that holds the memory, writes its index, and lends it to one engine at a time.

::

    no memory --> free --> lent --> reclaiming --> checking --> free

    reclaiming  its engine's connection has ended; processes that had the memory have not yet
    checking    all of them have; each row that an entry counts for is hashed again

A keeper whose memory was kept by the service manager begins with reclaiming: whoever had it may have it still.

Who had the memory is told by the kernel: each loan is a descriptor of its own of the rows, with a lock on it that is
there as long as any process has it open or mapped, ranks and tier hosts alike. A GPU's copies may go on a little
longer, until the last descriptor of a dead rank is closed: so ranks, and the engine, are also watched by pidfd.

One thread does everything but hashing. Killed in whatever instruction, it leaves memory that the next keeper can use:
the engine brings it back, or the service manager has kept it (``kept.py``).
"""

import contextlib
import logging
import os
import re
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtiers.api import KvtiersError, OffloadKey, StartError
from kvtiers.api.keys import group_of
from kvtiers.api.units import format_size
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.seal import PayloadHash
from kvtiers.layout.storage_name import StorageNames
from kvtiers.pool.descriptor_store import DescriptorStore, descriptor_store
from kvtiers.pool.kept import Kept, KeptMemory
from kvtiers.pool.listening import listen
from kvtiers.pool.memory import LONGEST_KEY, Index, Plane, Rows, Shape, counting, open_again
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
    Report,
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
from kvtiers.region.early_memory import EarlyMemory
from kvtiers.region.handshake import peer_credentials, peer_pidfd, process_name
from kvtiers.region.limits import usable_processors
from kvtiers.region.memfd import HUGE_PAGE_BYTES, HugePages

__all__ = ["Keeper", "serve"]

_log = logging.getLogger("kvtiers.pool")
HANDOVER_SECONDS = 2.0  # engines look for their next keeper more often, but for one whose interpreter is held
_OTHER_MEMORY = "this keeper has other memory by now"
_LOOK_SECONDS = 0.01  # how often a loan that nobody is known to hold is looked at
_UNUSABLE = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError, OSError, KvtiersError)
"""What a message may raise, whatever is in it. It must not end the keeper."""
_PAUSE_SECONDS = 0.005
_PIECE_ROWS = 64  # hashed by a thread at a stretch
_MOST_THREADS = 8


def _is_readable(source: socket.socket | int) -> bool:
    waiting = select.poll()  # not select.select: a keeper may have more than 1024 descriptors
    waiting.register(source, select.POLLIN)
    return bool(waiting.poll(0))


def _pid_of(pidfd: int) -> int:
    """Return a process's id as it is here; 0 if it has ended, or is in a PID namespace that cannot be seen."""
    found = re.search(r"^Pid:\s*(\d+)$", Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found is not None else 0


def _are_of_one_process(*pidfds: int) -> bool:
    """Return whether these are; False where that cannot be seen from here."""
    pids = set(map(_pid_of, pidfds))
    return len(pids) == 1 and 0 not in pids


class _Arena:
    """What the rows hold at present: the layout of one model's chunks, index and plane."""

    def __init__(self, shape: Shape, layout: CacheLayout, index: Index, plane: Plane) -> None:
        self.shape = shape
        self.layout = layout
        self.index = index
        self.plane = plane
        self.names = StorageNames(shape.prefix, b"")

    def payload_bytes(self, key: OffloadKey) -> int:
        """Return how many bytes of a row this key's chunk has; 0 if it can be none of this layout."""
        group = group_of(key) if 4 < len(key) <= LONGEST_KEY else len(self.layout.groups)
        return self.layout.payload_bytes(group) if group < len(self.layout.groups) else 0

    def has(self, index: int, plane: int) -> bool:
        """Return whether these are descriptors of its index and its plane."""
        return os.path.sameopenfile(self.index.fd, index) and os.path.sameopenfile(self.plane.fd, plane)

    def close(self) -> None:
        self.index.close()
        self.plane.close()


class _Peer:
    """A connected process. ``pidfds``: by rank, -1 for the process itself; ``hello``: that of an engine.

    Without a socket: whoever had the memory of the keeper before this one.
    """

    def __init__(self, sock: socket.socket | None = None) -> None:
        self.sock = sock
        self._had_another_keeper = sock is None
        self.pid, self.uid = peer_credentials(sock) if sock is not None else (0, os.geteuid())
        self.pidfds: dict[int, int] = {}
        self.hello: Hello | None = None
        self.told: Wait | None = None

    @property
    def name(self) -> str:
        """What it is called in what people read."""
        return process_name(self.pid) if self.pid or not self._had_another_keeper else "the engine of another keeper"


class Keeper:
    """Serves one pool until ``stop``. ``size``: bytes for rows, made and populated unless an engine brings some.

    ``handover``: how many seconds an engine that has the memory of the keeper before this one has to bring it.
    ``store``: has the memory of a keeper before this one, and is given this one's.
    """

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        *,
        huge_pages: HugePages = "off",
        handover: float = HANDOVER_SECONDS,
        store: DescriptorStore | None = None,
    ) -> None:
        self._listener = listener
        self._kept = KeptMemory(store or DescriptorStore())
        self._handover = handover
        self._size = size
        self._huge_pages: HugePages = huge_pages
        self._early: EarlyMemory | None = None
        self._rows: Rows | None = None
        self._is_fresh = False
        """The rows were made by this keeper, and lent to nobody."""
        self._arena: _Arena | None = None
        self._engine: _Peer | None = None
        self._checking: list[Future[list[int]]] = []
        self._check_began = 0.0
        self._peers: set[_Peer] = set()
        self._waiting: list[_Peer] = []
        self._stopping = False
        self._threads = max(1, min(_MOST_THREADS, int(usable_processors()) // 2))
        self._hashing = ThreadPoolExecutor(self._threads, "kvtiers-pool-hash")
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self.counts = {"published": 0, "published_late": 0, "engines": 0, "checked": 0, "damaged": 0}
        self.seconds = {"populate": 0.0, "check": 0.0}

    def stop(self) -> None:
        """End ``serve`` soon. From any thread, or a signal's handler."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"x")

    def _woken(self) -> None:
        self._wake_reader.recv(4096)

    def serve(self) -> None:
        """Serve until ``stop``; StartError if there is no memory for the pool."""
        self._watch(self._wake_reader, self._woken)
        self._watch(self._listener, self._accept)
        try:
            self._take_back()
            memory_from = time.monotonic() + self._handover
            while not self._stopping:
                due = [_LOOK_SECONDS] if self._is_reclaiming() else []
                if self._rows is None and self._early is None:
                    if (left := memory_from - time.monotonic()) <= 0:
                        self._make_memory()
                        continue
                    due.append(left)
                for key, _ in self._selector.select(min(due, default=None)):
                    key.data()
                self._reclaim()
                self._end_check()
                self._admit_next()
        finally:
            self._close()

    def _watch(self, source: Any, callback: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _close(self) -> None:
        for peer in list(self._peers):
            self._forget(peer)
        if self._early is not None:
            self._early.close()
        if self._arena is not None:
            self._arena.close()
        if self._rows is not None:
            self._rows.close()
        self._hashing.shutdown(cancel_futures=True)
        for closable in (self._selector, self._wake_reader, self._wake_writer):
            closable.close()

    # The memory.

    def _make_memory(self) -> None:
        self._early = EarlyMemory(
            "kvtiers-pool",
            self._size,
            huge_pages=self._huge_pages,
            prefault="all",
            window=self._size,
            option="--size",
        )
        if self._early.prefault is None:
            self._take_memory()
        else:
            self._watch(self._early.prefault, self._on_populated)

    def _on_populated(self) -> None:
        assert self._early is not None
        prefault = self._early.prefault
        assert prefault is not None
        descriptor = prefault.fileno()
        prefault.read()
        if not prefault.ended:
            return
        self._selector.unregister(descriptor)
        self.seconds["populate"] = prefault.seconds
        if prefault.error:
            raise StartError(f"pool: its memory cannot be populated: {prefault.error}; lower --size, or make room")
        self._take_memory()
        _log.info("pool: %s populated in %.1f s", format_size(self._size), prefault.seconds)

    def _take_memory(self) -> None:
        assert self._early is not None
        fd, _ = self._early.take()
        self._rows = Rows(fd, self._early.nbytes, self._huge_pages)
        self._is_fresh = True
        self._kept.keep_rows(fd)

    def _take_back(self) -> None:
        """Take the memory that the service manager has kept; let it go, in one line, where it cannot be used."""
        try:
            kept = self._kept.found()
            if kept is not None:
                self._use(kept)
                self._kept.close()
                return
        except _UNUSABLE as error:
            _log.warning("pool: the memory that the service manager has kept is let go: %s", error)
            for peer in list(self._peers):
                self._forget(peer)
            self._drop_memory()
        self._kept.let_go()

    def _use(self, kept: Kept) -> None:
        """Take memory that was kept. Whoever had it may have it still."""
        nbytes, page = os.fstat(kept.rows).st_size, HUGE_PAGE_BYTES[self._huge_pages]
        has, wanted = (nbytes, os.fstatvfs(kept.rows).f_bsize), (-(-self._size // page) * page, page)
        if has != wanted:
            sizes = (f"{format_size(size)} in pages of {format_size(of)}" for size, of in (has, wanted))
            raise StartError("it has {}, and {} are asked for".format(*sizes))
        self._rows = Rows(open_again(kept.rows, os.O_RDWR), nbytes, self._huge_pages)
        if kept.arena is not None:
            layout = CacheLayout.from_json(kept.arena.hello.layout)
            shape = Shape(nbytes // layout.row_stride, layout.row_stride, kept.arena.hello.prefix)
            self._open_arena(shape, layout, kept.arena.index_fd, kept.arena.plane_fd)
        before = _Peer()
        self._peers.add(before)
        for rank, pidfd in kept.processes.items():
            self._watch_process(before, rank, os.dup(pidfd))
        before.pid = _pid_of(before.pidfds[-1]) if -1 in before.pidfds else 0
        self._engine = before
        _log.info("pool: took back %s from the service manager", format_size(nbytes))

    def _adopt(self, shape: Shape, layout: CacheLayout, fds: Sequence[int]) -> str:
        """Take over what an engine brings back of another keeper; return why not, "" if it is done."""
        if len(fds) != 3:
            return "it brings no memory"
        rows, index, plane = fds
        if self._rows is not None and self._engine is not None and os.path.sameopenfile(self._rows.fd, rows):
            self._hear_out(self._engine)
            if self._arena is None or not self._arena.has(index, plane):  # what was kept is not what the engine has
                self._open_arena(shape, layout, index, plane)
                self._keep_arena()
            self._rename(shape.prefix)
            return ""
        if self._rows is not None and not self._is_fresh:
            return _OTHER_MEMORY
        self._drop_memory()  # made a moment ago: that of an engine is worth more
        nbytes = os.fstat(rows).st_size
        with contextlib.ExitStack() as undo:
            taken = Rows(open_again(rows, os.O_RDWR), nbytes)
            undo.callback(taken.close)
            self._open_arena(shape, layout, index, plane)
            undo.pop_all()
        self._rows = taken
        self._keep_arena()
        self._kept.keep_rows(taken.fd)
        _log.info("pool: took over %s that the engine brought back", format_size(nbytes))
        if nbytes < self._size:
            _log.warning("pool: for the %s of --size, restart it while no engine runs", format_size(self._size))
        return ""

    def _hear_out(self, peer: _Peer) -> None:
        """Take all that a peer has sent, and close its connection; its processes are watched on."""
        while peer.sock is not None and _is_readable(peer.sock):
            self._hear(peer)
        self._hang_up(peer)

    def _drop_memory(self) -> None:
        self._kept.drop_rows()
        self._is_fresh = False
        if self._early is not None:
            if self._rows is None and self._early.prefault is not None:
                self._selector.unregister(self._early.prefault.fileno())
            self._early.close()
            self._early = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _rename(self, prefix: str) -> None:
        arena = self._arena
        assert arena is not None
        if prefix != arena.shape.prefix:
            shape = arena.shape._replace(prefix=prefix)
            self._kept.drop_arena()
            arena.index.rename(shape)
            self._arena = _Arena(shape, arena.layout, arena.index, arena.plane)
            self._kept.name_arena(prefix, arena.layout)

    def _set_arena(self, shape: Shape, layout: CacheLayout) -> None:
        if not shape.num_rows:
            raise StartError(f"it has no room for a row of {format_size(shape.row_stride)}; raise the keeper's --size")
        if self._arena is not None and self._arena.shape == shape:
            return
        if self._arena is not None:
            _log.info("pool: %s is asked for, so %s is forgotten", shape.prefix, self._arena.shape.prefix)
            self._kept.drop_arena()
            self._arena.close()
            self._arena = None
        self._arena = _Arena(shape, layout, Index.create(shape), Plane.create(shape.num_rows))
        self._keep_arena()

    def _open_arena(self, shape: Shape, layout: CacheLayout, index: int, plane: int) -> None:
        """Take an arena by its descriptors, which stay the caller's; StartError if it is of other rows."""
        with contextlib.ExitStack() as undo:
            found = Index(open_again(index, os.O_RDWR), shape, writable=True)
            undo.callback(found.close)
            uses = Plane(open_again(plane, os.O_RDWR), shape.num_rows, writable=False)
            undo.pop_all()
        if self._arena is not None:
            self._arena.close()
        self._arena = _Arena(shape, layout, found, uses)

    def _keep_arena(self) -> None:
        arena = self._arena
        assert arena is not None
        self._kept.keep_arena(arena.index.fd, arena.plane.fd, arena.shape.prefix, arena.layout)

    # Engines come.

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone, or there is no descriptor to be had: the next look is as soon as there is one
            time.sleep(_PAUSE_SECONDS)
            return
        sock.setblocking(False)
        peer = _Peer(sock)
        self._peers.add(peer)
        if peer.uid != os.geteuid():
            self._refuse(peer, f"the pool's keeper runs as user id {os.geteuid()}, this process as {peer.uid}")
        else:
            self._watch(sock, lambda: self._hear(peer))

    def _hear(self, peer: _Peer) -> None:
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

    def _do(self, peer: _Peer, message: Request, fds: list[int]) -> None:
        match message:
            case Status():
                self._tell(peer, Figures(self.figures()))
            case Clear():
                self._clear(peer)
            case Hello() if peer.hello is None:
                self._greet(peer, message, fds)
            case Goodbye() if peer.hello is not None:
                self._unwatch(peer, -1)
            case Watch(rank) if peer is self._engine and len(fds) == 1:
                self._watch_process(peer, rank, fds.pop())
            case Unwatch(rank) if peer is self._engine:
                self._unwatch(peer, rank)
            case Publish(rows, editions, keys) if peer is self._engine:
                self._publish(rows, editions, keys)
            case Rename(prefix) if peer is self._engine:
                self._rename(prefix)
            case _:
                self._refuse(peer, "it sent a message out of place")

    def _greet(self, peer: _Peer, hello: Hello, fds: Sequence[int]) -> None:
        if hello.format != POOL_FORMAT:
            self._refuse(
                peer, f"its format is {hello.format}, the keeper's {POOL_FORMAT}; run the same kvtiers in both"
            )
            return
        peer.hello = hello
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
            self._waiting.append(peer)
            return
        layout = CacheLayout.from_json(hello.layout)
        fds, pidfds = fds[:3], fds[3:]
        shape = Shape(os.fstat(fds[0]).st_size // layout.row_stride if fds else 0, layout.row_stride, hello.prefix)
        if why := self._adopt(shape, layout, fds):
            self._refuse(peer, why)
            return
        for rank, pidfd in zip(hello.watched, pidfds, strict=False):
            self._watch_process(peer, rank, os.dup(pidfd))
        before = self._engine
        self._has_memory(peer)
        if before is not None:  # the same memory, so the same engine, by another connection: it names all that have it
            for rank in before.pidfds.keys() - peer.pidfds.keys():
                self._kept.drop_process(rank)
            self._forget(before)
        if before is None or before.hello is None:
            self.counts["engines"] += 1
        self._welcome(peer, ())

    def _has_memory(self, peer: _Peer) -> None:
        """Record that this engine has the memory, or is about to."""
        before, self._engine = self._engine, peer
        kept = before.pidfds if before is not None else {}
        for rank, pidfd in peer.pidfds.items():
            if rank not in kept or not _are_of_one_process(kept[rank], pidfd):
                self._kept.keep_process(rank, pidfd)

    def _admit_next(self) -> None:
        while self._waiting and self._rows is not None and self._engine is None and not self._checking:
            peer = self._waiting.pop(0)
            if peer.sock is not None:
                self._admit(peer, self._rows)
        for peer in self._waiting:
            self._tell_to_wait(peer)

    def _tell_to_wait(self, peer: _Peer) -> None:
        holder = self._engine
        if holder is not None:
            wait = Wait(f"{holder.name} has its memory", ends=holder.sock is None and -1 not in holder.pidfds)
        else:
            wait = Wait("its rows are being checked" if self._checking else "it is not populated yet", ends=True)
        if wait != peer.told and peer.sock is not None:
            peer.told = wait
            self._tell(peer, wait)

    def _admit(self, peer: _Peer, rows: Rows) -> None:
        assert peer.hello is not None
        try:
            layout = CacheLayout.from_json(peer.hello.layout)
            shape = Shape(rows.nbytes // layout.row_stride, layout.row_stride, peer.hello.prefix)
            self._set_arena(shape, layout)
            loan = rows.lend()
        except StartError as error:
            self._refuse(peer, str(error))
            return
        except _UNUSABLE as error:
            self._refuse(peer, f"its layout cannot be used: {error}")
            return
        assert self._arena is not None
        self._has_memory(peer)
        self.counts["engines"] += 1
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, loan)
            index = open_again(self._arena.index.fd, os.O_RDONLY)
            closing.callback(os.close, index)
            _log.info("pool: lent to %s, with %d chunks", peer.name, len(self._counting()))
            self._welcome(peer, (loan, index, self._arena.plane.fd))

    def _welcome(self, peer: _Peer, fds: Sequence[int]) -> None:
        assert self._arena is not None
        assert self._rows is not None
        assert peer.sock is not None
        shape = self._arena.shape
        try:
            send(peer.sock, Welcome(shape.num_rows, shape.row_stride, self._rows.nbytes), fds)
        except OSError:  # it has given up, and never had the memory by this connection
            if fds:
                for rank in list(peer.pidfds):
                    self._unwatch(peer, rank)
                self._engine = None
                self.counts["engines"] -= 1
            self._hang_up(peer)
            return
        self._is_fresh = False

    def _tell(self, peer: _Peer, report: Report, fds: Sequence[int] = ()) -> None:
        assert peer.sock is not None
        with contextlib.suppress(OSError):  # its end is seen when it is read, and its process's end by pidfd
            send(peer.sock, report, fds)

    def _refuse(self, peer: _Peer, reason: str) -> None:
        _log.warning("pool: refused %s: %s", peer.name, reason)
        if peer.sock is not None:
            self._tell(peer, Refused(reason))
            self._hang_up(peer)

    # Engines go.

    def _watch_process(self, peer: _Peer, rank: int, pidfd: int) -> None:
        try:
            self._watch(pidfd, lambda: self._on_exit(peer, rank))
        except OSError:  # it is none
            os.close(pidfd)
            raise
        if (before := peer.pidfds.pop(rank, None)) is not None:
            self._selector.unregister(before)
            os.close(before)
        peer.pidfds[rank] = pidfd
        if peer is self._engine:
            self._kept.keep_process(rank, pidfd)

    def _unwatch(self, peer: _Peer, rank: int) -> None:
        if (pidfd := peer.pidfds.pop(rank, None)) is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            if peer is self._engine:
                self._kept.drop_process(rank)

    def _on_exit(self, peer: _Peer, rank: int) -> None:
        pidfd = peer.pidfds.get(rank)
        if pidfd is None or not _is_readable(pidfd):
            return  # of the process that was this rank before, and seen a moment before
        if rank == -1:
            self._hear_out(peer)  # what it sent before its end is true
        self._unwatch(peer, rank)

    def _hang_up(self, peer: _Peer) -> None:
        """Close a process's connection. One that has the memory is watched on, until it and its ranks have ended."""
        if peer.sock is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(peer.sock)
            peer.sock.close()
            peer.sock = None
        if peer is not self._engine:
            self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if peer in self._waiting:
            self._waiting.remove(peer)
        self._peers.discard(peer)
        if peer.sock is not None:
            peer.sock.close()
            peer.sock = None
        for pidfd in peer.pidfds.values():
            self._selector.unregister(pidfd)
            os.close(pidfd)
        peer.pidfds.clear()

    def _is_reclaiming(self) -> bool:
        engine = self._engine
        return engine is not None and engine.sock is None and not engine.pidfds

    def _reclaim(self) -> None:
        """Take the memory back once no process has it, and nothing is under way to it; check what is in it."""
        if self._is_reclaiming() and self._rows is not None and not self._rows.is_lent():
            engine, self._engine = self._engine, None
            assert engine is not None
            _log.info("pool: %s has ended, and all that had its memory", engine.name)
            self._forget(engine)
            self._begin_check()

    # Rows.

    def _publish(self, rows: list[int], editions: list[int], keys: list[bytes]) -> None:
        arena = self._arena
        assert arena is not None
        if not len(rows) == len(editions) == len(keys) or not all(0 <= row < arena.shape.num_rows for row in rows):
            raise ValueError("rows that there are not")
        plane, index = arena.plane, arena.index
        told = [
            (row, edition, key)
            for row, edition, key in zip(rows, editions, keys, strict=True)
            if edition and plane.edition(row) == edition and arena.payload_bytes(key)
        ]
        digests = self._hashed([(row, key) for row, _, key in told])
        for (row, edition, key), digest in zip(told, digests, strict=True):
            if plane.edition(row) == edition:  # else its bytes may have changed while they were hashed
                index.write(row, edition, key, digest)
                self.counts["published"] += 1
        self.counts["published_late"] += len(rows) - len(told)

    def _begin_check(self) -> None:
        """Begin to hash all rows whose entries count, on threads: nobody else has the memory meanwhile."""
        if self._arena is None:
            return
        self._check_began = time.monotonic()
        rows = self._counting()
        self.counts["checked"] += len(rows)
        pieces = [rows[at : at + _PIECE_ROWS] for at in range(0, len(rows), _PIECE_ROWS)] or [[]]
        self._checking = [self._hashing.submit(self._damaged_of, piece) for piece in pieces]
        for each in self._checking:
            each.add_done_callback(lambda _: self._wake())

    def _damaged_of(self, rows: list[int]) -> list[int]:
        assert self._arena is not None
        index = self._arena.index
        return [row for row in rows if self._hash((row, index.key(row))) != index.digest(row)]

    def _end_check(self) -> None:
        """Forget the rows whose bytes are others, once all have been hashed."""
        if not self._checking or not all(each.done() for each in self._checking):
            return
        damaged = [row for each in self._checking for row in each.result()]
        assert self._arena is not None
        for row in damaged:
            self._arena.index.void(row)
        self._checking = []
        self.counts["damaged"] += len(damaged)
        self.seconds["check"] = seconds = time.monotonic() - self._check_began
        level = logging.WARNING if damaged else logging.INFO
        _log.log(level, "pool: its rows were checked in %.2f s, %d of them damaged", seconds, len(damaged))

    def _hashed(self, chunks: Sequence[tuple[int, OffloadKey]]) -> list[bytes]:
        if len(chunks) < 2 or self._threads == 1:
            return [self._hash(chunk) for chunk in chunks]
        return list(self._hashing.map(self._hash, chunks, chunksize=-(-len(chunks) // (4 * self._threads))))

    def _hash(self, chunk: tuple[int, OffloadKey]) -> bytes:
        """Return the hash of a row's chunk, as its seal in a store has it: over storage name and payload."""
        arena, rows = self._arena, self._rows
        assert arena is not None
        assert rows is not None
        row, key = chunk
        at = row * arena.shape.row_stride
        whole = PayloadHash(arena.names.name(key))
        whole.update(rows.mapping.view[at : at + arena.payload_bytes(key)])
        return whole.digest()

    def _counting(self) -> list[int]:
        """Return the rows whose entries count."""
        return counting(self._arena.index, self._arena.plane) if self._arena is not None else []

    def _clear(self, peer: _Peer) -> None:
        """Forget all chunks, unless an engine may have them: it alone can forget its own."""
        if self._engine is not None:
            holders = (
                ", ".join(process_name(each["pid"]) for each in self._processes()) or "a process that is not watched"
            )
            self._refuse(peer, f"an engine has its memory ({holders}); end it, or clear it there ('kvtiers ctl clear')")
            return
        if self._rows is None:  # an engine may be about to bring it
            self._refuse(peer, "it has no memory yet; ask again in a moment")
            return
        chunks = len(self._counting())
        if self._arena is not None:
            self._arena.index.clear()
        _log.info("pool: %s has had %d chunks forgotten", peer.name, chunks)
        self._tell(peer, Cleared(chunks))

    def _processes(self) -> list[dict[str, int]]:
        """Return the processes that are watched until they end: the engine's own is rank -1, tier hosts are below."""
        watched = self._engine.pidfds if self._engine is not None else {}
        return [{"pid": _pid_of(pidfd), "rank": rank} for rank, pidfd in sorted(watched.items())]

    def figures(self) -> dict[str, Any]:
        """Return what ``kvtiers pool status`` shows."""
        arena, engine = self._arena, self._engine
        return {
            "bytes": self._rows.nbytes if self._rows is not None else self._size,
            "populated": self._rows is not None,
            "checking": bool(self._checking),
            "rows": arena.shape.num_rows if arena is not None else 0,
            "row_bytes": arena.shape.row_stride if arena is not None else 0,
            "chunks": len(self._counting()),
            "holds": arena.shape.prefix if arena is not None else "",
            "lent": engine is not None,
            "engine": engine.pid if engine is not None else 0,
            "engine_connected": engine is not None and engine.sock is not None,
            "watched": len(engine.pidfds) if engine is not None else 0,
            "processes": self._processes(),
            "waiting": [peer.pid for peer in self._waiting],
            **self.counts,
            **{f"{name}_seconds": round(seconds, 3) for name, seconds in self.seconds.items()},
        }


def serve(path: Path, size: int, *, huge_pages: HugePages = "off") -> None:
    """Serve a pool at this path until SIGTERM or SIGINT; StartError, in one line, if it cannot be."""
    store = descriptor_store(os.environ)
    listener = listen(path)
    _log.info("pool: serves at %s", path)
    place = path.stat()
    keeper = Keeper(listener, size, huge_pages=huge_pages, store=store)
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
