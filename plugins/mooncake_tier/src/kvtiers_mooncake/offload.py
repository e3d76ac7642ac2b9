"""The directory of one process for values on its SSD, and the lock that keeps a second process out.

The client library takes any directory. Two clients in one truncate each other's files, and values come back as bytes of
other values, without an error.
"""

import fcntl
import os
from pathlib import Path

from kvtiers.api import ConfigError

__all__ = ["DirectoryLock"]

_LOCK_FILE = "kvtiers.lock"


class DirectoryLock:
    """One process's right to a directory, until ``release`` or its end, a kill included."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ConfigError(f"'offload': no directory {str(directory)!r}; make it, on a disk of this machine")
        path = directory / _LOCK_FILE
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"'offload': {error}; expected a directory that this process may write to") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise ConfigError(
                f"'offload': {str(directory)!r} is used by process {owner or '?'}; each process needs a directory of "
                "its own, or values would be damaged"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the directory back."""
        os.close(self._fd)
