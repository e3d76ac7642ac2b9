"""The background pinning of the region's rows for one device, in small pieces, behind the pre-faulting.

::

    pinning --> pinned ---> closed: every piece is unpinned again, last first
       '------> given up ------^    copies go on without

The pre-faulting stays a window ahead of the rows in use, so the pinning does too. ``pin_pace.py`` says how much of the
driver's time it takes. A piece is whole rows: one copy must not reach over two pieces.

A copy that needs pinned rows holds a lease while it is being launched. Giving up grants no new leases, waits for
those that are held and for the copies in flight, and only then unpins.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from kvtiers.api.units import format_size
from kvtiers.gpu.copier import CudaError
from kvtiers.gpu.pin_pace import PinPace, whole_pages
from kvtiers.region.client import RegionJoin

__all__ = ["PinnedRows", "Pinner"]

_log = logging.getLogger("kvtiers.gpu")
_WAIT_SECONDS = 0.5


class Pinner(Protocol):
    """The driver's calls that pin memory."""

    def enter(self) -> None:
        """Prepare the calling thread."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin this memory; CudaError if that cannot be."""

    def unpin(self, address: int) -> None:
        """Unpin what was pinned from this address on."""


class PinnedRows:
    """The rows that copies may treat as pinned: the first ``rows`` of the region. It only grows, or drops to 0."""

    def __init__(
        self,
        pinner: Pinner,
        region: RegionJoin,
        address: int,
        settle: Callable[[], None],
        pace: PinPace,
        is_busy: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = 0
        self.given_up = ""
        self._pinner = pinner
        self._region = region
        self._address = address
        self._settle = settle
        self._pace = pace
        self._is_busy = is_busy
        self._clock = clock
        self._pieces: list[int] = []
        self._leases = 0
        self._closing = False
        self._changed = threading.Condition()
        self._pinning = threading.Lock()
        region.pinned(0)  # before a job: rows that are not pinned are not to be leased
        self._thread = threading.Thread(target=self._run, name="kvtiers-pin", daemon=True)
        self._thread.start()

    def lease(self, rows: int) -> int:
        """Return how many of the first ``rows`` rows are pinned; if any are, they stay pinned until ``release``."""
        with self._changed:
            self._leases += bool(self.rows)
            return min(rows, self.rows)

    def release(self) -> None:
        """End a lease."""
        with self._changed:
            self._leases -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pin nothing within the block; it begins when the piece being pinned is."""
        with self._pinning:
            yield

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all rows are pinned or pinning was given up; return which."""
        with self._changed:
            self._changed.wait_for(lambda: self.given_up or self.rows == self._region.num_rows, timeout)
            return self.rows == self._region.num_rows

    def close(self) -> None:
        """Unpin everything; no copy is in flight any more. Waits for the piece being pinned, or 0.5 s for memory."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._pinner.enter()
            while not self._closing and self.rows < self._end():
                end = min(self.rows + self._piece_rows(), self._end())
                if self._wait_for(end):
                    self._pin(end)
            self._region.settle()
        except Exception as error:  # noqa: BLE001 -- after any error copies go on without pinning
            self._give_up(str(error) or type(error).__name__)
        with self._changed:
            self._changed.wait_for(lambda: self._closing)
            self.rows = 0
        self._unpin_all()

    def _end(self) -> int:
        """Return how many rows will be pinned: all, or those whose memory is available."""
        status = self._region.poll()
        return status.populated_rows if status.memory_is_short else self._region.num_rows

    def _piece_rows(self) -> int:
        stride = self._region.row_stride
        return whole_pages(max(1, self._pace.piece_bytes // stride), stride)

    def _wait_for(self, rows: int) -> bool:
        """Wait a while until these rows are populated, so that pinning does not do it in the driver."""
        status = self._region.poll()
        if status.populated_rows < rows and not status.prefault_ended:
            status = self._region.wait_change(status, _WAIT_SECONDS)
        return status.populated_rows >= rows or (status.prefault_ended and not status.memory_is_short)

    def _pin(self, end: int) -> None:
        stride = self._region.row_stride
        address = self._address + self.rows * stride
        nbytes = (end - self.rows) * stride
        with self._pinning:
            begin = self._clock()
            self._pinner.pin(address, nbytes)
            took = self._clock() - begin
        with self._changed:
            self._pieces.append(address)
            self.rows = end
            self._changed.notify_all()
        self._region.pinned(end)
        rest = self._pace.rest_after(nbytes, took, busy=self._is_busy())
        if rest > 0:
            self._pause(rest)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    def _give_up(self, reason: str) -> None:
        with self._changed:
            pinned, self.rows = self.rows, 0
            self._changed.wait_for(lambda: not self._leases)
        _log.warning(
            "rows cannot be pinned (after %s of %s): %s; copies to and from the GPU go on, slower",
            format_size(pinned * self._region.row_stride),
            format_size(self._region.num_rows * self._region.row_stride),
            reason,
        )
        try:
            self._settle()
        except Exception as error:  # noqa: BLE001 -- a lost device runs nothing any more
            _log.debug("before unpinning: %s", error)
        self._unpin_all()
        with self._changed:
            self.given_up = reason
            self._changed.notify_all()
        self._region.settle()

    def _unpin_all(self) -> None:
        while self._pieces:
            try:
                self._pinner.unpin(self._pieces.pop())
            except CudaError as error:  # the device is lost, and its registrations with it
                _log.debug("unpinning: %s", error)
