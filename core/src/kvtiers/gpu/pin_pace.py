"""The pace of pinning: how much at a time, and how long the driver is left alone after it.

A call that pins holds the driver until it has pinned, and whatever else calls the driver waits for it: each launch of
the engine's. So a piece is as small as it takes to last about ``seconds``, measured piece by piece, and after each the
pinning rests for so long that it takes no more than a share of the time::

    the engine rests          IDLE_SHARE: a launch that comes all the same finds a gap
    it works                  ``share``
    and is about to outrun    ``BEHIND`` times ``share``: copies to rows that are not pinned hold the driver as long as
    what is pinned            pinning them does, and each time anew

With ``share`` 1.0 it never rests: the start waits for it.
"""

import mmap
from dataclasses import dataclass

__all__ = ["BEHIND", "IDLE_SHARE", "PinPace", "whole_pages"]

IDLE_SHARE = 0.8
BEHIND = 4
_FIRST_BYTES = 4 << 20
_LEAST_BYTES = 4096


@dataclass(slots=True)
class PinPace:
    """Sizes and rests. ``seconds``: what a piece should last at most; ``most_bytes``: the largest piece.

    ``piece_bytes``: what to pin next; a caller that has to pin more at once (a whole row) does so.
    """

    share: float
    seconds: float
    most_bytes: int
    piece_bytes: int = 0

    def __post_init__(self) -> None:
        self.piece_bytes = self.piece_bytes or min(_FIRST_BYTES, self.most_bytes)

    def rest_after(self, took: float, *, busy: bool, behind: bool) -> float:
        """Record that the last piece took this many seconds; return for how many the driver is left alone."""
        if took > self.seconds:
            self.piece_bytes = max(_LEAST_BYTES, self.piece_bytes // 2)
        elif took < self.seconds / 2:
            self.piece_bytes = min(self.most_bytes, self.piece_bytes * 2)
        if self.share >= 1.0:
            return 0.0
        share = min(IDLE_SHARE, BEHIND * self.share if behind else self.share) if busy else IDLE_SHARE
        return took * (1.0 / share - 1.0)


def whole_pages(rows: int, row_stride: int) -> int:
    """Return the next number of rows that are whole pages of the system: no page may be pinned twice."""
    while rows * row_stride % mmap.PAGESIZE:
        rows += 1
    return rows
