"""What a tier host's memory allocator keeps for itself: little, since there is a host for each tier.

The C library keeps what was freed, for each of its arenas apart, of which it makes one for nearly every thread.
"""

import contextlib
import ctypes

__all__ = ["give_back", "share_arenas"]

_M_ARENA_MAX = -8
_ARENAS = 2


def share_arenas() -> None:
    """Let all threads that are begun from now on share a few arenas."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Give what is free back to the system. Takes some milliseconds, without Python's lock."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
