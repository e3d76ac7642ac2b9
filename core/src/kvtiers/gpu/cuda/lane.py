"""A lane of CUDA copies: its streams, its staging slots, and the order of its pieces.

Staged, to the host (to the GPU it is the same the other way round)::

    slot's stream     gather piece 1 into slot A .............. gather piece 4 into A
    slot's stream     gather piece 2 into slot B
    lane's stream     rows of piece 1 out of A, rows of piece 2 out of B, ...

The kernel between tensors and slots takes microseconds and runs at high priority, so that it starts when one of the
engine's kernels ends, and every slot has a stream of its own, so that all free slots are filled then. The
copy engine moves the rows and holds no multiprocessor. Everything is ordered by events, on the device.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvtiers.gpu.copy_plan import Indexes
from kvtiers.gpu.cuda.driver import CudaDriver, KernelParams
from kvtiers.gpu.cuda.geometry import Copies, GroupGeometry
from kvtiers.gpu.cuda.pieces import Piece

if TYPE_CHECKING:
    import torch

__all__ = ["CudaLane", "KernelGroup", "UnitTable"]

_THREADS = 512
_HIGH_PRIORITY = -1
_SLOT_ALIGN = 4096
_AHEAD = 4  # pieces without a slot that may be in flight: more would keep an expedited load waiting
_STAGED_AHEAD = 24
"""Staged pieces that may be in flight, however few slots there are: on the device each waits for its slot by itself.

