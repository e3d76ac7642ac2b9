"""Admission by expected reuse: which chunks are worth a write to one tier, shortly before they would leave the primary.

A chunk that is not written costs at most one miss, with the probability that it is used again. So, of the chunks that
were looked at of late, those with the lowest probabilities are declined for as long as all that they may cost together
is ``may_lose`` of all hits; that gives a threshold, which moves with the traffic. What was declined and is asked for
all the same is counted: if that is more than was expected, less is declined.

::

    not looked at --choose--> sent      --left--> forgotten: the tier has it, and says so at a lookup
                  --choose--> declined  --used--> not looked at
                              declined  --left--> gone, remembered, so that a miss is counted
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction import EvictionPolicy
from kvtiers.tiering.admission import AdmissionPolicy
from kvtiers_policies.forecast import WithForecast

__all__ = ["ReuseAdmission", "WriteBudget"]

_EDGES = [0.001 * 1.14**step for step in range(53)]  # of probabilities, up to 0.91
_BRAKE_AT = 0.6  # of what may be lost: from there on less is declined, since what was declined is missed later
_LEAST = 500  # chunks looked at before the first is declined
_HALVED_AT = 20_000  # chunks looked at: then all sums are halved, so that what was long ago counts less
_PRIOR_LOSS = 25.0  # misses, both expected and seen
_MOST_GONE = 1_000_000
_BURST_HOURS = 0.05  # of a budget of writes that may be used at once


class WriteBudget:
    """A bound on writes: a token bucket of chunks, and how long the sums of the admission have been running."""

    def __init__(self, chunks_per_hour: float, now: float) -> None:
        self._per_second = chunks_per_hour / 3600
        self._most = max(1.0, chunks_per_hour * _BURST_HOURS)
        self._left, self._at = self._most, now
        self._since = now

    def room(self, now: float) -> int:
        """Return how many chunks may be written now."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)
        return int(self._left)

    def take(self, chunks: int) -> None:
        """Count chunks as written."""
        self._left -= chunks

    def allowed(self, now: float) -> float:
        """Return how many chunks may be written in the time that the sums are of."""
        return max(1.0, (now - self._since) * self._per_second)

    def halve(self, now: float) -> None:
        """Let the sums' time be half as long."""
        self._since += (now - self._since) / 2


