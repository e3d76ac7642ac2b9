"""The cutting of a transfer into pieces that fit one launch and one staging slot."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtiers.gpu.copy_plan import GroupCopy, Indexes
from kvtiers.gpu.cuda.geometry import Copies, GroupGeometry

__all__ = ["Piece", "page_pieces", "staged_pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some of a group's blocks, ``blocks[i]`` at place ``places[i]`` of row ``rows[i]``.

    ``entries``: (block, row or image, place) of each for the kernel. Staged, a row has an image in the slot, of
    ``per_tensor`` places from ``first`` on; the blocks of ``whole`` rows, where there are any, are all blocks of each.
    """

    blocks: Indexes
    rows: Indexes
    places: Indexes
    entries: npt.NDArray[np.uint32]
    per_tensor: int
    first: int = 0
    whole: Indexes | None = None

    def row_copies(self, geometry: GroupGeometry) -> Copies:
        """Return the copies between rows and the slot, whose offsets are ``others``."""
        if self.whole is not None:
            return geometry.whole_copies(self.whole)
        images = self.entries[:, 1].astype(np.int64) * (geometry.block_bytes * self.per_tensor)
        return geometry.row_copies(self.rows, self.places, images, self.per_tensor, self.first)

    def page_copies(self, geometry: GroupGeometry) -> Copies:
        """Return the copies between rows and the tensors, whose addresses are ``others``."""
        return geometry.page_copies(self.blocks, self.rows, self.places)


def page_pieces(part: GroupCopy, geometry: GroupGeometry, blocks_per_piece: int) -> Iterator[Piece]:
    """Cut a part for copies that need no slot."""
    entries = _entries(part, part.rows)
    for start in range(0, len(part.blocks), blocks_per_piece):
        some = slice(start, start + blocks_per_piece)
        yield _piece(part, some, entries, geometry.blocks_per_chunk)


def staged_pieces(part: GroupCopy, geometry: GroupGeometry, slot_bytes: int, most_blocks: int) -> Iterator[Piece]:
    """Cut a part into pieces of whole rows, or of as many places of one row as fit a slot; at least one does."""
    per_chunk = geometry.blocks_per_chunk
    new_row = (part.rows[1:] != part.rows[:-1]) | (part.places[1:] <= part.places[:-1])
    starts = np.concatenate([[0], np.flatnonzero(new_row) + 1, [len(part.blocks)]])
    rows_fit = min(slot_bytes // (geometry.block_bytes * per_chunk), most_blocks // per_chunk)
    if rows_fit:
        # All that a piece needs is prepared here once: what is left for each piece is a handful of slices.
        images = np.cumsum(np.concatenate([[0], new_row])) % rows_fit
        entries = _entries(part, images)
        whole = (np.diff(starts) == per_chunk) if geometry.whole_cells else np.zeros(len(starts) - 1, np.bool_)
        cells = part.rows[starts[:-1]]
        for index in range(0, len(starts) - 1, rows_fit):
            end = min(index + rows_fit, len(starts) - 1)
            some = slice(starts[index], starts[end])
            in_whole_rows = cells[index:end] if whole[index:end].all() else None
            yield _piece(part, some, entries, per_chunk, whole=in_whole_rows)
        return
    fit = slot_bytes // geometry.block_bytes
    entries = _entries(part, np.zeros_like(part.rows))
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        at = begin
        while at < end:
            first = int(part.places[at])
            last = at + int(np.searchsorted(part.places[at:end], first + fit))
            yield _piece(part, slice(at, last), entries, fit, first=first)
            at = last


def _entries(part: GroupCopy, rows: Indexes) -> npt.NDArray[np.uint32]:
    return np.stack([part.blocks, rows, part.places], axis=1).astype(np.uint32)


def _piece(
    part: GroupCopy,
    some: slice,
    entries: npt.NDArray[np.uint32],
    per_tensor: int,
    *,
    first: int = 0,
    whole: Indexes | None = None,
) -> Piece:
    return Piece(part.blocks[some], part.rows[some], part.places[some], entries[some], per_tensor, first, whole)
