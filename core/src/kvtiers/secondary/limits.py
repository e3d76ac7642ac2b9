"""Rate limits of one tier: bytes and calls a second, as token buckets of one second's worth."""

import threading
import time
from collections.abc import Callable

from kvtiers.api import RateLimit

__all__ = ["RateLimiter"]


class _Bucket:
    """Time at which the next unit may pass; up to one second of unused rate is kept."""

    def __init__(self, per_second: float) -> None:
        self._seconds_per_unit = 1.0 / per_second
        self._next = 0.0

    def reserve(self, units: float, now: float) -> float:
        """Take units and return how many seconds to wait before using them."""
        self._next = max(self._next, now - 1.0) + units * self._seconds_per_unit
        return max(0.0, self._next - now)


class RateLimiter:
    """Makes the tier's threads wait their turn. Unlimited where the config sets nothing."""

    def __init__(self, limit: RateLimit, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes = _Bucket(limit.bytes_per_second) if limit.bytes_per_second else None
        self._calls = _Bucket(limit.requests_per_second) if limit.requests_per_second else None
        self._lock = threading.Lock()
        self._stop = stop
        self._clock = clock

    def pass_through(self, nbytes: int, calls: int = 1) -> None:
        """Wait until ``calls`` calls that move ``nbytes`` are allowed; at once when the tier is being closed."""
        if self._bytes is None and self._calls is None:
            return
        with self._lock:
            now = self._clock()
            wait = self._bytes.reserve(nbytes, now) if self._bytes else 0.0
            wait = max(wait, self._calls.reserve(calls, now) if self._calls else 0.0)
        if wait > 0:
            self._stop.wait(wait)
