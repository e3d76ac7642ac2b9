"""Copies between KV tensors in host memory and rows, vectorised over blocks.

A run of fragments is seen as an array ``(num_blocks, count, nbytes)`` in the tensor and as one of
``(num_rows, blocks_per_chunk, count, nbytes)`` in the region: both are views, and a copy is one indexed assignment for
each run and piece. Where a page is one fragment, as in direct and replicated rows, ``count`` is left out.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvtiers.gpu.copier import Lane
from kvtiers.gpu.copy_plan import GroupCopy, plan_copy, writers_turn
from kvtiers.gpu.tensors import Bytes, KVPages, blocks_of_groups, kv_pages
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.rank_map import CopyRun, RankMap, runs_of_rank
from kvtiers.region.client import RegionJoin
from kvtiers.types import BlockSpec

__all__ = ["HostCopier", "HostCopies"]

# numpy gathers a piece into a buffer and scatters it from there; at this size the buffer stays in the core's cache
# (measured: 1 MiB is as fast as 4 MiB, 256 KiB half as fast), and an expedited load waits for one piece only.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One run of fragments: where it lies in the tensor, and in the region while there is one."""

    tensor: int
    run: CopyRun
    pages: Bytes
    rows: Bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.run.nbytes * self.run.count


class HostCopier:
    """One rank's KV tensors, and the copies between them and the rows. ConfigError if they do not fit the layout.

    ``kv_tensors``: as ``kv_pages`` says; ``rank_map``: where this rank's bytes lie in a canonical row.
    """

    def __init__(
        self,
        layout: CacheLayout,
        rank: int,
        kv_tensors: Sequence[Any],
        rank_map: RankMap | None = None,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._rank_map = rank_map
        pages = kv_pages(layout, rank, kv_tensors)
        self._tensors = pages  # keeps their memory alive
        runs = runs_of_rank(layout, rank, rank_map)
        self._runs = [
            _Run(index, run, _fragments(page, run))
            for index, page in enumerate(pages)
            if page is not None
            for run in runs[index]
        ]
        self.num_blocks = blocks_of_groups(layout, pages)
        self.num_rows = 0

    def attach(self, region: memoryview) -> None:
        """Use this memory (flat, writable, whole rows) as the region."""
        memory = np.frombuffer(region, np.uint8)
        self.num_rows = len(memory) // self._layout.row_stride
        self._runs = [_Run(r.tensor, r.run, r.pages, self._in_rows(memory, r)) for r in self._runs]

    def detach(self) -> None:
        """Drop the region: no view of it is left here."""
        self._runs = [_Run(r.tensor, r.run, r.pages) for r in self._runs]
        self.num_rows = 0

    def store(self, spec: BlockSpec, chunk_ids: npt.NDArray[Any]) -> Iterator[int]:
        """Copy blocks into rows; yields the bytes copied after each piece. GeometryError before the first one."""
        for part in writers_turn(self._layout, self._rank, self._rank_map, self._plan(spec, chunk_ids, into_rows=True)):
            for run, blocks, rows, places in self._pieces(part):
                assert run.rows is not None
                run.rows[rows, places] = run.pages[blocks]
                yield len(blocks) * run.nbytes

    def load(self, spec: BlockSpec, chunk_ids: npt.NDArray[Any]) -> Iterator[int]:
        """Copy rows into blocks; yields the bytes copied after each piece. GeometryError before the first one."""
        for part in self._plan(spec, chunk_ids, into_rows=False):
            for run, blocks, rows, places in self._pieces(part):
                assert run.rows is not None
                run.pages[blocks] = run.rows[rows, places]
                yield len(blocks) * run.nbytes

    def _plan(self, spec: BlockSpec, chunk_ids: npt.NDArray[Any], *, into_rows: bool) -> list[GroupCopy]:
        return plan_copy(
            self._layout, spec, chunk_ids, num_blocks=self.num_blocks, num_rows=self.num_rows, into_rows=into_rows
        )

    def _pieces(self, part: GroupCopy) -> Iterator[tuple[_Run, Any, Any, Any]]:
        for run in self._runs:
            if self._layout.tensors[run.tensor].group == part.group:
                for blocks, rows, places in part.pieces(max(1, PIECE_BYTES // run.nbytes)):
                    yield run, blocks, rows, places

    def _in_rows(self, memory: Bytes, of: _Run) -> Bytes:
        layout, run = self._layout, of.run
        first = layout.tensor_offset(of.tensor, self._rank) + run.canonical_offset
        shape = (self.num_rows, layout.blocks_per_chunk)
        strides = (layout.row_stride, layout.page_in_row(of.tensor, self._rank))
        return _array(memory[first:], shape, strides, run, run.canonical_stride)


def _fragments(page: KVPages, run: CopyRun) -> Bytes:
    memory = page.host_bytes()[run.local_offset :]
    return _array(memory, (page.num_blocks,), (page.stride,), run, run.local_stride)


def _array(memory: Bytes, shape: tuple[int, ...], strides: tuple[int, ...], run: CopyRun, apart: int) -> Bytes:
    if run.count == 1:
        return as_strided(memory, (*shape, run.nbytes), (*strides, 1))
    return as_strided(memory, (*shape, run.count, run.nbytes), (*strides, apart, 1))


class HostCopies:
    """The copies of a ``HostCopier``: each piece has ended when ``advance`` returns."""

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    def mark(self) -> None:
        """Return no mark: the engine's earlier writes are in memory."""

    def attach(self, region: RegionJoin, is_busy: Callable[[], bool]) -> None:
        """Use this region, which is ready; there is nothing to pin."""
        del is_busy
        self._copier.attach(region.view)
        region.settle()

    def detach(self) -> None:
        """Release the region."""
        self._copier.detach()

    def copy(self, lane: Lane, blocks: BlockSpec, chunk_ids: npt.NDArray[Any], mark: None) -> "_HostCopy":
        """Prepare a copy."""
        del mark
        make = self._copier.store if lane == "store" else self._copier.load
        return _HostCopy(make(blocks, chunk_ids))

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class _HostCopy:
    def __init__(self, pieces: Iterator[int]) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._pieces = pieces

    def advance(self) -> bool:
        begin = time.perf_counter()
        piece = next(self._pieces, None)
        self.seconds += time.perf_counter() - begin
        self.nbytes += piece or 0
        return piece is not None

    def ended(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: it has ended."""
