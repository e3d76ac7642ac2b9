"""The keeper's listening socket: taking a path for it, in the place of one that a dead keeper left.

A name in the file system outlives its process, and two keepers may start at once. So a keeper looks whether the socket
that lies there is dead, and takes its place, under a lock on the folder.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kvtiers.api import StartError

__all__ = ["listen"]

_LOCKED_SECONDS = 5.0  # a keeper holds the lock for as long as it takes to bind
_PAUSE_SECONDS = 0.005


def listen(path: Path, *, locked: float = _LOCKED_SECONDS) -> socket.socket:
    """Return the keeper's listening socket, in the place of one that a dead keeper left; StartError if that is alive.

    Only processes of this user can connect to it. ``locked``: seconds for which another process may lock
    the folder.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with (
            _alone_in(path.parent, locked),
            contextlib.closing(socket.socket(listener.family, listener.type)) as probe,
        ):
            probe.setblocking(False)  # a keeper that is stopped answers nobody
            if path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen()
    except OSError as error:
        listener.close()
        raise StartError(f"pool: cannot serve at {path}: {_why_not(path, error)}") from None
    listener.setblocking(False)
    return listener


def _why_not(path: Path, error: OSError) -> str:
    """Return why this path cannot be the keeper's, and what to do."""
    if error.errno == errno.EADDRINUSE:
        if path.is_socket():
            return "another keeper serves there; give another --socket"
        return "it is no socket; remove it, or give another --socket"
    if error.errno in {errno.ENOENT, errno.EACCES}:
        return f"{error.strerror}; make {path.parent} for the engines' user, or give another --socket"
    return error.strerror or str(error)


@contextlib.contextmanager
def _alone_in(folder: Path, seconds: float) -> Iterator[None]:
    """Wait until no other keeper is about to take a place in this folder; OSError if somebody else locks it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError(f"another process has locked {folder} for {seconds:g} s") from None
                time.sleep(_PAUSE_SECONDS)
        yield
    finally:
        os.close(lock)
