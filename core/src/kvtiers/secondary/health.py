"""The breaker: takes a tier out of use when it fails, and puts it back by itself.

=========  ========================================================================================
state      leaves it when
=========  ========================================================================================
closed     ``failures`` in a row, or ``error_rate`` over the last ``window`` seconds: to open
open       ``delay`` has passed (doubled with each failed probe, up to ``max_delay``): to probing
probing    the one probe succeeds: to closed; it fails or does not answer in time: to open
=========  ========================================================================================
"""

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from kvtiers.api import BreakerConfig

__all__ = ["Breaker", "BreakerState"]


class BreakerState(IntEnum):
    """Exported as a gauge: 0, 1, 2."""

    CLOSED = 0
    OPEN = 1
    PROBING = 2


class Breaker:
    """One tier's breaker. All times come from the caller's clock; runs on the engine's thread."""

    def __init__(self, config: BreakerConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._failures = 0
        self._delay = config.delay
        self._retry_at = 0.0
        self._recent: deque[tuple[float, bool]] = deque()
        self._recent_failures = 0
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it has opened."""

    def record(self, *, ok: bool) -> None:
        """Take in how a call ended. While the breaker is not closed only the probe counts: ``probed``."""
        if self.state is not BreakerState.CLOSED:
            return
        now = self._clock()
        self._failures = 0 if ok else self._failures + 1
        self._recent.append((now, ok))
        self._recent_failures += not ok
        while self._recent and self._recent[0][0] < now - self._config.window:
            self._recent_failures -= not self._recent.popleft()[1]
        calls = len(self._recent)
        too_many = calls >= self._config.min_calls and self._recent_failures >= self._config.error_rate * calls
        if not ok and (self._failures >= self._config.failures or too_many):
            self.trip()

    def trip(self) -> None:
        """Open now, whatever was counted: the tier is known to be gone."""
        if self.state is BreakerState.CLOSED:
            self.opened += 1
            self._delay = self._config.delay
        self.state = BreakerState.OPEN
        self._retry_at = self._clock() + self._delay

    def wants_probe(self) -> bool:
        """Say whether the one probe is due; the caller sends it then, and reports with ``probed``."""
        if self.state is BreakerState.OPEN and self._clock() >= self._retry_at:
            self.state = BreakerState.PROBING
            return True
        return False

    def probed(self, *, ok: bool) -> None:
        """Take in how the probe ended."""
        if ok:
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._recent.clear()
            self._recent_failures = 0
            self._delay = self._config.delay
        else:
            self._delay = min(self._delay * 2, self._config.max_delay)
            self.state = BreakerState.OPEN
            self._retry_at = self._clock() + self._delay
