"""A client's shared memory: bounce rows, through which values of any memory pass, and the region of its caller.

The region lies behind the rows, on a huge page's boundary, or is memory of the caller's own. A value in it is moved
where it lies: its job names its parts, and a row number behind those of the rows, which has no memory.
"""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtiers.api import StartError
from kvtiers.api.units import format_size
from kvtiers.client.buffers import Bytes, Part
from kvtiers.gpu.cuda.buffers import CudaBuffer, CudaBuffers
from kvtiers.region.limits import memory_problem
from kvtiers.region.memfd import HUGE_PAGE_BYTES, create_memfd, detach_in_children, map_memory, prefer_huge_pages
from kvtiers.tier_set import TierRows

__all__ = ["BounceRows", "CallersMemory", "RegionRows", "RowLease", "RowNumbers", "UnmappableMemoryError"]

_LEAST_ROWS = 2
_MOST_IN_REGION = 4_096  # values in flight
_MOST_PARTS = 255  # of a value
_SETTLE_SECONDS = 0.05  # for enough rows for a job of some size; after that, any number will do
_WORTH_A_JOB = 8  # so many jobs use all rows


class RowLease:
    """Rows in use, until each of their holders has released them. Made with one holder. Any thread."""

    __slots__ = ("_holders", "_of", "rows")

    def __init__(self, of: "RowNumbers", rows: Sequence[int]) -> None:
        self._of = of
        self._holders = 1
        self.rows = rows

    def hold(self) -> None:
        """Add a holder."""
        with self._of.changed:
            self._holders += 1

    def another(self, wanted: int) -> "RowLease | None":
        """Return a lease of ``wanted`` further rows, or of some, without waiting; None if none is free."""
        return self._of.spares.take(wanted, 0.0)

    def release(self) -> None:
        """Remove a holder; the rows are free with the last one."""
        with self._of.changed:
            self._holders -= 1
            if not self._holders:
                self._of.free.extend(reversed(self.rows))
                self._of.changed.notify_all()


