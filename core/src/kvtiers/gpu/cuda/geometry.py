"""Addresses of one KV group's fragments, as arrays: in the tensors, in rows, and in images of rows in a staging slot.

An image holds one or more places of a row, tensor after tensor, without the bytes of other ranks::

    | t0: place a, a+1, ... | t1: place a, a+1, ... | ...

Within a page, fragments lie in the order in which they lie in the row, so that neighbours there are one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvtiers.gpu.copy_plan import Indexes
from kvtiers.gpu.tensors import KVPages
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.rank_map import CopyRun

__all__ = ["UNIT_BYTES", "Copies", "GroupGeometry", "group_geometry"]

UNIT_BYTES = 8192
"""Bytes that one warp of the kernel copies at a time; longer fragments are sliced."""


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies of whole ranges of bytes: offsets in the region, the address or offset at the other side, lengths."""

    rows: Indexes
    others: Indexes
    nbytes: Indexes

    def merged(self) -> "Copies":
        """Join copies whose ranges touch on both sides."""
        order = np.argsort(self.rows, kind="stable")
        rows, others, nbytes = self.rows[order], self.others[order], self.nbytes[order]
        apart = (rows[:-1] + nbytes[:-1] != rows[1:]) | (others[:-1] + nbytes[:-1] != others[1:])
        first = np.flatnonzero(np.concatenate([[len(rows) > 0], apart]))
        return Copies(rows[first], others[first], np.add.reduceat(nbytes, first) if len(first) else nbytes[:0])


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The places of fragments in a row or an image: ``tensor * places + place * page + within``."""

    tensor: Indexes
    page: Indexes
    within: Indexes

    def of(self, places: Indexes, per_tensor: int) -> Indexes:
        """Return offsets, an array (places, fragments)."""
        return self.tensor * per_tensor + places[:, None] * self.page + self.within


@dataclass(frozen=True, eq=False)
class GroupGeometry:
    """One group's fragments of one rank. ``cell_offset``: where the rank's cell starts in a row."""

    kv: Indexes
    stride: Indexes
    nbytes: Indexes
    row: _Side
    image: _Side
    cell_offset: int
    row_stride: int
    blocks_per_chunk: int
    whole_cells: bool
    """An image of all places is the rank's cell, byte for byte."""

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, all tensors together."""
        return int(self.nbytes.sum())

    def units(self, *, image: bool) -> Indexes:
        """Return the kernel's table of units, (units, 6), for rows or for images."""
        side = self.image if image else self.row
        slices = -(-self.nbytes // UNIT_BYTES)
        fragment = np.repeat(np.arange(len(self.nbytes)), slices)
        begin = (np.arange(len(fragment)) - np.repeat(np.cumsum(slices) - slices, slices)) * UNIT_BYTES
        return np.stack(
            [
                self.kv[fragment] + begin,
                self.stride[fragment],
                side.tensor[fragment],
                side.page[fragment],
                side.within[fragment] + begin,
                np.minimum(self.nbytes[fragment] - begin, UNIT_BYTES),
            ],
            axis=1,
        )

    def whole_copies(self, rows: Indexes) -> Copies:
        """Return the copies between whole cells of these rows and images that follow each other."""
        cell = self.block_bytes * self.blocks_per_chunk
        images = np.arange(len(rows), dtype=np.int64) * cell
        return Copies(rows * self.row_stride + self.cell_offset, images, np.full(len(rows), cell, np.int64))

    def row_copies(self, rows: Indexes, places: Indexes, images: Indexes, per_tensor: int, first: int) -> Copies:
        """Return the copies between rows and their images (``images[i]``: where entry i's image starts in the slot).

        Entries of one row lie in one image, of ``per_tensor`` places from ``first`` on.
        """
        whole = np.zeros(len(rows), np.bool_)
        if self.whole_cells and per_tensor == self.blocks_per_chunk:
            _, image, count = np.unique(images, return_inverse=True, return_counts=True)
            whole = (count == self.blocks_per_chunk)[image]
        lead = whole & (places == 0)
        part = ~whole
        at = rows[part, None] * self.row_stride + self.cell_offset
        in_row = at + self.row.of(places[part], self.blocks_per_chunk)
        in_image = images[part, None] + self.image.of(places[part] - first, per_tensor)
        lengths = np.broadcast_to(self.nbytes, in_row.shape)
        parts = Copies(in_row.ravel(), in_image.ravel(), lengths.ravel()).merged()
        return Copies(
            np.concatenate([rows[lead] * self.row_stride + self.cell_offset, parts.rows]),
            np.concatenate([images[lead], parts.others]),
            np.concatenate([np.full(lead.sum(), self.block_bytes * self.blocks_per_chunk, np.int64), parts.nbytes]),
        )

    def page_copies(self, blocks: Indexes, rows: Indexes, places: Indexes) -> Copies:
        """Return the copies between rows and the tensors themselves."""
        in_row = rows[:, None] * self.row_stride + self.cell_offset + self.row.of(places, self.blocks_per_chunk)
        in_kv = self.kv + blocks[:, None] * self.stride
        lengths = np.broadcast_to(self.nbytes, in_row.shape)
        return Copies(in_row.ravel(), in_kv.ravel(), lengths.ravel()).merged()


def group_geometry(
    layout: CacheLayout,
    rank: int,
    group: int,
    pages: Sequence[KVPages | None],
    runs: Sequence[Sequence[CopyRun]],
) -> GroupGeometry:
    """Lay out one group's fragments, in the order of the row."""
    lines = []
    row_before = image_before = 0
    for index, tensor in enumerate(layout.tensors):
        if tensor.group != group:
            continue
        page = pages[index]
        if page is not None:
            within = 0
            for local, end, canonical in sorted(_fragments(runs[index]), key=lambda fragment: fragment[2]):
                row = (row_before, layout.page_in_row(index, rank), canonical)
                image = (image_before, page.page_bytes, within)
                lines.append((page.address + local, page.stride, end - local, *row, *image))
                within += end - local
            image_before += page.page_bytes
        row_before += layout.page_in_row(index, rank)
    table = np.array(lines, np.int64).reshape(-1, 9).T
    return GroupGeometry(
        kv=table[0],
        stride=table[1],
        nbytes=table[2],
        row=_Side(*table[3:6]),
        image=_Side(*table[6:9]),
        cell_offset=layout.cell_offset(group, rank),
        row_stride=layout.row_stride,
        blocks_per_chunk=layout.blocks_per_chunk,
        whole_cells=np.array_equal(table[3:6], table[6:9]),
    )


def _fragments(runs: Sequence[CopyRun]) -> list[tuple[int, int, int]]:
    """Return (first local byte, end, first canonical byte) of each fragment."""
    return [
        (*local, canonical[0]) for run in runs for local, canonical in zip(run.local(), run.canonical(), strict=True)
    ]
