"""Child processes of a replay: ranks and further engines, each tied to the life of its parent.

A child begins with one message, the function to run and its arguments, and runs it with a connection to its parent.
A parent that ends, by ``kill -9`` too, takes its children with it: by the parent-death signal, and by end of file.
"""

import contextlib
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from kvtiers._process import die_with_parent, end, spawn
from kvtiers.api import KvtiersError

__all__ = ["Child", "ReplayError"]

_END_SECONDS = 10.0
_STUCK_SECONDS = 120


class ReplayError(KvtiersError):
    """A replay cannot go on."""


class Child:
    """A child process, as its parent sees it. ``serve``: a function of a module, called with its connection first.

    ``stuck_seconds``: after which it hangs in the middle of a message; a child that starts takes a while.
    """

    def __init__(
        self, name: str, serve: Callable[..., None], *args: object, stuck_seconds: int = _STUCK_SECONDS
    ) -> None:
        self.name = name
        self._stuck_seconds = stuck_seconds
        self._hangs = False
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", stuck_seconds, 0))
        with theirs:
            self.process = spawn(
                "kvtiers_replay.engine.processes",
                [str(theirs.fileno())],
                name=name,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the parent, which says when to end
            )
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.send((serve, args))

    def send(self, message: object) -> None:
        """Send a message. ReplayError if the child has ended, or does not take it."""
        try:
            self.connection.send(message)
        except BlockingIOError:
            raise self.silent(self._stuck_seconds) from None
        except OSError:
            raise self._lost() from None

    def receive(self, timeout: float) -> Any:
        """Return the child's next message. ReplayError if it has ended, or is silent for this many seconds."""
        try:
            if not self.connection.poll(timeout):
                raise self.silent(timeout)
            return self.connection.recv()
        except BlockingIOError:
            raise self.silent(self._stuck_seconds) from None
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._lost() from None

    def end(self) -> None:
        """Close the child's connection, at which it ends; kill it if it hangs, or does not end in time."""
        self.connection.close()
        if self._hangs:
            self.kill()
        end(self.process, _END_SECONDS)

    def kill(self) -> None:
        """End the child at once."""
        self.process.kill()
        self.process.wait()

    def silent(self, seconds: float) -> ReplayError:
        """Return the error of a child that is alive, and was silent for this many seconds: it hangs."""
        self._hangs = True
        return ReplayError(
            f"{self.name} (process {self.process.pid}) has not answered for {seconds:g} s; the replay cannot go on "
            "without it"
        )

    def _lost(self) -> ReplayError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        status = self.process.returncode
        how = "closed its connection" if status is None else f"ended with exit status {status}"
        if status is not None and status < 0:
            how = f"was killed by signal {-status}"
        return ReplayError(f"{self.name} (process {self.process.pid}) {how}; the replay cannot go on without it")


def main() -> None:
    """Run a child. Arguments: the connection's descriptor and the parent's process id."""
    descriptor, parent = map(int, sys.argv[1:3])
    die_with_parent(parent)
    connection: Connection[Any, Any] = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has no use for us any more
        serve, args = connection.recv()
        serve(connection, *args)
