"""The rights by which the engines of one machine fetch a chunk from a far tier once, and the others from a near one.

Engines that start together want the same chunks. Where a tier before the far one is shared by a machine's processes
(``TierConfig.shareable``) and takes stores, one engine has the right to fetch a chunk: it asks the near tier once more,
fetches the chunk from the far one, stores it in the near one, and releases the right. The others wait for that, and
then load from the near tier. A right is the name of an abstract socket: it takes no file and no call that waits, and
ends with its process, however that ends. Nothing depends on it but bytes: an engine that has waited for long fetches
by itself.

Names are those of a user and a network namespace: containers with networks of their own do not share rights.
"""

import enum
import errno
import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterable

from kvtiers.api import OffloadKey

__all__ = ["AGAIN_SECONDS", "FetchRights", "Turn"]

AGAIN_SECONDS = 0.05
"""How often a right that another engine has is tried again."""
_PATIENCE = 10.0  # for the engine that has one
_BYTES, _FEWEST, _MOST = 64 << 20, 16, 256  # of chunks at a time, between right and store
_MOST_REFUSED = 8192  # of which it is remembered since when
_PREFIX = "kvtiers-fetch-"


class Turn(enum.Enum):
    """Whose turn it is to fetch a chunk from a far tier."""

    OWN = "own"
    ANOTHERS = "another's"
    LATER = "later"
    """This engine has as many rights as it may have."""


class FetchRights:
    """The rights of one engine. ``scope``: what the names of its values have in common. Engine's thread only."""

    def __init__(self, chunk_bytes: int, scope: Callable[[], str]) -> None:
        self._most = min(_MOST, max(_FEWEST, _BYTES // max(1, chunk_bytes)))
        self._scope = scope
        self._held: dict[OffloadKey, socket.socket | None] = {}
        self._refused_at: dict[OffloadKey, float] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def take(self, key: OffloadKey, now: float) -> Turn:
        """Take the right to fetch a chunk, if it is free, or has been another engine's for long."""
        if len(self._held) >= self._most:
            return Turn.LATER
        if key in self._held:  # another prefetch of this engine has it
            return Turn.ANOTHERS
        since = self._refused_at.get(key)
        try:
            right = self._bound(key)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            if is_taken and (since is None or now - since < _PATIENCE):
                if len(self._refused_at) >= _MOST_REFUSED:
                    self._refused_at.clear()
                self._refused_at.setdefault(key, now)
                return Turn.ANOTHERS
            right = None  # without one, as where there are no descriptors left
        self._refused_at.pop(key, None)
        self._held[key] = right
        return Turn.OWN

    def release(self, keys: Iterable[OffloadKey]) -> None:
        """Release the rights to these chunks; others are ignored."""
        for key in keys:
            self._refused_at.pop(key, None)
            if (right := self._held.pop(key, None)) is not None:
                right.close()

    def release_all(self) -> None:
        """Release all rights."""
        self.release(list(self._held))

    def _bound(self, key: OffloadKey) -> socket.socket | None:
        if sys.platform != "linux":
            return None
        name = hashlib.blake2b(f"{os.getuid()}/{self._scope()}/".encode() + key, digest_size=20).hexdigest()
        right = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            right.bind(f"\0{_PREFIX}{name}")
        except OSError:
            right.close()
            raise
        return right
