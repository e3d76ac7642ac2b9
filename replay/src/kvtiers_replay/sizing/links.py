"""The links to tiers: good value sizes, and the prefix length from which a load pays.

**How large.** A value should be so large that the round trip does not count: at least what the link moves during one
(``bytes per second * round trip``), within bounds for each type of tier. Measured with one connection over loopback,
values of 64 KiB, 1 MiB and 4 MiB move at 1.1, 3.8 and 4.7 GB/s to a cache server, at 0.7, 3.1 and 2.7 to an object
store and, written as files, at 0.4, 1.1 and 1.4: below 256 KiB the cost of each call dominates, above 8 MiB there is
no gain. So 256 KiB to 2 MiB in memory and on a disk, 2 to 8 MiB over a network. Larger chunks have their price: a
prompt is stored in whole chunks, so half a chunk of each is lost on average, and one that differs in its last block is
another chunk.

**Break-even.** A load of n tokens takes ``round trips + bytes(n) / rate``, summed over the links on the way (from a
tier: its own and the primary's), computing them takes ``n / prefill speed``. See ``break_even_tokens``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers.layout.cache_layout import CacheLayout
from kvtiers_replay.sizing.model import ModelShape

__all__ = ["LINKS", "Link", "TierSuggestion", "break_even_tokens", "suggest"]

_KIB, _MIB = 1 << 10, 1 << 20
_LOCAL, _REMOTE = (256 * _KIB, 2 * _MIB), (2 * _MIB, 8 * _MIB)
_MOST_BLOCKS = 64  # of a chunk: the layout's own bound


@dataclass(frozen=True, slots=True)
class Link:
    """A type of tier: bytes per second, seconds of a round trip, and the bounds of a good value in bytes.

    The primary's link goes to the GPU of each rank, all at the same time; a tier's to the primary, for all ranks.
    """

    name: str
    bytes_per_second: float
    round_trip: float
    smallest: int
    largest: int

    @property
    def good_value_bytes(self) -> int:
        """The smallest good value: what the link moves during a round trip, within the bounds."""
        return min(max(self.smallest, math.ceil(self.bytes_per_second * self.round_trip)), self.largest)


PRIMARY = "primary"
LINKS = (
    # Usual figures, where none were measured: PCIe 4.0 x16; another process's memory; one NVMe drive; a cache server
    # over 25 GbE; an object store in the same region.
    Link(PRIMARY, 25e9, 20e-6, *_LOCAL),
    Link("memory", 10e9, 50e-6, *_LOCAL),
    Link("disk", 3e9, 200e-6, *_LOCAL),
    Link("network", 3e9, 500e-6, *_REMOTE),
    Link("object", 1e9, 30e-3, *_REMOTE),
)


@dataclass(frozen=True, slots=True)
class TierSuggestion:
    """A good chunk for one type of tier; all of it follows from ``layout``.

    ``value_bytes``: by group of layers, with the seal. ``tokens_per_gib``: what a GiB of the tier holds.
    ``break_even``: tokens from which on loading beats computing; None: it never does.
    """

    link: Link
    layout: CacheLayout
    tokens: int
    rank_bytes: tuple[int, ...]
    value_bytes: tuple[int, ...]
    tokens_per_gib: float
    break_even: int | None


def suggest(shape: ModelShape, tokens_per_block: int, links: Sequence[Link], prefill: float) -> list[TierSuggestion]:
    """Return a suggestion for each of these links, ``primary`` among them. ``prefill``: tokens per second."""
    primary = next(link for link in links if link.name == PRIMARY)
    found = []
    for link in links:
        layout = _layout_for(shape, tokens_per_block, link)
        groups = range(len(layout.groups))
        values = tuple(layout.value_bytes(group) for group in groups)
        # Every row of the primary is as long as its largest value.
        stored = layout.row_stride * len(values) if link is primary else sum(values)
        tokens = tokens_per_block * layout.blocks_per_chunk
        way = [primary] if link is primary else [link, primary]
        found.append(
            TierSuggestion(
                link,
                layout,
                tokens,
                tuple(layout.cell_bytes(group, 0) for group in groups),
                values,
                (1 << 30) * tokens / stored,
                break_even_tokens(shape, way, prefill, step=tokens),
            )
        )
    return found


def _layout_for(shape: ModelShape, tokens_per_block: int, link: Link) -> CacheLayout:
    """Return the layout with the fewest blocks a chunk, a power of two, whose smallest value is large enough."""
    blocks = 1
    while True:
        layout = shape.layout(tokens_per_block, blocks)
        smallest = min(layout.payload_bytes(group) for group in range(len(layout.groups)))
        if smallest >= link.good_value_bytes or smallest * 2 > link.largest or blocks * 2 > _MOST_BLOCKS:
            return layout
        blocks *= 2


def break_even_tokens(shape: ModelShape, way: Sequence[Link], prefill: float, step: int = 1) -> int | None:
    """Return the shortest prefix, in whole steps of tokens, that is loaded faster than computed; None: there is none.

    With R the round trips of the links on the way and b the seconds that a token takes on them,

        R + n * b = n / prefill,   so   n = R / (1 / prefill - b)

    and none if b >= 1 / prefill. A group with a window w is loaded for its last w tokens alone: from w tokens on it
    adds ``w * its b`` once instead of ``n * its b``. Prefill is taken as linear; attention makes long prompts slower
    than that, so that in truth loading pays a little earlier.
    """
    fixed = sum(link.round_trip for link in way)
    costs = sorted(
        (group.window or math.inf, _seconds_per_token(shape, group.bytes_per_token, way)) for group in shape.groups
    )
    slope = sum(seconds for _, seconds in costs)
    start = 0.0
    for end, seconds in [*costs, (math.inf, 0.0)]:
        gain = 1 / prefill - slope  # a token, as long as no further window is full
        if gain > 0 and (needed := max(start, fixed / gain)) <= end and needed < math.inf:
            return max(1, math.ceil(needed / step - 1e-9)) * step
        if end == math.inf:
            return None
        fixed += end * seconds
        slope -= seconds
        start = end
    return None


def _seconds_per_token(shape: ModelShape, rank_bytes: int, way: Sequence[Link]) -> float:
    """Return what these bytes of each rank take on all links: to the GPUs side by side, from a tier one by one."""
    return sum(
        (rank_bytes if link.name == PRIMARY else rank_bytes * shape.stored_ranks) / link.bytes_per_second
        for link in way
    )
