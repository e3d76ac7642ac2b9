"""Retries of a store's calls: rate-limited attempts, repeated after a transient error with backoff and a deadline."""

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvtiers.api import StoreContractError
from kvtiers.host.rate_limiter import RateLimiter

__all__ = ["Attempts", "NoTimeLeft"]

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
_T = TypeVar("_T")


class NoTimeLeft(Exception):  # noqa: N818 -- the deadline's doing, not the store's
    """A call's turn would have come after its deadline, or the tier is being closed."""


class Attempts:
    """Makes the calls of one store and counts the retries. Used by many threads."""

    def __init__(
        self,
        transient: tuple[type[Exception], ...],
        retries: int,
        limiter: RateLimiter,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transient = tuple(transient)
        self._retries = retries
        self._limiter = limiter
        self._stop = stop
        self._clock = clock

    def call(
        self, call: Callable[[], _T], *, give_up_at: float, nbytes: int = 0, urgent: bool = True
    ) -> tuple[_T, int]:
        """Return the call's result and the number of retries; raise its last error when attempts or time are used up.

        ``give_up_at``: when no new attempt begins any more. ``nbytes``, ``urgent``: for the rate limit, which counts
        every attempt.
        """
        for attempt in range(self._retries + 1):
            if not self._limiter.wait(nbytes, urgent=urgent, give_up_at=give_up_at):
                raise NoTimeLeft("no turn under the rate limit before the deadline")
            try:
                return call(), attempt
            except StoreContractError:  # whatever a store calls transient: asked again, it would answer the same
                raise
            except self._transient:
                pause = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter
                last = attempt == self._retries or self._clock() + pause >= give_up_at
                if last or self._stop.wait(pause):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")
