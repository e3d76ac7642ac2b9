"""Bounce buffers: values beside the rows, for rows without room for a seal and for seals that only one store writes.

Each thread has memory for the values that it works on at a time. The seal of a value that is stored is made there, and
the payload is written from its row; it is copied beside the seal first where the value has to lie in one place. A load
is read there, checked, and only what is sound is copied into its row. Half a value, or a damaged one, never touches
such a row. Values in a client's region are moved in the same way: their parts take the place of the row.

As that copy is all that touches the row, the rows of a load that is given up can be released before its calls of the
store have ended: its row fence (``row_fence.py``) lets no further value land.
"""

import ctypes
import threading
from collections.abc import Sequence

from kvtiers.layout.borrowed_views import Place, ValueViews
from kvtiers.region.memfd import HUGE_PAGE_BYTES, Mapping, prefer_huge_pages

__all__ = ["BounceBufferViews", "beside_rows", "copy_memory", "value_views"]


def value_views(region: memoryview, row_stride: int, value_bytes: int) -> ValueViews:
    """Return the views of a region of rows whose largest value has ``value_bytes``: in the rows, if they fit."""
    return (
        ValueViews(region, row_stride)
        if value_bytes <= row_stride
        else BounceBufferViews(region, row_stride, value_bytes)
    )


def beside_rows(views: ValueViews, value_bytes: int) -> ValueViews:
    """Return views of the same rows, each value of which lies outside of its row. Closed with ``views``.

    Two stores may be writing one row at the same time: only stores that write the very same seal may share its bytes.
    """
    return views if views.are_beside_rows else views.derive(BounceBufferViews, value_bytes)


_NO_MEMORY = memoryview(b"")


class _Stage(threading.local):
    """One thread's bounce buffers, the place of each row's value in them, and the rows whose values lie there whole.

    ``parts``: where a row's value lies in the client's region, if it does.
    """

    memory: Mapping | None = None
    places: dict[int, int] = {}  # noqa: RUF012 -- replaced, never changed in place
    parts: dict[int, Sequence[tuple[int, int]]] = {}  # noqa: RUF012 -- as above
    joined: frozenset[int] = frozenset()


class BounceBufferViews(ValueViews):
    """Views of values in memory of the calling thread. ``callers``: the region of a client's caller, if it has one."""

    are_beside_rows = True

    def __init__(self, region: memoryview, row_stride: int, value_bytes: int, callers: memoryview = _NO_MEMORY) -> None:
        super().__init__(region, row_stride)
        self._callers = callers
        self._value_bytes = value_bytes
        self._stage = _Stage()

    def close(self) -> None:
        """Release the memory."""
        super().close()
        self._callers = _NO_MEMORY

    def begin(self, rows: Sequence[int], parts: Sequence[Sequence[tuple[int, int]]] = ()) -> None:
        """Give each row's value a place."""
        stage, nbytes = self._stage, len(rows) * self._value_bytes
        if stage.memory is None or stage.memory.nbytes < nbytes:
            size = _round_up(nbytes)
            stage.memory = Mapping(-1, size, size)
            # A disk reads into whole stretches of memory far faster than into single pages.
            prefer_huge_pages(stage.memory)
        stage.places = {row: index * self._value_bytes for index, row in enumerate(rows)}
        stage.parts = dict(zip(rows, parts, strict=False))
        stage.joined = frozenset()

    def view_count(self, row: int, payload: int) -> int:
        """Return in how many places a value lies that is written: its payload's, and that of the rest."""
        return 1 if row in self._stage.joined else 1 + len(self._payload(row, payload))

    def join(self, row: int, payload: int) -> None:
        """Copy a value's payload to where its seal is."""
        if row in self._stage.joined:
            return
        memory, at = self._beside(row, payload)
        for region, offset, nbytes in self._payload(row, payload):
            copy_memory(region, offset, memory, at, nbytes)
            at += nbytes
        self.set_joined(row)

    def set_joined(self, row: int) -> None:
        """Have the bytes of the bounce buffer, as of ``own``, be the value that is written."""
        self._stage.joined |= {row}

    def parts(self, row: int, payload: int, nbytes: int) -> tuple[list[memoryview], memoryview]:
        """Return core's own views of a value that is written: of its payload, and of memory for the sealed value."""
        memory, at = self._beside(row, nbytes)
        parts = [(memory, at, payload)] if row in self._stage.joined else self._payload(row, payload)
        return [region[offset : offset + length] for region, offset, length in parts], memory[at : at + nbytes]

    def places(self, row: int, payload: int, nbytes: int) -> list[Place]:
        """Return where a value lies that is written."""
        memory, at = self._beside(row, nbytes)
        if row in self._stage.joined:
            return [(memory, at, nbytes)]
        return [*self._payload(row, payload), (memory, at + payload, nbytes - payload)]

    def _payload(self, row: int, payload: int) -> list[Place]:
        """Return where the payload lies that is stored or loaded; IndexError if it is not all there."""
        if not (parts := self._stage.parts.get(row)):
            return [(self._region, self._offset(row, payload), payload)]
        end = len(self._callers)
        if sum(nbytes for _, nbytes in parts) != payload or not all(0 < nbytes <= end - at for at, nbytes in parts):
            raise IndexError(f"a value of {payload} bytes does not lie in these parts of {end} bytes")
        return [(self._callers, at, nbytes) for at, nbytes in parts]

    def _beside(self, row: int, nbytes: int) -> tuple[memoryview, int]:
        memory, [at] = self.memory_of([row], [nbytes])
        return memory, at

    def land(self, row: int, payload: int) -> None:
        """Copy the payload of the value into the row, or into its parts."""
        memory, at = self._beside(row, payload)
        for region, offset, nbytes in self._payload(row, payload):
            copy_memory(memory, at, region, offset, nbytes)
            at += nbytes

    def end(self, *, kept: bool) -> None:
        """Forget the places; memory that a store still holds stays allocated until it drops it."""
        self._stage.places, self._stage.parts = {}, {}
        if kept:
            self._stage.memory = None

    def memory_of(self, rows: Sequence[int], sizes: Sequence[int]) -> tuple[memoryview, list[int]]:
        """Return the calling thread's bounce buffer, and the offset of each row's value in it."""
        if not all(0 < nbytes <= self._value_bytes for nbytes in sizes):
            raise IndexError(f"no {sorted(set(sizes))} bytes in a value of {self._value_bytes}")
        assert self._stage.memory is not None, "not begun"
        return self._stage.memory.view, [self._stage.places[row] for row in rows]


def _round_up(nbytes: int) -> int:
    """Return whole huge pages, which the kernel aligns to such pages."""
    page = HUGE_PAGE_BYTES["2MiB"]
    return -(-nbytes // page) * page


def copy_memory(source: memoryview, source_at: int, target: memoryview, target_at: int, nbytes: int) -> None:
    """Copy without holding the GIL: other threads are serving the store meanwhile."""
    array = ctypes.c_ubyte * nbytes
    ctypes.memmove(array.from_buffer(target, target_at), array.from_buffer(source, source_at), nbytes)
