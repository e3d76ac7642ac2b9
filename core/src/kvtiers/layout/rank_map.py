"""Rank maps: where a rank's bytes lie in a canonical row, whose bytes do not depend on tensor parallelism.

A rank map lists, for each KV tensor that the rank holds, runs of equal fragments: from a place in the rank's own page
to a place in the canonical page. Together they cover every byte of the rank's page once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import CacheLayout

__all__ = ["CopyRun", "RankMap", "heads_rank_map", "runs_of_rank"]


@dataclass(frozen=True)
class CopyRun:
    """``count`` fragments of ``nbytes`` each, ``*_stride`` bytes apart, from a local page into a canonical page."""

    tensor: int
    local_offset: int
    canonical_offset: int
    nbytes: int
    count: int = 1
    local_stride: int = 0
    canonical_stride: int = 0

    def local(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of each fragment in the rank's own page."""
        return self._ranges(self.local_offset, self.local_stride)

    def canonical(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of each fragment in the canonical page."""
        return self._ranges(self.canonical_offset, self.canonical_stride)

    def _ranges(self, start: int, stride: int) -> Iterator[tuple[int, int]]:
        return ((start + i * stride, start + i * stride + self.nbytes) for i in range(self.count))


@dataclass(frozen=True)
class RankMap:
    """The places of one rank's bytes in a canonical value.

    ``num_writers`` ranks hold identical bytes and take turns: this one writes the blocks whose id modulo
    ``num_writers`` is ``writer_index``.
    """

    runs: tuple[CopyRun, ...]
    writer_index: int = 0
    num_writers: int = 1


def heads_rank_map(
    layout: CacheLayout,
    *,
    rank: int,
    kv_heads: int,
    tp_rank: int,
    tp_size: int,
    parts: int = 2,
    page_order: Literal["HND", "NHD"] = "HND",
) -> RankMap:
    """Return the map of a rank that holds some of the KV heads of every block, for pages with the heads outermost.

    The rank's page is ``(parts, heads, tokens, bytes)`` ("HND") or ``(parts, tokens, heads, bytes)`` ("NHD"), with
    ``parts`` 2 for keys and values, 1 if they share a vector; the canonical page is ``(heads, parts, tokens, bytes)``
    of all heads. With more ranks than heads, the ranks of one head hold the same bytes and take turns.
    """
    if tp_size < 1 or not 0 <= tp_rank < tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise ConfigError(f"rank map: rank {tp_rank} of {tp_size} has no even share of {kv_heads} KV heads")
    writers = max(1, tp_size // kv_heads)
    heads = max(1, kv_heads // tp_size)
    first = tp_rank // writers * heads
    runs: list[CopyRun] = []
    for index, tensor in enumerate(layout.tensors):
        page = tensor.page_on(rank)
        if not page:
            continue
        tokens = layout.groups[tensor.group].tokens_per_block
        vector, rest = divmod(page, parts * heads * tokens)
        if rest or page * kv_heads != tensor.canonical_page_bytes * heads:
            raise ConfigError(
                f"rank map: tensor {tensor.name!r}: a page of {page} bytes, canonical {tensor.canonical_page_bytes}, "
                f"is not {parts} parts of {heads} of {kv_heads} heads of {tokens} tokens"
            )
        whole = CopyRun(index, 0, 0, tokens * vector, heads, tokens * vector, parts * tokens * vector)
        for part in range(parts):
            run = replace(
                whole,
                local_offset=part * heads * tokens * vector,
                canonical_offset=(first * parts + part) * tokens * vector,
            )
            runs += [run] if page_order == "HND" else _token_runs(run, heads, tokens, vector)
    return RankMap(tuple(runs), tp_rank % writers, writers)


def _token_runs(of_heads: CopyRun, heads: int, tokens: int, vector: int) -> list[CopyRun]:
    """Return the same fragments for a page whose tokens come before its heads: a run for each head."""
    return [
        CopyRun(
            of_heads.tensor,
            of_heads.local_offset + head * vector,
            of_heads.canonical_offset + head * of_heads.canonical_stride,
            vector,
            tokens,
            heads * vector,
            vector,
        )
        for head in range(heads)
    ]


def runs_of_rank(layout: CacheLayout, rank: int, rank_map: RankMap | None) -> tuple[tuple[CopyRun, ...], ...]:
    """Return this rank's runs for each tensor, in the row layouts without a map too: there a page is one run.

    ConfigError if the map does not fit the layout: a byte of the rank's page without a place, or with two.
    """
    if layout.row_layout != "canonical" and rank_map is not None:
        raise ConfigError(f"rank map: row_layout is {layout.row_layout!r}; only a canonical row has one")
    whole = [CopyRun(i, 0, 0, tensor.page_on(rank)) for i, tensor in enumerate(layout.tensors) if tensor.page_on(rank)]
    if rank_map is None:
        problems = _needs_map(layout, whole)
    else:
        problems = _problems(layout, rank, rank_map)
        whole = list(rank_map.runs)
    if problems:
        raise ConfigError([f"rank map: {problem}" for problem in problems])
    return tuple(tuple(run for run in whole if run.tensor == index) for index in range(len(layout.tensors)))


def _needs_map(layout: CacheLayout, whole: Sequence[CopyRun]) -> list[str]:
    if layout.row_layout != "canonical":
        return []
    split = [run for run in whole if run.nbytes != layout.tensors[run.tensor].canonical_page_bytes]
    if not split and layout.world_size == 1:
        return []
    return ["missing; in a canonical row it says where each rank's bytes lie"]


def _problems(layout: CacheLayout, rank: int, rank_map: RankMap) -> list[str]:
    problems = []
    if not 0 <= rank_map.writer_index < rank_map.num_writers:
        problems.append(
            f"writer_index is {rank_map.writer_index}, expected 0 to num_writers - 1 ({rank_map.num_writers - 1})"
        )
    for run in rank_map.runs:
        if not 0 <= run.tensor < len(layout.tensors):
            problems.append(f"tensor {run.tensor} does not exist, expected 0 to {len(layout.tensors) - 1}")
        if run.nbytes < 1 or run.count < 1:
            problems.append(
                f"tensor {run.tensor}: {run.count} fragments of {run.nbytes} bytes, expected 1 or more of both"
            )
    if problems:
        return problems
    for index, tensor in enumerate(layout.tensors):
        runs = [run for run in rank_map.runs if run.tensor == index]
        local = sorted(fragment for run in runs for fragment in run.local())
        canonical = sorted(fragment for run in runs for fragment in run.canonical())
        # Fragments that fill the page without a gap start and end where their neighbours do.
        edges = [(0, 0), *local, (tensor.page_on(rank),) * 2]
        if any(end != start for (_, end), (start, _) in pairwise(edges)):
            problems.append(
                f"tensor {tensor.name!r}: the runs do not cover its {tensor.page_on(rank)} bytes exactly once"
            )
        edges = [(0, 0), *canonical, (tensor.canonical_page_bytes,) * 2]
        if any(end > start for (_, end), (start, _) in pairwise(edges)):
            problems.append(
                f"tensor {tensor.name!r}: the runs overlap, or leave its canonical {tensor.canonical_page_bytes} bytes"
            )
    return problems
