"""The loan of a part of a pool's memory, as its engine has it, and a thread that talks to the keeper.

The engine's thread writes the plane and puts what it publishes into a queue; it never waits for the keeper. Where the
keeper has ended, all goes on but publishing: the thread looks for the next keeper, brings it the memory, and publishes
what the index does not have. Where the pool has several parts, it follows what the other engines publish.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtiers._failures import logged_boundary
from kvtiers.api import OffloadKey, StartError
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.pool.barrier import MemoryBarrier
from kvtiers.pool.memory import LONGEST_KEY, Index, Plane, Shape, residents
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
    decode_report,
    receive,
    send,
)
from kvtiers.pool.neighbours import Neighbours
from kvtiers.region.handshake import peer_credentials
from kvtiers.region.memfd import detach_in_children

__all__ = ["PoolLoan", "clear_pool", "is_served", "pool_figures"]

_log = logging.getLogger("kvtiers.pool")
_LOOK_SECONDS = 0.25
_FOLLOW_SECONDS = 0.01  # how often it is seen what other engines have published
_SEND_SECONDS = 5.0  # a keeper that takes nothing for so long counts as ended
_MOST_ROWS = 256  # of one message, which is 30 KiB then
_ANSWER_SECONDS = 10.0  # for the keeper's first word
_IN_USE_SECONDS = 10.0
_STOP_SECONDS = 5.0


def _connect(path: str, timeout: float) -> socket.socket:
    """Return a socket connected to the keeper; StartError, in one line, if there is none, or one of another user."""
    sock = None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(timeout)
        sock.connect(path)
        _, uid = peer_credentials(sock)
    except OSError as error:
        if sock is not None:
            sock.close()
        if isinstance(error, PermissionError):
            raise StartError(f"user id {os.geteuid()} may not connect to {path}; be the keeper's user") from None
        how = f"kvtiers pool serve --size SIZE --socket {path}"
        raise StartError(f"no keeper serves at {path}: {error.strerror or error}; start one: {how}") from None
    if uid != os.geteuid():
        sock.close()
        raise StartError(f"the keeper at {path} runs as user id {uid}, this process as {os.geteuid()}")
    return sock


def is_served(path: str) -> bool:
    """Return whether a keeper serves at this path."""
    try:
        _connect(path, _SEND_SECONDS).close()
    except StartError:
        return False
    return True


def pool_figures(path: str, timeout: float = _SEND_SECONDS) -> dict[str, Any]:
    """Return the keeper's figures; StartError, in one line, if there is none, or one of another format."""
    report = _ask(path, Status(), timeout)
    if isinstance(report, Figures):
        return report.figures
    raise _no_answer(path, report)


def clear_pool(path: str, timeout: float = _SEND_SECONDS) -> int:
    """Have the keeper forget all chunks; return how many. StartError, in one line, while an engine has them."""
    report = _ask(path, Clear(), timeout)
    if isinstance(report, Cleared):
        return report.chunks
    raise _no_answer(path, report)


def _no_answer(path: str, report: Report) -> StartError:
    return StartError(report.reason if isinstance(report, Refused) else f"the keeper at {path} answers: {report}")


def _ask(path: str, request: Request, timeout: float) -> Report:
    with contextlib.closing(_connect(path, timeout)) as sock:
        try:
            send(sock, request)
            return decode_report(receive(sock)[0])
        except TimeoutError:
            raise StartError(f"the keeper at {path} does not answer within {timeout:g} s; is it stopped?") from None
        except (OSError, ValueError) as error:
            raise StartError(f"the keeper at {path} gives no answer that can be read: {error}") from None


