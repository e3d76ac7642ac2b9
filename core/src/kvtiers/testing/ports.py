"""Ports for the servers that tests start: free, given to no client, and to no other process that asks here.

A port that the system gave, and that was closed again for a server to take, is one that it may give to the next
connection of any process before the server has started, or while it is down.
"""

import os
import random
import socket
import threading
from pathlib import Path

__all__ = ["free_port"]

_BUS = 10_000
_BLOCKS = range(10_000, 15_000, 50)
"""The first ports of blocks of 50. Linux gives clients ports from 32,768 on, and Mooncake takes some from 15,000 on."""
_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port of 127.0.0.1 that no call has returned before, in no process that still runs.

    The same holds for the port 10,000 above, where servers of a cluster have their bus. RuntimeError if there is none,
    or if the system may give these ports to clients.
    """
    return _ports.free()


class _Ports:
    """The ports of the blocks that this process has claimed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._left: list[int] = []

    def free(self) -> int:
        with self._lock:
            if self._owner != os.getpid():  # the first call, or the first one of a forked process
                _expect_no_clients()
                self._left.clear()
                self._owner = os.getpid()
            while True:
                if not self._left:
                    self._left.extend(_claimed_block())
                port = self._left.pop(0)
                if _is_free(port) and _is_free(port + _BUS):
                    return port


_ports = _Ports()


def _expect_no_clients() -> None:
    lowest = int(_CLIENTS.read_text().split()[0])
    if lowest < _BLOCKS.stop + _BUS:
        raise RuntimeError(
            f"{_CLIENTS} begins at {lowest}: clients could be given the ports of the tests' servers; "
            "set net.ipv4.ip_local_port_range to '32768 60999'"
        )


def _claimed_block() -> range:
    """Claim a block until this process ends: a name in the abstract namespace ends with it."""
    for first in random.sample(_BLOCKS, len(_BLOCKS)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvtiers-test-ports-{first}")
        except OSError:
            claim.close()
            continue
        claim.detach()  # it stays open
        return range(first, first + _BLOCKS.step)
    raise RuntimeError(f"no port from {_BLOCKS.start} to {_BLOCKS.stop} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
