"""The state of a region, in small memfds beside its rows: pages of words that one process writes and others read.

::

    RegionState   one a region: the shape of the rows, and how far they are populated. The owner writes, ranks read
    Desk          one a rank: how far it has pinned the rows. The rank writes, the owner reads

A word is 64 bits, read and written at once. A change wakes nobody: who waits for one looks again, ``FIRST_LOOK``
seconds later at first, and then after twice as long each time, up to ``LONGEST_LOOK``. The words are not in the rows'
own memfd, whose pages may be huge ones, and which every tier host can write to.
"""

import mmap
import os
from typing import NamedTuple

from kvtiers.api import StartError
from kvtiers.region.memfd import create_memfd, map_memory

__all__ = ["FIRST_LOOK", "LONGEST_LOOK", "SETTLED", "Desk", "Progress", "RegionState"]

FIRST_LOOK, LONGEST_LOOK = 0.002, 0.05
SETTLED = 2**64 - 1
"""Of a desk: the rank pins no more rows. It has pinned all, has none to pin, or cannot."""
_NUM_ROWS, _ROW_STRIDE, _MAP_BYTES, _PROGRESS = range(4)  # words of a region's state


class _Page:
    """One page of words, mapped from a memfd. ``fd``: to be handed over, of a page that this process has created."""

    fd = -1

    def __init__(self, memfd: int, *, writable: bool) -> None:
        self._mapping = map_memory(memfd, mmap.PAGESIZE, mmap.PAGESIZE, writable=writable)
        self._words = self._mapping.view.cast("Q")

    def _open(self, memfd: int, access: int) -> None:
        try:
            self.fd = os.open(f"/proc/self/fd/{memfd}", access | os.O_CLOEXEC)
        except OSError as error:
            raise StartError(f"cannot open a region's state for its ranks: {error}") from None

    def close(self) -> None:
        """Unmap a page that nobody reads any more, and close its descriptor. May be called again."""
        self._words.release()
        self._mapping.close()
        self.detach()

    def detach(self) -> None:
        """Close the descriptor in a forked child. The mapping does the same."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class Progress(NamedTuple):
    """How far the rows are populated: the first ``populated_rows``, and no more once ``prefault_ended``.

    ``memory_is_short``: there is no memory for the rows after these, which are therefore never used.
    """

    populated_rows: int
    prefault_ended: bool
    memory_is_short: bool = False


class RegionState(_Page):
    """The owner's page: number of rows, bytes from one to the next, bytes to map, and the progress of populating."""

    @classmethod
    def create(cls, name: str, num_rows: int, row_stride: int, map_bytes: int) -> "RegionState":
        """Make the page; StartError if it cannot be. Nobody can map it for writing by its ``fd``."""
        memfd = create_memfd(name, mmap.PAGESIZE)
        try:
            state = cls(memfd, writable=True)
            state._words[_NUM_ROWS], state._words[_ROW_STRIDE], state._words[_MAP_BYTES] = (
                num_rows,
                row_stride,
                map_bytes,
            )
            state._open(memfd, os.O_RDONLY)
        finally:
            os.close(memfd)
        return state

    @property
    def shape(self) -> tuple[int, int, int]:
        """(number of rows, bytes from one row to the next, bytes to map)."""
        return self._words[_NUM_ROWS], self._words[_ROW_STRIDE], self._words[_MAP_BYTES]

    @property
    def progress(self) -> Progress:
        """The progress of populating."""
        word = self._words[_PROGRESS]
        return Progress(word >> 2, bool(word & 1), bool(word & 2))

    @progress.setter
    def progress(self, progress: Progress) -> None:
        # One word: of two, a processor may show the later one first.
        self._words[_PROGRESS] = progress.populated_rows << 2 | progress.memory_is_short << 1 | progress.prefault_ended


class Desk(_Page):
    """A rank's page: how many of the first rows it has pinned. The owner makes it, and blanks it for each process."""

    @classmethod
    def create(cls, name: str) -> "Desk":
        """Make the page; StartError if it cannot be."""
        memfd = create_memfd(name, mmap.PAGESIZE)
        try:
            desk = cls(memfd, writable=True)
            desk._open(memfd, os.O_RDWR)
        finally:
            os.close(memfd)
        return desk

    @property
    def pinned(self) -> int | None:
        """Rows that the rank has pinned, while it pins on; ``SETTLED`` once it pins no more; None before it says so."""
        word = self._words[0]
        return word if word == SETTLED else word - 1 if word else None

    @pinned.setter
    def pinned(self, rows: int | None) -> None:
        self._words[0] = 0 if rows is None else min(rows + 1, SETTLED)
