"""The prices of loads: the seconds that a load has saved, by the cost of computing its tokens at their positions."""

from collections.abc import Collection, Sequence

from kvtiers.api import OffloadKey, group_of
from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["LoadPrices"]


class LoadPrices:
    """Prices the loads of all tiers. ``group``: the KV group by which prompts are measured, in chunks of ``tokens``."""

    def __init__(self, cost: PrefillCost, group: int, tokens: int) -> None:
        self._cost = cost
        self._group = group
        self._tokens = tokens

    def landed(
        self,
        slot: TierSlot,
        keys: Sequence[OffloadKey],
        positions: Sequence[int],
        good: Collection[OffloadKey],
        seconds: float,
    ) -> None:
        """Count what a load has saved. ``positions``: of each key's first token; ``good``: the keys that have come."""
        mine = [
            position
            for key, position in zip(keys, positions, strict=True)
            if group_of(key) == self._group and (len(good) == len(keys) or key in good)
        ]
        if mine:
            tokens = len(mine) * self._tokens
            computing = self._cost.seconds(tokens, sum(mine) / len(mine) + self._tokens / 2)
            if computing is not None:
                slot.count_saved(len(good), computing, seconds)
