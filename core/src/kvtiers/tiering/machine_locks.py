"""Locks on names that the engines of one machine share: on bytes of a file, or on the names of abstract sockets.

===============  ==========================================================================================
kind             shared by
===============  ==========================================================================================
``FileLocks``    all processes that may write the file: of any container, and by any path that leads to it
``SocketLocks``  the processes of one user in one network namespace
===============  ==========================================================================================

No call of either waits, nothing is written, and a lock ends with its process, however that ends.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import math
import os
import socket
import stat
import struct
import sys
import threading
from pathlib import Path

from kvtiers.region.memfd import detach_in_children

__all__ = ["FileLocks", "SocketLocks"]

_log = logging.getLogger("kvtiers.tiering")
_OPEN_SECONDS = 1.0  # for a file to be opened
_AGAIN_SECONDS = 10.0  # after which one that could not be used is tried again
_FIRST_BYTE = 1 << 62  # of as many, far behind all that a file holds: a file may be locked beyond its end
_TRIAL_BYTE = _FIRST_BYTE - 1
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_REFUSED = (errno.EAGAIN, errno.EACCES)
_LOCAL = {
    0x01021994: "tmpfs", 0x2FC12FC1: "zfs", 0x58465342: "xfs", 0x794C7630: "overlayfs", 0x9123683E: "btrfs",
    0xCA451A4E: "bcachefs", 0xEF53: "ext4", 0xF2F52010: "f2fs",
}  # fmt: skip
"""File systems whose locks are in the memory of this machine (the f_type of statfs(2)): no call asks a server."""

_libc = ctypes.CDLL(None, use_errno=True)


class FileLocks:
    """Locks on bytes of one file; a name's hash says which. Engine's thread, except for the opening.

    The locks are those of an open file description (``F_OFD_SETLK``): they hold between any two engines, also of one
    process, and closing another descriptor of the file drops none. The file is opened on a thread of its own, when it
    is first wanted, since its path may lead to a file system that hangs. It is used on ``_LOCAL`` file systems alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._opening: object | None = None
        self._tried_at = -math.inf
        self._has_logged = False
        self._handover = threading.Lock()
        detach_in_children(self)

    def are_usable(self, now: float) -> bool | None:
        """Return whether locks can be taken now; None: the file is being opened."""
        if self._fd >= 0:
            if os.fstat(self._fd).st_nlink:
                return True
            self.close()  # removed, as with its folder: others lock the file that has taken its place
        if self._opening is None and self._fd < 0 and now - self._tried_at >= _AGAIN_SECONDS:
            self._tried_at = now
            self._begin_opening()
        if self._opening is not None:
            return None if now - self._tried_at < _OPEN_SECONDS else False
        return self._fd >= 0

    def lock(self, name: bytes) -> bool:
        """Lock a name, after ``are_usable``; False if another engine has it. OSError: none can be had."""
        try:
            _set_lock(self._fd, fcntl.F_WRLCK, _byte_of(name))
        except OSError as error:
            if error.errno in _REFUSED:
                return False
            raise
        return True

    def unlock(self, name: bytes) -> None:
        """Unlock a name; one that is not locked is ignored."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                _set_lock(self._fd, fcntl.F_UNLCK, _byte_of(name))

    def close(self) -> None:
        """Drop all locks, and close the file until it is wanted again."""
        with self._handover:
            fd, self._fd, self._opening = self._fd, -1, None
        self._tried_at = -math.inf
        if fd >= 0:
            os.close(fd)

    def detach(self) -> None:
        """Close the file in a forked child, which would keep the locks of an engine that has ended."""
        self._handover = threading.Lock()  # a thread that is not in the child may have had it
        self.close()

    def _begin_opening(self) -> None:
        token = self._opening = object()
        try:
            threading.Thread(target=self._open, args=(token,), name="kvtiers-locks", daemon=True).start()
        except RuntimeError:  # no thread can be had
            self._opening = None

    def _open(self, token: object) -> None:
        fd, trouble = -1, ""
        try:
            fd = _opened(self._path)
        except OSError as error:
            trouble = error.strerror or str(error)
        with self._handover:
            if self._opening is token:
                self._fd, fd, self._opening = fd, -1, None
        if fd >= 0:  # it was closed meanwhile
            os.close(fd)
        if trouble and not self._has_logged:
            self._has_logged = True
            _log.warning(
                "%s cannot be used for locks: %s; engines of other containers and users may fetch the same chunks",
                self._path,
                trouble,
            )


class SocketLocks:
    """Locks on the names of abstract sockets, a descriptor each. Engine's thread."""

    def __init__(self) -> None:
        self._sockets: dict[bytes, socket.socket] = {}
        detach_in_children(self)

    def lock(self, name: bytes) -> bool:
        """Lock a name; False if another engine has it. OSError: none can be had."""
        if sys.platform != "linux":
            raise OSError(errno.ENOTSUP, "there are no abstract sockets")
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound.bind(f"\0kvtiers-fetch-{os.getuid()}-{name.hex()}")
        except OSError as error:
            bound.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        self._sockets[name] = bound
        return True

    def unlock(self, name: bytes) -> None:
        """Unlock a name; one that is not locked is ignored."""
        if (bound := self._sockets.pop(name, None)) is not None:
            bound.close()

    def detach(self) -> None:
        """Close the sockets in a forked child, as ``FileLocks.detach``."""
        for name in list(self._sockets):
            self.unlock(name)


def _byte_of(name: bytes) -> int:
    """Return the byte for a name of at least 8 bytes, which are a hash. Where two names share one, an engine waits."""
    return _FIRST_BYTE | int.from_bytes(name[:8], "little") >> 2


def _set_lock(fd: int, kind: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


def _opened(path: Path) -> int:
    """Open the file. OSError, with a reason in its text, if it cannot be used."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe there would wait
    try:
        _try_lock(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _try_lock(fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if (kind := _file_system(fd)) not in _LOCAL:
        raise OSError(errno.ENOTSUP, f"it is on a file system of type {kind:#x}, not on a local one")
    _set_lock(fd, fcntl.F_RDLCK, _TRIAL_BYTE)
    _set_lock(fd, fcntl.F_UNLCK, _TRIAL_BYTE)


def _file_system(fd: int) -> int:
    """Return the type of the file system that a file is on, as Linux numbers them; 0: unknown."""
    about = ctypes.create_string_buffer(512)  # struct statfs begins with a long f_type
    if _libc.fstatfs(fd, about):
        return 0
    return ctypes.c_ulong.from_buffer(about).value