class RowNumbers:
    """A bounded number of rows, ``count`` from ``first`` on, that are leased."""

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self.changed = threading.Condition()
        # The last one is used next: it is in the processor's cache.
        self.free = [*reversed(range(first, first + count))]
        self.spares = self
        """The rows for another try while a late job still has its own."""
        self._closed = False

    def take(self, wanted: int, until: float) -> RowLease | None:
        """Return a lease of ``wanted`` rows, or of some; None if there is none until then, or after ``end``."""
        least = min(wanted, max(1, self.count // _WORTH_A_JOB))
        settled = min(until, time.monotonic() + _SETTLE_SECONDS)
        with self.changed:
            while len(self.free) < least and not self._closed and (left := settled - time.monotonic()) > 0:
                self.changed.wait(left)
            while not self.free and not self._closed and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)
            if not self.free or self._closed:
                return None
            return RowLease(self, [self.free.pop() for _ in range(min(wanted, len(self.free)))])

    def none(self) -> RowLease:
        """Return a lease of no rows."""
        return RowLease(self, [])

    def end(self) -> None:
        """Lease no further row; calls that wait for one go on without."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()


class UnmappableMemoryError(StartError):
    """A caller's memory that another process cannot map: the client works without it, by bounce rows."""


class CallersMemory:
    """Shared memory of a caller's own, as it has mapped it.

    UnmappableMemoryError in one line if tier hosts cannot map it; StartError if it is empty, or cannot be written. Its
    view is kept, so that no other memory can come to lie at its addresses.
    """

    def __init__(self, fd: int, memory: Any) -> None:
        self.view = memoryview(memory).cast("B")
        array = np.frombuffer(self.view, np.uint8)
        if not array.nbytes or not array.flags.writeable:
            raise StartError("client: region: the caller's memory is empty, or cannot be written")
        self.address = int(array.__array_interface__["data"][0])
        self.at = _offset_in_file(fd, self.address, array.nbytes)
        self._check_mapping(fd, self.at + array.nbytes)
        self._theirs = fd
        self.fd = -1

    @staticmethod
    def _check_mapping(fd: int, nbytes: int) -> None:
        """Map it as a tier host will: the caller may have mapped it before the file was sealed against writes."""
        try:
            map_memory(fd, nbytes, 0).close()
        except StartError as error:
            raise UnmappableMemoryError(f"client: region: descriptor {fd}: {error}") from None

    def keep(self) -> None:
        """Take a descriptor of our own: hosts may be started again when the caller has closed its own."""
        self.fd = os.dup(self._theirs)
        detach_in_children(self)

    def close(self) -> None:
        """Close the descriptor, when no host is started any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    detach = close


def _offset_in_file(fd: int, address: int, nbytes: int) -> int:
    """Return where in the file the memory begins; UnmappableMemoryError if not all of it is a shared mapping of it."""
    try:
        about, found, end = os.fstat(fd), None, address
    except OSError as error:
        raise UnmappableMemoryError(f"client: region: descriptor {fd}: {error}") from None
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
    for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        place, access, offset, where, inode, *_ = line.split()
        start, stop = (int(number, 16) for number in place.split("-"))
        if start <= end < stop:
            if (access[3], where, int(inode)) != ("s", device, about.st_ino):
                break
            at = int(offset, 16) + end - start
            found = at if found is None else found
            if at != found + end - address:
                break
            end = stop
            if end >= address + nbytes and found + nbytes <= about.st_size:
                return found
    raise UnmappableMemoryError(
        f"client: region: the {nbytes} bytes at {address:#x} are no shared mapping of descriptor {fd}; give that "
        "of a memfd or of shm_open, and the memory that was mapped from it"
    )


class BounceRows(RowNumbers):
    """Rows of ``row_stride`` bytes in a memfd, and ``region`` for the caller: so many bytes, or memory of its own.

    They are in no core file. ``in_region``: how many values in the region may be in flight; 0: they pass the rows.
    """

    def __init__(self, count: int, row_stride: int, region: "int | CallersMemory" = 0, in_region: int = 0) -> None:
        count = max(_LEAST_ROWS, count)
        super().__init__(0, count)
        self.row_stride = row_stride
        self.nbytes = count * row_stride
        self._callers = region if isinstance(region, CallersMemory) else None
        region_bytes = region if isinstance(region, int) else 0
        region_at = _round_up(self.nbytes, HUGE_PAGE_BYTES["2MiB"])
        self.map_bytes = region_at + _round_up(region_bytes, mmap.PAGESIZE) if region else self.nbytes
        if problem := memory_problem(self.map_bytes, option="bounce_bytes or region_bytes"):
            raise StartError(f"client: {problem}")
        self._fd = create_memfd("kvtiers-client", self.map_bytes)
        try:
            self._mapping = map_memory(self._fd, self.map_bytes, self.map_bytes)
        except StartError:
            os.close(self._fd)
            raise
        prefer_huge_pages(self._mapping)
        self.cuda = CudaBuffers(self.view, row_stride)
        if self._callers is not None:
            self._callers.keep()
        self._region = slice(region_at, region_at + region_bytes)
        self.in_region: RegionRows | None = None
        if region and in_region:
            self.in_region = RegionRows(self, min(_MOST_IN_REGION, in_region), self._place)
        detach_in_children(self)

    @property
    def _place(self) -> "_RegionPlace":
        callers, at, nbytes = self._callers, self._region.start, len(self.region)
        if callers is None:
            return _RegionPlace(None, at, nbytes, self._mapping.address + at)
        return _RegionPlace(callers.fd, callers.at, nbytes, callers.address)

    @property
    def fd(self) -> int:
        """The memfd, for tier hosts."""
        return self._fd

    @property
    def view(self) -> memoryview:
        """All rows. ValueError after ``close``."""
        return self._mapping.view[: self.nbytes]

    @property
    def region(self) -> memoryview:
        """The caller's memory. ValueError after ``close``."""
        if self._callers is not None:
            return self._callers.view
        # An empty slice would keep the memory mapped as well.
        return self._mapping.view[self._region] if self._region.start < self._region.stop else memoryview(b"")

    def row(self, number: int, nbytes: int) -> Bytes:
        """Return the first bytes of a row."""
        return np.frombuffer(self._mapping.view, np.uint8, nbytes, number * self.row_stride)

    def for_tiers(self, sizes: Sequence[tuple[int, int]], *, core_dumps: bool) -> TierRows:
        """Return the rows as tiers see them. ``sizes``, ``core_dumps``: as there."""
        callers = None
        if self.in_region is not None:
            place = self.in_region.place
            callers = {"fd": place.fd, "at": place.at, "nbytes": place.nbytes}
        return TierRows(self.view, self.row_stride, sizes, self._fd, self.map_bytes, core_dumps, callers)

    def in_words(self) -> str:
        """Return what there is instead of a primary, for the start line."""
        caller = f" and {format_size(len(self.region))} of the caller's" if len(self.region) else ""
        return f"none, but {format_size(self.nbytes)} of bounce rows{caller}"

    def end(self) -> None:
        """Lease no further row, nor one of the region's."""
        super().end()
        if self.in_region is not None:
            self.in_region.end()

    def close(self) -> None:
        """Release the memory, after ``end``; a call that is copying keeps it mapped until it has done so."""
        self.cuda.close()
        if self._callers is not None:
            self._callers.close()
        self._mapping.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def detach(self) -> None:
        """Close the memfd in a forked child."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _RegionPlace(NamedTuple):
    """Where a region lies: in the file of a descriptor (None: that of the rows), and in this process's memory."""

    fd: int | None
    at: int
    nbytes: int
    address: int


class RegionRows(RowNumbers):
    """The row numbers of values in a caller's region: as many as may be in flight."""

    def __init__(self, rows: BounceRows, count: int, place: _RegionPlace) -> None:
        super().__init__(rows.count, count)
        self.spares = rows
        self.place = place
        self._begin, self._end = place.address, place.address + place.nbytes

    def parts_of(self, value: Sequence[Part]) -> list[tuple[int, int]] | None:
        """Return where the parts of a value lie in the region; None unless all of them lie in the caller's region.

        Parts that follow each other are one.
        """
        found: list[tuple[int, int]] = []
        for part in value:
            if not part.nbytes:
                continue
            if isinstance(part, CudaBuffer):
                return None
            start = part.__array_interface__["data"][0]
            if not self._begin <= start <= self._end - part.nbytes:
                return None
            start -= self._begin
            if found and sum(found[-1]) == start:
                found[-1] = found[-1][0], found[-1][1] + part.nbytes
            elif len(found) == _MOST_PARTS:
                return None
            else:
                found.append((start, part.nbytes))
        return found


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
