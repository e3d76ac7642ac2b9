"""The geometry of KV groups: which tokens, blocks and chunks a transfer covers, and how it names them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.api import OffloadKey, group_of
from kvtiers.layout.cache_layout import CacheLayout, KVGroup
from kvtiers.types import BlockSpec, ChunkIds

__all__ = ["Geometry", "Group", "in_prefix_order"]


@dataclass(frozen=True, slots=True)
class Group:
    """One KV group. ``reach``: how many tokens before a position the computation there reads; None: all of them."""

    index: int
    tokens_per_block: int
    tokens_per_chunk: int
    reach: int | None


def _reach(group: KVGroup) -> int | None:
    if group.kind == "full_attention":
        return None
    # A window includes the token itself. A state is read where it was left: in the block of the token before.
    return 1 if group.window is None else group.window - 1


class Geometry:
    """The arithmetic of a layout's groups. Token positions count from the request's first token."""

    def __init__(self, layout: CacheLayout) -> None:
        self.blocks_per_chunk = layout.blocks_per_chunk
        self.groups = tuple(
            Group(index, group.tokens_per_block, layout.tokens_per_chunk(index), _reach(group))
            for index, group in enumerate(layout.groups)
        )
        self.full = tuple(group for group in self.groups if group.reach is None)
        self.windowed = tuple(group for group in self.groups if group.reach is not None)
        self.load_step = math.lcm(*(group.tokens_per_block for group in self.groups))
        """A load begins and ends where every group has a whole number of blocks."""
        self.chunk_step = math.gcd(*(group.tokens_per_chunk for group in self.groups))
        """Every chunk of every group ends at a multiple of this many tokens."""
        self.longest_chunk = max(group.tokens_per_chunk for group in self.groups)

    def floor(self, tokens: int) -> int:
        """Return the last position up to ``tokens`` where a load may end."""
        return tokens // self.load_step * self.load_step

    def blocks_between(self, group: Group, start: int, end: int) -> range:
        """Return the blocks that a load of the tokens from ``start`` to ``end`` brings, by index in the request.

        Of a windowed group only those that the computation from ``end`` on reads.
        """
        first = start if group.reach is None else max(start, end - group.reach)
        if first >= end:
            return range(0)
        return range(first // group.tokens_per_block, end // group.tokens_per_block)

    def chunks_of(self, blocks: range) -> range:
        """Return the chunks, by index in the request, that hold these blocks."""
        if not blocks:
            return range(0)
        return range(blocks.start // self.blocks_per_chunk, -(-blocks.stop // self.blocks_per_chunk))

    def chunk_ids(self, keys: Sequence[OffloadKey], chunk_ids: ChunkIds) -> ChunkIds:
        """Return rows that are given in the order of ``keys`` group by group instead, as a transfer wants them."""
        if len(self.groups) == 1:
            return chunk_ids
        return chunk_ids[np.argsort([group_of(key) for key in keys], kind="stable")]

    def spec(self, blocks: Sequence[Sequence[int]], firsts: Sequence[int]) -> BlockSpec:
        """Return the blocks of a transfer: for each group their ids, and the index of the first one in the request."""
        ids = np.fromiter((block for of_group in blocks for block in of_group), np.int64)
        return BlockSpec(ids, tuple(len(of_group) for of_group in blocks), tuple(firsts))


def in_prefix_order(chunks: Iterable[tuple[Group, range, Sequence[OffloadKey]]]) -> list[OffloadKey]:
    """Return the keys of chunks of several groups, each with its range of chunks, by where in the prefix they end.

    Eviction follows the order in which keys are given, tail first: this way all groups lose the same tokens.
    """
    parts = [part for part in chunks if part[1]]
    if len(parts) == 1:
        return list(parts[0][2])
    placed = [
        ((chunk + 1) * group.tokens_per_chunk, group.index, key)
        for group, places, keys in parts
        for chunk, key in zip(places, keys, strict=True)
    ]
    placed.sort()
    return [key for _, _, key in placed]
