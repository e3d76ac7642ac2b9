"""The hash of a row's chunk, as its seal in a store has it: over storage name and payload."""

from kvtiers.api import OffloadKey
from kvtiers.api.keys import group_of
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.seal import PayloadHash
from kvtiers.layout.storage_name import StorageNames
from kvtiers.pool.memory import LONGEST_KEY

__all__ = ["ChunkHash"]


class ChunkHash:
    """Hashes chunks of a layout whose names have this prefix. ``view``: all rows."""

    def __init__(self, prefix: str, layout: CacheLayout, view: memoryview) -> None:
        self._names = StorageNames(prefix, b"")
        self._layout = layout
        self._view = view

    def payload_bytes(self, key: OffloadKey) -> int:
        """Return how many bytes of a row this key's chunk has; 0 if it can be none of this layout."""
        group = group_of(key) if 4 < len(key) <= LONGEST_KEY else len(self._layout.groups)
        return self._layout.payload_bytes(group) if group < len(self._layout.groups) else 0

    def __call__(self, row: int, key: OffloadKey) -> bytes:
        """Return the hash of the chunk of this key in this row."""
        at = row * self._layout.row_stride
        whole = PayloadHash(self._names.name(key))
        whole.update(self._view[at : at + self.payload_bytes(key)])
        return whole.digest()
