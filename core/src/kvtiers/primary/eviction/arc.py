"""ARC: adapts between chunks used by one request and chunks used by several.

Two lists, each a leaf-first LRU: T1 (``_once``) has the chunks that only the request that brought them has used, T2
(``_often``) those that a later request used again. Two ghost lists, B1 and B2, remember keys evicted from T1 and T2.
A request that wants to store what B1 remembers says that T1 is too small, and the other way round: that moves the
target size of T1. A chunk that comes back from a ghost list has been used again, and goes to T2.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Two things differ. A re-use of a
resident chunk counts when the request ends. And each ghost list has as many keys as the primary has rows, where the
paper has T1 and B1 together as many: prompts bring their chunks by the hundred, which leave so short a B1 before they
come back (a point of hits less on Mooncake's conversation trace, in a primary of 1 % of it).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.primary.eviction.lru import LRUPolicy

__all__ = ["ARCPolicy"]


@dataclass(slots=True)
class _Request:
    """The uses of one request: new chunks, reused chunks (in order), ghosts counted."""

    brought: set[OffloadKey] = field(default_factory=set)
    reused: dict[OffloadKey, None] = field(default_factory=dict)
    counted: set[OffloadKey] = field(default_factory=set)

    def has_used(self, key: OffloadKey) -> bool:
        """Return whether the request has named this chunk as used."""
        return key in self.brought or key in self.reused


class ARCPolicy(EvictionPolicy):
    """The ARC policy: chunks used once do not evict chunks that several requests use."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once = LRUPolicy()
        self._often = LRUPolicy()
        self._once_ghosts: dict[OffloadKey, None] = {}
        self._often_ghosts: dict[OffloadKey, None] = {}
        self._target = 0.0
        self._comes_back = False  # what the last request wants to store was in T2, so that a tie is T1's loss
        self._unwritten: set[OffloadKey] = set()
        self._requests: dict[str, _Request] = {}

    @property
    def target(self) -> float:
        """The target size of T1 in chunks, as adapted so far."""
        return self._target

    def on_store_miss(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Move the target for keys that a ghost list remembers, once for each request."""
        once, often = self._once_ghosts, self._often_ghosts
        self._comes_back = not often.keys().isdisjoint(keys)
        found = [key for key in keys if key in once or key in often]
        if not found:
            return
        counted = self._requests.setdefault(request_id, _Request()).counted if request_id else set()
        for key in found:
            if key in counted:
                continue
            counted.add(key)
            if key in once:
                self._target = min(self._target + max(1.0, len(often) / len(once)), float(self.capacity))
            else:
                self._target = max(self._target - max(1.0, len(once) / len(often)), 0.0)

    def access(self, keys: Sequence[OffloadKey], request_id: str, new: Sequence[OffloadKey] = ()) -> None:
        """Bring new chunks into T1, ghosts into T2; the others keep their list until the request ends."""
        if not keys:
            return
        request = self._requests.setdefault(request_id, _Request())
        back: set[OffloadKey] = set()
        if new:
            # The eviction that made room for a ghost may have pushed it out of its list.
            back.update(request.counted.intersection(new))
            for ghosts in (self._once_ghosts, self._often_ghosts):
                for key in ghosts.keys() & new:
                    del ghosts[key]
                    back.add(key)
            self._unwritten.update(new)
            request.brought.update(new)
        request.reused.update(dict.fromkeys(key for key in keys if key not in request.brought))
        in_often = self._often.known
        first = [key for key in new if key not in back] if back else new
        self._once.access([key for key in keys if key not in in_often and key not in back], request_id, first)
        again = [key for key in new if key in back] if back else ()
        self._often.access([key for key in keys if key in in_often or key in back], request_id, again)
        if not request_id:
            self.request_finished(request_id)

    def request_finished(self, request_id: str) -> None:
        """Move what the request used again from T1 to T2; settle the recency in both."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        known_once, known_often = self._once.known, self._often.known
        again = [key for key in request.reused if key not in self._unwritten]
        rising = [key for key in again if key in known_once]
        if rising:
            used = [key for key in again if key in known_once or key in known_often]
            evictable = self._once.take(rising)
            # Under a request's id again, so that T1's and T2's chunks end up in the order of its prefix.
            self._often.access(used, request_id, rising)
            self._often.mark_evictable(evictable)
        self._once.request_finished(request_id)
        self._often.request_finished(request_id)

    def mark_evictable(self, keys: Sequence[OffloadKey]) -> None:
        """Put the chunks back at their places."""
        self._unwritten.difference_update(keys)
        once, often = self._split(keys)
        self._once.mark_evictable(once)
        self._often.mark_evictable(often)

    def mark_pinned(self, keys: Sequence[OffloadKey]) -> None:
        """Take the chunks out; their places are kept."""
        once, often = self._split(keys)
        self._once.mark_pinned(once)
        self._often.mark_pinned(often)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget the chunks; they do not become ghosts, since they were not evicted."""
        self._unwritten.difference_update(keys)
        once, often = self._split(keys)
        self._once.remove(once)
        self._often.remove(often)

    def evict(self, count: int) -> list[OffloadKey] | None:
        """Take from T2 while T1 is not above its target, where what is to come will go; else from T1."""
        if count > self._once.evictable + self._often.evictable:
            return None
        first = min(count, self._below_target(), self._often.evictable)
        from_once = min(count - first, self._once.evictable)
        often = self._often.evict(count - from_once) or []
        once = self._once.evict(from_once) or []
        self._remember(self._once_ghosts, once)
        self._remember(self._often_ghosts, often)
        return often[:first] + once + often[first:]

    def evict_unused(self, count: int, request_id: str) -> list[OffloadKey]:
        """Take from T1 and T2 as ``evict`` does, and from one of them alone where the other has no more."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        # Asked of neither list: with another one's end a chunk moves to T2, which has no record of who used it in T1.
        often = self._often.evict_behind(min(count, self._below_target()), request.has_used)
        once = self._once.evict_behind(count - len(often), request.has_used)
        often += self._often.evict_behind(count - len(once) - len(often), request.has_used)
        self._remember(self._once_ghosts, once)
        self._remember(self._often_ghosts, often)
        return once + often

    def coldest(self) -> Iterator[OffloadKey]:
        """Yield the evictable chunks as one large eviction would take them."""
        often = self._often.coldest()
        return chain(islice(often, self._below_target()), self._once.coldest(), often)

    def clear(self) -> None:
        """Forget all chunks, ghosts, requests and the target."""
        self._once.clear()
        self._often.clear()
        self._once_ghosts.clear()
        self._often_ghosts.clear()
        self._unwritten.clear()
        self._requests.clear()
        self._target = 0.0
        self._comes_back = False

    def _split(self, keys: Sequence[OffloadKey]) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
        in_often = self._often.known
        often = [key for key in keys if key in in_often]
        return (keys if not often else [key for key in keys if key not in in_often]), often

    def _below_target(self) -> int:
        """Return how many chunks T1 takes until it is above its target; at it is above, for what was in T2."""
        most = math.ceil(self._target) - 1 if self._comes_back else int(self._target)
        return max(0, most + 1 - len(self._once.known))

    def _remember(self, ghosts: dict[OffloadKey, None], keys: list[OffloadKey]) -> None:
        ghosts.update(dict.fromkeys(keys))
        excess = len(ghosts) - self.capacity
        if excess > 0:
            for key in list(islice(ghosts, excess)):
                del ghosts[key]
