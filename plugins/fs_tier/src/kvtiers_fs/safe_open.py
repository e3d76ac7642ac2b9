"""Safe opening below a directory: follows no symbolic link, on the way or at the end.

Linux does it in one call, ``openat2`` with ``RESOLVE_NO_SYMLINKS`` (5.6 and newer); elsewhere, and where a container
forbids that call, every directory on the way is opened by itself.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable

__all__ = ["FOLDER", "Opener", "open_by_parts", "opener"]

Opener = Callable[[int, str, int], int]
"""(directory's descriptor, path below it, flags) -> a new descriptor. OSError, ELOOP or ENOTDIR at a link."""

FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory to reach what is in it, not to list it."""

_OPENAT2 = 437
_RESOLVE_NO_SYMLINKS = 0x04
_AGAIN = (errno.EINTR, errno.EAGAIN)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_by_parts(root: int, path: str, flags: int) -> int:
    """Open ``path`` below ``root`` one part after the other, none of them a link."""
    *folders, last = path.split("/")
    at = root
    try:
        for folder in folders:
            before, at = at, os.open(folder, FOLDER, dir_fd=at)
            if before != root:
                os.close(before)
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    finally:
        if at != root:
            os.close(at)


def opener() -> Opener:
    """Return the fastest way to open beneath a directory that this system has."""
    if not sys.platform.startswith("linux"):
        return open_by_parts
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
    hows: dict[int, _OpenHow] = {}

    def open_beneath(root: int, path: str, flags: int) -> int:
        how = hows.get(flags)
        if how is None:
            how = hows[flags] = _OpenHow(flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS)
        while True:
            fd: int = syscall(_OPENAT2, root, path.encode(), ctypes.addressof(how), ctypes.sizeof(how))
            if fd >= 0:
                return fd
            number = ctypes.get_errno()
            if number not in _AGAIN:
                raise OSError(number, os.strerror(number), path)

    top = os.open("/", FOLDER)
    try:
        os.close(open_beneath(top, ".", FOLDER))
    except OSError:  # an old kernel, or a container that forbids it
        return open_by_parts
    finally:
        os.close(top)
    return open_beneath
