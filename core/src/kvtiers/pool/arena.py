"""What a pool's rows hold, as the keeper has it: one model's chunks, by the index and the plane of the rows.

Another model, layout or namespace gets another arena in the same rows; a new prefix alone (other weights) renames it.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence

from kvtiers.api import OffloadKey
from kvtiers.api.keys import group_of
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.seal import PayloadHash
from kvtiers.layout.storage_name import StorageNames
from kvtiers.pool.memory import LONGEST_KEY, Index, Plane, Rows, Shape, counting, open_again

__all__ = ["Arena"]


class Arena:
    """Index and plane of these rows, for chunks of this layout whose names have this prefix.

    ``fds``: index and plane, which stay the caller's, of one that is there, else it is made; StartError if they are of
    other rows.
    """

    def __init__(self, rows: Rows, prefix: str, layout: CacheLayout, fds: Sequence[int] = ()) -> None:
        self._rows = rows
        self.layout = layout
        self.shape = shape = Shape(rows.nbytes // layout.row_stride, layout.row_stride, prefix)
        if not fds:
            self.index, self.plane = Index.create(shape), Plane.create(shape.num_rows)
            return
        index, plane = fds
        with contextlib.ExitStack() as undo:
            self.index = Index(open_again(index, os.O_RDWR), shape, writable=True)
            undo.callback(self.index.close)
            self.plane = Plane(open_again(plane, os.O_RDWR), shape.num_rows, writable=False)
            undo.pop_all()

    def has(self, fds: Sequence[int]) -> bool:
        """Return whether these are descriptors of its index and its plane."""
        return all(map(os.path.sameopenfile, (self.index.fd, self.plane.fd), fds))

    @contextlib.contextmanager
    def lent(self) -> Iterator[Sequence[int]]:
        """Open the descriptors that an engine gets, until the end of the block: rows, index to read, and plane."""
        with contextlib.ExitStack() as closing:
            rows = self._rows.lend()
            closing.callback(os.close, rows)
            index = open_again(self.index.fd, os.O_RDONLY)
            closing.callback(os.close, index)
            yield rows, index, self.plane.fd

    def rename(self, prefix: str) -> None:
        """Forget all chunks: those of another prefix follow."""
        self.shape = self.shape._replace(prefix=prefix)
        self.index.rename(self.shape)

    def counting(self) -> list[int]:
        """Return the rows whose entries count."""
        return counting(self.index, self.plane)

    def payload_bytes(self, key: OffloadKey) -> int:
        """Return how many bytes of a row this key's chunk has; 0 if it can be none of this layout."""
        group = group_of(key) if 4 < len(key) <= LONGEST_KEY else len(self.layout.groups)
        return self.layout.payload_bytes(group) if group < len(self.layout.groups) else 0

    def hash(self, row: int, key: OffloadKey) -> bytes:
        """Return the hash of a row's chunk, as its seal in a store has it: over storage name and payload."""
        at = row * self.shape.row_stride
        whole = PayloadHash(StorageNames(self.shape.prefix, b"").name(key))
        whole.update(self._rows.mapping.view[at : at + self.payload_bytes(key)])
        return whole.digest()

    def damaged_of(self, rows: Sequence[int]) -> list[int]:
        """Return those of these rows, whose entries count, that hold other bytes than those that were hashed."""
        return [row for row in rows if self.hash(row, self.index.key(row)) != self.index.digest(row)]

    def close(self) -> None:
        """Close index and plane."""
        self.index.close()
        self.plane.close()
