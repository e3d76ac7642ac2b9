"""Rate limits at a region's socket, to which any local user can connect many processes, again and again.

The first refusals each get a log line and an answer; then one a second does. While all ranks are joined, the socket is
not served for a moment after several refusals in a row, so that a process that connects in a loop costs the engine no
time; a rank that comes back waits for that moment at most. What hangs up without a word is no refusal, and costs as
much: all connections are accepted at a bounded rate. While ranks are missing, it is high enough for all
of them at once.
"""

import time
from collections.abc import Callable

__all__ = ["AcceptRate", "Refusals"]

_FIRST = 20
_SECONDS = 1.0
_IN_A_ROW = 50
_PAUSE_SECONDS = 0.05
_WINDOW_SECONDS = 0.1
_IN_A_WINDOW = 100  # 1,000 a second: 2 % of a processor; a full backlog of 1,024 is through in a second
_IN_A_WINDOW_AT_THE_START = 400


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


class AcceptRate:
    """Bounds how many connections are accepted. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = 0.0
        self._left = 0

    def accepted(self, *, at_start: bool) -> float:
        """Count a connection; return for how many seconds no other is to be accepted, 0: for none.

        ``at_start``: ranks are missing.
        """
        now = self._clock()
        if now >= self._ends:
            self._ends = now + _WINDOW_SECONDS
            self._left = _IN_A_WINDOW_AT_THE_START if at_start else _IN_A_WINDOW
        self._left -= 1
        return self._ends - now if self._left <= 0 else 0.0
