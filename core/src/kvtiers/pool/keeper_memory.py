"""The keeper's memory, and what is in it: it is made, or taken over, hashed as it fills, and checked.

::

    nothing --> being populated --> rows --> rows with arenas: what they hold, in a part for each engine

It is one thread's, the keeper's; only hashing is done on others. A keeper that is killed in whatever instruction leaves
memory that the next one can use: the engine brings it back, or the service manager has kept it (``kept.py``).
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

from kvtiers.api import OffloadKey, StartError
from kvtiers.api.units import format_size
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.pool.arena import Arena, arena_name
from kvtiers.pool.chunk_hash import ChunkHash
from kvtiers.pool.kept import Kept, KeptMemory
from kvtiers.pool.memory import Index, Rows, open_again, prefix_bytes
from kvtiers.region.early_memory import EarlyMemory
from kvtiers.region.limits import usable_processors
from kvtiers.region.memfd import HUGE_PAGE_BYTES, HugePages
from kvtiers.region.prefault import Prefault

__all__ = ["KeeperMemory"]

T = TypeVar("T")
_log = logging.getLogger("kvtiers.pool")
_PIECE_ROWS = 64  # hashed by a thread at a stretch
_MOST_THREADS = 8


class _Check(NamedTuple):
    began: float
    pieces: list[Future[list[int]]]


class KeeperMemory:
    """A pool's memory: ``rows`` of ``size`` bytes, or as many as an engine brings, and ``arenas`` as engines had it.

    ``parts``: for so many engines, or as many as it has that is taken over. ``kept``: what the service manager has of
    it. ``wake``: called, from any thread, when ``end_checks`` may have something to do. ``prefault``: what populates
    the rows until they are there; its descriptor is to be watched.
    """

    def __init__(
        self, size: int, parts: int, huge_pages: HugePages, kept: KeptMemory, wake: Callable[[], None]
    ) -> None:
        self._size = size
        self.parts = parts
        self._huge_pages: HugePages = huge_pages
        self.kept = kept
        self._wake = wake
        self._early: EarlyMemory | None = None
        self.rows: Rows | None = None
        self.arenas: list[Arena] = []
        """The first one is that whose engines ended the longest ago."""
        self._checks: dict[int, _Check] = {}
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
        """Read how far ``prefault`` is; return whether it has just ended. StartError: there is no room for rows."""
        if (prefault := self.prefault) is None:  # given up a moment ago
            return False
        prefault.read()
        if not prefault.ended:
            return False
        self.seconds["populate"] = prefault.seconds
        if problem := prefault.error or (prefault.remark if prefault.populated < self._size else ""):
            raise StartError(f"pool: its memory cannot be populated: {problem}; lower --size, or make room")
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
        for fds, layout in kept.arenas:
            if (parts := Index.parts_of(fds[0])) != self.parts:
                raise StartError(f"it is for {parts} engines, and {self.parts} are asked for")
            self.arenas.append(Arena(self.rows, parts, CacheLayout.from_json(layout), fds))
        parts_of_all = [part for arena in self.arenas for part in arena.parts]
        if len(set(parts_of_all)) < len(parts_of_all):
            raise StartError("a part of it is in two arenas")
        self._drop_unused()
        _log.info("pool: took back %s from the service manager", format_size(nbytes))

    def has(self, rows: int) -> bool:
        """Return whether this is a descriptor of its rows."""
        return self.rows is not None and os.path.sameopenfile(self.rows.fd, rows)

    def adopt(self, layout: CacheLayout, fds: Sequence[int]) -> Arena:
        """Take what an engine has of another keeper, in place of all there is; what is raised leaves nothing.

        ``fds``: rows, index and plane, which stay the caller's.
        """
        self.drop()
        nbytes = os.fstat(fds[0]).st_size
        self.rows = Rows(open_again(fds[0], os.O_RDWR), nbytes)
        try:
            arena = self.take_arena(layout, fds[1:])
        except BaseException:
            self._release()
            raise
        self.kept.keep_rows(self.rows.fd)
        _log.info("pool: took over %s that the engine brought back", format_size(nbytes))
        if nbytes < self._size:
            _log.warning("pool: for the %s of --size, restart it while no engine runs", format_size(self._size))
        return arena

    def drop(self) -> None:
        """Give up all there is, and have nothing kept."""
        self.kept.drop_rows()
        for arena in self.arenas:
            self.kept.drop_arena(arena)
        self._release()

    def close(self) -> None:
        """Give up all there is, but for what is kept."""
        self._release()
        self._hashing.shutdown(cancel_futures=True)

    def _release(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None
        for arena in list(self.arenas):
            self._close_arena(arena)
        if self.rows is not None:
            self.rows.close()
            self.rows = None

    # The arenas.

    def arena_of(self, part: int) -> Arena | None:
        """Return the arena that a part is in, None if it is in none that is known."""
        return next((arena for arena in self.arenas if arena.prefix(part)), None)

    def arena_for(self, layout: CacheLayout) -> Arena | None:
        """Return the arena for such chunks, None if there is none yet."""
        return next((arena for arena in self.arenas if arena.name == arena_name(layout)), None)

    def give(self, part: int, layout: CacheLayout, prefix: str) -> Arena:
        """Return the arena for such chunks, which this part is in now: nobody has it, or reads what is in it.

        StartError if a part has no room for a row, or the index for the prefix.
        """
        assert self.rows is not None
        prefix_bytes(prefix)
        before, arena = self.arena_of(part), self.arena_for(layout)
        if arena is None:
            arena = Arena(self.rows, self.parts, layout)
            self._add(arena)
        try:
            if before is not None and before is not arena:
                _log.info("pool: %d chunks of %s are forgotten for an engine of other sizes", *_held(before, part))
                before.release(part)  # first: a part of two arenas would be written by both
            arena.rename(part, prefix)
        finally:
            self._drop_unused()
        return arena

    def take_arena(self, layout: CacheLayout, fds: Sequence[int]) -> Arena:
        """Return the arena of the index and plane that an engine of these rows has.

        If it is not known, it is taken in place of one that was kept for such chunks. StartError, OSError: it is of
        other rows.
        """
        assert self.rows is not None
        for arena in self.arenas:
            if arena.has(fds):
                return arena
        if (parts := Index.parts_of(fds[0])) != self.parts and self.arenas:
            raise StartError(f"its memory is in {parts} parts, the keeper's in {self.parts}")
        arena, before = Arena(self.rows, parts, layout, fds), self.arena_for(layout)
        known = {part for other in self.arenas if other is not before for part in other.parts}
        if not known.isdisjoint(arena.parts) or (before is not None and not {*before.parts} <= {*arena.parts}):
            arena.close()
            raise StartError("another arena has a part of its")
        if before is not None:
            self._close_arena(before)
        self.parts = parts
        self._add(arena)
        return arena

    def _add(self, arena: Arena) -> None:
        self.arenas.append(arena)
        self.kept.keep_arena(arena)

    def _drop_unused(self) -> None:
        """Drop the arenas that have no part."""
        for arena in [arena for arena in self.arenas if not arena.parts]:
            self._close_arena(arena)
            self.kept.drop_arena(arena)

    def _close_arena(self, arena: Arena) -> None:
        for part in arena.parts:
            if (check := self._checks.pop(part, None)) is not None:
                wait([piece for piece in check.pieces if not piece.cancel()])
        self.arenas.remove(arena)
        arena.close()

    def clear(self) -> int:
        """Forget all chunks; return how many."""
        chunks = sum(len(self.counting(part)) for part in range(self.parts))
        for arena in self.arenas:
            for part in arena.parts:
                arena.index.clear(part)
        return chunks

    def counting(self, part: int) -> list[int]:
        """Return the rows of a part whose entries count."""
        arena = self.arena_of(part)
        return arena.counting(part) if arena is not None else []

    # Hashing.

    def publish(self, part: int, rows: list[int], editions: list[int], keys: list[bytes]) -> None:
        """Hash a part's rows and write their entries, but for those of other editions; ValueError: it has none such."""
        if (arena := self.arena_of(part)) is None:
            raise ValueError("rows of no arena")
        own, chunk_hash = arena.shape.rows_of(part), arena.chunk_hash(part)
        if not len(rows) == len(editions) == len(keys) or not all(row in own for row in rows):
            raise ValueError("rows that there are not")
        plane, index = arena.plane, arena.index
        told = [
            (row, edition, key)
            for row, edition, key in zip(rows, editions, keys, strict=True)
            if edition and plane.edition(row) == edition and chunk_hash.payload_bytes(key)
        ]
        digests = self._hashed(chunk_hash, [row for row, _, _ in told], [key for _, _, key in told])
        for (row, edition, key), digest in zip(told, digests, strict=True):
            if plane.edition(row) == edition:  # else its bytes may have changed while they were hashed
                index.write(row, edition, key, digest)
                self.counts["published"] += 1
        self.counts["published_late"] += len(rows) - len(told)

    def _submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread make a call; without a thread to be had, make it."""
        try:
            return self._hashing.submit(call, *arguments)
        except RuntimeError:
            made: Future[T] = Future()
            made.set_result(call(*arguments))
            return made

    def _hashed(self, chunk_hash: ChunkHash, rows: Sequence[int], keys: Sequence[OffloadKey]) -> list[bytes]:
        if len(rows) < 2 or self._threads == 1:
            return list(map(chunk_hash, rows, keys))
        step = -(-len(rows) // (4 * self._threads))
        pieces = [slice(at, at + step) for at in range(0, len(rows), step)]
        hashed: list[Future[list[bytes]]] = [
            self._submit(list, map(chunk_hash, rows[piece], keys[piece])) for piece in pieces
        ]
        return [digest for piece in hashed for digest in piece.result()]

    @property
    def checks(self) -> int:
        """How many parts are being checked."""
        return len(self._checks)

    def is_checking(self, part: int) -> bool:
        """Return whether a part's rows are being hashed again: until then no other engine is to have them."""
        return part in self._checks

    def begin_check(self, part: int) -> None:
        """Begin to hash a part's rows whose entries count, on threads: no engine has it meanwhile."""
        if (arena := self.arena_of(part)) is None:
            return
        self.arenas.remove(arena)
        self.arenas.append(arena)
        arena.plane.unpin_all(part)
        began, rows = time.monotonic(), arena.counting(part)
        self.counts["checked"] += len(rows)
        pieces = [rows[at : at + _PIECE_ROWS] for at in range(0, len(rows), _PIECE_ROWS)] or [[]]
        check = _Check(began, [self._submit(arena.damaged_of, part, piece) for piece in pieces])
        self._checks[part] = check
        for piece in check.pieces:
            piece.add_done_callback(lambda _: self._wake())

    def end_checks(self) -> None:
        """Forget the rows whose bytes are others, of each part whose rows have all been hashed."""
        for part, check in list(self._checks.items()):
            if all(piece.done() for piece in check.pieces):
                self._end_check(part, check)

    def _end_check(self, part: int, check: _Check) -> None:
        arena = self.arena_of(part)
        assert arena is not None
        if any(piece.exception() is not None for piece in check.pieces):
            damaged = arena.counting(part)
        else:
            damaged = [row for piece in check.pieces for row in piece.result()]
        for row in damaged:
            arena.index.void(row)
        del self._checks[part]
        self.counts["damaged"] += len(damaged)
        self.seconds["check"] = seconds = time.monotonic() - check.began
        level = logging.WARNING if damaged else logging.INFO
        _log.log(level, "pool: its rows were checked in %.2f s, %d of them damaged", seconds, len(damaged))

    def figures(self) -> dict[str, Any]:
        """Return what ``kvtiers pool status`` shows of it. ``parts``: of each one."""
        parts = [self._figures_of(part) for part in range(self.parts)]
        return {
            "bytes": self.rows.nbytes if self.rows is not None else self._size,
            "populated": self.rows is not None,
            "chunks": sum(part["chunks"] for part in parts),
            "parts": parts,
            **self.counts,
            **{f"{name}_seconds": round(seconds, 3) for name, seconds in self.seconds.items()},
        }

    def _figures_of(self, part: int) -> dict[str, Any]:
        arena, checking = self.arena_of(part), self.is_checking(part)
        if arena is None:
            return {"arena": "", "row_bytes": 0, "rows": 0, "chunks": 0, "holds": "", "checking": checking}
        chunks, holds = _held(arena, part)
        return {
            "arena": arena.name,
            "row_bytes": arena.shape.row_stride,
            "rows": len(arena.shape.rows_of(part)),
            "chunks": chunks,
            "holds": holds,
            "checking": checking,
        }


def _held(arena: Arena, part: int) -> tuple[int, str]:
    return len(arena.counting(part)), arena.prefix(part)
