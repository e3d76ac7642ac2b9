"""Attempts at a store's calls: under the tier's rate limit, repeated after a transient error until a deadline.

Loads and probes have requests that wait for them, stores have none. So loads and probes take the next turn and borrow
from the token bucket; a store waits until the bucket is out of debt. A call that moves no value, as a probe, waits for
the rate of calls alone: behind the bytes of loads, one request's loads would hold up the answer to another one.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvtiers.api import RateLimit, StoreContractError

__all__ = ["Attempts", "NoTimeLeft", "RateLimiter"]

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
_BURST_SECONDS = 1.0  # so much of an unused rate is kept
_T = TypeVar("_T")


class NoTimeLeft(Exception):  # noqa: N818 -- the deadline's doing, not the store's
    """A call's turn would have come after its deadline, or the tier is being closed."""


class _Bucket:
    """A token bucket that may go into debt: ``_paid_at`` is when it will be out of it."""

    def __init__(self, per_second: float) -> None:
        self._seconds_per_unit = 1.0 / per_second
        self._paid_at = float("-inf")

    def debt(self, now: float) -> float:
        """Return the seconds until the bucket is out of debt."""
        return max(0.0, self._paid_at - now)

    def take(self, units: float, now: float) -> None:
        """Take units, in stock or not."""
        self._paid_at = max(self._paid_at, now - _BURST_SECONDS) + units * self._seconds_per_unit


class RateLimiter:
    """Makes the tier's threads wait their turn. Unlimited where the config sets nothing."""

    def __init__(self, limit: RateLimit, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes = _Bucket(limit.bytes_per_second) if limit.bytes_per_second else None
        self._calls = _Bucket(limit.requests_per_second) if limit.requests_per_second else None
        self._lock = threading.Lock()
        self._stop = stop
        self._clock = clock

    def wait(self, nbytes: int, *, urgent: bool, give_up_at: float) -> bool:
        """Wait for the turn of one call that moves ``nbytes``.

        False, and nothing taken, if it does not come before ``give_up_at`` (by the clock) or the tier is being closed.
        """
        costs = [(bucket, units) for bucket, units in ((self._bytes, nbytes), (self._calls, 1)) if bucket and units]
        if not costs:
            return True
        while True:
            with self._lock:
                now = self._clock()
                debt = max(bucket.debt(now) for bucket, _ in costs)
                if debt and now + debt >= give_up_at:
                    return False
                mine = urgent or not debt
                if mine:
                    for bucket, units in costs:
                        bucket.take(units, now)
            if debt and self._stop.wait(debt):
                return False
            if mine:
                return True


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
