"""Views of one value, lent to a store for the length of a call.

A fresh exporter (a small array over the region) stands behind each view. If it is still alive after the call, somebody
kept the buffer, and could read or write the row when it is another chunk's. Releasing the view alone would not show
that: a slice of it, or an array made from it, lives on.

The arrays are of ctypes, not of numpy, which would bring a pool of threads of its own into every tier host.
"""

import contextlib
import ctypes
import gc
import threading
import weakref
from collections.abc import Sequence

__all__ = ["Loan", "ValueViews"]

_collecting = threading.Lock()  # a collection that meets another one under way does nothing at all


class Loan:
    """One view that is out. ``view``: 1-D, format B, of exactly one value."""

    __slots__ = ("_exporter", "view")

    def __init__(self, region: memoryview, offset: int, nbytes: int, *, readonly: bool) -> None:
        array = (ctypes.c_ubyte * nbytes).from_buffer(region, offset)
        self._exporter = weakref.ref(array)
        view = memoryview(array).cast("B")
        self.view = view.toreadonly() if readonly else view

    def take_back(self) -> bool:
        """End the loan; False if the borrower kept the buffer."""
        with contextlib.suppress(BufferError):  # what was made from it cannot be taken away; it shows below
            self.view.release()
        del self.view  # else our own reference would keep the exporter when the borrower has let go of it
        return self.is_free() or _is_garbage(self)

    def is_free(self) -> bool:
        """Say whether nobody holds the buffer any more."""
        return self._exporter() is None


def _is_garbage(loan: Loan) -> bool:
    """Say whether only a cycle (an exception and its traceback, say) still held the buffer, which nobody can reach."""
    with _collecting:
        gc.collect(1)  # it is as young as the call; a full collection can take long in an engine
        if not loan.is_free():
            gc.collect()
    return loan.is_free()


class ValueViews:
    """Cuts views of values out of a region of rows, bounds checked: a slice past the end would be silently short.

    Work on the values of some rows is bracketed by ``begin`` and ``end``, of one thread. Here a value lies in its row
    and they do nothing; see ``staging.py`` for rows that have no room for one.
    """

    def __init__(self, region: memoryview, row_stride: int) -> None:
        self._region = region
        self._row_stride = row_stride
        self._rows = len(region) // row_stride

    def close(self) -> None:
        """Let go of the region; there is nothing to cut from any more."""
        self._region = memoryview(b"")
        self._rows = 0

    def begin(self, rows: Sequence[int], *, filled: bool) -> None:
        """Begin work on the values of these rows; ``filled``: with what the rows hold."""

    def land(self, row: int, nbytes: int) -> None:
        """See that the first ``nbytes`` of this value are in its row."""

    def end(self, *, kept: bool) -> None:
        """End the work; ``kept``: somebody still holds what was lent."""

    def lend(self, row: int, nbytes: int, *, readonly: bool) -> Loan:
        """Lend the value of a row, ``nbytes`` long. IndexError if there is no such row or it is not that long."""
        memory, offset = self._place(row, nbytes)
        return Loan(memory, offset, nbytes, readonly=readonly)

    def own(self, row: int, nbytes: int) -> memoryview:
        """Return core's own writable view of the value of a row, ``nbytes`` long, for sealing and checking."""
        memory, offset = self._place(row, nbytes)
        return memory[offset : offset + nbytes]

    def _place(self, row: int, nbytes: int) -> tuple[memoryview, int]:
        return self._region, self._offset(row, nbytes)

    def _offset(self, row: int, nbytes: int) -> int:
        if not 0 <= row < self._rows or not 0 < nbytes <= self._row_stride:
            raise IndexError(
                f"no {nbytes} bytes in row {row}; rows 0 to {self._rows - 1} have {self._row_stride} bytes"
            )
        return row * self._row_stride
