"""The ``EvictionPolicy`` interface.

To add one, subclass ``EvictionPolicy`` and declare an entry point in the group ``kvtiers.eviction``; its name is what
``primary.eviction`` in the configuration says.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

from kvtiers.api import OffloadKey
from kvtiers.types import RequestHints

__all__ = ["EvictionPolicy"]


class EvictionPolicy(ABC):
    """Decides which chunk leaves the primary next. It holds keys only, never rows.

    The primary tier calls it, on the engine's thread: no method blocks, and each should cost O(1) a chunk. All calls
    are batches, and no batch names a key twice. A key is *known* from the ``access`` that names it in ``new`` until
    it is removed, evicted or cleared; all other calls name known keys. A new key is not evictable; it is after
    ``mark_evictable`` and until ``mark_pinned``. ``clock``: seconds; the primary's own, once it has the policy.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, capacity: int) -> None:
        """Start empty, for a primary of ``capacity`` rows."""
        self.capacity = capacity

    @abstractmethod
    def access(self, keys: Sequence[OffloadKey], request_id: str, new: Sequence[OffloadKey] = ()) -> None:
        """Count these chunks as used by this request; they are in the order of its prefix, head first.

        ``new``: those of them that were stored or promoted just now, in the same order, and are not known yet. A
        request that names a chunk again, by a retry for example, has used it once. An empty ``request_id`` stands
        for a request of this one call. The head of a prefix is worth more than its tail: without the head, the tail
        is never found.
        """

    @abstractmethod
    def request_finished(self, request_id: str) -> None:
        """Handle a request's end: the moment to settle the recency of its uses. An unknown one is ignored."""

    @abstractmethod
    def mark_evictable(self, keys: Sequence[OffloadKey]) -> None:
        """Allow these chunks to be evicted. That is not a use: their rank is the one that ``access`` gave them."""

    @abstractmethod
    def mark_pinned(self, keys: Sequence[OffloadKey]) -> None:
        """Forbid the eviction of these chunks, all evictable until now. Their rank stays."""

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget these chunks; they are gone, but not by eviction."""

    @abstractmethod
    def evict(self, count: int) -> list[OffloadKey] | None:
        """Choose exactly ``count`` evictable chunks, forget and return them; None, and no change, if there are fewer.

        Only evictable chunks are looked at, so that pinned ones never cost time.
        """

    def evict_unused(self, count: int, request_id: str) -> list[OffloadKey]:
        """Do as ``evict``, for up to ``count`` chunks, none of which this running request has named in ``access``.

        Comes for promotions, and for stores where tenants have shares. Need not find all of them: when it returns
        fewer, ``evict`` is called, with all that the request uses pinned meanwhile, which takes time for each of these;
        or, where tenants have shares, the first of ``coldest`` that it does not use are removed.
        LRU and ARC look at each bucket's tail, up to the first chunk that the request has used. By default it finds
        none.
        """
        del count, request_id
        return []

    def hint(self, request_id: str, hints: RequestHints) -> None:
        """Handle what a client says of a request: before its first use, and again with its output when it ends.

        Nothing by default. A policy must not believe a hint at the cost of other sessions.
        """
        del request_id, hints

    def worth_storing(self, keys: Sequence[OffloadKey], request_id: str) -> int:
        """Return how many of the leading keys should be resident, since something would have to leave for the others.

        ``keys``: what a request offers to store, in the order of its prefix, those that are here included. Comes
        before ``evict``, and before the ``access`` that names those which were stored. Not asked where a tier below
        takes chunks: they get there by way of the primary. All of them, by default.
        """
        del request_id
        return len(keys)

    def forecasts_reuse(self) -> bool:
        """Begin to learn what ``expected_reuse`` answers; False, by default: this policy has no idea of it.

        Then the admission policy that asks has a policy of its own put around this one (``AdmissionPolicy.around``).
        """
        return False

    def evict_first(self, seen: Collection[OffloadKey] | None) -> None:
        """From now on evict chunks in ``seen`` before others that rank about as low: those are still to be looked at.

        A wish, for policies whose ranks change without a use. Nothing by default. ``seen`` changes with time; None: no
        tier looks at chunks any more.
        """
        del seen

    def expected_reuse(self, keys: Sequence[OffloadKey]) -> Sequence[float]:
        """Return the probability (0 to 1) of each of these known chunks to be used again, from now on."""
        return [1.0] * len(keys)

    def shared_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading keys, all of one prefix, requests of several sessions have used."""
        del keys
        return 0

    @abstractmethod
    def coldest(self) -> Iterator[OffloadKey]:
        """Yield the evictable chunks in about the order in which they would be evicted. Changes nothing.

        The caller reads as many as it wants, before any other call.
        """

    def leaving(self, count: int, seen: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return, of the ``count`` chunks that would be evicted next, those that are not in ``seen``. Changes nothing.

        May leave out chunks that are evicted together with one that is in ``seen``, where that saves time.
        """
        return [key for key in islice(self.coldest(), count) if key not in seen]

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, also what was learnt and what unfinished requests did."""

    def on_store_miss(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Handle the absence of chunks that a request is about to store. Comes before ``evict``.

        The keys are not known, and may never become so: there may be no room. May come again for the same request.
        """
