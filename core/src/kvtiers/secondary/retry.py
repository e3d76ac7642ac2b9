"""Attempts at a store call: transient errors are tried again, with growing pauses, as long as there is time."""

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Attempts"]

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
_T = TypeVar("_T")


class Attempts:
    """Calls a store, again after transient errors; counts the retries. One object for each store, many threads."""

    def __init__(self, transient: tuple[type[Exception], ...], retries: int, stop: threading.Event) -> None:
        self._transient = transient
        self._retries = retries
        self._stop = stop

    def call(self, call: Callable[[], _T], give_up_at: float) -> tuple[_T, int]:
        """Return the call's result and the number of retries; raise its last error when attempts or time are used up.

        ``give_up_at``: ``time.monotonic()`` seconds after which no new attempt begins.
        """
        for attempt in range(self._retries + 1):
            try:
                return call(), attempt
            except self._transient:
                pause = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter
                last = attempt == self._retries or time.monotonic() + pause >= give_up_at
                if last or self._stop.wait(pause):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")
