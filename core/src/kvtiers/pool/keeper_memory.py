"""The keeper's memory, and what is in it: it is made, or taken over, hashed as it fills, and checked.

::

    nothing --> being populated --> rows --> rows with an arena: what they hold for the engines of one model

It is one thread's, the keeper's; only hashing is done on others. A keeper that is killed in whatever instruction leaves
memory that the next one can use: the engine brings it back, or the service manager has kept it (``kept.py``).
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from kvtiers.api import OffloadKey, StartError
from kvtiers.api.units import format_size
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.pool.arena import Arena
from kvtiers.pool.kept import Kept, KeptMemory
from kvtiers.pool.memory import Rows, Shape, open_again
from kvtiers.region.early_memory import EarlyMemory
from kvtiers.region.limits import usable_processors
from kvtiers.region.memfd import HUGE_PAGE_BYTES, HugePages
from kvtiers.region.prefault import Prefault

__all__ = ["KeeperMemory"]

_log = logging.getLogger("kvtiers.pool")
_PIECE_ROWS = 64  # hashed by a thread at a stretch
_MOST_THREADS = 8


class _Check(NamedTuple):
    began: float
    pieces: list[Future[list[int]]]


class KeeperMemory:
    """A pool's memory: ``rows`` of ``size`` bytes, or as many as an engine brings, and an ``arena`` once one had it.

    ``kept``: what the service manager has of it. ``wake``: called, from any thread, when ``end_check`` may have
    something to do. ``prefault``: what populates the rows until they are there; its descriptor is to be watched.
    """

    def __init__(self, size: int, huge_pages: HugePages, kept: KeptMemory, wake: Callable[[], None]) -> None:
        self._size = size
        self._huge_pages: HugePages = huge_pages
        self.kept = kept
        self._wake = wake
        self._early: EarlyMemory | None = None
        self.rows: Rows | None = None
        self.arena: Arena | None = None
        self._check: _Check | None = None
        self._threads = max(1, min(_MOST_THREADS, int(usable_processors()) // 2))
        self._hashing = ThreadPoolExecutor(self._threads, "kvtiers-pool-hash")
        self.counts = {"published": 0, "published_late": 0, "checked": 0, "damaged": 0}
        self.seconds = {"populate": 0.0, "check": 0.0}

    # The rows.

    @property
    def prefault(self) -> Prefault | None:
        """The program that populates the rows, None before it has begun and after it has ended."""
        return self._early.prefault if self._early is not None else None

    def make(self) -> None:
        """Begin to make the rows. They are there at once if nothing can populate them; StartError if they cannot be."""
        self._early = EarlyMemory(
            "kvtiers-pool", self._size, huge_pages=self._huge_pages, prefault="all", window=self._size, option="--size"
        )
        if self.prefault is None:
            self._take_early()

    def populate(self) -> bool:
        """Read how far ``prefault`` is; return whether it has just ended. StartError if there are no rows."""
        if (prefault := self.prefault) is None:  # given up a moment ago
            return False
        prefault.read()
        if not prefault.ended:
            return False
        self.seconds["populate"] = prefault.seconds
        if prefault.error:
            raise StartError(f"pool: its memory cannot be populated: {prefault.error}; lower --size, or make room")
        self._take_early()
        _log.info("pool: %s populated in %.1f s", format_size(self._size), prefault.seconds)
        return True

    def _take_early(self) -> None:
        early, self._early = self._early, None
        assert early is not None
        fd, _ = early.take()
        self.rows = Rows(fd, early.nbytes, self._huge_pages)
        self.kept.keep_rows(fd)

    def take_back(self, kept: Kept) -> None:
        """Take rows that were kept, and what they hold. What is raised may leave a part of it, for ``drop``."""
        nbytes, page = os.fstat(kept.rows).st_size, HUGE_PAGE_BYTES[self._huge_pages]
        has, wanted = (nbytes, os.fstatvfs(kept.rows).f_bsize), (-(-self._size // page) * page, page)
        if has != wanted:
            sizes = (f"{format_size(size)} in pages of {format_size(of)}" for size, of in (has, wanted))
            raise StartError("it has {}, and {} are asked for".format(*sizes))
        self.rows = Rows(open_again(kept.rows, os.O_RDWR), nbytes, self._huge_pages)
        if kept.arena is not None:
            fds, hello = kept.arena
            self.arena = Arena(self.rows, hello.prefix, CacheLayout.from_json(hello.layout), fds)
        _log.info("pool: took back %s from the service manager", format_size(nbytes))

    def has(self, rows: int) -> bool:
        """Return whether this is a descriptor of its rows."""
        return self.rows is not None and os.path.sameopenfile(self.rows.fd, rows)

    def adopt(self, prefix: str, layout: CacheLayout, fds: Sequence[int]) -> None:
        """Take what an engine has of another keeper, in place of all there is; what is raised leaves nothing.

        ``fds``: rows, index and plane, which stay the caller's.
        """
        self.drop()
        nbytes = os.fstat(fds[0]).st_size
        rows = Rows(open_again(fds[0], os.O_RDWR), nbytes)
        with contextlib.ExitStack() as undo:
            undo.callback(rows.close)
            self.arena = Arena(rows, prefix, layout, fds[1:])
            undo.pop_all()
        self.rows = rows
        self.kept.keep_arena(self.arena)
        self.kept.keep_rows(rows.fd)
        _log.info("pool: took over %s that the engine brought back", format_size(nbytes))
        if nbytes < self._size:
            _log.warning("pool: for the %s of --size, restart it while no engine runs", format_size(self._size))

    def drop(self) -> None:
        """Give up all there is, and have nothing kept."""
        self.kept.drop_rows()
        self._release()

    def close(self) -> None:
        """Give up all there is, but for what is kept."""
        self._release()
        self._hashing.shutdown(cancel_futures=True)

    def _release(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        if self.rows is not None:
            self.rows.close()
            self.rows = None

    # The arena.

    def set_arena(self, prefix: str, layout: CacheLayout) -> Arena:
        """Return the arena of such chunks: the one that is there, or an empty one; StartError if no row has room."""
        assert self.rows is not None
        if layout.row_stride > self.rows.nbytes:
            raise StartError(f"it has no room for a row of {format_size(layout.row_stride)}; raise the keeper's --size")
        if self.arena is not None:
            if (self.arena.shape.row_stride, self.arena.shape.prefix) == (layout.row_stride, prefix):
                return self.arena
            _log.info("pool: %s is asked for, so %s is forgotten", prefix, self.arena.shape.prefix)
            self.kept.drop_arena()
            self.arena.close()
            self.arena = None
        self.arena = Arena(self.rows, prefix, layout)
        self.kept.keep_arena(self.arena)
        return self.arena

    def correct(self, prefix: str, layout: CacheLayout, fds: Sequence[int]) -> None:
        """Take index and plane that the rows' engine has, where others were kept, and name them as the engine does.

        StartError, OSError: they are of other rows.
        """
        assert self.rows is not None
        if self.arena is None or not self.arena.has(fds):
            found = Arena(self.rows, prefix, layout, fds)
            if self.arena is not None:
                self.arena.close()
            self.arena = found
            self.kept.keep_arena(found)
        self.rename(prefix)

    def rename(self, prefix: str) -> None:
        """Forget all chunks, unless their names have this prefix: those to come have it."""
        assert self.arena is not None
        if prefix != self.arena.shape.prefix:
            self.kept.drop_arena()
            self.arena.rename(prefix)
            self.kept.name_arena(self.arena)

    def clear(self) -> int:
        """Forget all chunks; return how many."""
        chunks = len(self._counting())
        if self.arena is not None:
            self.arena.index.clear()
        return chunks

    def _counting(self) -> list[int]:
        return self.arena.counting() if self.arena is not None else []

    # Hashing.

    def publish(self, rows: list[int], editions: list[int], keys: list[bytes]) -> None:
        """Hash these rows and write their entries, but for those of other editions; ValueError: there are none such."""
        arena = self.arena
        assert arena is not None
        if not len(rows) == len(editions) == len(keys) or not all(0 <= row < arena.shape.num_rows for row in rows):
            raise ValueError("rows that there are not")
        plane, index = arena.plane, arena.index
        told = [
            (row, edition, key)
            for row, edition, key in zip(rows, editions, keys, strict=True)
            if edition and plane.edition(row) == edition and arena.payload_bytes(key)
        ]
        digests = self._hashed(arena, [row for row, _, _ in told], [key for _, _, key in told])
        for (row, edition, key), digest in zip(told, digests, strict=True):
            if plane.edition(row) == edition:  # else its bytes may have changed while they were hashed
                index.write(row, edition, key, digest)
                self.counts["published"] += 1
        self.counts["published_late"] += len(rows) - len(told)

    def _hashed(self, arena: Arena, rows: Sequence[int], keys: Sequence[OffloadKey]) -> list[bytes]:
        if len(rows) < 2 or self._threads == 1:
            return list(map(arena.hash, rows, keys))
        return list(self._hashing.map(arena.hash, rows, keys, chunksize=-(-len(rows) // (4 * self._threads))))

    @property
    def is_checking(self) -> bool:
        """Whether rows are being hashed again: until then nobody is to have them."""
        return self._check is not None

    def begin_check(self) -> None:
        """Begin to hash all rows whose entries count, on threads: nobody else has the memory meanwhile."""
        if self.arena is None:
            return
        began, rows = time.monotonic(), self.arena.counting()
        self.counts["checked"] += len(rows)
        pieces = [rows[at : at + _PIECE_ROWS] for at in range(0, len(rows), _PIECE_ROWS)] or [[]]
        self._check = _Check(began, [self._hashing.submit(self.arena.damaged_of, piece) for piece in pieces])
        for piece in self._check.pieces:
            piece.add_done_callback(lambda _: self._wake())

    def end_check(self) -> None:
        """Forget the rows whose bytes are others, once all have been hashed."""
        check = self._check
        if check is None or not all(piece.done() for piece in check.pieces):
            return
        damaged = [row for piece in check.pieces for row in piece.result()]
        assert self.arena is not None
        for row in damaged:
            self.arena.index.void(row)
        self._check = None
        self.counts["damaged"] += len(damaged)
        self.seconds["check"] = seconds = time.monotonic() - check.began
        level = logging.WARNING if damaged else logging.INFO
        _log.log(level, "pool: its rows were checked in %.2f s, %d of them damaged", seconds, len(damaged))

    def figures(self) -> dict[str, Any]:
        """Return what ``kvtiers pool status`` shows of it."""
        shape = self.arena.shape if self.arena is not None else Shape(0, 0, "")
        return {
            "bytes": self.rows.nbytes if self.rows is not None else self._size,
            "populated": self.rows is not None,
            "checking": self.is_checking,
            "rows": shape.num_rows,
            "row_bytes": shape.row_stride,
            "chunks": len(self._counting()),
            "holds": shape.prefix,
            **self.counts,
            **{f"{name}_seconds": round(seconds, 3) for name, seconds in self.seconds.items()},
        }
