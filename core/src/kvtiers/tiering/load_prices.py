"""The prices of loads: the seconds that a request's loads have saved, by what computing its tokens would have taken.

They are counted once, when the request takes what was loaded for it: then all of its loads have ended, and those of its
windows and states, which save no tokens of their own, count with their seconds.
"""

from collections.abc import Collection, Sequence

from kvtiers.api import OffloadKey, group_of
from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.requests import Landed, RequestState
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
        state: RequestState,
        slot: TierSlot,
        keys: Sequence[OffloadKey],
        positions: Sequence[int],
        good: Collection[OffloadKey],
        seconds: float,
    ) -> None:
        """Record a load of a request's. ``positions``: of each key's first token; ``good``: the keys that have come."""
        mine = [
            position
            for key, position in zip(keys, positions, strict=True)
            if group_of(key) == self._group and (len(good) == len(keys) or key in good)
        ]
        chunks, prefix_chunks, sum_of_positions, so_far = state.landed.get(slot, Landed(0, 0, 0, 0.0))
        state.landed[slot] = Landed(
            chunks + len(good), prefix_chunks + len(mine), sum_of_positions + sum(mine), so_far + seconds
        )

    def used(self, state: RequestState) -> None:
        """Count what the loads of a request have saved, which it uses now; nothing if it has given some of them up."""
        landed, state.landed = state.landed, {}
        if state.load_over:
            return
        computing = {slot: self._computing(one) for slot, one in landed.items() if one.prefix_chunks}
        whole = sum(computing.values())
        beside = sum(slot.seconds_of(one.chunks, one.seconds) for slot, one in landed.items() if slot not in computing)
        for slot, seconds in computing.items():
            if seconds > 0:
                loading = slot.seconds_of(landed[slot].chunks, landed[slot].seconds) + beside * seconds / whole
                slot.count_saved(seconds, loading)

    def _computing(self, one: Landed) -> float:
        """Return what computing takes instead; 0 if nothing was computed so far."""
        mean = one.sum_of_positions / one.prefix_chunks + self._tokens / 2
        return self._cost.seconds(one.prefix_chunks * self._tokens, mean) or 0.0
