"""The pieces of a put or a get: as many values at a time as there are rows for, in bounce rows or in the region.

::

    values --cut--> pieces --leased, gathered--> in flight --over, or late--> memory taken back --> rows released

The next piece is gathered while a tier host works on the one before. When the call goes on with a piece, no host writes
into the caller's memory any more: its jobs have ended, or have been detached from it.
"""

import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import TypeVar

from kvtiers.client.arguments import Value
from kvtiers.client.buffers import Bytes, gather, scatter
from kvtiers.client.driver import Driver
from kvtiers.client.requests import Get, Put
from kvtiers.client.rows import BounceRows, RowLease, RowNumbers
from kvtiers.client.state import ClientState
from kvtiers.gpu.cuda.buffers import CudaBuffer

__all__ = ["JOB_BYTES", "Pieces"]

JOB_BYTES = 16 << 20
"""The most bytes of one piece in bounce rows: the next one is gathered while its host works on it."""
_REGION_BYTES = 64 << 20  # of a piece that is not gathered: its host has enough to do
_REGION_PARTS = 1 << 15  # of a piece: a job's message is to be short
_MOST_PIECES = 16  # of one call at a time
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
        """Return the pieces of a call, in each of which all values lie in the region or none does."""
        pieces: deque[Sequence[Value]] = deque()
        region = self._rows.in_region
        for rows, most_bytes in ((self._rows, JOB_BYTES), (region, _REGION_BYTES)):
            if rows is None:
                continue
            some = [value for value in values if (value.in_region is not None) == (rows is region)]
            parts = max((len(value.in_region or ()) for value in some), default=1)
            most = max(1, min(most_bytes // self._rows.row_stride, rows.count // 4, _REGION_PARTS // max(1, parts)))
            pieces.extend(some[start : start + most] for start in range(0, len(some), most))
        return pieces

    def moved(
        self, kind: type[_Moving], todo: deque[Sequence[Value]], until: float
    ) -> Generator[tuple[Sequence[Value], _Moving], None, None]:
        """Move values piece by piece; yield each when it is over, or its time is, and no host writes to it any more.

        Its rows are the caller's until the next one is asked for. What is left in ``todo`` has got no rows in time.
        """
        begun: deque[tuple[Sequence[Value], _Moving]] = deque()
        has_begun = False
        try:
            while todo or begun:
                is_late = has_begun and time.monotonic() >= until  # then the rest would only be copied
                if todo and not is_late and self._may_begin(kind, todo[0], len(begun)):
                    # Not waited for while this call has some rows: they may be all that there are.
                    piece = self._begin(kind, todo, until, 0.0 if begun else until)
                    if piece is not None:
                        begun.append(piece)  # first: an interrupt must not leave it in use
                        has_begun = True
                        self._driver.send(piece[1])
                        continue
                if not begun:
                    break
                some, request = begun[0]
                self._state.wait(request, until)
                self._take_back(request)
                yield some, request
                begun.popleft()[1].release()
        finally:
            for _, request in begun:
                self._take_back(request)
                request.release()

    def _may_begin(self, kind: type[_Moving], piece: Sequence[Value], begun: int) -> bool:
        """Return whether one more piece may be in flight. Gets leave half of the rows free for other calls' first ones.

        Rows of a get are free again when they have been scattered, in the call's order: that may take longer than
        reading. A late value needs another row as well.
        """
        rows = self._rows_for(piece)
        leaves_half = len(rows.free) - len(piece) >= rows.count // 2
        return not begun or (begun < _MOST_PIECES and (kind is Put or leaves_half))

    def _rows_for(self, piece: Sequence[Value]) -> RowNumbers:
        region = self._rows.in_region
        return self._rows if region is None or piece[0].in_region is None else region

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
        self, kind: type[_Moving], todo: deque[Sequence[Value]], until: float, rows_until: float
    ) -> tuple[Sequence[Value], _Moving] | None:
        """Return the next piece, or as much of it as there are rows for, to be sent; None if there are none until then.

        The caller holds the request's rows.
        """
        lease: RowLease | None = None
        if self._state.is_usable:
            lease = self._rows_for(todo[0]).take(len(todo[0]), rows_until)
        if lease is None:
            return None
        piece = todo.popleft()
        some, rest = piece[: len(lease.rows)], piece[len(lease.rows) :]
        if rest:
            todo.appendleft(rest)
        parts: dict[int, Sequence[tuple[int, int]]] = {}
        on_gpu: list[tuple[CudaBuffer, Bytes]] = []
        try:
            for row, value in zip(lease.rows, some, strict=True):
                if value.in_region is not None:
                    parts[row] = value.in_region
                elif kind is Put:
                    on_gpu += gather(value.parts[0], self._rows.row(row, value.nbytes))
            if on_gpu:
                self._rows.cuda.copy(on_gpu, into_rows=True)
            request = kind([value.key for value in some], lease, until, parts)
        except BaseException:
            lease.release()
            raise
        if parts:
            self._state.count(direct_values=len(some))
        return some, request

    def _take_back(self, request: Put | Get) -> None:
        """Have no host write into the region for this piece any more; wait for those that do, or are being killed."""
        if request.parts and request.stop():
            self._driver.wake()
            request.wait_detached()
