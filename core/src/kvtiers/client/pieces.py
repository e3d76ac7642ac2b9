"""The pieces of a put or a get: as many values at a time as there are rows for, or claims on the client's region.

::

    values --cut--> pieces --leased, gathered or claimed--> in flight --over, or late--> revoked --> rows released

The next piece is gathered while a tier host works on the one before. When the call goes on with a piece, no host writes
into the caller's memory any more: claims on it have ended, or have been revoked.
"""

import math
import time
from collections import deque
from collections.abc import Collection, Generator, Sequence
from typing import TypeVar

from kvtiers.client.arguments import Value
from kvtiers.client.buffers import Bytes, gather, scatter
from kvtiers.client.driver import Driver
from kvtiers.client.requests import Get, Put, Task
from kvtiers.client.rows import BounceRows, RowLease
from kvtiers.client.state import ClientState
from kvtiers.gpu.cuda.buffers import CudaBuffer
from kvtiers.region.claims import ClaimState, ClaimTable

__all__ = ["JOB_BYTES", "Pieces"]

JOB_BYTES = 16 << 20
"""The most bytes of one piece in bounce rows: the next one is gathered while its host works on it."""
_CLAIMED_BYTES = 64 << 20  # of a piece that is not gathered: its host has enough to do
_MOST_PIECES = 16  # of one call at a time
_RELEASE_SECONDS = 0.05  # for the driver to drop what has not begun: nothing depends on it
_REVOKE_SECONDS = 0.002  # how often a claim is tried again that a host is using
_COPYING_SECONDS = 0.1  # for a host to end a copy into a caller's memory
_IN_USE = "the time of a call is over, and it is still writing into the call's memory"
_Moving = TypeVar("_Moving", Put, Get)


