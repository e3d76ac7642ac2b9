"""The step clock and the pass limit: what vLLM's steps take, and when a scheduling pass is to end.

**The clock** counts prefill tokens and seconds, for ``load_wait: auto``. A step counts in which prompts are most of
what is computed. vLLM may schedule a step before the one before has ended; steps end in the order in which they begin,
and a step of prompts is computed when the one of prompts before it has been. The end of a short one says nothing of the
next: it is seen only when the next has been launched, which takes a while. So a step may count with what was left of a
decoding step before it; what makes a step longer is no harm (``estimates.py``), what makes it shorter is.

**The limit.** The loads that a pass finds begin when it has ended, and a burst makes it long: on an H100 24 prompts of
8k tokens took 106 ms to schedule, for as long the link stood still. So a pass that has found loads passes over the
requests that it has not looked up after ``_LONGEST_PASS``; the next one looks them up while the first loads run. Where
something is computed the next pass comes only when that step has ended, and a pass may take as long as such a step.
"""

import math
import time
from collections import deque
from collections.abc import Callable

__all__ = ["PassLimit", "StepClock"]

_STEPS_IN_FLIGHT = 4  # vLLM schedules that far ahead at most
_PREFILL_TOKENS = 8  # tokens a request in a step of which prompts are the larger part
_LONGEST_PASS = 0.016  # four requests of 8k tokens: what the link takes 80 ms for


class StepClock:
    """Times steps. Runs on the engine's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: deque[tuple[int, int, float, float]] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._ended = 0.0  # the last step of prompts
        self._short_step = math.inf  # seconds of the last step that computed something, but no prompts
        self._computed = (0, 0.0, 0.0)
        self._computes_prompts = False  # the step that began last

    def begins(self, tokens: int, requests: int, position: float = 0.0) -> None:
        """Record a step that computes this many tokens for this many requests.

        ``position``: how many tokens are before each of them in its request, on average.
        """
        self._computes_prompts = tokens > 0 and tokens >= _PREFILL_TOKENS * requests
        self._running.append((tokens, tokens if self._computes_prompts else 0, position, self._clock()))

    def ends(self) -> None:
        """Record the end of the oldest step."""
        if not self._running:
            return
        computes, tokens, position, began = self._running.popleft()
        if computes and not tokens:
            self._short_step = self._clock() - began
        if not tokens:
            return
        before_it, self._ended = self._ended, self._clock()
        computed, seconds, where = self._computed
        where += (position - where) * tokens / (computed + tokens)
        self._computed = (computed + tokens, seconds + self._ended - max(began, before_it), where)

    def until_next_pass(self) -> float:
        """Return about how many seconds after this pass the next one comes, if something is computed."""
        return math.inf if self._computes_prompts else self._short_step

    def take_computed(self) -> tuple[int, float, float]:
        """Return tokens, seconds and mean position of the steps that count and were not taken yet."""
        computed, self._computed = self._computed, (0, 0.0, 0.0)
        return computed


class PassLimit:
    """Limits the time until the loads of a scheduling pass begin. Runs on the engine's thread."""

    def __init__(self, steps: StepClock, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._began: float | None = None
        self._loads = False
        self.was_reached = False
        """Requests were passed over in this pass."""

    def load_found(self) -> None:
        """Record that this pass has found a load."""
        self._loads = True

    def is_reached(self, *, idle: bool) -> bool:
        """Return whether a request is to wait for the next pass; asked before each one is looked up.

        ``idle``: nothing is computed, neither by requests that run nor by those that this pass has scheduled.
        """
        now = self._clock()
        if self._began is None:
            self._began = now
        longest = _LONGEST_PASS if idle else max(_LONGEST_PASS, self._steps.until_next_pass())
        if self._loads and now - self._began >= longest:
            self.was_reached = True
        return self.was_reached

    def pass_ends(self) -> bool:
        """Prepare for the next pass; return whether requests were passed over in this one."""
        was_reached = self.was_reached
        self._began, self._loads, self.was_reached = None, False, False
        return was_reached
