"""Bounce rows: a bounded number of rows in shared memory, between callers' memory and the tiers."""

import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvtiers.api import StartError
from kvtiers.client.buffers import Bytes
from kvtiers.region.limits import memory_problem
from kvtiers.region.memfd import create_memfd, detach_in_children, map_memory, prefer_huge_pages

__all__ = ["BounceRows", "RowLease"]

_LEAST_ROWS = 2
_SETTLE_SECONDS = 0.05  # for enough rows for a job of some size; after that, any number will do
_WORTH_A_JOB = 8  # so many jobs use all rows


class RowLease:
    """Rows in use, until each of their holders has released them. Made with one holder. Any thread."""

    __slots__ = ("_holders", "_of", "rows")

    def __init__(self, of: "BounceRows", rows: Sequence[int]) -> None:
        self._of = of
        self._holders = 1
        self.rows = rows

    def hold(self) -> None:
        """Add a holder."""
        with self._of.changed:
            self._holders += 1

    def another(self, wanted: int) -> "RowLease | None":
        """Return a lease of ``wanted`` further rows, or of some, without waiting; None if none is free."""
        return self._of.take(wanted, 0.0)

    def release(self) -> None:
        """Remove a holder; the rows are free with the last one."""
        with self._of.changed:
            self._holders -= 1
            if not self._holders:
                self._of.free.extend(reversed(self.rows))
                self._of.changed.notify_all()


class BounceRows:
    """Rows of ``row_stride`` bytes in a memfd. They are in no core file."""

    def __init__(self, count: int, row_stride: int) -> None:
        self.count = max(_LEAST_ROWS, count)
        self.row_stride = row_stride
        nbytes = self.count * row_stride
        if problem := memory_problem(nbytes):
            raise StartError(f"client: {problem}")
        self._fd = create_memfd("kvtiers-client", nbytes)
        try:
            self._mapping = map_memory(self._fd, nbytes, nbytes)
        except StartError:
            os.close(self._fd)
            raise
        prefer_huge_pages(self._mapping)
        self.changed = threading.Condition()
        self.free = [*reversed(range(self.count))]  # the last one is used next: it is in the processor's cache
        self._closed = False
        detach_in_children(self)

    @property
    def fd(self) -> int:
        """The memfd, for tier hosts."""
        return self._fd

    @property
    def view(self) -> memoryview:
        """All rows. ValueError after ``close``."""
        return self._mapping.view

    def row(self, number: int, nbytes: int) -> Bytes:
        """Return the first bytes of a row."""
        return np.frombuffer(self._mapping.view, np.uint8, nbytes, number * self.row_stride)

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

    def close(self) -> None:
        """Release the memory, after ``end``; a call that is copying keeps it mapped until it has done so."""
        self._mapping.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def detach(self) -> None:
        """Close the memfd in a forked child."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
