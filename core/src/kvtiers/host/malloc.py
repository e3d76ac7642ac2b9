"""Tuning of a tier host's memory allocator: it keeps freed memory while there is work, and little when idle.

The C library keeps what was freed, for each of its arenas apart, of which it makes one for nearly every thread. What is
large it gives back at once, and the next buffer of that size costs a page fault for every 4 KiB.
"""

import contextlib
import ctypes

__all__ = ["give_back", "keep_little"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = ((_M_ARENA_MAX, 2), (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 64 << 20))


def keep_little() -> None:
    """Make all threads share a few arenas, which keep freed memory until ``give_back``. Before any thread starts."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        for setting, value in _SETTINGS:
            ctypes.CDLL(None).mallopt(setting, value)


def give_back() -> None:
    """Give what is free back to the system. Takes some milliseconds, without Python's lock."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
