"""How long vLLM's steps take: what ``load_wait: auto`` and the seconds saved are reckoned from.

A step counts in which prompts are most of what is computed. vLLM may schedule a step before the one before has ended;
steps end in the order in which they begin, and each is computed when the one before has been.
"""

import time
from collections import deque
from collections.abc import Callable

from kvtiers.tiering.load_or_recompute import PrefillPrice

__all__ = ["StepClock"]

_STEPS_IN_FLIGHT = 4  # vLLM schedules that far ahead at most
_PREFILL_TOKENS = 8  # tokens a request in a step of which prompts are the larger part


class StepClock:
    """Times steps. Runs on the engine's thread; ``seconds_per_token`` may be read from any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: deque[tuple[int, float]] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._ended = 0.0
        self._computed = (0, 0.0)
        self._price = PrefillPrice()

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds that computing a token of a prompt takes; None until a prompt has been computed."""
        return self._price.seconds_per_token

    def begins(self, tokens: int, requests: int) -> None:
        """Take note of a step that computes so many tokens for so many requests."""
        self._running.append((tokens if tokens >= _PREFILL_TOKENS * requests else 0, self._clock()))

    def ends(self) -> None:
        """Take note of the end of the oldest step."""
        if not self._running:
            return
        tokens, began = self._running.popleft()
        before_it, self._ended = self._ended, self._clock()
        if tokens:
            seconds = self._ended - max(began, before_it)
            self._computed = (tokens, seconds)
            self._price.observe(tokens, seconds)

    def take_computed(self) -> tuple[int, float]:
        """Return tokens and seconds of the newest step that counts and was not taken yet."""
        computed, self._computed = self._computed, (0, 0.0)
        return computed
