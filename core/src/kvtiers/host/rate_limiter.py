"""The rate limiter of one tier: bytes and calls a second.

Loads and probes have requests that wait for them, stores have none. So loads and probes take the next turn and borrow
from the token bucket; a store waits until the bucket is out of debt. A call that moves no value, as a probe, waits for
the rate of calls alone: behind the bytes of loads, one request's loads would hold up the answer to another one.
"""

import threading
import time
from collections.abc import Callable

from kvtiers.api import RateLimit

__all__ = ["RateLimiter"]

_BURST_SECONDS = 1.0  # so much of an unused rate is kept


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
