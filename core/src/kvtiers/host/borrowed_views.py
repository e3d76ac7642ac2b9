"""Views of values, lent to a store for the length of one call.

A fresh exporter (an array over the region) stands behind the views of a call. If it is still alive after the call,
somebody kept a buffer, and could read or write the row when it is another chunk's. Releasing the views alone would not
show that: a slice of one, or an array made from it, lives on.

The arrays are of ctypes, not of numpy, which would bring a pool of threads of its own into every tier host.
"""

import contextlib
import ctypes
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Sequence

__all__ = ["Loan", "ValueViews"]

_collecting = threading.Lock()  # a collection that meets another one under way does nothing at all


@functools.lru_cache(16)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * nbytes  # a new class otherwise each time, for the garbage collector to find


class Loan:
    """Views that are out together. ``views``: each 1-D, format B, of exactly one value, at (offset, length)."""

    __slots__ = ("_exporter", "views")

    def __init__(self, region: memoryview, places: Sequence[tuple[int, int]], *, readonly: bool) -> None:
        array = _array_type(len(region)).from_buffer(region)
        self._exporter = weakref.ref(array)
        whole = memoryview(array).cast("B")
        if readonly:
            whole = whole.toreadonly()
        self.views = [whole[offset : offset + nbytes] for offset, nbytes in places]

    def take_back(self) -> bool:
        """End the loan; False if the borrower kept a buffer."""
        for view in self.views:
            with contextlib.suppress(BufferError):  # what was made from it cannot be taken away; it shows below
                view.release()
        self.views = []  # else our own references would keep the exporter when the borrower has let go of it
        return self.is_free() or _is_garbage(self)

    def is_free(self) -> bool:
        """Say whether nobody holds a buffer any more."""
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
    and they do nothing; see ``bounce_buffers.py`` for rows that have no room for one.
    """

    are_beside_rows = False
    """Whether a row is touched by ``land`` alone."""

    def __init__(self, region: memoryview, row_stride: int) -> None:
        self._region = region
        self._row_stride = row_stride
        self._rows = len(region) // row_stride
        self._derived: list[ValueViews] = []

    def derive(self, kind: Callable[[memoryview, int, int], "ValueViews"], value_bytes: int) -> "ValueViews":
        """Return other views of the same rows, which are closed together with these."""
        derived = kind(self._region, self._row_stride, value_bytes)
        self._derived.append(derived)
        return derived

    def close(self) -> None:
        """Release the region; there is nothing to cut from any more."""
        for derived in self._derived:
            derived.close()
        self._region = memoryview(b"")
        self._rows = 0

    def begin(self, rows: Sequence[int], *, filled: bool) -> None:
        """Begin work on the values of these rows; ``filled``: with what the rows hold."""

    def land(self, row: int, nbytes: int) -> None:
        """See that the first ``nbytes`` of this value are in its row."""

    def end(self, *, kept: bool) -> None:
        """End the work; ``kept``: somebody still holds what was lent."""

    def lend(self, rows: Sequence[int], sizes: Sequence[int], *, readonly: bool) -> Loan:
        """Lend the values of rows, so many bytes each. IndexError if there is no such row or it is not that long."""
        memory, offsets = self._places(rows, sizes)
        return Loan(memory, [*zip(offsets, sizes, strict=True)], readonly=readonly)

    def own(self, rows: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Return core's own writable views of the values of rows, for sealing and checking."""
        memory, offsets = self._places(rows, sizes)
        return [memory[offset : offset + nbytes] for offset, nbytes in zip(offsets, sizes, strict=True)]

    def _places(self, rows: Sequence[int], sizes: Sequence[int]) -> tuple[memoryview, list[int]]:
        return self._region, [self._offset(row, nbytes) for row, nbytes in zip(rows, sizes, strict=True)]

    def _offset(self, row: int, nbytes: int) -> int:
        if not 0 <= row < self._rows or not 0 < nbytes <= self._row_stride:
            raise IndexError(
                f"no {nbytes} bytes in row {row}; rows 0 to {self._rows - 1} have {self._row_stride} bytes"
            )
        return row * self._row_stride
