"""The rights by which the engines of one machine fetch a chunk from a far tier once, and the others from a near one.

Engines that start together want the same chunks. Where a tier before the far one is shared by a machine's processes
(``TierConfig.shareable``) and takes stores, one engine has the right to fetch a chunk: it asks the near tier once more,
fetches the chunk from the far one, stores it in the near one, and releases the right. The others wait for that, and
then load from the near tier. Nothing depends on a right but bytes: an engine that has waited for long fetches by
itself.

A right is a lock (``machine_locks.py``) on a byte of the near tier's lock file (``TierConfig.shared_lock_file``), so
that those who share the near tier share rights, containers included. Where it has no such file, or one that cannot be
used, a right is the name of an abstract socket.
"""

import enum
import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from kvtiers.api import OffloadKey
from kvtiers.tiering.machine_locks import FileLocks, SocketLocks

__all__ = ["AGAIN_SECONDS", "FetchRights", "Turn"]

AGAIN_SECONDS = 0.05
"""How often a right that another engine has is tried again."""
_PATIENCE = 10.0  # for the engine that has one
_BYTES, _FEWEST, _MOST = 64 << 20, 16, 256  # of chunks at a time, between right and store
_MOST_REFUSED = 8192  # of which it is remembered since when


class Turn(enum.Enum):
    """Whose turn it is to fetch a chunk from a far tier."""

    OWN = "own"
    ANOTHERS = "another's"
    LATER = "later"
    """This engine has as many rights as it may have, or the lock file is being opened."""


class FetchRights:
    """The rights of one engine. ``scope``: what the names of its values have in common. Engine's thread only."""

    def __init__(self, chunk_bytes: int, scope: Callable[[], str]) -> None:
        self._most = min(_MOST, max(_FEWEST, _BYTES // max(1, chunk_bytes)))
        self._scope = scope
        self._sockets = SocketLocks()
        self._files: dict[Path, FileLocks] = {}
        self._held: dict[OffloadKey, tuple[FileLocks | SocketLocks, bytes] | None] = {}
        self._refused_at: dict[OffloadKey, float] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def take(self, key: OffloadKey, lock_file: Path | None, now: float) -> Turn:
        """Take the right to fetch a chunk, if it is free, or has been another engine's for long.

        ``lock_file``: of the near tier.
        """
        if len(self._held) >= self._most:
            return Turn.LATER
        if key in self._held:  # another prefetch of this engine has it
            return Turn.ANOTHERS
        locks = self._locks(lock_file, now)
        if locks is None:
            return Turn.LATER
        name = hashlib.blake2b(f"{self._scope()}/".encode() + key, digest_size=20).digest()
        right: tuple[FileLocks | SocketLocks, bytes] | None = (locks, name)
        try:
            is_free = locks.lock(name)
        except OSError:  # as where there are no descriptors left: it is fetched without a right
            is_free, right = True, None
        if not is_free:
            if now - self._refused_at.get(key, now) < _PATIENCE:
                if len(self._refused_at) >= _MOST_REFUSED:
                    self._refused_at.clear()
                self._refused_at.setdefault(key, now)
                return Turn.ANOTHERS
            right = None
        self._refused_at.pop(key, None)
        self._held[key] = right
        return Turn.OWN

    def release(self, keys: Iterable[OffloadKey]) -> None:
        """Release the rights to these chunks; others are ignored."""
        for key in keys:
            self._refused_at.pop(key, None)
            if (right := self._held.pop(key, None)) is not None:
                locks, name = right
                locks.unlock(name)

    def release_all(self) -> None:
        """Release all rights, and close the lock files."""
        self.release(list(self._held))
        for locks in self._files.values():
            locks.close()

    def _locks(self, lock_file: Path | None, now: float) -> FileLocks | SocketLocks | None:
        """Return the locks that stand for rights; None: that is being found out."""
        if lock_file is None or sys.platform != "linux":
            return self._sockets
        if (locks := self._files.get(lock_file)) is None:
            locks = self._files[lock_file] = FileLocks(lock_file)
        is_usable = locks.are_usable(now)
        if is_usable is None:
            return None
        return locks if is_usable else self._sockets
