"""An LRU cache of prefixes in a few obvious lines, to compare the whole stack with. It shares no code with it."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Hits(NamedTuple):
    references: int
    primary: int
    secondary: int

    @property
    def share(self) -> float:
        return (self.primary + self.secondary) / self.references


def replay(requests: Sequence[Sequence[bytes]], primary_size: int, secondary_size: int = 0) -> Hits:
    """One request after the other. A request uses all its blocks, its head last, so that its tail is evicted first."""
    primary: OrderedDict[bytes, None] = OrderedDict()
    secondary: OrderedDict[bytes, None] = OrderedDict()
    references = primary_hits = secondary_hits = 0
    for blocks in requests:
        references += len(blocks)
        promoted = set()
        computed_from = len(blocks)
        for index, block in enumerate(blocks):
            if block in primary:
                primary_hits += 1
            elif block in secondary:
                secondary_hits += 1
                promoted.add(block)
                secondary.move_to_end(block)
            else:
                computed_from = index
                break
        for block in blocks[computed_from:]:
            if secondary_size and block not in primary:
                secondary[block] = None
                secondary.move_to_end(block)
        for block in reversed(blocks):
            primary[block] = None
            primary.move_to_end(block)
        while len(primary) > primary_size:
            primary.popitem(last=False)
        while len(secondary) > secondary_size:
            secondary.popitem(last=False)
    return Hits(references, primary_hits, secondary_hits)
