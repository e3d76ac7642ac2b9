"""What a pool's rows hold, as the keeper has it: chunks of these sizes, by the index and the plane of the rows.

A pool has an arena for each layout's sizes, over the same memory. Each part is in one of them at most, which that one's
index says, with the prefix of the part's chunks: so the next keeper knows it, too.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence

from kvtiers.api import StartError
from kvtiers.api.units import format_size
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.pool.chunk_hash import ChunkHash
from kvtiers.pool.memory import Index, Plane, Rows, Shape, counting, open_again, prefix_bytes

__all__ = ["Arena", "arena_name"]


def arena_name(layout: CacheLayout) -> str:
    """Return the name of the arena for chunks of this layout's sizes."""
    return hashlib.blake2b(repr(_sizes(layout)).encode(), digest_size=6).hexdigest()


def _sizes(layout: CacheLayout) -> tuple[int, list[int]]:
    return layout.row_stride, [layout.payload_bytes(group) for group in range(len(layout.groups))]


class Arena:
    """Index and plane of these rows, in so many parts, for chunks of this layout's sizes.

    ``fds``: index and plane, which stay the caller's, of one that is there, else it is made; StartError if they are of
    other rows, or if a part has no room for one.
    """

    def __init__(self, rows: Rows, parts: int, layout: CacheLayout, fds: Sequence[int] = ()) -> None:
        self._rows = rows
        self.layout = layout
        self.name = arena_name(layout)
        self.shape = shape = Shape(rows.nbytes, layout.row_stride, parts)
        if not all(map(shape.rows_of, range(parts))):
            raise StartError(f"it has no room for a row of {format_size(layout.row_stride)}; raise the keeper's --size")
        if not fds:
            with contextlib.ExitStack() as undo:
                self.index = Index.create(shape)
                undo.callback(self.index.close)
                self.plane = Plane.create(shape)
                undo.pop_all()
            return
        index, plane = fds
        with contextlib.ExitStack() as undo:
            self.index = Index(open_again(index, os.O_RDWR), shape, writable=True)
            undo.callback(self.index.close)
            self.plane = Plane(open_again(plane, os.O_RDWR), shape, writable=True)
            undo.pop_all()

    def has(self, fds: Sequence[int]) -> bool:
        """Return whether these are descriptors of its index and its plane."""
        return all(map(os.path.sameopenfile, (self.index.fd, self.plane.fd), fds))

    @contextlib.contextmanager
    def lent(self, part: int) -> Iterator[Sequence[int]]:
        """Open the descriptors that an engine gets, until the end of the block: rows, index to read, and plane."""
        with contextlib.ExitStack() as closing:
            rows = self._rows.lend(part)
            closing.callback(os.close, rows)
            index = open_again(self.index.fd, os.O_RDONLY)
            closing.callback(os.close, index)
            yield rows, index, self.plane.fd

    def prefix(self, part: int) -> str:
        """Return what the names of a part's chunks begin with; "" if the part is not in this arena."""
        return self.index.prefix(part)[1]

    @property
    def parts(self) -> list[int]:
        """The parts that are in this arena."""
        return [part for part in range(self.shape.parts) if self.prefix(part)]

    def rename(self, part: int, prefix: str) -> None:
        """Have a part in this arena, and forget its chunks, unless their names have this prefix: those to come have it.

        StartError as of ``prefix_bytes``.
        """
        prefix_bytes(prefix)
        if prefix != self.prefix(part):
            self.index.rename(part, prefix)

    def release(self, part: int) -> None:
        """Forget a part's chunks: it is in no arena. Nobody may have it, or read it."""
        self.index.release(part)

    def counting(self, part: int) -> list[int]:
        """Return the rows of a part whose entries count."""
        return counting(self.index, self.plane, self.shape.rows_of(part))

    def chunk_hash(self, part: int) -> ChunkHash:
        """Return what hashes a part's chunks."""
        return ChunkHash(self.prefix(part), self.layout, self._rows.mapping.view)

    def damaged_of(self, part: int, rows: Sequence[int]) -> list[int]:
        """Return those of these rows, whose entries count, that hold other bytes than those that were hashed."""
        hashed = self.chunk_hash(part)
        return [row for row in rows if hashed(row, self.index.key(row)) != self.index.digest(row)]

    def close(self) -> None:
        """Close index and plane."""
        self.index.close()
        self.plane.close()
