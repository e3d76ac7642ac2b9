"""The state of a client that all parts of a call share: whether tiers may still be asked, and the client's counts."""

import logging
import os
import threading
import time
from typing import Any

from kvtiers._failures import log_with_backoff
from kvtiers.client.requests import Request
from kvtiers.metrics import ClientMetrics

__all__ = ["ClientState"]

_log = logging.getLogger("kvtiers")


class ClientState:
    """Whether one client can be used, its counts, and what each call does with both. Any thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._metrics = ClientMetrics()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._is_closed

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child: there a lock may be held by a thread that the child does not have."""
        return os.getpid() != self._process

    @property
    def is_usable(self) -> bool:
        """Whether tiers may be asked: the client is open, and this is no forked child."""
        return not self._is_closed and not self.is_forked

    def close(self) -> bool:
        """Use no tier from now on; return whether the client was open."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        return not was_closed

    def count(self, **more: int) -> int:
        """Add to these counts; return the last one."""
        with self._lock:
            for name, number in more.items():
                total: int = getattr(self._metrics, name) + number
                setattr(self._metrics, name, total)
            return total

    def counts(self) -> dict[str, Any]:
        """Return all counts by name."""
        return self._metrics.as_data()

    def refuse(self, what: str, values: int = 1) -> None:
        """Count values that a call cannot have meant, and log with backoff what is wrong with them."""
        times = self.count(refused_values=values)
        log_with_backoff(times, _log.warning, "client: refused %s (%d values so far)", what, times)

    def wait(self, request: Request, until: float) -> None:
        """Wait for the end of a request; one that has not ended until then is counted, and has an error."""
        if not request.over.wait(max(0.0, until - time.monotonic())):
            self.count(expired_calls=1)
            request.error = request.error or "not ended in time"
