"""Hints around an eviction policy: what leaves before the policy is asked, and what is held back from it.

The policy takes a chunk that is held back for pinned, and gets it back when its hint is over or nothing else can leave
(``primary/kept.py``). So any policy serves, and an eviction that would succeed without hints succeeds with them.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, filterfalse, islice

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.primary.kept import Kept
from kvtiers.types import RequestHints

__all__ = ["HintedPolicy"]


class HintedPolicy(EvictionPolicy):
    """Evicts as ``policy`` does, but by the hints in ``kept`` first. Chunks are removed only while they are pinned.

    ``evictable``: how many chunks of the policy already are.
    """

    def __init__(self, policy: EvictionPolicy, kept: Kept, evictable: int = 0) -> None:
        super().__init__(policy.capacity)
        self.policy = policy
        self.kept = kept
        self.clock = policy.clock
        self.stores_for = ""
        """The request for which chunks leave: what it has brought itself does not leave first."""
        self.spared: Collection[OffloadKey] = ()
        """What that request has used otherwise, where this is known: it does not leave first either."""
        self._evictable = evictable

    # -- hints

    def keep(self, keys: Sequence[OffloadKey], until: float, *, high: bool) -> None:
        """Keep these chunks, none of which is evictable now, until this time."""
        self._give_back(self.kept.keep(keys, until, high=high))

    def expire(self, now: float) -> None:
        """End the hints whose time is over."""
        if self.kept.is_active:
            self._give_back(self.kept.expire(now))

    @property
    def first_out(self) -> int:
        """Evictable chunks of low priority."""
        return self.kept.first_out if self.kept.is_active else 0

    # -- uses

    def on_store_miss(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Note for whom chunks will leave."""
        self.stores_for = request_id
        self.policy.on_store_miss(keys, request_id)

    def access(self, keys: Sequence[OffloadKey], request_id: str, new: Sequence[OffloadKey] = ()) -> None:
        """Count the use, also of chunks of low priority."""
        if self.kept.is_active:
            fresh = set(new)
            self.kept.used([key for key in keys if key not in fresh], request_id)
            self.kept.brought(new, request_id)
        self.policy.access(keys, request_id, new)

    def request_finished(self, request_id: str) -> None:
        """Settle the recency; what the request has brought keeps its priority."""
        if self.kept.is_active:
            self.kept.request_finished(request_id)
        self.policy.request_finished(request_id)

    def hint(self, request_id: str, hints: RequestHints) -> None:
        """Do what the policy does."""
        self.policy.hint(request_id, hints)

    def worth_storing(self, keys: Sequence[OffloadKey], request_id: str) -> int:
        """Do what the policy does."""
        own, self.policy.capacity = self.policy.capacity, self.capacity
        try:
            return self.policy.worth_storing(keys, request_id)
        finally:
            self.policy.capacity = own

    # -- residents

    def mark_evictable(self, keys: Sequence[OffloadKey]) -> None:
        """Hold back those that are kept, and let the policy have the others."""
        self._evictable += len(keys)
        self._give_back(self.kept.hold(keys) if self.kept.is_active else keys)

    def mark_pinned(self, keys: Sequence[OffloadKey]) -> None:
        """Forbid the eviction of these chunks."""
        self._evictable -= len(keys)
        if self.kept.is_active:
            keys = self.kept.unhold(keys)
        if keys:
            self.policy.mark_pinned(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget these chunks; their hints hold for when they come back."""
        self.policy.remove(keys)
        if self.kept.is_active:
            self.kept.left(keys)

    def clear(self) -> None:
        """Forget all chunks."""
        self._evictable = 0
        self.kept.clear()
        self.policy.clear()

    # -- eviction

    def evict(self, count: int) -> list[OffloadKey] | None:
        """Take what is of low priority, then what the policy chooses, and of what is kept only what is short then."""
        if not self.kept.is_active:
            return self._left(self.policy.evict(count))
        if count > self._evictable:
            return None
        victims = self._low(count)
        short = count - (self._evictable - self.kept.held)
        if short > 0:
            self._give_back(self.kept.give_up(short))
        rest = count - len(victims)
        chosen = (self.policy.evict(rest) or []) if rest else []
        assert len(chosen) in {0, rest}, "the policy evicted another number than it was asked for"
        return self._left(victims + chosen)

    def evict_unused(self, count: int, request_id: str) -> list[OffloadKey]:
        """Do as ``evict``, but for what is kept."""
        victims = self._low(count) if self.kept.is_active else []
        rest = count - len(victims)
        return self._left(victims + (self.policy.evict_unused(rest, request_id) if rest else [])) or []

    def evict_kept(self, count: int, request_id: str) -> list[OffloadKey]:
        """Do as ``evict_unused``, for what is kept and not ``spared``; the oldest hints end first."""
        self._give_back(self.kept.give_up(count, self.spared))
        return self._left(self.policy.evict_unused(count, request_id)) or []

    def coldest(self) -> Iterator[OffloadKey]:
        """Yield the evictable chunks, those that are kept last."""
        if not self.kept.is_active:
            return self.policy.coldest()
        others = filterfalse(self.kept.leaves_first, self.policy.coldest())
        return chain(self.kept.iter_first_out(), others, self.kept.iter_held())

    def leaving(self, count: int, seen: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return what leaves next and is not in ``seen``."""
        if not (self.kept.is_active and self.kept.first_out):
            return self.policy.leaving(count, seen)
        return [key for key in islice(self.coldest(), count) if key not in seen]

    # -- forecasts

    def forecasts_reuse(self) -> bool:
        """Do what the policy does."""
        return self.policy.forecasts_reuse()

    def evict_first(self, seen: Collection[OffloadKey] | None) -> None:
        """Do what the policy does."""
        self.policy.evict_first(seen)

    def expected_reuse(self, keys: Sequence[OffloadKey]) -> Sequence[float]:
        """Return what the policy expects."""
        return self.policy.expected_reuse(keys)

    def shared_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return what the policy has seen."""
        return self.policy.shared_prefix(keys)

    # -- inside

    def _give_back(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self.policy.mark_evictable(keys)

    def _low(self, count: int) -> list[OffloadKey]:
        """Take chunks of low priority from the policy; none that the request has brought or used itself."""
        victims = self.kept.take_first_out(count, self.stores_for, self.spared)
        if victims:
            self.policy.remove(victims)
        return victims

    def _left(self, victims: list[OffloadKey] | None) -> list[OffloadKey] | None:
        if victims:
            self._evictable -= len(victims)
            if self.kept.is_active:
                self.kept.left(victims)
        return victims
