"""Whether the page cache has a file, so that reading it costs a copy and no wait for the disk."""

import ctypes
import mmap

__all__ = ["is_cached"]

_MAP_FAILED = ctypes.c_void_p(-1).value
_HERE = b"\x01"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def is_cached(fd: int, nbytes: int) -> bool:
    """Say whether at least half of the first ``nbytes`` is in the page cache; True where the system does not tell.

    It tells those who may write the file, and others that everything is there.
    """
    if not hasattr(_libc, "mincore"):
        return True
    # Mapped and never touched: nothing is read. A read that must not wait (RWF_NOWAIT) would begin to read ahead.
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        return True
    try:
        pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages):
            return True
        return 2 * pages.raw.count(_HERE) >= len(pages)
    finally:
        _libc.munmap(address, nbytes)
