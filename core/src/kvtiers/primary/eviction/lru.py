"""Least recently used, by request: the tail of a request's prefix goes before its head.

Each running request has a *bucket*: the chunks that it uses, in the order of its prefix. A bucket has one rank, the
time of the request's first use; when the request ends, its bucket becomes the hottest and takes back whatever other
requests took from it. Eviction empties the coldest bucket from its tail. So a request counts once, however often it
retries and whatever it does in between.

A chunk's *place* is one integer, the bucket's number and the position in the bucket: one dictionary look-up gives
both. A bucket's evictable chunks are a dictionary in the order of their places. Chunks come back from a pin mostly
in order and behind the others; if not, the bucket is sorted once, when eviction reaches it.
"""

from collections.abc import Callable, Iterator, KeysView, Sequence
from itertools import chain, count, islice, takewhile

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.primary.eviction.buckets import PLACE_SHIFT, Bucket, BucketQueue, merge_order

__all__ = ["LRUPolicy"]


class LRUPolicy(EvictionPolicy):
    """Evicts what the request that ended longest ago used, tail first. The default."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self._place_of: dict[OffloadKey, int] = {}
        self._evictable = 0
        self._buckets: dict[int, Bucket] = {}
        self._running: dict[str, Bucket] = {}
        self._queue = BucketQueue()
        self._numbers = count(1)
        self._ranks = count(1)

    @property
    def known(self) -> KeysView[OffloadKey]:
        """All known keys."""
        return self._place_of.keys()

    @property
    def evictable(self) -> int:
        """The number of evictable chunks."""
        return self._evictable

    def access(self, keys: Sequence[OffloadKey], request_id: str, new: Sequence[OffloadKey] = ()) -> None:
        """Put the chunks into the request's bucket, unless they are in a hotter one."""
        if not keys:
            return
        bucket = self._running.get(request_id)
        if bucket is None:
            number = next(self._numbers)
            bucket = self._buckets[number] = Bucket(number, next(self._ranks))
            if request_id:
                self._running[request_id] = bucket
        places = self._give_places(bucket, keys)
        if not new:
            self._move(bucket, keys)
        else:
            bucket.size += len(new)
            if len(new) == len(keys):
                self._place_of.update(zip(keys, places, strict=True))
            else:
                self._place_of.update(zip(new, bucket.places_of(new), strict=True))
                self._move(bucket, keys)
        if not request_id:
            self._retire(bucket)

    def request_finished(self, request_id: str) -> None:
        """Make the request's bucket the hottest, with all chunks that it used and that are still here."""
        bucket = self._running.pop(request_id, None)
        if bucket is None:
            return
        bucket.rank = next(self._ranks)
        now = list(map(self._place_of.get, bucket.places))
        if now != list(bucket.places.values()):
            self._move(bucket, [key for key, place in zip(bucket.places, now, strict=True) if place is not None])
        self._queue.push(bucket)
        self._retire(bucket)

    def mark_evictable(self, keys: Sequence[OffloadKey]) -> None:
        """Make chunks evictable again, at the places in the order that they had before they were pinned."""
        for bucket, part, first_place in self._by_bucket(keys):
            bucket.add(part, first_place, self._place_of)
            self._queue.push(bucket)
        self._evictable += len(keys)

    def mark_pinned(self, keys: Sequence[OffloadKey]) -> None:
        """Take pinned chunks out of the order, which keeps their places for when they are evictable again."""
        for bucket, part, _ in self._by_bucket(keys):
            bucket.pin(part)
        self._evictable -= len(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget the chunks and their places."""
        self.take(keys)

    def take(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget the chunks and return those that were evictable."""
        were_evictable: list[OffloadKey] = []
        for bucket, part, _ in self._by_bucket(keys):
            were_evictable += bucket.discard(part)
            self._shrink(bucket, len(part))
        for key in keys:
            del self._place_of[key]
        self._evictable -= len(were_evictable)
        return were_evictable

    def evict(self, count: int) -> list[OffloadKey] | None:
        """Empty the coldest buckets, each from its tail."""
        return self._evict(count) if count <= self._evictable else None

    def evict_unused(self, count: int, request_id: str) -> list[OffloadKey]:
        """Do as ``evict``, but of each bucket only what comes behind the last chunk that this request has used."""
        own = self._running.get(request_id)
        return [] if own is None else self.evict_behind(count, own.places.__contains__)

    def evict_behind(self, count: int, is_used: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        """Evict up to ``count`` chunks, of each bucket only what comes behind the last one that is used."""
        victims: list[OffloadKey] = []
        aside = []
        while len(victims) < count and (bucket := self._queue.coldest()) is not None:
            unused = takewhile(lambda key: not is_used(key), reversed(bucket.put_in_order(self._place_of)))
            found = list(islice(unused, count - len(victims)))
            victims += found
            bucket.pin(found)
            self._shrink(bucket, len(found))
            if bucket.evictable:
                self._queue.set_aside(bucket)
                aside.append(bucket)
        for bucket in aside:
            self._queue.push(bucket)
        self._gone(victims)
        return victims

    def coldest(self) -> Iterator[OffloadKey]:
        """Yield the evictable chunks exactly in the order of eviction."""
        return chain.from_iterable(
            reversed(bucket.put_in_order(self._place_of)) for bucket in self._queue.coldest_first()
        )

    def clear(self) -> None:
        """Forget all chunks and requests."""
        self._place_of.clear()
        self._evictable = 0
        self._buckets.clear()
        self._running.clear()
        self._queue.clear()

    def _evict(self, count: int) -> list[OffloadKey]:
        victims: list[OffloadKey] = []
        while (wanted := count - len(victims)) > 0:
            bucket = self._queue.coldest()
            assert bucket is not None, "as many are evictable as are wanted"
            evictable = bucket.put_in_order(self._place_of)
            if len(evictable) <= wanted:
                victims.extend(reversed(evictable))
                self._shrink(bucket, len(evictable))
                bucket.evictable = {}
            else:
                victims.extend([evictable.popitem()[0] for _ in range(wanted)])
                self._shrink(bucket, wanted)
        self._gone(victims)
        return victims

    def _gone(self, victims: list[OffloadKey]) -> None:
        # In one call: these keys are the coldest in the processor's caches too, and so their misses overlap.
        list(map(self._place_of.pop, victims))
        self._evictable -= len(victims)

    def _give_places(self, bucket: Bucket, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the place of each key in ``bucket``; those that have none get one."""
        if bucket.places and not bucket.places.keys().isdisjoint(keys):
            if not all(map(bucket.places.__contains__, keys)):
                self._merge(bucket, keys)
            return bucket.places_of(keys)
        first = bucket.first_place + len(bucket.places)
        # A list, so that all dictionaries share these integers: less memory, and quickly found to be equal.
        places = list(range(first, first + len(keys)))
        bucket.places.update(zip(keys, places, strict=True))
        return places

    def _merge(self, bucket: Bucket, keys: Sequence[OffloadKey]) -> None:
        """Reassign all places of a bucket, with ``keys``, some of which have one already, in their order."""
        before = bucket.places
        order = merge_order(before, keys)
        places = list(range(bucket.first_place, bucket.first_place + len(order)))
        bucket.places = dict(zip(order, places, strict=True))
        here = [key for key, place in before.items() if self._place_of.get(key) == place]
        # Their order among each other stays, and so does that of the evictable ones.
        self._place_of.update(zip(here, bucket.places_of(here), strict=True))

    def _move(self, bucket: Bucket, keys: Sequence[OffloadKey]) -> None:
        """Put these known chunks at their places in ``bucket``, except from hotter buckets."""
        for source, part, _ in self._by_bucket(keys):
            if source.rank >= bucket.rank:  # itself, or hotter: a use never makes a chunk colder
                continue
            evictable = source.discard(part)
            self._shrink(source, len(part))
            self._place_of.update(zip(part, bucket.places_of(part), strict=True))
            bucket.size += len(part)
            if evictable:
                evictable.sort(key=self._place_of.__getitem__)
                bucket.add(evictable, self._place_of[evictable[0]], self._place_of)
                self._queue.push(bucket)

    def _by_bucket(self, keys: Sequence[OffloadKey]) -> list[tuple[Bucket, Sequence[OffloadKey], int]]:
        """Return these known chunks by bucket, in the order of their places, and the first place of each part."""
        if not keys:
            return []
        places = list(map(self._place_of.__getitem__, keys))
        if places != (ordered := sorted(places)):
            keys, places = sorted(keys, key=self._place_of.__getitem__), ordered
        number = places[0] >> PLACE_SHIFT
        if number == places[-1] >> PLACE_SHIFT:
            return [(self._buckets[number], keys, places[0])]
        starts = [0]
        for index, place in enumerate(places):
            if place >> PLACE_SHIFT != number:
                number = place >> PLACE_SHIFT
                starts.append(index)
        ends = [*starts[1:], len(places)]
        return [
            (self._buckets[places[start] >> PLACE_SHIFT], keys[start:end], places[start])
            for start, end in zip(starts, ends, strict=True)
        ]

    def _shrink(self, bucket: Bucket, gone: int) -> None:
        bucket.size -= gone
        if bucket.finished and not bucket.size:
            del self._buckets[bucket.first_place >> PLACE_SHIFT]

    def _retire(self, bucket: Bucket) -> None:
        bucket.places = {}
        bucket.finished = True
        self._shrink(bucket, 0)
