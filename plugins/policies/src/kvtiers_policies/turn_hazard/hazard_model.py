"""The hazard model: how likely a run of chunks is used next at each age, learnt online from what has happened.

The age since the last use is cut into bins, each about 1.6 times as wide as the one before. The hazard in a bin is the
probability that the run is used at that age, given that it was not used before: ``sigmoid`` of a sum of one weight for
the bin, and two for each feature, of which one counts at every age and one in this bin alone. A use is a positive
example for the bin it falls into, and each bin that passes without a use is a negative one. Weights are updated by
AdaGrad (Duchi, Hazan and Singer, JMLR 12, 2011), over small batches, since numpy costs as much for 64 runs as for one.

``rank`` is the index of Gittins (J. R. Stat. Soc. B 41, 1979): over all horizons the best ratio of the probability of
a use to the time that the memory is held for it.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BINS", "BIN_ENDS", "HazardModel", "Row", "bin_of", "half_octave", "octave"]

Row: TypeAlias = bytes
"""The number of the weight of each feature of a run, one a byte: a batch of them is joined to one array."""
Curves: TypeAlias = npt.NDArray[np.float64]

BINS = 21
BIN_ENDS: list[float] = [2.0 ** (index / 1.5) for index in range(BINS)]
"""Seconds of age at which each bin is over; the last one has no end, and counts as this long."""
_WIDTHS = np.diff(np.array([0.0, *BIN_ENDS]))
_WIDTH_LIST: list[float] = _WIDTHS.tolist()
_BIN_NUMBERS = np.arange(BINS)
_PRIOR = 0.03
_FEW = 100  # examples of a bin
_RATE, _RATE_AT_ALL_AGES = 0.4, 0.2


def bin_of(age: float, first: int = 0) -> int:
    """Return the bin of this age (seconds), but none before ``first``."""
    return min(BINS - 1, max(first, bisect_right(BIN_ENDS, age)))


def octave(value: float, most: int) -> int:
    """Return 0 below 1, then 1 for each power of two that the value has reached; ``most`` at most."""
    return min(most, int(value).bit_length())


def half_octave(value: float, most: int) -> int:
    """Do as ``octave``, but count the middle between two powers as well."""
    if value < 1:
        return 0
    exponent = int(value).bit_length() - 1
    return min(most, 1 + exponent * 2 + int((value / (1 << exponent) - 1) * 2))


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

    def learn(self, rows: Sequence[Row], bins: Sequence[int], used: Sequence[bool]) -> None:
        """Learn from runs that were used in these bins, or were not."""
        row, column = self._table(rows), np.array(bins)[:, None]
        places = np.concatenate((row * BINS + column, row + self._flat, column + (len(self._weights) - BINS)), 1)
        error = 1 / (1 + np.exp(-self._weights[places].sum(1))) - np.array(used, float)
        self._seen += np.bincount(bins, minlength=BINS)
        flat, errors = places.ravel(), np.repeat(error, places.shape[1])
        size = len(self._weights)
        self._squares += np.bincount(flat, errors * errors, size)
        self._weights -= self._rates * np.bincount(flat, errors, size) / np.sqrt(self._squares)

    def curves(self, rows: Sequence[Row], bins: Sequence[int]) -> Curves:
        """Return the hazards of runs by bin; 0 in bins that are over."""
        row = self._table(rows)
        # Transposed: numpy adds up along the first axis, run by run, in half the time.
        sums = self._by_bin.take(row.T, 0).sum(0) + self._at_all_ages[row].sum(1)[:, None] + self._of_bin
        hazards: Curves = 1 / (1 + np.exp(-sums))
        hazards[np.array(bins)[:, None] > _BIN_NUMBERS] = 0.0
        return hazards

    def _table(self, rows: Sequence[Row]) -> npt.NDArray[np.intp]:
        return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, self._features).astype(np.intp)

    def rank(self, rows: Sequence[Row], bins: Sequence[int]) -> list[float]:
        """Return the index of each run in the bin of its age, uses a second of held memory: the least leaves first."""
        hazards = self.curves(rows, bins)
        alive = np.cumprod(1 - hazards, 1)
        held = _WIDTHS * (1 - hazards / 2)
        held[:, 1:] *= alive[:, :-1]
        held[np.array(bins)[:, None] > _BIN_NUMBERS] = 0.0
        held = np.cumsum(held, 1)
        ratios = np.divide(1 - alive, held, out=np.zeros_like(held), where=held > 0)
        return ratios.max(1).tolist()  # type: ignore[no-any-return]  # floats

    def rank_one(self, row: Row) -> float:
        """Return what ``rank`` does for one run that was used just now, several times as fast."""
        numbers = np.frombuffer(row, np.uint8)
        at_all_ages = float(self._at_all_ages[numbers].sum())
        alive, held, ratios = 1.0, 0.0, []
        sums = (self._by_bin.take(numbers, 0).sum(0) + self._of_bin).tolist()
        for each, width in zip(sums, _WIDTH_LIST, strict=True):
            hazard = 1 / (1 + math.exp(-at_all_ages - each))
            held += alive * width * (1 - hazard / 2)
            alive *= 1 - hazard
            ratios.append((1 - alive) / held)
        return max(ratios)

    @property
    def examples(self) -> int:
        """Bins with and without a use that were learnt from so far."""
        return int(self._seen.sum())

    def next_uses(self, rows: Sequence[Row], bins: Sequence[int]) -> Curves:
        """Return the probability of each run, in the bin of its age, that its next use falls into each bin.

        None at ages of which too little was seen: there the prior alone would speak, bin after bin.
        """
        hazards = self.curves(rows, bins)
        few = np.cumsum(np.concatenate(([0], self._seen < _FEW)))
        hazards[few[1:] > few[np.array(bins)][:, None]] = 0.0
        uses: Curves = hazards * np.cumprod(np.hstack((np.ones((len(rows), 1)), 1 - hazards[:, :-1])), 1)
        return uses
