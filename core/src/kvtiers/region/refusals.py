"""Rate limits for refused processes at a region's socket, of which any local user can start many.

The first refusals each get a log line and an answer; then one a second does. While all ranks are joined, the socket is
not served for a moment after several refusals in a row, so that a process that connects in a loop costs the engine no
time; a rank that comes back waits for that moment at most.
"""

import time
from collections.abc import Callable

__all__ = ["Refusals"]

_FIRST = 20
_SECONDS = 1.0
_IN_A_ROW = 50
_PAUSE_SECONDS = 0.05


class Refusals:
    """Counts refusals. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = _FIRST
        self._next = 0.0
        self._since_pause = 0
        self.unlogged = 0
        """Refusals since the last one that was logged."""

    def should_log(self) -> bool:
        """Count one refusal; return whether it is to be logged and answered."""
        self._since_pause += 1
        now = self._clock()
        if self._left > 0:
            self._left -= 1
        elif now < self._next:
            self.unlogged += 1
            return False
        self._next = now + _SECONDS
        return True

    def take_unlogged(self) -> str:
        """Return text about the refusals that were not logged, "" if there are none; reset their count."""
        unlogged, self.unlogged = self.unlogged, 0
        return f" ({unlogged} more since the last such line)" if unlogged else ""

    def pause(self) -> float:
        """Return for how many seconds no connection is to be accepted now; 0: for none."""
        if self._since_pause < _IN_A_ROW:
            return 0.0
        self._since_pause = 0
        return _PAUSE_SECONDS
