"""Borrowed views: views of values that a store may use for the length of one call, and the check that it kept none.

A new exporter (an array over the region) stands behind the views of each call. If it is still alive after the call,
the store kept a buffer, and could read or write the row when it is another chunk's. Releasing the views alone would not
show that: a slice of one, or an array made from it, lives on. The views themselves are watched as well: one that is
kept is released, but what the store meant to do with it fails later, and elsewhere.

The arrays are of ctypes, not of numpy, which would bring a pool of threads of its own into every tier host.
"""

import contextlib
import ctypes
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["LentValues", "Loan", "Place", "ValueViews"]

Place = tuple[memoryview, int, int]
"""Memory, and an offset and a length in it."""

_RETURN_SECONDS = 0.02  # a pool's thread holds its task's arguments for a moment after it has given the result
_collecting = threading.Lock()  # a garbage collection that starts while another one runs does nothing at all


@functools.lru_cache(16)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * nbytes  # a new class otherwise each time, for the garbage collector to find


class Loan:
    """The views of one call. ``views``: each 1-D, format B, of exactly one value, at (offset, length)."""

    __slots__ = ("_borrowed", "_exporter", "views")

    def __init__(self, region: memoryview, places: Sequence[tuple[int, int]], *, readonly: bool) -> None:
        array = _array_type(len(region)).from_buffer(region)
        self._exporter = weakref.ref(array)
        whole = memoryview(array).cast("B")
        if readonly:
            whole = whole.toreadonly()
        self.views = [whole[offset : offset + nbytes] for offset, nbytes in places]
        self._borrowed = [weakref.ref(view) for view in self.views]

    def take_back(self) -> bool:
        """End the loan; False if the store kept a view, or a buffer made from one.

        A view that was kept is released, so that it is of no use to the store any more; what was made from it cannot
        be taken away, and holds the memory until it is gone (``is_free``). May wait for some hundredths of a second
        where something is still held: another thread may be about to drop it, or a cycle has to be collected.
        """
        self.views = []  # else our own references would keep the exporter when the store has dropped it
        if self.is_free():
            return True
        for borrowed in self._borrowed:
            if (view := borrowed()) is not None:
                with contextlib.suppress(BufferError):  # something was made from it, which shows below
                    view.release()
                del view
        return self._is_returned()

    def is_free(self) -> bool:
        """Return whether nothing holds the memory any more; a view that has been released does not."""
        return self._exporter() is None

    def _is_returned(self) -> bool:
        """Return whether views and buffers are all gone, as soon as they are, at the latest after a moment."""
        borrowed: list[weakref.ref[Any]] = [*self._borrowed, self._exporter]
        out = [ref for ref in borrowed if ref() is not None]
        until = time.monotonic() + _RETURN_SECONDS
        if all(_ends(ref, until - time.monotonic()) for ref in out):
            return True
        with _collecting:
            gc.collect(1)  # a cycle is as young as the call; a full collection can take long in an engine
            if any(ref() is not None for ref in out):
                gc.collect()
        return all(ref() is None for ref in out)


def _ends(ref: "weakref.ref[Any]", seconds: float) -> bool:
    """Wait until what this refers to is gone; False if that takes longer."""
    gone = threading.Event()
    thing = ref()
    if thing is None:
        return True
    watch = weakref.ref(thing, lambda _: gone.set())
    del thing
    gone.wait(max(0.0, seconds))
    return watch() is None


