"""The circuit breaker of a tier: takes it out of use when it fails, and puts it back by itself.

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
from dataclasses import dataclass
from enum import IntEnum

from kvtiers.api import BreakerConfig

__all__ = ["Breaker", "BreakerState"]

_SPANS = 30  # the window moves on in so many steps


class BreakerState(IntEnum):
    """A breaker's state, exported as a gauge: 0, 1, 2."""

    CLOSED = 0
    OPEN = 1
    PROBING = 2


@dataclass(slots=True)
class _Span:
    """The calls recorded in one part of the window."""

    begin: float
    calls: int = 0
    failures: int = 0


class Breaker:
    """One tier's breaker. All times come from the caller's clock; runs on the engine's thread."""

    def __init__(self, config: BreakerConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._failures = 0
        self._delay = config.delay
        self._retry_at = 0.0
        self._spans: deque[_Span] = deque()
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it has opened."""

    def record(self, *, ok: bool) -> None:
        """Record how a call ended. While the breaker is not closed only the probe counts: ``probed``."""
        if self.state is not BreakerState.CLOSED:
            return
        self._failures = 0 if ok else self._failures + 1
        now, window = self._clock(), self._config.window
        spans = self._spans
        while spans and spans[0].begin < now - window:
            spans.popleft()
        if not spans or now >= spans[-1].begin + window / _SPANS:
            spans.append(_Span(now))
        spans[-1].calls += 1
        spans[-1].failures += not ok
        if not ok and (self._failures >= self._config.failures or self._fails_too_often()):
            self.trip()

    def trip(self) -> None:
        """Open now, whatever was counted: the tier is gone."""
        if self.state is BreakerState.CLOSED:
            self.opened += 1
        self.state = BreakerState.OPEN
        self._retry_at = self._clock() + self._delay

    def probe_soon(self) -> None:
        """Make the probe due at once, if the breaker is open: the tier seems to be back."""
        self._retry_at = self._clock()

    def wants_probe(self) -> bool:
        """Return whether the one probe is due; the caller sends it then, and reports with ``probed``."""
        if self.state is BreakerState.OPEN and self._clock() >= self._retry_at:
            self.state = BreakerState.PROBING
            return True
        return False

    def probed(self, *, ok: bool) -> None:
        """Record how the probe ended."""
        if ok:
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._spans.clear()
            self._delay = self._config.delay
        else:
            self._delay = min(self._delay * 2, self._config.max_delay)
            self.state = BreakerState.OPEN
            self._retry_at = self._clock() + self._delay

    def _fails_too_often(self) -> bool:
        calls = sum(span.calls for span in self._spans)
        failures = sum(span.failures for span in self._spans)
        return calls >= self._config.min_calls and failures >= self._config.error_rate * calls
