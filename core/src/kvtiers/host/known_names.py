"""A cache of the names that a store holds, so that N replicas do not write the same system prompt N times."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvtiers.host.messages import drop_oldest

__all__ = ["KnownNames"]

_MOST_KNOWN = 65_536


class KnownNames:
    """The names of one store; for many threads. ``seconds``: how long a name counts as present.

    Names are remembered by their hash alone: two that share one, a chance of one in 10^9 with a full memory, cost a
    write that is not made.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[int, float] = {}
        self._lock = threading.Lock()

    def sort(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the indexes of the names that are known to be there, and of those that have to be asked for."""
        present, unknown = [], []
        with self._lock:
            now = self._clock()
            for index, name in enumerate(names):
                if self._until.get(hash(name), 0.0) > now:
                    present.append(index)
                else:
                    unknown.append(index)
        return present, unknown

    def learn(self, names: Iterable[str]) -> None:
        """Add names that are there now: written, read or seen."""
        with self._lock:
            until = self._clock() + self._seconds
            for name in names:
                self._until[hash(name)] = until
            drop_oldest(self._until, _MOST_KNOWN)

    def forget(self, names: Iterable[str]) -> None:
        """Remove names that are absent, or whose presence is unknown."""
        with self._lock:
            for name in names:
                self._until.pop(hash(name), None)