def _welcome(sock: socket.socket, deadline: float, in_use_seconds: float) -> tuple[Welcome, list[int]]:
    """Return the keeper's WELCOME and its three descriptors; StartError says why there is none in time."""
    until, has_answered = time.monotonic() + _ANSWER_SECONDS, False
    why = "the keeper did not answer in time"
    while (left := until - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            message, fds = receive(sock)
        except TimeoutError:
            break
        if not message:
            raise StartError("the keeper has ended while this start waited for it")
        match decode_report(message):
            case Wait(reason, ends):
                why = f"{reason}, for longer than this start can wait"
                now = time.monotonic()
                until = until if has_answered else now + min(in_use_seconds, deadline)
                until, has_answered = max(until, now + deadline) if ends else until, True
                _log.info("pool: %s; the start waits for %.0f s at most", reason, until - time.monotonic())
            case Welcome() as welcome if len(fds) == 3:
                return welcome, fds
            case Refused(reason):
                raise StartError(reason)
            case _:
                for fd in fds:
                    os.close(fd)
                raise StartError("the keeper's answer is out of place, or there is no descriptor for it to be had")
    raise StartError(why)


def _give_up(sock: socket.socket) -> None:
    """Close a connection to the keeper, which may have lent the memory just now."""
    with contextlib.suppress(OSError):
        sock.settimeout(0)
        send(sock, Goodbye())
    sock.close()


class PoolLoan:
    """A pool's memory, as one engine has it until ``close``. Made by ``take``.

    ``renew``, ``use`` and ``publish`` are for the engine's thread, ``watch`` and ``unwatch`` for the one that admits
    ranks.
    """

    def __init__(
        self,
        path: str,
        hello: Hello,
        sock: socket.socket,
        welcome: Welcome,
        fds: Sequence[int],
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._look_seconds = look_seconds
        self._path = path
        self._hello = hello
        self._sock: socket.socket | None = sock
        self._shape = shape = Shape(welcome.nbytes, welcome.row_stride, welcome.parts)
        self.num_rows, self.nbytes = shape.num_rows, shape.nbytes
        self._part = welcome.part
        self.own = shape.rows_of(welcome.part)
        """The rows that are this engine's; those of the others it reads."""
        self._barrier = MemoryBarrier() if shape.parts > 1 else None
        self._neighbours: Neighbours | None = None
        rows, index, plane = fds
        with contextlib.ExitStack() as undo:
            self._rows = os.dup(rows)
            undo.callback(os.close, self._rows)
            self._index = Index(os.dup(index), shape, writable=False)
            undo.callback(self._index.close)
            self._plane = Plane(os.dup(plane), shape, welcome.part, writable=True)
            undo.callback(self._plane.close)
            self._plane.unpin_all(welcome.part)  # of an engine that died while there was no keeper
            if self._index.prefix(welcome.part)[1] != hello.prefix:
                raise StartError("the keeper lends chunks of other names")
            undo.pop_all()
        self._sealed: dict[int, tuple[int, OffloadKey]] = {}
        self._watched: dict[int, int] = {}
        self._refused_at = (0, 0)
        """The socket of a keeper that has other memory: it is not asked again."""
        self._sending = threading.Lock()
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtiers-pool", daemon=True)
        detach_in_children(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.detach()
            raise StartError(f"no thread can be had for the pool: {error}") from None

    @classmethod
    def take(
        cls,
        path: str,
        prefix: str,
        layout: CacheLayout,
        deadline: float,
        *,
        in_use_seconds: float = _IN_USE_SECONDS,
        look_seconds: float = _LOOK_SECONDS,
    ) -> "PoolLoan":
        """Ask the keeper for its memory, for chunks whose names have this prefix, and of this layout.

        Waits for the engine before this one to end, ``deadline`` seconds at most, and ``in_use_seconds`` for one that
        is at work. ``look_seconds``: how often the loan sees whether its keeper is there, or looks for the next one.
        StartError says in one line why there is no memory to be had.
        """
        hello = Hello(POOL_FORMAT, prefix, layout.to_json())
        sock = _connect(path, _SEND_SECONDS)
        fds: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(_give_up, sock)
            try:
                send(sock, hello)
                welcome, fds = _welcome(sock, deadline, in_use_seconds)
                sock.settimeout(_SEND_SECONDS)
                loan = cls(path, hello, sock, welcome, fds, look_seconds)
            except (OSError, ValueError) as error:
                raise StartError(f"the pool's keeper gives no answer that can be used: {error}") from None
            finally:
                for fd in fds:
                    os.close(fd)
            undo.pop_all()
        return loan

    @property
    def has_keeper(self) -> bool:
        """Whether a keeper takes what is published, as far as is known. Any thread."""
        return self._sock is not None and self._thread.is_alive()

    # The region's.

    def take_rows(self) -> int:
        """Return a descriptor of the rows, the caller's own."""
        return os.dup(self._rows)

    def watch(self, rank: int, pidfd: int) -> None:
        """Let the keeper wait for the end of this rank's process, too; OSError if it cannot be told. Waits for it.

        Before the process has the memory: what was sent counts, also after a ``kill -9`` of the engine.
        """
        with self._sending:
            if (before := self._watched.pop(rank, None)) is not None:
                os.close(before)
            self._watched[rank] = os.dup(pidfd)
            try:
                if self._sock is not None:
                    send(self._sock, Watch(rank), [pidfd])
            except ConnectionError as error:  # the next keeper, which has the memory from here only, is told
                self._lose(error)

    def unwatch(self, rank: int) -> None:
        """Record that nothing of this rank touches a row any more."""
        with self._sending:  # and not by the queue: another process of this rank may be watched at once
            if (pidfd := self._watched.pop(rank, None)) is None:
                return
            os.close(pidfd)
            try:
                if self._sock is not None:
                    send(self._sock, Unwatch(rank))
            except OSError as error:
                self._lose(error)

    # The primary's.

    def meet_neighbours(self, view: memoryview) -> Neighbours | None:
        """Begin to follow what the other engines have, None if the pool is for one. ``view``: all rows."""
        if self._barrier is not None:
            layout, prefix = CacheLayout.from_json(self._hello.layout), self._hello.prefix
            self._neighbours = Neighbours(
                self._index, self._plane, self._shape, self._part, prefix, layout, view, self._barrier
            )
        return self._neighbours

    def residents(self) -> Iterator[tuple[list[OffloadKey], list[int]]]:
        """Yield the chunks that are there, with their rows, as ``memory.residents`` says."""
        return residents(self._index, self._plane, self.own)

    def renew(self, rows: Sequence[int]) -> None:
        """Begin another edition of these rows, which are about to be written to."""
        self._plane.renew(rows)

    def renew_all(self) -> None:
        """Begin another edition of all rows that are this engine's."""
        self._plane.renew_all()

    def use(self, rows: Sequence[int]) -> None:
        """Record that these rows, in the order of a prefix, were used now."""
        self._plane.use(rows)

    def take_touched(self) -> list[int]:
        """Return rows that other engines have used since they were last returned, not all at once."""
        return self._plane.take_touched()

    def publish(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Let other engines, and the next one, find these chunks. Never waits."""
        if not self._thread.is_alive():  # nobody would take it
            return
        edition = self._plane.edition
        told = [(row, edition(row), key) for row, key in zip(rows, keys, strict=True) if len(key) <= LONGEST_KEY]
        for at in range(0, len(told), _MOST_ROWS):
            some, editions, names = zip(*told[at : at + _MOST_ROWS], strict=True)
            self._queue.put(Publish(list(some), list(editions), list(names)))

    def rename(self, prefix: str) -> None:
        """Let all chunks from now on have names with this prefix; those before are found by nobody."""
        if self._neighbours is not None:
            self._neighbours.rename(prefix)
        self._queue.put(Rename(prefix))

    def close(self) -> None:
        """Give the memory back, after the engine has unmapped it: the keeper has all that was published by then."""
        self._queue.put(Goodbye())
        self._queue.put(None)
        self._thread.join(_STOP_SECONDS)
        self.detach()
        if not self._thread.is_alive():  # else it reads them still
            self._index.close()
            self._plane.close()

    def detach(self) -> None:
        """Close all descriptors, as in a forked child."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        for fd in (self._rows, *self._watched.values()):
            if fd >= 0:
                os.close(fd)
        self._rows = -1
        self._watched = {}
        self._index.detach()
        self._plane.detach()

    # The thread.

    def _run(self) -> None:
        with logged_boundary(_log, "the pool's thread ended"):
            look_at, follow_at = time.monotonic() + self._look_seconds, 0.0
            while True:
                now = time.monotonic()
                wait = max(0.0, look_at - now)
                if (neighbours := self._neighbours) is not None and neighbours.is_followed:
                    if now >= follow_at:
                        follow_at = now + _FOLLOW_SECONDS
                        neighbours.is_followed = False
                        with logged_boundary(_log, "pool: what other engines have is not followed any more"):
                            neighbours.follow()
                            neighbours.is_followed = True
                    wait = min(wait, max(0.0, follow_at - now))
                with contextlib.suppress(queue.Empty):
                    message = self._queue.get(timeout=wait)
                    if message is None:
                        return
                    self._note(message)
                    if isinstance(message, Goodbye) and self._sock is None:
                        self._find_keeper()  # else it waits for the end of this process
                    self._send(message)
                if time.monotonic() >= look_at:  # of a busy engine, too: the next keeper waits for a moment only
                    if not self._is_connected():
                        self._find_keeper()
                    if neighbours is not None and neighbours.is_to_claim:
                        with logged_boundary(_log, "pool: it is not known which parts have no engine"):
                            neighbours.claim_parts(self._rows)
                    look_at = time.monotonic() + self._look_seconds

    def _note(self, message: Request) -> None:
        match message:
            case Publish(rows, editions, keys):
                told = zip(rows, editions, keys, strict=True)
                self._sealed |= {row: (number, key) for row, number, key in told}
            case Rename(prefix):
                self._sealed.clear()
                self._hello = Hello(POOL_FORMAT, prefix, self._hello.layout)

    def _send(self, message: Request) -> None:
        with self._sending:
            if self._sock is None:
                return
            try:
                send(self._sock, message)
            except OSError as error:
                self._lose(error)

    def _lose(self, why: object) -> None:
        _log.warning("pool: its keeper has ended (%s): chunks are used, but not kept for the next engine", why)
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _is_connected(self) -> bool:
        with self._sending:
            if self._sock is None:
                return False
            try:
                self._sock.settimeout(0)
                message, _ = receive(self._sock)
                self._lose(decode_report(message) if message else "its connection is closed")
            except BlockingIOError:
                return True
            except (OSError, ValueError) as error:
                self._lose(error)
            finally:
                if self._sock is not None:
                    self._sock.settimeout(_SEND_SECONDS)
            return False

    def _find_keeper(self) -> None:
        """Bring the memory to the next keeper, but for one that has refused it; publish what it does not have."""
        try:
            found = Path(self._path).stat()
            place = found.st_ino, found.st_ctime_ns
            if place == self._refused_at:
                return
            sock = _connect(self._path, _SEND_SECONDS)
        except (StartError, OSError):
            return
        try:
            with self._sending:  # no process gets the memory meanwhile
                watched = list(self._watched)
                prefix, layout = self._hello.prefix, self._hello.layout
                hello = Hello(POOL_FORMAT, prefix, layout, holds=True, watched=watched, part=self._part)
                pidfds = [self._watched[rank] for rank in watched]
                send(sock, hello, [self._rows, self._index.fd, self._plane.fd, *pidfds])
                report = decode_report(receive(sock)[0])
                self._sock = sock if isinstance(report, Welcome) else None
            if isinstance(report, Refused):
                _log.warning("pool: the next keeper does not take the memory: %s", report.reason)
                self._refused_at = place
        except (OSError, ValueError) as error:
            _log.debug("pool: the next keeper cannot be reached: %s", error)
        if self._sock is None:
            sock.close()
            return
        _log.info("pool: another keeper has taken over its memory")
        self._publish_again()

    def _publish_again(self) -> None:
        has, now = self._index.editions, self._plane.editions
        self._sealed = {row: told for row, told in self._sealed.items() if now[row] == told[0]}
        missing = [(row, *told) for row, told in self._sealed.items() if has[row] != told[0]]
        for at in range(0, len(missing), _MOST_ROWS):
            rows, numbers, keys = zip(*missing[at : at + _MOST_ROWS], strict=True)
            self._send(Publish(list(rows), list(numbers), list(keys)))
