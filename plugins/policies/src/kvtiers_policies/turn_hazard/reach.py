"""The reach of uses: how far a run of chunks is used when it is used again, learnt by the age of that use.

A user who answers within a minute goes on from the end of a run. Another session that comes by an hour later shares its
first chunks only, such as the first passage that was found for a question. So what is left of a run's worth when it is
about to be evicted is often that of its first chunks alone.

Places are cut into powers of two. Of the uses that reached each, by age and by whether the run had been used again
before, the share that ended there is counted; the prior is that few do.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvtiers_policies.turn_hazard.hazard_model import BINS, bin_of

__all__ = ["PLACES", "Reach", "place_number"]

Shares: TypeAlias = npt.NDArray[np.float64]

PLACES = 14
_BINS_TOGETHER = 3
_AGES = -(-BINS // _BINS_TOGETHER)
_AGE_OF_BIN = np.arange(BINS) // _BINS_TOGETHER
_PRIOR_USES, _PRIOR_ENDS = 10.0, 0.2


def place_number(place: int) -> int:
    """Return the power of two that a chunk's place in its run falls into."""
    return min(PLACES - 1, place.bit_length())


class Reach:
    """Counts of uses and of their ends, by (used again before, age, place)."""

    def __init__(self) -> None:
        self._uses = np.full((2, _AGES, PLACES), _PRIOR_USES)
        self._ends = np.full((2, _AGES, PLACES), _PRIOR_ENDS)

    def note(self, gap: float, used: int, length: int, *, again: bool) -> None:
        """Count a use of the first ``used`` chunks of a run of ``length``, ``gap`` seconds after the last one."""
        age = bin_of(gap) // _BINS_TOGETHER
        last = place_number(used - 1)
        self._uses[int(again), age, : last + 1] += 1
        if used < length:
            end = place_number(used)
            self._ends[int(again), age, end] += 1
            if end > last:
                self._uses[int(again), age, end] += 1

    def shares(self, *, again: bool) -> Shares:
        """Return the share of the uses in each bin of age that reach each place: (BINS, PLACES)."""
        ends = self._ends[int(again)] / self._uses[int(again)]
        ends[:, 0] = 0.0  # a use reaches the first chunk
        shares: Shares = np.cumprod(1 - ends, 1)[_AGE_OF_BIN]
        return shares
