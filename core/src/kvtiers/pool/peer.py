"""A process at the keeper's socket, and by their pidfds the processes that have the memory with it."""

import contextlib
import os
import re
import select
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvtiers.pool.messages import Hello, Report, Wait, send
from kvtiers.region.handshake import process_name

if TYPE_CHECKING:
    from kvtiers.layout.cache_layout import CacheLayout

__all__ = ["Peer", "are_of_one_process", "is_readable", "pid_of"]


def is_readable(source: socket.socket | int) -> bool:
    """Return whether there is something to read, or for a pidfd, whether its process has ended."""
    waiting = select.poll()  # not select.select: a keeper may have more than 1024 descriptors
    waiting.register(source, select.POLLIN)
    return bool(waiting.poll(0))


def pid_of(pidfd: int) -> int:
    """Return a process's id as it is here; 0 if it has ended, or is in a PID namespace that cannot be seen."""
    found = re.search(r"^Pid:\s*(\d+)$", Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found is not None else 0


def are_of_one_process(*pidfds: int) -> bool:
    """Return whether these are; False where that cannot be seen from here."""
    pids = set(map(pid_of, pidfds))
    return len(pids) == 1 and 0 not in pids


class Peer:
    """A connected process. ``pidfds``: by rank, -1 for the process itself; ``hello``, ``layout``: those of an engine.

    Without a socket: an engine that has hung up, or whoever had the memory of the keeper before this one.
    ``part``: that it has, or had; -1: none. ``selector``: watches the socket, by whoever has made it, and the pidfds.
    """

    def __init__(self, selector: selectors.BaseSelector, pid: int, sock: socket.socket | None = None) -> None:
        self._selector = selector
        self.pid = pid
        self.sock = sock
        self.name = process_name(pid) if pid or sock is not None else "the engine of another keeper"
        """What it is called in what people read."""
        self.pidfds: dict[int, int] = {}
        self.hello: Hello | None = None
        self.layout: CacheLayout | None = None
        self.part = -1
        self.told: Wait | None = None

    def tell(self, report: Report) -> None:
        """Send this, if there is a connection: its end is seen when it is read, and its process's end by pidfd."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                send(self.sock, report)

    def watch(self, rank: int, pidfd: int, on_event: Callable[[], None]) -> None:
        """Watch this process, in place of the one that was this rank. Takes over the pidfd; OSError if it is none."""
        try:
            self._selector.register(pidfd, selectors.EVENT_READ, on_event)
        except OSError:
            os.close(pidfd)
            raise
        self.unwatch(rank)
        self.pidfds[rank] = pidfd

    def unwatch(self, rank: int) -> bool:
        """Watch the process of this rank no longer; return whether there was one."""
        pidfd = self.pidfds.pop(rank, None)
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
        return pidfd is not None

    def has_ended(self, rank: int) -> bool:
        """Return whether the process that is watched as this rank has."""
        return rank in self.pidfds and is_readable(self.pidfds[rank])

    @property
    def has_left(self) -> bool:
        """Whether it has hung up, and no process of its is watched."""
        return self.sock is None and not self.pidfds

    @property
    def is_leaving(self) -> bool:
        """Whether it has hung up, and its own process has ended."""
        return self.sock is None and -1 not in self.pidfds

    def processes(self) -> list[dict[str, int]]:
        """Return the processes that are watched until they end: the engine's own is rank -1, tier hosts are below."""
        return [{"pid": pid_of(pidfd), "rank": rank} for rank, pidfd in sorted(self.pidfds.items())]

    def hang_up(self) -> None:
        """Close the connection; what is watched is watched on."""
        if self.sock is not None:
            self._selector.unregister(self.sock)
            self.sock.close()
            self.sock = None

    def close(self) -> None:
        """Hang up, and watch nothing."""
        self.hang_up()
        for rank in list(self.pidfds):
            self.unwatch(rank)
