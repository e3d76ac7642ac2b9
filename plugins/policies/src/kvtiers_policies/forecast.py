"""An eviction policy with the model of turn-hazard beside it, which learns when chunks are used again and evicts none.

A tier with ``admission: expected-reuse`` needs the model whatever the policy is: which chunks leave the primary, and
which of those are worth writing down, are two questions.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.types import RequestHints
from kvtiers_policies.turn_hazard import TurnHazardPolicy

__all__ = ["WithForecast"]


class WithForecast(EvictionPolicy):
    """Evicts as ``policy`` does, and answers ``expected_reuse``. ``residents``: chunks that ``policy`` has already."""

    def __init__(self, policy: EvictionPolicy, capacity: int, residents: Iterable[OffloadKey] = ()) -> None:
        super().__init__(capacity)
        self.policy = policy
        self._unlearnt = set(residents)  # the model learns of these with their next use
        self.clock = policy.clock
        # It is never said that a chunk may leave, so it ranks none: that is what costs most.
        self._model = TurnHazardPolicy(capacity)
        self._model.clock = policy.clock
        self._model.forecasts_reuse()

    def forecasts_reuse(self) -> bool:
        """Return that it does."""
        return True

    def evict_first(self, seen: Collection[OffloadKey] | None) -> None:
        """Do what the policy does."""
        self.policy.evict_first(seen)

    def access(self, keys: Sequence[OffloadKey], request_id: str, new: Sequence[OffloadKey] = ()) -> None:
        """Count the use, and learn from it."""
        self.policy.access(keys, request_id, new)
        if self._unlearnt and (late := self._unlearnt.intersection(keys)):
            self._unlearnt -= late
            late.update(new)
            new = [key for key in keys if key in late]
        self._model.access(keys, request_id, new)

    def request_finished(self, request_id: str) -> None:
        """Handle a request's end."""
        self.policy.request_finished(request_id)
        self._model.request_finished(request_id)

    def hint(self, request_id: str, hints: RequestHints) -> None:
        """Handle what a client says."""
        self.policy.hint(request_id, hints)
        self._model.hint(request_id, hints)

    def mark_evictable(self, keys: Sequence[OffloadKey]) -> None:
        """Do what the policy does."""
        self.policy.mark_evictable(keys)

    def mark_pinned(self, keys: Sequence[OffloadKey]) -> None:
        """Do what the policy does."""
        self.policy.mark_pinned(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget that the chunks are resident."""
        self.policy.remove(keys)
        self._left(keys)

    def evict(self, count: int) -> list[OffloadKey] | None:
        """Evict what the policy chooses."""
        victims = self.policy.evict(count)
        if victims:
            self._left(victims)
        return victims

    def evict_unused(self, count: int, request_id: str) -> list[OffloadKey]:
        """Evict what the policy chooses."""
        victims = self.policy.evict_unused(count, request_id)
        if victims:
            self._left(victims)
        return victims

    def worth_storing(self, keys: Sequence[OffloadKey], request_id: str) -> int:
        """Do what the policy does."""
        return self.policy.worth_storing(keys, request_id)

    def on_store_miss(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Do what the policy does."""
        self.policy.on_store_miss(keys, request_id)

    def expected_reuse(self, keys: Sequence[OffloadKey]) -> list[float]:
        """Return what the model expects."""
        return self._model.expected_reuse(keys)

    def shared_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return what the model has seen."""
        return self._model.shared_prefix(keys)

    def coldest(self) -> Iterator[OffloadKey]:
        """Yield the policy's order."""
        return self.policy.coldest()

    def leaving(self, count: int, seen: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return the policy's order."""
        return self.policy.leaving(count, seen)

    def clear(self) -> None:
        """Forget everything."""
        self.policy.clear()
        self._model.clear()
        self._unlearnt.clear()

    def _left(self, keys: Sequence[OffloadKey]) -> None:
        """Forget that these chunks are resident, in the model."""
        if self._unlearnt:
            known = [key for key in keys if key not in self._unlearnt]
            self._unlearnt.difference_update(keys)
            keys = known
        if keys:
            self._model.remove(keys)
