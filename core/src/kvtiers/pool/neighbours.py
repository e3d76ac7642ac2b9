"""What the other engines of a pool have that this one may read.

A thread follows the index; the engine's thread looks chunks up, pins their rows, and has each checked at its first use
here: another process could have written to it since the keeper hashed it. Chunks of another prefix, so of another
model, layout or other weights, are none of these.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtiers._failures import logged_boundary
from kvtiers.api import OffloadKey
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.pool.barrier import MemoryBarrier
from kvtiers.pool.chunk_hash import ChunkHash
from kvtiers.pool.memory import Index, Plane, Shape, claim, end_claim, is_lent, residents
from kvtiers.region.limits import usable_processors

__all__ = ["Checked", "Neighbours", "Place"]

_log = logging.getLogger("kvtiers.pool")
_LEAST_THREADS, _MOST_THREADS = 2, 8
_PIECE_ROWS = 16  # hashed by a thread at a stretch


class Place(NamedTuple):
    """Where a chunk of another engine's is: a row, as long as it is of this edition."""

    row: int
    edition: int


class Checked(NamedTuple):
    """The end of a check: the places, and the keys of those that hold what the keeper has hashed."""

    places: Sequence[Place]
    sound: Sequence[OffloadKey]


class _Followed:
    """What was seen of the index, of chunks whose names begin with a prefix."""

    def __init__(self, prefix: str, num_rows: int, hash_chunk: ChunkHash) -> None:
        self.prefix = prefix
        self.hash_chunk = hash_chunk
        self.places: dict[OffloadKey, Place] = {}
        self.news: deque[tuple[list[OffloadKey], list[OffloadKey]]] = deque()
        """Which chunks have come, and which have gone, since the engine's thread took these."""
        self.changes = -1
        self.editions: npt.NDArray[np.uint32] = np.zeros(num_rows, np.uint32)
        self._key_of: dict[int, OffloadKey] = {}
        self._copies: dict[OffloadKey, list[Place]] = {}
        """Older places of chunks that several rows hold."""

    def take(self, rows: Sequence[int], editions: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """Take in that these rows hold these chunks; none where the edition is 0."""
        came, gone = list[OffloadKey](), list[OffloadKey]()
        for row, edition, key in zip(rows, editions, keys, strict=True):
            self.editions[row] = edition
            if (before := self._key_of.pop(row, None)) is not None and self._drop(before, row):
                gone.append(before)
            if edition:
                if (place := self.places.get(key)) is None:
                    came.append(key)
                else:
                    self._copies.setdefault(key, []).append(place)
                self.places[key] = Place(row, edition)
                self._key_of[row] = key
        self.news.append((came, gone))

    def _drop(self, key: OffloadKey, row: int) -> bool:
        """Forget that this row holds a chunk; return whether none does now."""
        copies = self._copies.pop(key, [])
        left = [place for place in [*copies, self.places[key]] if place.row != row]
        if not left:
            del self.places[key]
            return True
        self.places[key] = left.pop()
        if left:
            self._copies[key] = left
        return False


class Neighbours:
    """The readable chunks of the other parts of a pool, for the engine that has ``part``. ``view``: all rows.

    ``follow`` and ``claim_parts`` are for one thread, all else for the engine's.
    """

    def __init__(
        self,
        index: Index,
        plane: Plane,
        shape: Shape,
        part: int,
        prefix: str,
        layout: CacheLayout,
        view: memoryview,
        barrier: MemoryBarrier,
    ) -> None:
        self._barrier = barrier
        self._index = index
        self._plane = plane
        self._shape = shape
        self._others = [other for other in range(shape.parts) if other != part]
        self._layout = layout
        self._view = view
        self.is_followed = True
        self.is_to_claim = False
        """Whether this engine writes to its tiers what others have left that ended: it claims their parts."""
        self._claimed: dict[int, range] = {}
        """Such parts, and their rows."""
        self._left: dict[int, list[OffloadKey]] = {}
        """By such a part, its chunks that ``take_left`` has not returned yet."""
        self._lists_again = False
        """Whether the chunks of all these parts are to be listed once more."""
        self._sound: dict[int, int] = {}
        self._damaged: set[Place] = set()
        self._checked: deque[Checked] = deque()
        threads = max(_LEAST_THREADS, min(_MOST_THREADS, int(usable_processors()) // 2))
        self._hashing = ThreadPoolExecutor(threads, "kvtiers-pool-check")
        self.rename(prefix)

    @property
    def places(self) -> Mapping[OffloadKey, Place]:
        """Where the chunks are, as far as the index was followed. They may have left."""
        return self._followed.places

    def rename(self, prefix: str) -> None:
        """Forget all: the names of chunks begin with this prefix from now on."""
        self._followed = _Followed(prefix, self._shape.num_rows, ChunkHash(prefix, self._layout, self._view))

    def follow(self) -> None:
        """Take in what has changed in the index."""
        followed, index = self._followed, self._index
        if followed.changes == (changes := index.changes):
            return
        followed.changes = changes
        for part in self._others:
            rows, named = self._shape.rows_of(part), index.prefix(part)
            now = np.zeros(len(rows), np.uint32)  # of other chunks, or of none: another arena has the part
            if named[1] == followed.prefix:
                now[:] = index.editions[rows.start : rows.stop]
            changed: list[int] = np.flatnonzero(now != followed.editions[rows.start : rows.stop]).tolist()
            if not changed:
                continue
            keys = [index.key(rows.start + at) if now[at] else b"" for at in changed]
            again = index.editions[rows.start : rows.stop]
            if index.prefix(part) != named:  # some may be of the new one, which is a change, too
                continue
            # An entry that was written meanwhile, too: its key may be of either edition.
            whole = [(at, key) for at, key in zip(changed, keys, strict=True) if not now[at] or again[at] == now[at]]
            followed.take(
                [rows.start + at for at, _ in whole], [int(now[at]) for at, _ in whole], [k for _, k in whole]
            )
            if part in self._claimed:  # the keeper was not done yet with what its engine had published
                self._left[part] = [*self._left.get(part, ()), *(key for at, key in whole if now[at])]

    def claim_parts(self, loan: int) -> None:
        """Claim each part that no engine has, unless another one has claimed it; end claims to those that one has.

        ``loan``: a descriptor of this engine's loan.
        """
        listed = self._claimed
        if self._lists_again:  # cleared first: after a reset during the list they are listed again
            self._lists_again, listed = False, {}
        for part in self._others:
            if self._index.prefix(part)[1] != self._followed.prefix or is_lent(loan, part):
                if part in self._claimed:
                    self._claimed = {other: rows for other, rows in self._claimed.items() if other != part}
                    end_claim(loan, part)
            elif part not in listed and claim(loan, part):
                rows = self._shape.rows_of(part)
                for row in rows:  # its engine may have done anything before it ended: checked again at the next use
                    self._sound.pop(row, None)
                self._claimed = {**self._claimed, part: rows}
                self._left[part] = [key for keys, _ in residents(self._index, self._plane, rows) for key in keys]

    def take_left(self) -> list[OffloadKey]:
        """Return chunks in a part that was claimed since, those used last at the end; more at the next call.

        From the first call on this engine claims parts: it has a tier that is to get what is in them.
        """
        self.is_to_claim = True
        return self._left.popitem()[1] if self._left else []

    def list_again(self) -> None:
        """Have ``take_left`` return the chunks of all parts that are claimed once more."""
        self._lists_again = True

    def is_left(self, key: OffloadKey) -> bool:
        """Return whether a chunk is in a part that this engine has claimed."""
        place = self.places.get(key)
        return place is not None and any(place.row in rows for rows in self._claimed.values())

    def take_news(self) -> list[tuple[list[OffloadKey], list[OffloadKey]]]:
        """Return which chunks have come, and which have gone, since the last call, in order."""
        news = self._followed.news
        return [news.popleft() for _ in range(len(news))]

    def pin(self, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], list[Place]]:
        """Pin the rows of these chunks; return those that still had theirs, and where they are."""
        found = [(key, place) for key, place in zip(keys, map(self.places.get, keys), strict=True) if place is not None]
        if self._damaged:
            found = [(key, place) for key, place in found if place not in self._damaged]
        pinned = list(compress(found, self._plane.pin(place for _, place in found)))
        return [key for key, _ in pinned], [place for _, place in pinned]

    def may_have(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether a row of another engine's holds one of these chunks still."""
        places = filter(None, map(self.places.get, keys))
        return any(place not in self._damaged and self._plane.edition(place.row) == place.edition for place in places)

    def unpin(self, rows: Sequence[int]) -> None:
        """Let the owners of these rows have them again."""
        self._plane.unpin(rows)

    def check(self, keys: Sequence[OffloadKey], places: Sequence[Place]) -> Checked:
        """Have these chunks, whose rows are pinned, checked by threads; return those that were before."""
        sound = self._sound
        is_new = [sound.get(place.row) != place.edition for place in places]  # looked at once: claim_parts forgets some
        chunks = list(zip(keys, places, strict=True))
        known = [chunk for chunk, new in zip(chunks, is_new, strict=True) if not new]
        rest = list(compress(chunks, is_new))
        for at in range(0, len(rest), _PIECE_ROWS):
            piece = rest[at : at + _PIECE_ROWS], self._followed.hash_chunk
            try:
                self._hashing.submit(self._check, *piece)
            except RuntimeError:  # no thread is to be had
                self._check(*piece)
        return Checked([place for _, place in known], [key for key, _ in known])

    def _check(self, chunks: Sequence[tuple[OffloadKey, Place]], hash_chunk: ChunkHash) -> None:
        sound, places = list[OffloadKey](), [place for _, place in chunks]
        self._damaged.update(places)  # until it is known better, whatever is raised
        with logged_boundary(_log, "pool: chunks of another engine could not be checked"):
            sound += [key for key, place in chunks if self._is_sound(key, place, hash_chunk)]
        self._checked.append(Checked(places, sound))

    def _is_sound(self, key: OffloadKey, place: Place, hash_chunk: ChunkHash) -> bool:
        if hash_chunk(place.row, key) == self._index.digest(place.row):
            self._sound[place.row] = place.edition
            self._damaged.discard(place)
            return True
        _log.warning("pool: a chunk of another engine, in row %d, is damaged, and is not used", place.row)
        return False

    def take_checked(self) -> list[Checked]:
        """Return the checks that have ended since the last call. Their rows are pinned still."""
        return [self._checked.popleft() for _ in range(len(self._checked))]

    def held(self, rows: Sequence[int]) -> list[int]:
        """Return those of these rows of the engine's, whose editions were raised just now, that others read."""
        self._barrier()
        return self._plane.pinned(rows)

    def lent(self) -> list[int]:
        """Return the rows of the engine's that others read."""
        return self._plane.all_pinned()

    def close(self) -> None:
        """End the checks, which are soon over, and release the view."""
        self._hashing.shutdown(cancel_futures=True)
        self._view = memoryview(b"")
        self.rename("")
