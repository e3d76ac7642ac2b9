"""The counts of a store's requests by kind, and their cost."""

import threading
from collections.abc import Mapping

from kvtiers_objectstore.failures import ObjectStoreError, ObjectStoreThrottledError

__all__ = ["Requests"]

_KINDS = ("get", "head", "put", "post", "list", "delete")


class Requests:
    """The requests of one store, counted by all its threads.

    ``put_price``, ``get_price``: US dollars for 1,000 of PUT, POST and LIST, and of GET and HEAD; a DELETE is free.
    """

    def __init__(self, put_price: float, get_price: float) -> None:
        self._prices = {"put": put_price, "post": put_price, "list": put_price, "get": get_price, "head": get_price}
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_KINDS, 0)
        self._failed = self._throttled = 0
        self._read = self._written = 0

    def count(self, kind: str, number: int = 1) -> None:
        """Count requests before they are sent. ``kind``: get, head, put, post, list or delete."""
        with self._lock:
            self._counts[kind] += number

    def count_failed(self, error: Exception) -> None:
        """Count a failed request."""
        with self._lock:
            self._failed += isinstance(error, ObjectStoreError)
            self._throttled += isinstance(error, ObjectStoreThrottledError)

    def count_bytes(self, *, read: int = 0, written: int = 0) -> None:
        """Count bytes of values that arrived."""
        with self._lock:
            self._read += read
            self._written += written

    def figures(self) -> Mapping[str, float]:
        """Return all counts, and the estimate of what the requests cost in US dollars, without transfer and storage."""
        with self._lock:
            counts = dict(self._counts)
            others = {
                "failed_requests": self._failed,
                "throttled_requests": self._throttled,
                "read_bytes": self._read,
                "written_bytes": self._written,
            }
        dollars = sum(counts[kind] * price / 1000 for kind, price in self._prices.items())
        return {**{f"{kind}_requests": n for kind, n in counts.items()}, **others, "request_dollars": dollars}
