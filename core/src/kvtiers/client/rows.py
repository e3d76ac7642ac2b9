"""A client's shared memory: bounce rows, the claims on its caller's values, and the memory that these lie in.

::

    rows      a bounded number of bounce rows, through which values of any memory pass
    claims    records of 4 KiB, each of a value in the caller's region, for one call (``region/claims.py``); their row
              numbers follow those of the rows
    region    the caller's own, on a huge page's boundary; empty where none was asked for
"""

import mmap
import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvtiers.api import StartError
from kvtiers.api.units import format_size
from kvtiers.client.buffers import Bytes
from kvtiers.region.claims import RECORD_BYTES, ClaimTable
from kvtiers.region.limits import memory_problem
from kvtiers.region.memfd import HUGE_PAGE_BYTES, create_memfd, detach_in_children, map_memory, prefer_huge_pages
from kvtiers.tier_set import TierRows

__all__ = ["BounceRows", "Claims", "RowLease", "RowNumbers"]

_LEAST_ROWS = 2
_MOST_CLAIMS = 4_096
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


class BounceRows(RowNumbers):
    """Rows of ``row_stride`` bytes in a memfd, and ``region_bytes`` for the caller. They are in no core file.

    ``claims``: so many; None where there are none, or the caller has no memory here.
    """

    def __init__(self, count: int, row_stride: int, region_bytes: int = 0, claims: int = 0) -> None:
        count = max(_LEAST_ROWS, count)
        super().__init__(0, count)
        self.row_stride = row_stride
        self.nbytes = count * row_stride
        claims = min(_MOST_CLAIMS, claims) if region_bytes else 0
        at = _round_up(self.nbytes, RECORD_BYTES)
        region_at = _round_up(at + claims * RECORD_BYTES, HUGE_PAGE_BYTES["2MiB"])
        self.map_bytes = region_at + _round_up(region_bytes, mmap.PAGESIZE) if region_bytes else self.nbytes
        if problem := memory_problem(self.map_bytes, option="bounce_bytes or region_bytes"):
            raise StartError(f"client: {problem}")
        self._fd = create_memfd("kvtiers-client", self.map_bytes)
        try:
            self._mapping = map_memory(self._fd, self.map_bytes, self.map_bytes)
        except StartError:
            os.close(self._fd)
            raise
        prefer_huge_pages(self._mapping)
        self._region = slice(region_at, region_at + region_bytes)
        self.claims: Claims | None = None
        if claims:
            place = {"first": count, "at": at, "count": claims, "parts_from": region_at}
            self.claims = Claims(self, self._fd, self._mapping.view, self._mapping.address, place)
        detach_in_children(self)

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
        # An empty slice would keep the memory mapped as well.
        return self._mapping.view[self._region] if self._region.start < self._region.stop else memoryview(b"")

    def row(self, number: int, nbytes: int) -> Bytes:
        """Return the first bytes of a row."""
        return np.frombuffer(self._mapping.view, np.uint8, nbytes, number * self.row_stride)

    def for_tiers(self, sizes: Sequence[tuple[int, int]], *, core_dumps: bool) -> TierRows:
        """Return the rows as tiers see them. ``sizes``, ``core_dumps``: as there."""
        claims = self.claims.place if self.claims is not None else None
        return TierRows(self.view, self.row_stride, sizes, self._fd, self.map_bytes, core_dumps, claims)

    def in_words(self) -> str:
        """Return what there is instead of a primary, for the start line."""
        caller = f" and {format_size(len(self.region))} of the caller's" if len(self.region) else ""
        return f"none, but {format_size(self.nbytes)} of bounce rows{caller}"

    def end(self) -> None:
        """Lease no further row, nor claim."""
        super().end()
        if self.claims is not None:
            self.claims.end()

    def close(self) -> None:
        """Release the memory, after ``end``; a call that is copying keeps it mapped until it has done so."""
        if self.claims is not None:
            self.claims.table.close()
        self._mapping.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def detach(self) -> None:
        """Close the memfd in a forked child."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Claims(RowNumbers):
    """The claims on values in a caller's region. ``place``: the other arguments of ``ClaimTable``, for the hosts."""

    def __init__(self, rows: BounceRows, fd: int, memory: memoryview, address: int, place: dict[str, int]) -> None:
        super().__init__(place["first"], place["count"])
        self.spares = rows
        self.place = place
        self.table = ClaimTable(fd, memory, **place)
        self._begin, self._end = address + place["parts_from"], address + len(memory)
        self._address = address

    def parts_of(self, value: Sequence[Bytes]) -> list[tuple[int, int]] | None:
        """Return where the parts of a value lie in the memory; None unless all of them lie in the caller's region.

        Parts that follow each other are one.
        """
        found: list[tuple[int, int]] = []
        for part in value:
            if not part.nbytes:
                continue
            start = part.__array_interface__["data"][0]
            if not self._begin <= start <= self._end - part.nbytes:
                return None
            start -= self._address
            if found and sum(found[-1]) == start:
                found[-1] = found[-1][0], found[-1][1] + part.nbytes
            elif len(found) == ClaimTable.MOST_PARTS:
                return None
            else:
                found.append((start, part.nbytes))
        return found


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
