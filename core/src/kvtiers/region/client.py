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
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvtiers._failures import logged_boundary
from kvtiers._process import receive_fds
from kvtiers.api import StartError
from kvtiers.api.units import waitable
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.region.handshake import FORMAT, Kind, connect, peer_credentials, peer_pidfd
from kvtiers.region.memfd import Mapping, detach_in_children, map_memory, prefer_huge_pages, require_linux
from kvtiers.region.region import AnonymousRegion
from kvtiers.region.state import FIRST_LOOK, LONGEST_LOOK, SETTLED, Desk, RegionState

__all__ = ["JoinState", "JoinStatus", "RegionJoin"]

_log = logging.getLogger("kvtiers.region")
_FIRST_DELAY, _LONGEST_DELAY = 0.005, 0.02  # the engine's start waits for the ranks
_STOP_SECONDS = 10.0
_LONGEST_MESSAGE = 1 << 16

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
        self._region_state: RegionState | None = None
        self._desk: Desk | None = None
        self._sock: socket.socket | None = None
        self._owner = 0
        self._pidfd: int | None = None
        self._thread: threading.Thread | None = None
        self._leaving = False

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
        return self.poll().populated_rows

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
        status, region = self._status, self._region_state
        if region is None or status.prefault_ended:
            return status
        return JoinStatus(status.state, status.reason, *region.progress)

    def wait_change(self, seen: JoinStatus, timeout: float) -> JoinStatus:
        """Block until the status is another one than ``seen``, for at most so many seconds; return it."""
        end, pause = time.monotonic() + waitable(timeout), FIRST_LOOK
        with self._changed:
            while (status := self.poll()) == seen and (left := end - time.monotonic()) > 0:
                self._changed.wait(min(pause, left))  # a change of the state wakes it, more rows do not
                pause = min(2 * pause, LONGEST_LOOK)
            return status

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
        if (desk := self._desk) is not None and self.state == "ready":
            desk.pinned = rows

    def settle(self) -> None:
        """Report to the region's owner that this rank has pinned all rows, or pins no more. Any thread; never waits."""
        self.pinned(SETTLED)

    def close(self) -> None:
        """Unmap the region and notify its owner. A buffer still in use keeps the memory mapped, with a warning."""
        if self.state == "closed":
            return
        self._leaving = True
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):  # the thread has just closed it
                sock.shutdown(socket.SHUT_RD)  # wakes the thread
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        self._end("closed", "")
        self._view = None
        unmapped = self._mapping is None or self._mapping.close()
        if not unmapped:
            _log.warning("%s: a buffer made from its view is still in use; its memory stays mapped", self._where)
        elif self._sock is not None:
            with contextlib.suppress(OSError):  # the owner's end was not noticed yet
                self._sock.send(Kind.GOODBYE.message())
        self._disconnect()

    def detach(self) -> None:
        """Close everything in a forked child, where this rank counts as closed. The mapping does the same."""
        self._changed = threading.Condition()  # another thread may have held the lock at the fork
        why = "this process was forked from the rank's"  # and has none of its pages: they are not looked at
        self._set(dataclasses.replace(self._status, state="closed", reason=why, prefault_ended=True))
        self._disconnect()

    # The joining thread.

    def _set(self, status: JoinStatus) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def _end(self, state: JoinState, reason: str) -> None:
        self._set(dataclasses.replace(self.poll(), state=state, reason=reason, prefault_ended=True))
        self._region_state = self._desk = None  # another thread may be reading them: unmapped with the last reference

    def _run(self, deadline: float, seconds: float) -> None:
        with logged_boundary(_log, "%s: the joining thread ended", self._where) as joining:
            try:
                self._join(deadline, seconds)
            except StartError as error:
                self._give_up(str(error))
        if joining.error:  # what waits for this rank must get the reason
            self._give_up(f"its joining thread ended: {joining.error}")

    def _give_up(self, reason: str) -> None:
        self._disconnect()
        _log.warning("%s: offloading stays off: %s", self._where, reason)  # nothing else may ever ask for the reason
        self._end("lost" if self._mapping else "refused", reason)

    def _join(self, deadline: float, seconds: float) -> None:
        require_linux()
        while self._connect(deadline, seconds):
            while self._receive(deadline, seconds):
                pass
            if self._leaving:
                return
            self._disconnect()
            if self.state == "ready":
                reason = f"the scheduler's process {self._owner} has ended or closed the region"
                _log.warning("%s: %s", self._where, reason)
                self._end("lost", reason)
                return

    def _connect(self, deadline: float, seconds: float) -> bool:
        """Say HELLO to the region's owner, once there is one; False if closed meanwhile. StartError at the deadline."""
        delay = _FIRST_DELAY
        while not self._leaving:
            try:
                self._sock = connect(self.engine_id)
            except OSError as error:
                if error.errno not in {errno.ECONNREFUSED, errno.EAGAIN}:
                    raise StartError(f"cannot reach the scheduler's process: {error}") from None
            else:
                self._say_hello(self._sock)
                return not self._leaving
            if time.monotonic() >= deadline:
                raise StartError(
                    f"no scheduler answered within {seconds:.3g} s; is it started with this engine id, on this "
                    "machine, as this user, in the same container (network namespace)?"
                )
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)
        return False

    def _say_hello(self, sock: socket.socket) -> None:
        self._owner, uid = peer_credentials(sock)
        if uid != os.geteuid():
            raise StartError(
                f"process {self._owner} of user id {uid} answers in the scheduler's place, and this rank "
                f"runs as {os.geteuid()}; run both as one user, or choose another engine id if it is a stranger"
            )
        with contextlib.suppress(ProcessLookupError):  # the end of the stream shows it too
            self._pidfd = peer_pidfd(sock)
        hello = {"format": FORMAT, "rank": self.rank, "layout": json.loads(self.layout.to_json())}
        try:
            sock.send(Kind.HELLO.message(json.dumps(hello).encode()))
        except OSError as error:  # any other one is seen when the answer is read
            if error.errno == errno.EMSGSIZE:
                raise StartError(f"its cache layout is too large for a message: {error}") from None

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._sock = self._pidfd = None

    def _receive(self, deadline: float, seconds: float) -> bool:
        """Wait for a message and take it; False if the owner has ended or hung up, StartError if it refuses."""
        assert self._sock is not None
        ready = select.poll()
        for source in (self._sock, self._pidfd):
            if source is not None:
                ready.register(source, select.POLLIN)
        left = max(0.0, deadline - time.monotonic()) if self.state == "joining" else None
        found = ready.poll(None if left is None else left * 1000)
        if not found:
            raise StartError(f"the scheduler's process {self._owner} did not answer within {seconds:.3g} s")
        try:
            message, fds = receive_fds(self._sock, _LONGEST_MESSAGE, 3)
        except ConnectionResetError:  # reported once: what was sent before, or the end, comes next
            return True
        except OSError:  # the pidfd alone is ready: another process may hold the socket of one that has ended
            return False
        try:
            if message[:1] == Kind.REFUSED.message():
                raise StartError(f"refused by the scheduler's process: {message[1:].decode(errors='replace')}")
            if message == Kind.WELCOME.message() and self._mapping is None:
                self._map(fds)
        finally:
            for fd in fds:
                os.close(fd)
        return bool(message)

    def _map(self, fds: Sequence[int]) -> None:
        if len(fds) != 3:
            raise StartError("no descriptor is to be had for the region's memory; raise the limit of open files")
        rows, state, desk = fds
        region = RegionState(state, writable=False)
        num_rows, row_stride, map_bytes = region.shape
        used = num_rows * row_stride
        if row_stride != self.layout.row_stride or not used <= map_bytes <= os.fstat(rows).st_size:
            raise StartError(f"the scheduler's process offers memory of another shape: {region.shape}")
        self._desk = Desk(desk, writable=True)
        self._mapping = map_memory(rows, map_bytes, used, core_dumps=self._core_dumps)
        prefer_huge_pages(self._mapping)  # as the pre-fault program did: what it got is mapped as it lies
        self._view = self._mapping.view
        self.num_rows = num_rows
        self._region_state = region
        self._set(dataclasses.replace(self._status, state="ready"))
