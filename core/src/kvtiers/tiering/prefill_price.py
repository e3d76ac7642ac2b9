"""The price of prefill: the seconds that computing some tokens of a prompt takes, by their position in it.

Attention reads all tokens before the one that is computed, so a token is dearer the further into its prompt it is::

    seconds a token = seconds at the beginning + slope x position

What a load has saved is priced by this, once, when it lands (``LoadPrices``). The decision to load goes by
``PrefillCost``, for which all tokens cost the same.

Both terms are fitted to the engine's last steps, of each of which the tokens, the seconds and the tokens' mean position
are known: seconds are linear in the mean position, however many prompts a step has. The slope is the median of those
between any two steps that are far enough apart (Theil-Sen), the beginning what then is left of a token's seconds; of
that the lower third, since whatever disturbs a step makes it longer. Short steps do not count, as in ``PrefillCost``.
No token is priced as further into its prompt than those that were computed: the saving is never guessed too high.
"""

from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate, combinations
from statistics import median
from typing import NamedTuple

from kvtiers.api import OffloadKey, group_of
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["LoadPrices", "PrefillPrice"]

_STEPS = 16
_SMALLEST = 1 / 4  # of the largest step's tokens
_SHARE = 1 / 3
_APART = 1 / 4  # of the furthest position: steps that are nearer to each other say nothing of the slope
_FEWEST_PAIRS = 3


class _Step(NamedTuple):
    tokens: int
    per_token: float
    position: float


class PrefillPrice:
    """The seconds that the engine takes to compute a prompt's tokens, by their position. For the engine's thread."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_STEPS)
        self._fit: tuple[float, float] | None = None

    def observe(self, tokens: int, seconds: float, position: float = 0.0) -> None:
        """Take a step into account that has computed so many tokens of prompts, more than none, in so many seconds.

        ``position``: the mean number of tokens before each of them in its prompt; 0 for each step: not known.
        """
        if self._steps and tokens < _SMALLEST * max(self._steps).tokens:
            return
        self._steps.append(_Step(tokens, seconds / tokens, position))
        self._fit = None

    def seconds(self, tokens: int, position: float) -> float | None:
        """Return what computing so many tokens of this mean position takes; None: nothing was computed yet."""
        if not self._steps:
            return None
        if self._fit is None:
            self._fit = self._refit()
        begin, slope = self._fit
        return tokens * (begin + slope * min(position, max(step.position for step in self._steps)))

    def _refit(self) -> tuple[float, float]:
        apart = _APART * max(step.position for step in self._steps)
        slopes = [
            (b.per_token - a.per_token) / (b.position - a.position)
            for a, b in combinations(self._steps, 2)
            if abs(b.position - a.position) > apart
        ]
        slope = max(0.0, median(slopes)) if len(slopes) >= _FEWEST_PAIRS else 0.0
        ordered = sorted((step.per_token - slope * step.position, step.tokens) for step in self._steps)
        wanted = _SHARE * sum(tokens for _, tokens in ordered)
        reached = accumulate(tokens for _, tokens in ordered)
        begin = next(begin for (begin, _), so_far in zip(ordered, reached, strict=True) if so_far >= wanted)
        return max(0.0, begin), slope


class LoadPrices:
    """Prices the loads of all tiers. ``group``: the KV group by which prompts are measured, in chunks of ``tokens``."""

    def __init__(self, price: PrefillPrice, group: int, tokens: int) -> None:
        self._price = price
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
            computing = self._price.seconds(tokens, sum(mine) / len(mine) + self._tokens / 2)
            if computing is not None:
                slot.count_saved(len(good), computing, seconds)
