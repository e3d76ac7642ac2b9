"""What a store is known to hold, so that N replicas do not write the same system prompt N times.

Who moves values knows names (``KnownNames``). Who sends jobs knows what it cannot rely on (``DoubtedKeys``): a chunk
that the store seemed to have and did not give. Its next write is made without asking, by whichever host, else a value
of another format or length would stand in the way for ever.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvtiers.api import OffloadKey
from kvtiers.secondary.protocol import Status

__all__ = ["DoubtedKeys", "KnownNames"]

_MOST_KNOWN = 65_536
_MOST_DOUBTED = 8_192
_DROPPED_AT_ONCE = 1_024  # dropping one at a time would walk over the gaps of all dropped before
_NOT_GIVEN = frozenset({Status.MISSING, Status.CORRUPT})
_Known = TypeVar("_Known")
_Value = TypeVar("_Value")


class KnownNames:
    """The names of one store; for many threads. ``seconds``: how long a name is believed to be there.

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
        """These are there now: written, read or seen."""
        with self._lock:
            until = self._clock() + self._seconds
            for name in names:
                self._until[hash(name)] = until
            _bound(self._until, _MOST_KNOWN)

    def forget(self, names: Iterable[str]) -> None:
        """These are not there, or nobody knows."""
        with self._lock:
            for name in names:
                self._until.pop(hash(name), None)


class DoubtedKeys:
    """The chunks of one tier that are to be written whatever the store says. For one thread."""

    def __init__(self) -> None:
        self.keys: dict[OffloadKey, None] = {}

    def note(self, keys: Sequence[OffloadKey], statuses: bytes, *, is_load: bool) -> None:
        """Take note of what became of each of these keys in a job: not given, or given or written after all."""
        if is_load and not _NOT_GIVEN.isdisjoint(statuses):
            self.keys.update((key, None) for key, status in zip(keys, statuses, strict=False) if status in _NOT_GIVEN)
            _bound(self.keys, _MOST_DOUBTED)
        if self.keys:
            for key, status in zip(keys, statuses, strict=False):
                if status == Status.DONE:
                    self.keys.pop(key, None)

    def among(self, keys: Sequence[OffloadKey]) -> bytes:
        """Return a byte for each of these keys, 1 for a doubted one; nothing if none is."""
        if self.keys.keys().isdisjoint(keys):
            return b""
        return bytes(key in self.keys for key in keys)

    def clear(self) -> None:
        """Nothing is doubted any more."""
        self.keys.clear()


def _bound(known: dict[_Known, _Value], most: int) -> None:
    if len(known) > most:
        for oldest in list(itertools.islice(known, len(known) - most + _DROPPED_AT_ONCE)):
            del known[oldest]
