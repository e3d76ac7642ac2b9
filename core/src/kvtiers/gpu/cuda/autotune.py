"""Autotuning of the copy method: a short measurement on scratch memory, once for each shape and device.

Small transfers (one row) and bulk ones are measured apart, and so is each direction. Staged copies disturb a
model least, so another method must be clearly faster to be chosen: a direct kernel holds its multiprocessors for
as long as the link takes, and a copy a page keeps the driver busy.
"""

import logging
import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtiers.gpu.copy_plan import GroupCopy
from kvtiers.gpu.cuda.driver import CudaDriver
from kvtiers.gpu.cuda.geometry import GroupGeometry
from kvtiers.gpu.pin_pace import whole_pages
from kvtiers.gpu.settings import CopyMethod

__all__ = ["Choice", "Scratch", "choose"]

_log = logging.getLogger("kvtiers.gpu")
_BULK_BYTES, _MOST_BLOCKS, _MOST_HOST_BYTES = 32 << 20, 512, 256 << 20
_STREAM_BYTES = 128 << 20  # bulk copies in a row: several staging slots full, so that their pieces overlap
_PINNED_BYTES = 4 << 20
_MOST_TIMES = 8  # of tiny blocks: they are slow, and a worker waits for its measurement
_ROUNDS = 7
"""Rounds in which each method is measured once; the best of each method counts. A GPU that has just been idle has slow
multiprocessors for the first milliseconds, which is no fault of the method that is measured first."""
_WORTH_IT = {"staged": 1.0, "direct": 0.75, "pages": 0.75}
"""A method is chosen if it takes less than this share of the time that staged copies take."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The method for transfers of up to ``small_bytes``, and the one for larger transfers."""

    small: CopyMethod
    bulk: CopyMethod
    small_bytes: int

    def of(self, nbytes: int) -> CopyMethod:
        """Return the method for a transfer of this many bytes."""
        return self.small if nbytes <= self.small_bytes else self.bulk


class Scratch:
    """Memory in place of a group's tensors and rows: as many blocks of the same fragments, side by side.

    ``pinned_bytes``: pinned at a time, a few rows: the engine's launches wait for each call.
    """

    def __init__(
        self,
        geometry: GroupGeometry,
        driver: CudaDriver,
        new_device_memory: Callable[[int], Any],
        pinned_bytes: int = _PINNED_BYTES,
    ) -> None:
        per_chunk = geometry.blocks_per_chunk
        rows = min(
            _BULK_BYTES // (geometry.block_bytes * per_chunk),
            _MOST_BLOCKS // per_chunk,
            _MOST_HOST_BYTES // geometry.row_stride,
        )
        self.rows = max(1, rows)
        self.kv = new_device_memory(self.rows * per_chunk * geometry.block_bytes)
        memory = mmap.mmap(-1, self.rows * geometry.row_stride)  # whole pages: none is pinned twice
        self.host = np.frombuffer(memory, np.uint8)
        self.host[:: mmap.PAGESIZE] = 0  # populated here, and not by the driver
        self.address = int(self.host.__array_interface__["data"][0])
        begin = np.cumsum(geometry.nbytes) - geometry.nbytes
        stride = np.full_like(begin, geometry.block_bytes)
        self.geometry = replace(geometry, kv=begin + self.kv.data_ptr(), stride=stride)
        self._driver = driver
        self._pinned: list[int] = []
        step = whole_pages(max(1, pinned_bytes // geometry.row_stride), geometry.row_stride) * geometry.row_stride
        try:
            for start in range(0, self.host.nbytes, step):
                driver.pin(self.address + start, min(step, self.host.nbytes - start))
                self._pinned.append(self.address + start)
        except BaseException:
            self.close()
            raise

    def part(self, rows: int) -> GroupCopy:
        """Return all blocks of the first rows."""
        row, place = np.divmod(np.arange(rows * self.geometry.blocks_per_chunk), self.geometry.blocks_per_chunk)
        return GroupCopy(0, np.arange(len(row)), row, place)

    def close(self) -> None:
        """Free the memory; nothing uses it any more."""
        while self._pinned:
            self._driver.unpin(self._pinned.pop())


def choose(scratch: Scratch, methods: list[CopyMethod], copy: Callable[[CopyMethod, list[GroupCopy]], None]) -> Choice:
    """Return the fastest of the methods; ``copy`` makes these copies one after the other and waits for them."""
    row_bytes = scratch.geometry.block_bytes * scratch.geometry.blocks_per_chunk
    times = min(-(-_STREAM_BYTES // (row_bytes * scratch.rows)), _MOST_TIMES)
    small = _best(methods, copy, [scratch.part(1)])
    bulk = _best(methods, copy, [scratch.part(scratch.rows)] * times)
    return Choice(small, bulk, int(row_bytes * scratch.rows**0.5))


def _best(
    methods: list[CopyMethod], copy: Callable[[CopyMethod, list[GroupCopy]], None], parts: list[GroupCopy]
) -> CopyMethod:
    seconds = dict.fromkeys(methods, math.inf)
    for number in range(1 + _ROUNDS):
        for method in methods:
            begin = time.perf_counter()
            copy(method, parts)
            if number:  # the first is to warm up
                seconds[method] = min(seconds[method], time.perf_counter() - begin)
    blocks = sum(len(part.blocks) for part in parts)
    _log.debug("%d blocks: %s", blocks, {name: f"{taken * 1e6:.0f} us" for name, taken in seconds.items()})
    return min(methods, key=lambda method: seconds[method] / _WORTH_IT[method])
