"""The protection of landed promotions: until their first read, and for a while, they are not evictable.

Without that, promotions that land together evict each other before the requests that wait for them come to read.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice, repeat, takewhile

from kvtiers.api import OffloadKey

__all__ = ["Protection"]


class Protection:
    """The protected chunks, oldest first: at most ``limit`` of them, none for longer than ``seconds``."""

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        # Not a dict: looking for the first key of one costs time for each that was removed before it.
        self._since: OrderedDict[OffloadKey, float] = OrderedDict()
        self.keys = self._since.keys()

    def begin(self, keys: list[OffloadKey], now: float) -> list[OffloadKey]:
        """Protect these chunks; return those, the oldest, that lose their protection since there are too many."""
        self._since.update(dict.fromkeys(keys, now))
        return self.end(list(islice(self._since, max(0, len(self._since) - self.limit))))

    def end(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Protect these chunks no longer; return those that were protected."""
        if not self._since:
            return []
        since = map(self._since.pop, keys, repeat(None))
        return [key for key, begun in zip(keys, since, strict=False) if begun is not None]

    def expire(self, now: float) -> list[OffloadKey]:
        """End the protection of chunks that have had it for ``seconds``; return them."""
        if not self._since:
            return []
        return self.end(list(takewhile(lambda key: now - self._since[key] >= self.seconds, self._since)))

    def clear(self) -> None:
        """Protect nothing any more."""
        self._since.clear()
