"""The step clock: prefill tokens and seconds of vLLM's steps, for ``load_wait: auto``.

A step counts in which prompts are most of what is computed. vLLM may schedule a step before the one before has ended;
steps end in the order in which they begin, and each is computed when the one before has been.
"""

import time
from collections import deque
from collections.abc import Callable

__all__ = ["StepClock"]

_STEPS_IN_FLIGHT = 4  # vLLM schedules that far ahead at most
_PREFILL_TOKENS = 8  # tokens a request in a step of which prompts are the larger part


class StepClock:
    """Times steps. Runs on the engine's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: deque[tuple[int, float, float]] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._ended = 0.0
        self._computed = (0, 0.0, 0.0)

    def begins(self, tokens: int, requests: int, position: float = 0.0) -> None:
        """Record a step that computes this many tokens for this many requests.

        ``position``: how many tokens are before each of them in its request, on average.
        """
        self._running.append((tokens if tokens >= _PREFILL_TOKENS * requests else 0, position, self._clock()))

    def ends(self) -> None:
        """Record the end of the oldest step."""
        if not self._running:
            return
        tokens, position, began = self._running.popleft()
        before_it, self._ended = self._ended, self._clock()
        if tokens:
            computed, seconds, where = self._computed
            where += (position - where) * tokens / (computed + tokens)
            self._computed = (computed + tokens, seconds + self._ended - max(began, before_it), where)

    def take_computed(self) -> tuple[int, float, float]:
        """Return tokens, seconds and mean position of the steps that count and were not taken yet."""
        computed, self._computed = self._computed, (0, 0.0, 0.0)
        return computed
