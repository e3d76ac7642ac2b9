"""Copy plans: the geometry of one transfer, as index arrays of blocks, rows and places.

A transfer names GPU blocks (``BlockSpec``) and chunks (rows of the region). Group by group, the blocks fill the
group's chunks in order: the first chunk from place ``block_indices[g] % blocks_per_chunk`` on, the last one perhaps
not to its end. The chunk ids of all groups follow each other in one array, like the block ids.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtiers.api import KvtiersError
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.rank_map import RankMap
from kvtiers.types import BlockSpec

__all__ = ["GeometryError", "GroupCopy", "Indexes", "plan_copy", "writers_turn"]

Indexes: TypeAlias = npt.NDArray[np.int64]


class GeometryError(KvtiersError):
    """Blocks and chunks of a transfer do not add up; nothing of it is copied."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupCopy:
    """One group's part of a transfer: ``blocks[i]`` belongs at place ``places[i]`` of the chunk in ``rows[i]``."""

    group: int
    blocks: Indexes
    rows: Indexes
    places: Indexes

    def where(self, chosen: npt.NDArray[np.bool_]) -> "GroupCopy":
        """Return the blocks that ``chosen`` selects."""
        return GroupCopy(self.group, self.blocks[chosen], self.rows[chosen], self.places[chosen])

    def pieces(self, blocks_per_piece: int) -> Iterator[tuple[Indexes, Indexes, Indexes]]:
        """Yield (blocks, rows, places), a fixed number of blocks at a time."""
        for start in range(0, len(self.blocks), blocks_per_piece):
            some = slice(start, start + blocks_per_piece)
            yield self.blocks[some], self.rows[some], self.places[some]


def plan_copy(
    layout: CacheLayout,
    spec: BlockSpec,
    chunk_ids: npt.NDArray[Any],
    *,
    num_blocks: Sequence[int],
    num_rows: int,
    into_rows: bool,
) -> list[GroupCopy]:
    """Return the copies of one transfer, empty groups left out; GeometryError if it does not add up.

    ``num_blocks``: the GPU blocks that each group has; ``num_rows``: the rows of the region. ``into_rows``: the rows
    are written (a store), else the blocks are (a load); whatever is written must be named once.
    """
    block_ids = _integers("block_ids", spec.block_ids)
    chunks = _integers("chunk_ids", chunk_ids)
    groups = len(layout.groups)
    sizes = _counts("group_sizes", spec.group_sizes, groups)
    spec = BlockSpec(block_ids, sizes, _counts("block_indices", spec.block_indices, groups))
    _check_spec(layout, spec, len(block_ids), len(chunks))
    _check_range("chunk id", chunks, num_rows, "rows in the region")
    if into_rows:
        _check_unique("chunk id", chunks)
    plan = []
    first_block = first_chunk = 0
    for group, size in enumerate(spec.group_sizes):
        if not size:
            continue
        blocks = block_ids[first_block : first_block + size]
        _check_range(f"group {group}: block id", blocks, num_blocks[group], "blocks in its tensors")
        if not into_rows:
            _check_unique(f"group {group}: block id", blocks)
        chunk, places = np.divmod(
            np.arange(size, dtype=np.int64) + spec.block_indices[group] % layout.blocks_per_chunk,
            layout.blocks_per_chunk,
        )
        plan.append(GroupCopy(group, blocks, chunks[first_chunk + chunk], places))
        first_block += size
        first_chunk += _chunks_of(layout, spec, group)
    return plan


def writers_turn(
    layout: CacheLayout, rank: int, rank_map: RankMap | None, plan: list[GroupCopy]
) -> Iterator[GroupCopy]:
    """Yield the part of a store that this rank writes: all of it, unless other ranks hold the same bytes.

    Of a replicated row rank 0 is the one writer; in a canonical row the ranks of a map take turns, block by block.
    """
    if layout.row_layout == "replicated" and rank != 0:
        return
    writers, turn = (rank_map.num_writers, rank_map.writer_index) if rank_map else (1, 0)
    for part in plan:
        mine = part.blocks % writers == turn
        yield part if mine.all() else GroupCopy(part.group, part.blocks[mine], part.rows[mine], part.places[mine])


def _chunks_of(layout: CacheLayout, spec: BlockSpec, group: int) -> int:
    size = spec.group_sizes[group]
    skip = spec.block_indices[group] % layout.blocks_per_chunk
    return -(-(size + skip) // layout.blocks_per_chunk) if size else 0


def _check_spec(layout: CacheLayout, spec: BlockSpec, num_ids: int, num_chunks: int) -> None:
    if sum(spec.group_sizes) != num_ids:
        raise GeometryError(f"group_sizes {tuple(spec.group_sizes)} sum to {sum(spec.group_sizes)}, not to the "
                            f"{num_ids} block ids")  # fmt: skip
    needed = sum(_chunks_of(layout, spec, group) for group in range(len(layout.groups)))
    if needed != num_chunks:
        raise GeometryError(
            f"{num_chunks} chunk ids, but group_sizes {tuple(spec.group_sizes)} from block_indices "
            f"{tuple(spec.block_indices)} on, with {layout.blocks_per_chunk} blocks a chunk, need {needed}"
        )


def _counts(name: str, values: Sequence[int], groups: int) -> tuple[int, ...]:
    """Return these as Python's integers, which never overflow."""
    try:
        counts = tuple(operator.index(value) for value in values)
    except TypeError:
        raise GeometryError(f"{name} is {values!r}, expected integers") from None
    if len(counts) != groups:
        raise GeometryError(f"{name} has {len(counts)} entries, expected one for each of {groups} groups")
    if min(counts) < 0:
        raise GeometryError(f"{name} is {counts}, expected no negative number")
    return counts


def _integers(name: str, values: npt.NDArray[Any]) -> Indexes:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GeometryError(f"{name} is an array of shape {array.shape} and type {array.dtype}, expected 1-D integers")
    return array.astype(np.int64, copy=False)


def _check_range(what: str, ids: Indexes, end: int, of_what: str) -> None:
    if len(ids) and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < end:
        raise GeometryError(f"{what} {low if low < 0 else high} does not exist; there are {end} {of_what}")


def _check_unique(what: str, ids: Indexes) -> None:
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise GeometryError(f"{what} {int(twice[0])} would be written twice in one transfer")
