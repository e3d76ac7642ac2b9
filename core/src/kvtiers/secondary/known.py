"""What a store is known to hold, so that N replicas do not write the same system prompt N times.

Names are remembered by their hash alone: two that share one, a chance of one in 10^9 with a full memory, cost a write
that is not made. A name is *doubted* when the store seemed to have it and did not give it: its next write is made
without asking, else a value of another format or length would stand in the way for ever.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

__all__ = ["KnownNames"]

_MOST_KNOWN = 65_536
_MOST_DOUBTED = 8_192
_DROPPED_AT_ONCE = 1_024  # dropping one at a time would walk over the gaps of all dropped before


class KnownNames:
    """The names of one store; for many threads. ``seconds``: how long a name is believed to be there."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[int, float] = {}
        self._doubted: dict[int, None] = {}
        self._lock = threading.Lock()

    def sort(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the indexes of the names that are known to be there, and of those that have to be asked for.

        A name in neither list is doubted.
        """
        present, unknown = [], []
        with self._lock:
            now = self._clock()
            for index, name in enumerate(names):
                if self._until.get(hash(name), 0.0) > now:
                    present.append(index)
                elif hash(name) not in self._doubted:
                    unknown.append(index)
        return present, unknown

    def learn(self, names: Iterable[str]) -> None:
        """These are there now: written, read or seen."""
        with self._lock:
            until = self._clock() + self._seconds
            for name in names:
                self._doubted.pop(hash(name), None)
                self._until[hash(name)] = until
            _bound(self._until, _MOST_KNOWN)

    def forget(self, names: Iterable[str]) -> None:
        """These are not there, or nobody knows."""
        with self._lock:
            for name in names:
                self._until.pop(hash(name), None)

    def doubt(self, name: str) -> None:
        """The store did not give this one, whatever it says when asked."""
        with self._lock:
            self._until.pop(hash(name), None)
            self._doubted[hash(name)] = None
            _bound(self._doubted, _MOST_DOUBTED)


def _bound(names: dict[int, float] | dict[int, None], most: int) -> None:
    if len(names) > most:
        for oldest in list(itertools.islice(names, len(names) - most + _DROPPED_AT_ONCE)):
            del names[oldest]
