"""A memory barrier on the processors of all engines of a pool: membarrier(2).

The reader of a word that two processes write and read in opposite orders pays nothing for it; the writer calls it.
"""

import ctypes
import platform

from kvtiers.api import StartError

__all__ = ["MemoryBarrier"]

_NUMBERS = {"x86_64": 324, "aarch64": 283}
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2


class MemoryBarrier:
    """Registers this process for the barriers of others; StartError where the kernel has none."""

    def __init__(self) -> None:
        self._number = _NUMBERS.get(platform.machine(), -1)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._call(_REGISTER_GLOBAL_EXPEDITED)

    def __call__(self) -> None:
        """Return when all processes that are registered have passed a barrier since the call."""
        self._call(_GLOBAL_EXPEDITED)

    def _call(self, command: int) -> None:
        if self._number < 0 or self._syscall(self._number, command, 0):
            raise StartError(f"no membarrier(2) to share a pool with (errno {ctypes.get_errno()})")
