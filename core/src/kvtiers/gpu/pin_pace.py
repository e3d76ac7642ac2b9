"""The duty cycle of pinning: the size of each piece, and the pause after it.

A call that pins holds the driver until it has pinned, and all other calls wait for it, each launch of the engine's
included. So a piece is sized to take about ``seconds``, and after each one pinning pauses long enough to take no more
than a share of the time::

    the engine is idle        IDLE_SHARE: an unexpected launch still finds a gap
    the engine computes       ``share``

Size and pause follow the fastest of the last pieces: a call may also wait for the driver, and while it waits it holds
nothing. A pause that counted these waits in kept pinning beside a busy engine far below its share. Many small pieces
also make later copies slower.

Stores do not speed it up: rows that are not pinned yet are not leased, so an engine that computes without a pause keeps
as much of what it stores as pinning has made room for, and older chunks are evicted for newer ones.

With ``share`` 1.0 it never pauses: the start waits for it.
"""

import mmap
from collections import deque
from dataclasses import dataclass, field

__all__ = ["IDLE_SHARE", "PinPace", "whole_pages"]

IDLE_SHARE = 0.8
_FIRST_BYTES = 4 << 20
_LEAST_BYTES = 4096
_REMEMBERED = 8  # pieces, of which the fastest counts


@dataclass(slots=True)
class PinPace:
    """Piece sizes and pauses. ``seconds``: the longest time of a piece; ``most_bytes``: the largest piece.

    ``piece_bytes``: what to pin next; a caller that has to pin more at once (a whole row) does so.
    """

    share: float
    seconds: float
    most_bytes: int
    piece_bytes: int = field(init=False)
    _rates: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_REMEMBERED))

    def __post_init__(self) -> None:
        self.piece_bytes = min(_FIRST_BYTES, self.most_bytes)

    def rest_after(self, nbytes: int, took: float, *, busy: bool) -> float:
        """Record that the last piece, of so many bytes, took this many seconds; return how many to pause."""
        self._rates.append(nbytes / max(took, 1e-6))
        fits = int(max(self._rates) * self.seconds)
        held = nbytes / max(self._rates)
        self.piece_bytes = min(self.most_bytes, max(_LEAST_BYTES, min(fits, 2 * self.piece_bytes)))
        if self.share >= 1.0:
            return 0.0
        share = min(IDLE_SHARE, self.share) if busy else IDLE_SHARE
        return held * (1.0 / share - 1.0)


def whole_pages(rows: int, row_stride: int) -> int:
    """Return the next number of rows that are whole pages of the system: no page may be pinned twice."""
    while rows * row_stride % mmap.PAGESIZE:
        rows += 1
    return rows
