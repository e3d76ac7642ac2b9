"""Ports for the servers that tests start: free, given to no client, and to no other process that asks here.

A port that the system gave, and that was closed again for a server to take, is one that it may give to the next
connection of any process before the server has started, or while it is down.
"""

import random
import socket
import threading
from collections.abc import Iterator

__all__ = ["free_port"]

_BUS = 10_000
_PLACES = range(10_000, 15_000, 50)
"""The first port of each place. Linux gives clients ports from 32,768 on, and Mooncake takes some from 15,000 on."""

_lock = threading.Lock()


def free_port() -> int:
    """Return a port of 127.0.0.1 that no call has returned before, in no process that still runs.

    The same holds for the port 10,000 above, where a Redis Cluster's bus listens.
    """
    with _lock:
        return next(_free)


def _places() -> Iterator[int]:
    """Claim places, one after another, until this process ends; a name in the abstract namespace ends with it."""
    for first in random.sample(_PLACES, len(_PLACES)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvtiers-test-ports-{first}")
        except OSError:
            claim.close()
            continue
        claim.detach()  # it stays open
        yield first
    raise RuntimeError(f"no port from {_PLACES.start} to {_PLACES.stop} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_free = (
    port
    for first in _places()
    for port in range(first, first + _PLACES.step)
    if _is_free(port) and _is_free(port + _BUS)
)
