"""Suspect keys of one tier: a lookup said yes, and the load did not bring the chunk.

The next store of such a key overwrites whatever is there, without asking first: a value of another format or length
would stand in its way for ever. Kept on the engine's side, so that it holds for every host of the tier.
"""

from collections.abc import Sequence

from kvtiers.api import OffloadKey
from kvtiers.host.messages import Status, drop_oldest

__all__ = ["SuspectKeys"]

_MOST_SUSPECT = 8_192
_NOT_GIVEN = frozenset({Status.MISSING, Status.CORRUPT})


class SuspectKeys:
    """The chunks of one tier that are to be written whatever the store says. For one thread."""

    def __init__(self) -> None:
        self.keys: dict[OffloadKey, None] = {}

    def note(self, keys: Sequence[OffloadKey], statuses: bytes, *, is_load: bool) -> None:
        """Take note of what became of each of these keys in a job: not given, or given or written after all."""
        if is_load and not _NOT_GIVEN.isdisjoint(statuses):
            self.keys.update((key, None) for key, status in zip(keys, statuses, strict=False) if status in _NOT_GIVEN)
            drop_oldest(self.keys, _MOST_SUSPECT)
        if self.keys:
            for key, status in zip(keys, statuses, strict=False):
                if status == Status.DONE:
                    self.keys.pop(key, None)

    def among(self, keys: Sequence[OffloadKey]) -> bytes:
        """Return a byte for each of these keys, 1 for a doubted one; nothing if none is."""
        if self.keys.keys().isdisjoint(keys):
            return b""
        return bytes(key in self.keys for key in keys)

    def clear(self) -> None:
        """Nothing is doubted any more."""
        self.keys.clear()
