"""What a step does that computes nothing while loads run, or until a lookup is answered: it rests.

vLLM steps as fast as it can while a request waits for its KV. On a machine with few processors that takes one of them
from the processes that load, and in one process it takes the interpreter from the thread that copies: each of its turns
comes after a switch interval, 5 ms, then. A rest is short beside what has been waited already, so that the end of a
load is seen in time, and short beside a step that computes, since a request may come meanwhile.

A request whose lookup is not answered yet is put off by a step. Where nothing else is computed that is an empty one,
which takes as long as most answers; and where several requests have come at once, it is the step that computes the
others, and takes far longer than an answer: so the scheduling pass rests first.
"""

import time
from collections.abc import Callable

__all__ = ["Rest"]

_SHARE = 0.05  # of the time since the engine began to wait
_SHORTEST = 0.0001
_LONGEST = 0.001
_ANSWER = 0.002  # of four requests at once on two processors, nearly all were answered by then


class Rest:
    """The rests of an engine; runs on its thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._idle_since: float | None = None
        self._answer_by: float | None = None

    def for_answer(self) -> bool:
        """Rest a moment within a pass of an engine that was idle before; False: it has rested enough in this step."""
        now = self._clock()
        if self._answer_by is None:
            self._answer_by = now + _ANSWER
        if now >= self._answer_by:
            return False
        self._sleep(_SHORTEST)
        return True

    def step(self, *, idle: bool) -> None:
        """End a step. ``idle``: nothing is computed in it, and loads run."""
        self._answer_by = None
        if not idle:
            self._idle_since = None
            return
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        self._sleep(min(_LONGEST, max(_SHORTEST, _SHARE * (now - self._idle_since))))