A busy engine keeps the interpreter for 5 ms (Python's switch interval) before this thread gets it again. A piece takes
0.55 ms on a link of 55 GB/s, so four pieces ahead left the link idle for more than half of the time, and 24 cover two
such waits. More would keep an expedited load waiting, and fill the driver's queue, whose calls then block.
"""

_Descriptors: TypeAlias = tuple[Indexes, Indexes, Indexes]
"""Destinations, sources and lengths of copies."""


class UnitTable:
    """The kernel's table of units, in GPU memory."""

    def __init__(self, table: "torch.Tensor") -> None:
        self._table = table  # keeps it alive
        self.address, self.count = table.data_ptr(), len(table)


@dataclass(frozen=True, slots=True, eq=False)
class KernelGroup:
    """A KV group's geometry and its tables of units, for rows and for images."""

    geometry: GroupGeometry
    row_units: UnitTable
    image_units: UnitTable


@dataclass(slots=True, eq=False)
class _Slot:
    """A part of the ring, its stream, and its events: filled, and free again."""

    address: int
    stream: Any
    filled: int
    free: int
    used: bool = False


class CudaLane:
    """Launches pieces in order, into rows or out of them. Used by one thread, which has entered the driver.

    ``region``: the address of row 0. ``ring``: GPU memory for so many slots. ``urgent``: one stream, of high priority.
    Streams are few on purpose: the device has few queues, and streams that share one wait for each other.
    """

    def __init__(
        self,
        driver: CudaDriver,
        ring: "torch.Tensor",
        *,
        to_rows: bool,
        slots: int,
        urgent: bool,
        staging_programs: int,
        direct_programs: int,
    ) -> None:
        import torch  # late, as in all modules here: kvtiers imports without torch

        self.region = 0
        self.to_rows = to_rows
        self.slot_bytes = len(ring) // slots // _SLOT_ALIGN * _SLOT_ALIGN
        self._driver = driver
        self._ring = ring
        self._staging_programs, self._direct_programs = staging_programs, direct_programs
        own = torch.cuda.Stream(ring.device, priority=_HIGH_PRIORITY if urgent else 0)
        streams = [own if urgent else torch.cuda.Stream(ring.device, priority=_HIGH_PRIORITY) for _ in range(slots)]
        self._streams = [own, *streams]
        self.stream: int = own.cuda_stream
        with driver.current():
            self._slots = [
                _Slot(ring.data_ptr() + i * self.slot_bytes, stream.cuda_stream, driver.new_event(), driver.new_event())
                for i, stream in enumerate(streams)
            ]
        self._next = 0
        self._pieces: deque[tuple[int, _Descriptors | None]] = deque()
        self._spare: list[int] = []
        self._spare_timed: list[int] = []
        self._params = KernelParams()
        self._entries = np.frombuffer(self._params.entries, np.uint32).reshape(-1, 3)

    # -- pieces

    def staged(self, group: KernelGroup, piece: Piece, mark: int, *, pinned: bool) -> None:
        """Move one piece through the next slot. The device, not this thread, waits until the slot is free."""
        self._make_room(_STAGED_AHEAD)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        driver = self._driver
        image_bytes = group.geometry.block_bytes * piece.per_tensor
        first, second = (slot.stream, self.stream) if self.to_rows else (self.stream, slot.stream)
        if slot.used:
            driver.order_after(first, slot.free)
        driver.order_after(slot.stream, mark)
        if self.to_rows:
            self._launch(slot.address, image_bytes, group.image_units, piece, self._staging_programs, slot.stream)
        else:
            self._launched(self._copy(piece.row_copies(group.geometry), slot.address, pinned=pinned))
        driver.record(slot.filled, first)
        driver.order_after(second, slot.filled)
        if self.to_rows:
            self._launched(self._copy(piece.row_copies(group.geometry), slot.address, pinned=pinned))
        else:
            self._launch(slot.address, image_bytes, group.image_units, piece, self._staging_programs, slot.stream)
        driver.record(slot.free, second)
        slot.used = True

    def direct(self, group: KernelGroup, piece: Piece, mark: int) -> None:
        """Copy by the kernel, directly to or from pinned rows."""
        self._make_room(_AHEAD)
        self._driver.order_after(self.stream, mark)
        row_0 = self.region + group.geometry.cell_offset
        self._launch(row_0, group.geometry.row_stride, group.row_units, piece, self._direct_programs, self.stream)
        self._launched()

    def pages(self, geometry: GroupGeometry, piece: Piece, mark: int, *, pinned: bool) -> None:
        """Copy page by page with the copy engine, without a slot."""
        self._make_room(_AHEAD)
        self._driver.order_after(self.stream, mark)
        self._launched(self._copy(piece.page_copies(geometry), pinned=pinned))

    # -- beginnings and ends

    def begin_event(self) -> int:
        """Return a timed event before what this lane launches next."""
        return self._timed(self.stream)

    def end_event(self) -> int:
        """Return a timed event after everything that this lane has launched."""
        if self.to_rows:
            return self._timed(self.stream)
        # On a slot's stream, so that the next job's rows need not wait for this one's kernels.
        last = self._slots[self._next - 1].stream
        copied = self._spare.pop() if self._spare else self._driver.new_event()
        self._driver.record(copied, self.stream)
        for event in (copied, *(slot.free for slot in self._slots if slot.used)):
            self._driver.order_after(last, event)
        self._spare.append(copied)
        return self._timed(last)

    def has_ended(self, event: int) -> bool:
        """Return whether all before this event has ended, without waiting. Any thread."""
        return self._driver.has_ended(event)

    def wait(self, event: int) -> None:
        """Wait for all before this event. Any thread."""
        self._driver.wait(event)

    def recycle(self, begin: int, end: int) -> float:
        """Return the seconds between a job's two events, and recycle the events. Any thread."""
        seconds = self._driver.seconds_between(begin, end)
        self._spare_timed += (begin, end)
        return seconds

    def give_up(self, *events: int) -> None:
        """Recycle the events of a failed job that has nothing in flight any more. Any thread."""
        self._spare_timed += events

    def is_idle(self) -> bool:
        """Return whether everything that was launched has ended, without waiting. Any thread."""
        return all(self._driver.is_idle(stream.cuda_stream) for stream in self._streams)

    def settle(self) -> None:
        """Wait for everything that was launched. Any thread."""
        for stream in self._streams:
            self._driver.synchronize(stream.cuda_stream)

    # -- one call each

    def _timed(self, stream: int) -> int:
        event = self._spare_timed.pop() if self._spare_timed else self._driver.new_event(timed=True)
        self._driver.record(event, stream)
        return event

    def _launch(self, base: int, stride: int, units: UnitTable, piece: Piece, programs: int, stream: int) -> None:
        """Launch the kernel; row (or image) i of the piece's entries starts at ``base + i * stride``."""
        params, entries = self._params, piece.entries
        params.base, params.row_stride = base, stride
        params.units, params.num_units = units.address, units.count
        params.num_entries, params.into_rows = len(entries), self.to_rows
        params.places, params.first = piece.per_tensor, piece.first
        self._entries[: len(entries)] = entries
        self._driver.launch(params, programs, _THREADS, stream)

    def _copy(self, copies: Copies, base: int = 0, *, pinned: bool) -> _Descriptors:
        """Begin these copies, the other side's offsets from ``base`` on; what is returned lives as long as they run."""
        rows, others = copies.rows + self.region, copies.others + base
        to, source = (rows, others) if self.to_rows else (others, rows)
        if pinned:
            # Rows are not written to while they are loaded from; blocks and slots are, by copies in flight.
            self._driver.copy_batch(to, source, copies.nbytes, self.stream, source_is_settled=not self.to_rows)
        else:
            # Without pinning a copy waits inside the driver for the work before it, and every other call of the driver
            # then waits with it, an engine's too: so the earlier work is awaited first.
            self._driver.synchronize(self.stream)
            self._driver.copy_each(to, source, copies.nbytes, self.stream)
        return to, source, copies.nbytes

    def _make_room(self, most: int) -> None:
        """Wait until fewer pieces than ``most`` are in flight."""
        while len(self._pieces) >= most:
            oldest, _ = self._pieces[0]
            if not self._driver.has_ended(oldest):
                self._driver.wait(oldest)
            self._pieces.popleft()
            self._spare.append(oldest)

    def _launched(self, descriptors: _Descriptors | None = None) -> None:
        event = self._spare.pop() if self._spare else self._driver.new_event()
        self._driver.record(event, self.stream)
        self._pieces.append((event, descriptors))
