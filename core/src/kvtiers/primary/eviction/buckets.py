"""Buckets: the chunks of one request by their place in its prefix, and the buckets by rank.

A chunk's *place* is one integer, the bucket's number and the position in the bucket: one dictionary look-up gives
both.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence

from kvtiers.api import OffloadKey

__all__ = ["PLACE_SHIFT", "Bucket", "BucketQueue", "merge_order"]

PLACE_SHIFT = 32
_SMALL = 64


class Bucket:
    """The chunks that one request uses.

    ``rank``: colder is less. ``queued``: the rank under which the bucket is in the queue. ``size``: how many known
    chunks have their place here. ``evictable``: those of them that may be evicted, by place while ``in_order``.
    ``places``: the place here, in order, of every chunk that the running request has used, wherever it is now.
    """

    __slots__ = ("evictable", "finished", "first_place", "in_order", "places", "queued", "rank", "size")

    def __init__(self, number: int, rank: int) -> None:
        self.first_place = number << PLACE_SHIFT
        self.rank = rank
        self.queued = 0
        self.size = 0
        self.evictable: dict[OffloadKey, None] = {}
        self.in_order = True
        self.places: dict[OffloadKey, int] = {}
        self.finished = False

    def places_of(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the places here of these chunks."""
        return list(map(self.places.__getitem__, keys))

    def add(self, keys: Sequence[OffloadKey], first_place: int, place_of: dict[OffloadKey, int]) -> None:
        """Make these chunks evictable; they are in the order of their places here, from ``first_place`` on."""
        if not self.evictable:
            self.evictable = dict.fromkeys(keys)
            self.in_order = True
            return
        self.in_order = self.in_order and place_of[next(reversed(self.evictable))] < first_place
        self.evictable.update(dict.fromkeys(keys))

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Make these chunks, all evictable, not evictable."""
        evictable = self.evictable
        if len(keys) == len(evictable):
            self.evictable = {}
            return
        for key in keys:
            del evictable[key]

    def discard(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Make those of these chunks that are evictable not evictable, and return them."""
        evictable = self.evictable
        if not evictable:
            return []
        found = [key for key in keys if key in evictable]
        self.pin(found)
        return found

    def put_in_order(self, place_of: dict[OffloadKey, int]) -> dict[OffloadKey, None]:
        """Return the evictable chunks, head first."""
        if not self.in_order:
            self.evictable = dict.fromkeys(sorted(self.evictable, key=place_of.__getitem__))
            self.in_order = True
        return self.evictable


class BucketQueue:
    """The buckets that have evictable chunks, coldest first.

    A heap of buckets, not of chunks: one push when a bucket gets its first evictable chunk or a new rank. Entries
    that are no longer true are dropped when they come up, or all at once when they may be the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Bucket]] = []
        self._limit = _SMALL

    def push(self, bucket: Bucket) -> None:
        """Queue the bucket under its rank, unless it is queued already or has no evictable chunk."""
        if not bucket.evictable or bucket.queued == bucket.rank:
            return
        bucket.queued = bucket.rank
        heapq.heappush(self._heap, (bucket.rank, bucket))
        if len(self._heap) > self._limit:
            self._sweep()

    def coldest(self) -> Bucket | None:
        """Return the coldest bucket with an evictable chunk; None: there is none."""
        while self._heap:
            rank, bucket = self._heap[0]
            if bucket.queued == rank and bucket.evictable:
                return bucket
            heapq.heappop(self._heap)
            if bucket.queued == rank:
                bucket.queued = 0
        return None

    def set_aside(self, coldest: Bucket) -> None:
        """Take out the bucket that ``coldest`` has just returned, until it is pushed again."""
        heapq.heappop(self._heap)
        coldest.queued = 0

    def coldest_first(self) -> Iterator[Bucket]:
        """Yield all buckets with evictable chunks. Changes nothing."""
        heap = self._heap.copy()
        while heap:
            rank, bucket = heapq.heappop(heap)
            if bucket.queued == rank and bucket.evictable:
                yield bucket

    def clear(self) -> None:
        """Drop all entries."""
        self._heap.clear()
        self._limit = _SMALL

    def _sweep(self) -> None:
        for rank, bucket in self._heap:
            if bucket.queued == rank and not bucket.evictable:
                bucket.queued = 0
        self._heap = [entry for entry in self._heap if entry[1].queued == entry[0]]
        heapq.heapify(self._heap)
        self._limit = max(_SMALL, 2 * len(self._heap))


def merge_order(known: Iterable[OffloadKey], keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Return ``known`` with the rest of ``keys`` between them: after their predecessor, or before the first."""
    places = dict.fromkeys(known)
    leading: list[OffloadKey] = []
    following: dict[OffloadKey, list[OffloadKey]] = {}
    anchor: OffloadKey | None = None
    first: OffloadKey | None = None
    for key in keys:
        if key in places:
            anchor = key
            first = key if first is None else first
        elif anchor is None:
            leading.append(key)
        else:
            following.setdefault(anchor, []).append(key)
    order: list[OffloadKey] = []
    for key in places:
        if key == first:
            order += leading
        order.append(key)
        order += following.get(key, ())
    return order