class ReuseAdmission(AdmissionPolicy):
    """The decisions of one tier, by what may be lost of all hits and, where there is one, by a bound on writes."""

    def __init__(
        self,
        may_lose: float,
        chunks: int | None = None,
        writes_per_hour: float | None = None,
        now: float = 0.0,
    ) -> None:
        self._may_lose = may_lose
        self._holds = math.inf if chunks is None else chunks
        self._budget = None if writes_per_hour is None else WriteBudget(writes_per_hour, now)
        self._ever = 0  # chunks looked at
        self.looked_at: set[OffloadKey] = set()
        self._declined: set[OffloadKey] = set()
        self._gone: dict[OffloadKey, int] = {}  # and how many chunks had been looked at then
        self._chunks = [0.0] * (len(_EDGES) + 1)  # looked at, by probability
        self._misses = [0.0] * (len(_EDGES) + 1)  # that declining these would cost
        self._looked_at = 0.0
        self._hits = 0.0
        self._expected = self._seen = self._prior = 2 * _PRIOR_LOSS  # misses of what was declined
        self.missed = 0

    @staticmethod
    def around(policy: EvictionPolicy, capacity: int, residents: Iterable[OffloadKey]) -> EvictionPolicy:
        """Put the model of turn-hazard beside a policy that has no forecast."""
        return WithForecast(policy, capacity, residents)

    # -- what is to be written

    def unsent(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return those of these chunks that were not sent."""
        return [key for key in keys if key not in self.looked_at or key in self._declined]

    def choose(self, keys: Sequence[OffloadKey], odds: Sequence[float], now: float) -> list[OffloadKey]:
        """Return those of these chunks that are worth a write; the others are declined until they are used again.

        ``odds``: the probability of each to be used again. ``now``: seconds.
        """
        numbers = [bisect_right(_EDGES, each) for each in odds]
        for number, each in zip(numbers, odds, strict=True):
            self._chunks[number] += 1
            self._misses[number] += each
        self._looked_at += len(keys)
        self._ever += len(keys)
        if self._looked_at >= _HALVED_AT:
            self._halve(now)
        threshold = self._threshold(now)
        likely = [key for key, number in zip(keys, numbers, strict=True) if number >= threshold]
        worth = likely if self._budget is None else likely[: self._budget.room(now)]
        if len(worth) < len(keys):
            written = set(worth)
            declined = {key: each for key, each in zip(keys, odds, strict=True) if key not in written}
            self._expected += sum(declined.values())
            self._declined.update(declined)
            self.looked_at.update(declined)
        return worth

    def room(self, now: float) -> int | None:
        """Return how many chunks the budget of writes leaves; None: there is no such budget."""
        return None if self._budget is None else self._budget.room(now)

    def sent(self, keys: Collection[OffloadKey], *, written: bool) -> None:
        """Record that these chunks are on their way to the tier (``written``), or that a tier has them."""
        self.looked_at.update(keys)
        self._declined.difference_update(keys)
        if written and self._budget is not None:
            self._budget.take(len(keys))

    def failed(self, keys: Iterable[OffloadKey]) -> None:
        """Record that these chunks were not stored: they are looked at again."""
        self.looked_at.difference_update(keys)

    # -- what happens to chunks

    def read(self, keys: Sequence[OffloadKey]) -> None:
        """Count hits; what was declined is looked at again when it is about to leave."""
        self._hits += len(keys)
        if self._declined and (declined := self._declined.intersection(keys)):
            self._declined -= declined
            self.looked_at -= declined

    def computed(self, keys: Iterable[OffloadKey]) -> None:
        """Count those of these chunks, which had to be computed, that would be hits if they had not been declined."""
        gone = self._gone
        if gone:
            oldest = self._ever - self._holds  # before that, a full tier would have dropped it by now
            missed = sum(gone.pop(key) > oldest for key in keys if key in gone)
            self.missed += missed
            self._seen += missed
            self._hits += missed

    def left(self, keys: Sequence[OffloadKey]) -> int:
        """Record that these chunks are no longer resident; return how many left before they were looked at."""
        if self._declined and (declined := self._declined.intersection(keys)):
            self._declined -= declined
            self._gone.update((key, self._ever) for key in keys if key in declined)
            if len(self._gone) > _MOST_GONE:
                for key in list(islice(self._gone, _MOST_GONE // 8)):
                    del self._gone[key]
        before = len(self.looked_at)
        self.looked_at.difference_update(keys)
        return len(keys) - (before - len(self.looked_at))

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Handle chunks that are resident no longer, through no eviction."""
        self.looked_at.difference_update(keys)
        self._declined.difference_update(keys)

    def reset(self) -> None:
        """Forget all chunks; what was counted stays."""
        self.looked_at.clear()
        self._declined.clear()
        self._gone.clear()

    # -- inside

    def _threshold(self, now: float) -> int:
        """Return the lowest number of an odds' interval that is written."""
        if self._looked_at < _LEAST:
            return 0
        may_cost = self._may_lose * self._hits
        cost = self._seen - self._prior
        may_cost *= min(1.0, max(0.0, (1 - cost / max(1.0, may_cost)) / (1 - _BRAKE_AT)))
        may_cost /= max(1.0, self._seen / self._expected)
        threshold = 0
        for misses in self._misses:
            may_cost -= misses
            if may_cost < 0:
                break
            threshold += 1
        if self._budget is not None:
            allowed, number = self._budget.allowed(now), len(self._chunks)
            while number > threshold and allowed >= self._chunks[number - 1]:
                number -= 1
                allowed -= self._chunks[number]
            threshold = max(threshold, number - 1)  # of the last interval as much as there is room for
        return threshold

    def _halve(self, now: float) -> None:
        self._looked_at /= 2
        self._hits /= 2
        self._chunks = [each / 2 for each in self._chunks]
        self._misses = [each / 2 for each in self._misses]
        self._expected = self._expected / 2 + _PRIOR_LOSS
        self._seen = self._seen / 2 + _PRIOR_LOSS  # the prior's part stays as it is
        if self._budget is not None:
            self._budget.halve(now)
