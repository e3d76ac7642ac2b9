"""The circuit breaker of a tier: takes it out of use when it fails, and puts it back by itself.

=========  ========================================================================================
state      leaves it when
=========  ========================================================================================
closed     ``failures`` in a row, or ``error_rate`` over the last ``window`` seconds: to open
open       ``delay`` has passed (doubled with each failed probe, up to ``max_delay``): to probing
probing    the one probe succeeds: to closed; it fails or does not answer in time: to open
=========  ========================================================================================

Loads are judged by themselves, and together with all other calls: a store may answer questions and take what is
written while no value can be read. The probe does not read a value, so a tier whose loads failed comes back on trial:
the next load that fails opens the breaker again, for twice as long as before.
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


class _Window:
    """The calls of one kind: how many have failed in a row, and how many within the window."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self.in_a_row = 0
        self._spans: deque[_Span] = deque()

    def add(self, now: float, *, ok: bool) -> bool:
        """Add a call; return whether too many have failed now."""
        self.in_a_row = 0 if ok else self.in_a_row + 1
        window, spans = self._config.window, self._spans
        while spans and spans[0].begin < now - window:
            spans.popleft()
        if not spans or now >= spans[-1].begin + window / _SPANS:
            spans.append(_Span(now))
        spans[-1].calls += 1
        spans[-1].failures += not ok
        return not ok and (self.in_a_row >= self._config.failures or self._fails_too_often())

    def clear(self) -> None:
        """Forget all calls."""
        self.in_a_row = 0
        self._spans.clear()

    def _fails_too_often(self) -> bool:
        calls = sum(span.calls for span in self._spans)
        failures = sum(span.failures for span in self._spans)
        return calls >= self._config.min_calls and failures >= self._config.error_rate * calls


class Breaker:
    """One tier's breaker. All times come from the caller's clock; runs on the engine's thread."""

    def __init__(self, config: BreakerConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._all, self._loads = _Window(config), _Window(config)
        self._delay = config.delay
        self._retry_at = 0.0
        self._changed_at = clock()
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it has opened."""
        self.on_trial = False
        """Loads had failed when it opened, and none has succeeded since."""
        self.relapses = 0
        """How often it has opened on trial, since a load has succeeded."""

    @property
    def seconds(self) -> float:
        """For how long it has been in use, or out of use; a probe changes neither. From any thread."""
        return max(0.0, self._clock() - self._changed_at)

    def record(self, *, ok: bool, is_load: bool = False) -> None:
        """Record how a call ended. While the breaker is not closed only the probe counts: ``probed``."""
        if self.state is not BreakerState.CLOSED:
            return
        now = self._clock()
        trips = self._all.add(now, ok=ok)
        if is_load:
            trips = self._loads.add(now, ok=ok) or trips
            if ok:
                self._pass_trial()
            elif self.on_trial:
                self.relapses += 1
                self._delay = min(self._delay * 2, self._config.max_delay)
                trips = True
        if trips:
            self.trip()

    def trip(self) -> None:
        """Open now, whatever was counted: the tier is gone."""
        if self.state is BreakerState.CLOSED:
            self.opened += 1
            self.on_trial = self.on_trial or self._loads.in_a_row > 0
            self._changed_at = self._clock()
        self.state = BreakerState.OPEN
        self._retry_at = self._clock() + self._delay

    def probe_soon(self) -> None:
        """Make the probe due at once, if the breaker is open: the tier seems to be back."""
        self._retry_at = self._clock()

    @property
    def probe_is_due(self) -> bool:
        """Return whether it is open, and the one probe is due. From any thread."""
        return self.state is BreakerState.OPEN and self._clock() >= self._retry_at

    def wants_probe(self) -> bool:
        """Return whether the one probe is due; the caller sends it then, and reports with ``probed``."""
        if self.probe_is_due:
            self.state = BreakerState.PROBING
            return True
        return False

    def probed(self, *, ok: bool, is_load: bool = False) -> None:
        """Record how the probe ended. ``is_load``: it was a load."""
        if ok:
            self.state = BreakerState.CLOSED
            self._changed_at = self._clock()
            self._all.clear()
            self._loads.clear()
            if is_load or not self.on_trial:
                self._pass_trial()
        else:
            self._delay = min(self._delay * 2, self._config.max_delay)
            self.state = BreakerState.OPEN
            self._retry_at = self._clock() + self._delay

    def _pass_trial(self) -> None:
        self.on_trial, self.relapses = False, 0
        self._delay = self._config.delay
