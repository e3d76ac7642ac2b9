"""Copies between KV tensors in host memory (numpy arrays) and rows, vectorised over blocks.

A tensor's pages are seen as a matrix ``(num_blocks, page_bytes)``, its places in the region as an array
``(num_rows, blocks_per_chunk, page_bytes)`` of strides ``(row_stride, page_bytes, 1)``: both are views, and a copy is
one indexed assignment for each tensor and piece.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvtiers.api import ConfigError
from kvtiers.base import BlockSpec
from kvtiers.gpu.copy_plan import GroupCopy, plan_copy
from kvtiers.rows.layout import CacheLayout

__all__ = ["HostCopier"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

# numpy gathers a piece into a buffer and scatters it from there; at this size the buffer stays in the core's cache
# (measured: 1 MiB is as fast as 4 MiB, 256 KiB half as fast), and an expedited load waits for one piece only.
PIECE_BYTES = 1 << 20


class HostCopier:
    """One rank's KV tensors, and the copies between them and the rows. ConfigError if they do not fit the layout.

    ``kv_tensors[i]`` holds the pages of ``layout.tensors[i]``: first axis the blocks, the rest contiguous, at least a
    page long (more is padding, which is not copied); None where this rank does not hold that tensor.
    """

    def __init__(self, layout: CacheLayout, rank: int, kv_tensors: Sequence[Any]) -> None:
        _check_layout(layout, rank, kv_tensors)
        self._layout = layout
        self._rank = rank
        # In a replicated row all ranks hold the same bytes: one of them writes, all read.
        self._writes = layout.row_layout != "replicated" or rank == 0
        self._pages = [_pages(layout, rank, index, tensor) for index, tensor in enumerate(kv_tensors)]
        self._of_group = [
            [i for i, tensor in enumerate(layout.tensors) if tensor.group == group and self._pages[i] is not None]
            for group in range(len(layout.groups))
        ]
        self.num_blocks = [
            min((len(pages) for i in indexes if (pages := self._pages[i]) is not None), default=2**62)
            for indexes in self._of_group
        ]
        self._rows: list[npt.NDArray[np.uint8]] = []
        self.num_rows = 0

    def attach(self, region: memoryview) -> None:
        """Use this memory (flat, writable, whole rows) as the region."""
        memory = np.frombuffer(region, np.uint8)
        layout = self._layout
        self.num_rows = len(memory) // layout.row_stride
        self._rows = [
            as_strided(
                memory[layout.tensor_offset(index, self._rank) :],
                (self.num_rows, layout.blocks_per_chunk, page := layout.page_in_row(index, self._rank)),
                (layout.row_stride, page, 1),
            )
            for index in range(len(layout.tensors))
        ]

    def detach(self) -> None:
        """Forget the region: no view of it is left here."""
        self._rows = []
        self.num_rows = 0

    def store(self, spec: BlockSpec, chunk_ids: npt.NDArray[Any]) -> Iterator[int]:
        """Copy blocks into rows; yields the bytes copied after each piece. GeometryError before the first one."""
        plan = self._plan(spec, chunk_ids, into_rows=True)
        if self._writes:
            for part, rows_of, pages_of, step in self._tensors(plan):
                for blocks, rows, places in part.pieces(step):
                    rows_of[rows, places] = pages_of[blocks]
                    yield len(blocks) * pages_of.shape[1]

    def load(self, spec: BlockSpec, chunk_ids: npt.NDArray[Any]) -> Iterator[int]:
        """Copy rows into blocks; yields the bytes copied after each piece. GeometryError before the first one."""
        plan = self._plan(spec, chunk_ids, into_rows=False)
        for part, rows_of, pages_of, step in self._tensors(plan):
            for blocks, rows, places in part.pieces(step):
                pages_of[blocks] = rows_of[rows, places]
                yield len(blocks) * pages_of.shape[1]

    def _plan(self, spec: BlockSpec, chunk_ids: npt.NDArray[Any], *, into_rows: bool) -> list[GroupCopy]:
        return plan_copy(
            self._layout, spec, chunk_ids, num_blocks=self.num_blocks, num_rows=self.num_rows, into_rows=into_rows
        )

    def _tensors(self, plan: list[GroupCopy]) -> Iterator[tuple[GroupCopy, Bytes, Bytes, int]]:
        for part in plan:
            for index in self._of_group[part.group]:
                pages = self._pages[index]
                assert pages is not None
                yield part, self._rows[index], pages, max(1, PIECE_BYTES // pages.shape[1])


def _check_layout(layout: CacheLayout, rank: int, kv_tensors: Sequence[Any]) -> None:
    if not 0 <= rank < layout.world_size:
        raise ConfigError(f"rank {rank} does not exist; the layout's world_size is {layout.world_size}")
    if layout.row_layout == "canonical":
        raise ConfigError("row_layout 'canonical' cannot be copied from host memory; use 'direct' or 'replicated'")
    if len(kv_tensors) != len(layout.tensors):
        raise ConfigError(f"{len(kv_tensors)} KV tensors, but the layout names {len(layout.tensors)}")


def _pages(layout: CacheLayout, rank: int, index: int, tensor: Any) -> Bytes | None:
    """Return the tensor's pages as bytes, (num_blocks, page_bytes), a view of the engine's own memory."""
    page = layout.tensors[index].page_on(rank)
    if page == 0:
        return None
    where = f"kv_tensors[{index}] ({layout.tensors[index].name!r})"
    if not isinstance(tensor, np.ndarray):
        raise ConfigError(f"{where}: expected a numpy array, got {type(tensor).__name__}")
    if tensor.ndim < 2 or not len(tensor) or not tensor[0].flags.c_contiguous or not tensor.flags.writeable:
        raise ConfigError(
            f"{where}: expected a writable array of blocks, each of them contiguous, got shape {tensor.shape} "
            f"and strides {tensor.strides}"
        )
    block_bytes = tensor[0].nbytes
    if block_bytes < page:
        raise ConfigError(f"{where}: a block has {block_bytes} bytes, but the layout's page_bytes is {page}")
    flat = as_strided(tensor, (len(tensor), tensor[0].size), (tensor.strides[0], tensor.itemsize))
    return flat.view(np.uint8)[:, :page]
