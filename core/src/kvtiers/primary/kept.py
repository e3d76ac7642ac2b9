"""The hints of clients about chunks: those to keep for a time, which leave later than others, and those to leave first.

Neither is a lock. A kept chunk that could be evicted is *held back*: the eviction policy takes it for pinned, and gets
it back when its time is over, or as soon as there is nothing else to evict; so an allocation that would succeed without
hints succeeds with them. A chunk of low priority is one that a request of low priority has brought and no other
has used: it is evicted before the policy is asked, the tail of its request first.

At most ``limit`` chunks are kept, resident or not, so memory is bounded; further ones take the place of those that were
hinted at longest ago. All costs are O(1) a chunk, none where there are no hints, and no policy is asked to search.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice

from kvtiers.api import OffloadKey

__all__ = ["Kept"]


class Kept:
    """The hints that hold, by chunk, and the evictable chunks that they concern. Engine's thread only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_active = False
        """There are hints: else no method needs to be called."""
        self.held = 0
        """Evictable chunks that are held back from the policy."""
        self.over_share = 0
        """Hints dropped since no more chunks may be kept."""
        self.given_up = 0
        """Kept chunks that were given back to the policy before their time, as there was nothing else to evict."""
        # By priority, normal and high: until when, in whole seconds, the oldest hint first.
        self._until: tuple[OrderedDict[OffloadKey, int], ...] = (OrderedDict(), OrderedDict())
        self._held: tuple[OrderedDict[OffloadKey, None], ...] = (OrderedDict(), OrderedDict())
        self._due: dict[int, dict[OffloadKey, None]] = {}
        self._seconds: list[int] = []  # a heap: those in ``_due``
        self._low_requests: set[str] = set()
        self._low: dict[OffloadKey, str] = {}  # by chunk, the request that brought it
        self._first_out: dict[str, dict[OffloadKey, None]] = {}  # evictable, by request

    # -- hints

    def keep(self, keys: Sequence[OffloadKey], until: float, *, high: bool) -> list[OffloadKey]:
        """Keep these chunks, head first, until this time; return chunks that were held back and are kept no longer.

        A hint does not shorten or weaken one that holds.
        """
        second = math.ceil(until)
        for key in reversed(keys[: self.limit]):  # the tail first: it is the first to be given up
            before = self._until[1].pop(key, -1)
            is_high = high or before >= 0
            before = max(before, self._until[0].pop(key, -1))
            last = max(second, before)
            self._until[is_high][key] = last
            if before != last:
                self._move(key, before, last)
            if self._held[0].pop(key, 0) is None or self._held[1].pop(key, 0) is None:
                self._held[is_high][key] = None
        self.over_share += max(0, len(keys) - self.limit)
        excess = max(0, len(self._until[0]) + len(self._until[1]) - self.limit)
        self.over_share += excess
        gone = list(islice(chain(*self._until), excess))
        self._note()
        return self._forget(gone)

    def brings_low(self, request_id: str) -> None:
        """Take what this request brings for chunks of low priority."""
        self._low_requests.add(request_id)
        self._note()

    def request_finished(self, request_id: str) -> None:
        """Forget a request; what it has brought stays of low priority."""
        self._low_requests.discard(request_id)
        self._note()

    def brought(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Handle chunks that became resident for a request."""
        if request_id in self._low_requests:
            self._low.update(dict.fromkeys(keys, request_id))

    def used(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Handle the use of resident chunks: those that another request brought are of low priority no longer."""
        for key in keys if self._low else ():
            if self._low.get(key, request_id) != request_id:
                self._take_out(key)
                del self._low[key]

    def expire(self, now: float) -> list[OffloadKey]:
        """End the hints whose time is over; return the chunks that were held back."""
        over: list[OffloadKey] = []
        while self._seconds and self._seconds[0] <= now:
            over += self._due.pop(heapq.heappop(self._seconds), ())
        return self._forget(over) if over else []

    # -- residents

    def hold(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Handle chunks that became evictable; return those that the policy is to have."""
        high, normal = self._until[1], self._until[0]
        rest: list[OffloadKey] = []
        for key in reversed(keys):
            if key in high:
                self._held[1][key] = None
            elif key in normal:
                self._held[0][key] = None
            else:
                rest.append(key)
        self.held += len(keys) - len(rest)
        rest.reverse()
        for key in rest if self._low else ():
            if (request_id := self._low.get(key)) is not None:
                self._first_out.setdefault(request_id, {})[key] = None
        return rest

    def unhold(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Handle evictable chunks that are not evictable any more; return those that the policy has."""
        rest: list[OffloadKey] = []
        for key in keys:
            if self._held[0].pop(key, 0) is None or self._held[1].pop(key, 0) is None:
                self.held -= 1
            else:
                self._take_out(key)
                rest.append(key)
        return rest

    def left(self, keys: Sequence[OffloadKey]) -> None:
        """Handle chunks that are not resident any more; their hints hold for when they come back."""
        for key in keys if self._low else ():
            self._take_out(key)
            self._low.pop(key, None)
        self._note()

    def give_up(self, count: int, spared: Collection[OffloadKey] = ()) -> list[OffloadKey]:
        """Return this many chunks that are held back to the policy, those of normal priority first; their hints end."""
        gone = list(islice((key for key in chain(*self._held) if key not in spared), count))
        self.given_up += len(gone)
        return self._forget(gone)

    def take_first_out(self, count: int, not_of: str, spared: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return up to ``count`` evictable chunks of low priority, in their order, none that this request brought.

        None of ``spared``, either.
        """
        taken: list[OffloadKey] = []
        for request_id in list(self._first_out) if count else ():
            if request_id == not_of and request_id:
                continue
            keys = self._first_out[request_id]
            found = list(islice((key for key in reversed(keys) if key not in spared), count - len(taken)))
            taken += found
            for key in found:
                del keys[key]
            if not keys:
                del self._first_out[request_id]
            if len(taken) == count:
                break
        for key in taken:
            del self._low[key]
        return taken

    @property
    def first_out(self) -> int:
        """Evictable chunks of low priority."""
        return sum(map(len, self._first_out.values())) if self._first_out else 0

    def iter_first_out(self) -> Iterator[OffloadKey]:
        """Yield the evictable chunks of low priority in the order in which they leave."""
        for keys in self._first_out.values():
            yield from reversed(keys)

    def leaves_first(self, key: OffloadKey) -> bool:
        """Return whether this is an evictable chunk of low priority."""
        return key in self._first_out.get(self._low.get(key, ""), ())

    def iter_held(self) -> Iterator[OffloadKey]:
        """Yield the chunks that are held back, in the order in which they are given up."""
        return chain(*self._held)

    def clear(self) -> None:
        """Forget all chunks; requests of low priority stay so."""
        for until, held in zip(self._until, self._held, strict=True):
            until.clear()
            held.clear()
        self._due.clear()
        self._seconds.clear()
        self._low.clear()
        self._first_out.clear()
        self.held = 0
        self._note()

    # -- inside

    def _move(self, key: OffloadKey, before: int, second: int) -> None:
        """Let a hint end in another second."""
        if before >= 0:
            self._end(key, before)
        if second not in self._due:
            self._due[second] = {}
            heapq.heappush(self._seconds, second)
        self._due[second][key] = None

    def _end(self, key: OffloadKey, second: int) -> None:
        due = self._due.get(second)
        if due is not None:
            due.pop(key, None)
            if not due and self._seconds and self._seconds[0] != second:
                return  # found empty when its time has come
            if not due:
                heapq.heappop(self._seconds)
                del self._due[second]

    def _forget(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """End the hints of these chunks; return those that were held back."""
        held: list[OffloadKey] = []
        for key in keys:
            for until, holds in zip(self._until, self._held, strict=True):
                second = until.pop(key, -1)
                if second >= 0:
                    self._end(key, second)
                    if holds.pop(key, 0) is None:
                        held.append(key)
        self.held -= len(held)
        self._note()
        return held

    def _take_out(self, key: OffloadKey) -> None:
        request_id = self._low.get(key)
        keys = None if request_id is None else self._first_out.get(request_id)
        if keys is not None and request_id is not None:
            keys.pop(key, None)
            if not keys:
                del self._first_out[request_id]

    def _note(self) -> None:
        self.is_active = bool(self._until[0] or self._until[1] or self._low_requests or self._low)
