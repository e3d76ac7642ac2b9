"""Events on their way to whoever takes them: kept in order, bounded, forgotten by a reset."""

from collections import deque
from collections.abc import Sequence

from kvtiers.base import OffloadEvent

__all__ = ["EventLog"]

_MAX_KEYS = 1 << 17


class EventLog:
    """The events since the last ``take``. Of too many the oldest are dropped."""

    def __init__(self) -> None:
        self._events: deque[OffloadEvent] = deque()
        self._keys = 0

    def add(self, events: Sequence[OffloadEvent]) -> int:
        """Append these events; return how many old ones were dropped for them."""
        self._events.extend(events)
        self._keys += sum([len(event.keys) for event in events])
        dropped = 0
        while self._keys > _MAX_KEYS:
            self._keys -= len(self._events.popleft().keys)
            dropped += 1
        return dropped

    def take(self) -> list[OffloadEvent]:
        """Return the events, oldest first, and keep none."""
        events = list(self._events)
        self.clear()
        return events

    def clear(self) -> None:
        """Keep none."""
        self._events.clear()
        self._keys = 0