class Pieces:
    """Moves the values of one client's calls, piece by piece. Any thread, several at once."""

    def __init__(self, driver: Driver, rows: BounceRows, state: ClientState) -> None:
        self._driver = driver
        self._rows = rows
        self._state = state

    def settle(self, values: Sequence[Value], until: float) -> bool:
        """Wait until a GPU has ended its queued work on values in its memory; return whether it has until then."""
        given = (part for value in values for parts in value.parts for part in parts)
        buffers = [part for part in given if isinstance(part, CudaBuffer)]
        if not buffers or self._rows.cuda.settle(buffers, until):
            return True
        self._state.count(expired_calls=1)
        return False

    def cut(self, values: Sequence[Value]) -> deque[Sequence[Value]]:
        """Return the pieces of a call, in each of which all values are claimed or none is."""
        pieces: deque[Sequence[Value]] = deque()
        claims = self._rows.claims
        for rows, most_bytes in ((self._rows, JOB_BYTES), (claims, _CLAIMED_BYTES)):
            if rows is None:
                continue
            some = [value for value in values if (value.claimed is not None) == (rows is claims)]
            most = max(1, min(most_bytes // self._rows.row_stride, rows.count // 4))
            pieces.extend(some[start : start + most] for start in range(0, len(some), most))
        return pieces

    def moved(
        self, kind: type[_Moving], todo: deque[Sequence[Value]], until: float, *, in_place: bool = False
    ) -> Generator[tuple[Sequence[Value], _Moving], None, None]:
        """Move values piece by piece; yield each when it is over, or its time is, and no host writes to it any more.

        Its rows are the caller's until the next one is asked for. What is left in ``todo`` has got no rows in time.
        """
        begun: deque[tuple[Sequence[Value], _Moving]] = deque()
        try:
            while todo or begun:
                if todo and self._may_begin(kind, todo[0], len(begun)):
                    # Not waited for while this call has some rows: they may be all that there are.
                    piece = self._begin(kind, todo, until, 0.0 if begun else until, in_place=in_place)
                    if piece is not None:
                        begun.append(piece)  # first: an interrupt must leave no claim open
                        self._driver.send(piece[1])
                        continue
                    if not begun:
                        break
                some, request = begun[0]
                self._state.wait(request, until)
                self._revoke(some, request)
                yield some, request
                begun.popleft()[1].release()
        finally:
            for some, request in begun:
                self._revoke(some, request)
                request.release()

    def _may_begin(self, kind: type[_Moving], piece: Sequence[Value], begun: int) -> bool:
        """Return whether one more piece may be in flight. Gets leave half of the rows free for other calls' first ones.

        Rows of a get are free again when they have been scattered, in the call's order: that may take longer than
        reading. A late value needs another row as well.
        """
        claims = self._rows.claims if piece[0].claimed is not None else None
        rows = self._rows if claims is None else claims
        leaves_half = len(rows.free) - len(piece) >= rows.count // 2
        return not begun or (begun < _MOST_PIECES and (kind is Put or leaves_half))

    def scatter(self, some: Sequence[Value], request: Get, found: list[bool]) -> None:
        """Copy what a piece has brought into its views, and note in ``found`` which values of the call are there."""
        on_gpu: list[tuple[CudaBuffer, Bytes]] = []
        for value in some:
            if (row := request.found.get(value.key)) is not None:
                for place, parts in zip(value.places, value.parts, strict=True):
                    if row < self._rows.count:
                        on_gpu += scatter(self._rows.row(row, value.nbytes), parts)
                    found[place] = True
                self._state.count(found_bytes=value.nbytes)
        if on_gpu:
            self._rows.cuda.copy(on_gpu, into_rows=False)

    def _begin(
        self,
        kind: type[_Moving],
        todo: deque[Sequence[Value]],
        until: float,
        rows_until: float,
        *,
        in_place: bool,
    ) -> tuple[Sequence[Value], _Moving] | None:
        """Return the next piece, or as much of it as there are rows for, to be sent; None if there are none until then.

        The caller holds the request's rows.
        """
        claims = self._rows.claims if todo[0][0].claimed is not None else None
        lease: RowLease | None = None
        if self._state.is_usable:
            lease = (self._rows if claims is None else claims).take(len(todo[0]), rows_until)
        if lease is None:
            return None
        piece = todo.popleft()
        some, rest = piece[: len(lease.rows)], piece[len(lease.rows) :]
        if rest:
            todo.appendleft(rest)
        on_gpu: list[tuple[CudaBuffer, Bytes]] = []
        try:
            for row, value in zip(lease.rows, some, strict=True):
                if claims is not None:
                    claims.table.open(row, value.claimed or (), in_place=in_place)
                elif kind is Put:
                    on_gpu += gather(value.parts[0], self._rows.row(row, value.nbytes))
            if on_gpu:
                self._rows.cuda.copy(on_gpu, into_rows=True)
            request = kind([value.key for value in some], lease, until)
        except BaseException:
            lease.release()
            raise
        if claims is not None:
            self._state.count(direct_values=len(some))
        return some, request

    def _revoke(self, some: Sequence[Value], request: Put | Get) -> None:
        """End the claims of a piece, so that no host writes to its memory any more; learn what has landed there."""
        claims = self._rows.claims
        if claims is None or some[0].claimed is None:
            return
        left = dict(zip(request.lease.rows, some, strict=True))
        states = self._ended(request, claims.table, left) if request.stop() else {}
        if isinstance(request, Get):
            for row, value in left.items():
                # Also what a job has done whose result came when the request was over.
                if value.key not in request.found and states.get(row, claims.table.state(row)) is ClaimState.LANDED:
                    request.found[value.key] = row

    def _ended(self, request: Put | Get, table: ClaimTable, rows: Collection[int]) -> dict[int, ClaimState]:
        """Revoke these claims and return their last states; wait for a host that writes to their memory just now."""
        # Neither task may be dropped for coming late.
        soon = Task(lambda: self._driver.release_jobs(request), math.inf)
        if self._driver.send(soon):
            soon.over.wait(_RELEASE_SECONDS)
        states: dict[int, ClaimState] = {}
        kill_at = time.monotonic() + _COPYING_SECONDS
        while True:
            for row in rows:
                if row not in states and (state := table.revoke(row)) is not None:
                    states[row] = state
            if len(states) == len(rows):
                return states
            if not request.stop():  # no host uses them any more, though one has left a lock behind
                return states | {row: table.state(row) for row in rows if row not in states}
            if time.monotonic() >= kill_at:
                kill_at = math.inf
                self._driver.send(Task(lambda: self._driver.kill_jobs(request, _IN_USE), math.inf))
            time.sleep(_REVOKE_SECONDS)