class LentValues:
    """The views of one call, as of a ``Loan``, of values each of which may lie in several places."""

    __slots__ = ("_loans", "views")

    def __init__(self, values: Sequence[Sequence[Place]], *, readonly: bool) -> None:
        if len(values) == 1 and len(values[0]) == 1:  # as of most stores: a value a call, in its row
            memory, offset, nbytes = values[0][0]
            self._loans = [Loan(memory, [(offset, nbytes)], readonly=readonly)]
            self.views = [[*self._loans[0].views]]
            return
        memories: dict[int, tuple[memoryview, list[tuple[int, int]]]] = {}
        for places in values:
            for memory, offset, nbytes in places:
                memories.setdefault(id(memory), (memory, []))[1].append((offset, nbytes))
        loans = {key: Loan(memory, spans, readonly=readonly) for key, (memory, spans) in memories.items()}
        views = {key: iter([*loan.views]) for key, loan in loans.items()}
        self._loans = [*loans.values()]
        self.views = [[next(views[id(memory)]) for memory, _, _ in places] for places in values]

    def take_back(self) -> bool:
        """End the loan; False if the store kept a view, or a buffer made from one."""
        self.views = []
        returned = [loan.take_back() for loan in self._loans]
        return all(returned)

    def is_free(self) -> bool:
        """Return whether nothing holds the memory any more; a view that has been released does not."""
        return all(loan.is_free() for loan in self._loans)


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
        """Return views of another kind over the same rows; closing these closes them, too."""
        derived = kind(self._region, self._row_stride, value_bytes)
        self._derived.append(derived)
        return derived

    def close(self) -> None:
        """Release the region. No view can be made after this."""
        for derived in self._derived:
            derived.close()
        self._region = memoryview(b"")
        self._rows = 0

    def begin(self, rows: Sequence[int], parts: Sequence[Sequence[tuple[int, int]]] = ()) -> None:
        """Begin work on the values of these rows. ``parts``: where they lie instead, in a client's region."""

    def view_count(self, row: int, payload: int) -> int:  # noqa: ARG002 -- as those where it depends on them
        """Return in how many places a value lies that is written."""
        return 1

    def join(self, row: int, payload: int) -> None:
        """Make a value that is about to be written contiguous."""

    def set_joined(self, row: int) -> None:
        """Have the bytes of ``own`` be the value that is written."""

    def parts(self, row: int, payload: int, nbytes: int) -> tuple[list[memoryview], memoryview]:
        """Return core's own views of a value that is written: of its payload, and of memory for the sealed value."""
        at = self._offset(row, nbytes)
        return [self._region[at : at + payload]], self._region[at : at + nbytes]

    def places(self, row: int, payload: int, nbytes: int) -> list[Place]:  # noqa: ARG002 -- as above
        """Return where a value lies that is written."""
        return [(self._region, self._offset(row, nbytes), nbytes)]

    def land(self, row: int, payload: int) -> None:
        """Put the payload of this value into its row, if it is not there."""

    def end(self, *, kept: bool) -> None:
        """End the work; ``kept``: a store still holds a borrowed view."""

    def borrow(self, rows: Sequence[int], sizes: Sequence[int], *, readonly: bool) -> Loan:
        """Return a loan of rows' values, so many bytes each. IndexError if a row is not there, or not that long."""
        memory, offsets = self.memory_of(rows, sizes)
        return Loan(memory, [*zip(offsets, sizes, strict=True)], readonly=readonly)

    def own(self, rows: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Return core's own writable views of the values of rows, for sealing and checking."""
        memory, offsets = self.memory_of(rows, sizes)
        return [memory[offset : offset + nbytes] for offset, nbytes in zip(offsets, sizes, strict=True)]

    def memory_of(self, rows: Sequence[int], sizes: Sequence[int]) -> tuple[memoryview, list[int]]:
        """Return the memory that the values of rows are sealed, read and checked in, and each one's offset there."""
        return self._region, [self._offset(row, nbytes) for row, nbytes in zip(rows, sizes, strict=True)]

    def _offset(self, row: int, nbytes: int) -> int:
        if not 0 <= row < self._rows or not 0 < nbytes <= self._row_stride:
            raise IndexError(
                f"no {nbytes} bytes in row {row}; rows 0 to {self._rows - 1} have {self._row_stride} bytes"
            )
        return row * self._row_stride
