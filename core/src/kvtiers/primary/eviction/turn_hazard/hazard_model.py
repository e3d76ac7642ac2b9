"""The hazard model: how likely a run of chunks is used next at each age, learnt online from what has happened.

The age since the last use is cut into bins, each about 1.6 times as wide as the one before. The hazard in a bin is the
probability that the run is used at that age, given that it was not used before: ``sigmoid`` of a sum of one weight for
the bin, and two for each feature, of which one counts at every age and one in this bin alone. A use is a positive
example for the bin it falls into, and each bin that passes without a use is a negative one. Weights are updated by
AdaGrad (Duchi, Hazan and Singer, JMLR 12, 2011), over small batches, since numpy costs as much for 64 runs as for one.

``rank`` is the index of Gittins (J. R. Stat. Soc. B 41, 1979): over all horizons the best ratio of the probability of
a use to the time that the memory is held for it.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BINS", "HazardModel", "bin_end", "bin_of", "step"]

Rows: TypeAlias = tuple[int, ...]
"""The weights' row of each feature of a run."""
Curves: TypeAlias = npt.NDArray[np.float64]

BINS = 21
_ENDS: list[float] = [
    2.0 ** (index / 1.5) for index in range(BINS)
]  # seconds; the last bin has no end, and counts as this long
_WIDTHS = np.diff(np.array([0.0, *_ENDS]))
_WIDTH_LIST: list[float] = _WIDTHS.tolist()
_BIN_NUMBERS = np.arange(BINS)
_PRIOR = 0.03
_FEW = 100  # examples of a bin
_RATE, _RATE_AT_ALL_AGES = 0.4, 0.2


def bin_of(age: float, first: int = 0) -> int:
    """Return the bin of this age (seconds), but none before ``first``."""
    index = first
    while index < BINS - 1 and age >= _ENDS[index]:
        index += 1
    return index


def bin_end(index: int) -> float:
    """Return the age (seconds) at which this bin is over."""
    return _ENDS[index]


def step(value: float, unit: float, most: int, steps: int = 1) -> int:
    """Return 0 below ``unit``, then the number of the power of two, or of its ``steps`` parts; ``most`` at most."""
    if value < unit:
        return 0
    exponent = int(value / unit).bit_length() - 1
    part = int((value / unit / (1 << exponent) - 1) * steps) if steps > 1 else 0
    return min(most, 1 + exponent * steps + part)


class HazardModel:
    """Weights of ``sizes[i]`` values of feature i. All arrays have a row for each run."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.starts = [sum(sizes[:index]) for index in range(len(sizes))]
        rows = sum(sizes)
        self._features = len(sizes)
        self._flat = rows * BINS  # where the weights for all ages begin; those of the bins alone come last
        self._weights = np.zeros(self._flat + rows + BINS)
        self._weights[-BINS:] = np.log(_PRIOR / (1 - _PRIOR))
        self._squares = np.ones_like(self._weights)
        share = 1 / np.sqrt(len(sizes))
        self._rates = np.full_like(self._weights, _RATE * share)
        self._rates[self._flat : -BINS] = _RATE_AT_ALL_AGES * share
        self._rates[-BINS:] = _RATE
        self._by_bin = self._weights[: self._flat].reshape(rows, BINS)
        self._at_all_ages = self._weights[self._flat : -BINS]
        self._of_bin = self._weights[-BINS:]
        self._seen = np.zeros(BINS)

    @property
    def nbytes(self) -> int:
        """The memory of all arrays."""
        return self._weights.nbytes + self._squares.nbytes + self._rates.nbytes

    def learn(self, rows: Sequence[Rows], bins: Sequence[int], used: Sequence[bool]) -> None:
        """Learn from runs that were used in these bins, or were not."""
        row, column = self._table(rows), np.array(bins)[:, None]
        places = np.hstack((row * BINS + column, row + self._flat, column + (len(self._weights) - BINS)))
        error = 1 / (1 + np.exp(-self._weights[places].sum(1))) - np.array(used, float)
        self._seen += np.bincount(bins, minlength=BINS)
        flat, each = places.ravel(), places.shape[1]
        size = len(self._weights)
        self._squares += np.bincount(flat, np.repeat(error * error, each), size)
        self._weights -= self._rates * np.bincount(flat, np.repeat(error, each), size) / np.sqrt(self._squares)

    def curves(self, rows: Sequence[Rows], bins: Sequence[int]) -> Curves:
        """Return the hazards of runs by bin; 0 in bins that are over."""
        row = self._table(rows)
        sums = self._by_bin[row].sum(1) + self._at_all_ages[row].sum(1)[:, None] + self._of_bin
        hazards: Curves = 1 / (1 + np.exp(-sums))
        hazards[np.array(bins)[:, None] > _BIN_NUMBERS] = 0.0
        return hazards

    def _table(self, rows: Sequence[Rows]) -> npt.NDArray[np.intp]:
        flat = np.fromiter(itertools.chain.from_iterable(rows), np.intp, len(rows) * self._features)
        return flat.reshape(-1, self._features)

    def rank(self, rows: Sequence[Rows], bins: Sequence[int]) -> list[float]:
        """Return the index of each run in the bin of its age, uses a second of held memory: the least leaves first."""
        hazards = self.curves(rows, bins)
        alive = np.cumprod(1 - hazards, 1)
        held = _WIDTHS * (1 - hazards / 2)
        held[:, 1:] *= alive[:, :-1]
        held[np.array(bins)[:, None] > _BIN_NUMBERS] = 0.0
        held = np.cumsum(held, 1)
        ratios = np.divide(1 - alive, held, out=np.zeros_like(held), where=held > 0)
        return ratios.max(1).tolist()  # type: ignore[no-any-return]  # floats

    def rank_one(self, rows: Rows) -> float:
        """Return what ``rank`` does for one run that was used just now, several times as fast."""
        at_all_ages = float(self._at_all_ages.take(rows).sum())
        alive, held, best = 1.0, 0.0, 0.0
        sums = (self._by_bin.take(rows, 0).sum(0) + self._of_bin).tolist()
        for each, width in zip(sums, _WIDTH_LIST, strict=True):
            hazard = 1 / (1 + math.exp(-at_all_ages - each))
            held += alive * width * (1 - hazard / 2)
            alive *= 1 - hazard
            best = max(best, (1 - alive) / held)
        return best

    @property
    def examples(self) -> int:
        """Bins with and without a use that were learnt from so far."""
        return int(self._seen.sum())

    def next_uses(self, rows: Sequence[Rows], bins: Sequence[int]) -> Curves:
        """Return the probability of each run, in the bin of its age, that its next use falls into each bin.

        None at ages of which too little was seen: there the prior alone would speak, bin after bin.
        """
        hazards = self.curves(rows, bins)
        few = np.cumsum(np.concatenate(([0], self._seen < _FEW)))
        hazards[few[1:] > few[np.array(bins)][:, None]] = 0.0
        uses: Curves = hazards * np.cumprod(np.hstack((np.ones((len(rows), 1)), 1 - hazards[:, :-1])), 1)
        return uses
