"""A tenant's rows and its policy, as ``shares.py`` divides them, and what running requests use of them.

What a request uses makes no room for its own stores, so each store where rows are short asks how much that is. One
that is refused at every step must not count all of it each time: it counts what has changed since.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import filterfalse

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.primary.eviction.hinted import HintedPolicy
from kvtiers.primary.kept import Kept

__all__ = ["Request", "Tenant"]

_CHANGES = 1024
_REPLAYED = 64  # of them, at most, for a request that uses more: it may never be asked again


@dataclass(slots=True, eq=False)
class Request:
    """A running request. ``evictable``: of what it has used in ``tenant``, after that one's first ``changes``."""

    used: dict[OffloadKey, None] = field(default_factory=dict)
    tenant: "Tenant | None" = None
    evictable: int = 0
    changes: int = 0

    def use(self, keys: Sequence[OffloadKey]) -> None:
        """Count these chunks as used."""
        if self.tenant is not None and self.tenant.changes_since(self) > _REPLAYED:
            self.tenant = None
        if self.tenant is not None:
            count = self.tenant.count_of(self)
            fresh = filterfalse(self.used.__contains__, keys)
            self.evictable = count + sum(map(self.tenant.evictable.__contains__, fresh))
        self.used.update(dict.fromkeys(keys))


class Tenant:
    """A tenant with a share, or all others together. ``share``: rows that are never taken for another one."""

    __slots__ = ("_changed", "_changes", "_dropped", "evictable", "policy", "resident", "share")

    def __init__(self, policy: EvictionPolicy, share: int, hints: int) -> None:
        self.policy = HintedPolicy(policy, Kept(hints))
        self.share = share
        self.resident = 0
        self.evictable: set[OffloadKey] = set()
        self._changes: list[tuple[int, Sequence[OffloadKey]]] = []  # the latest ones of ``evictable``
        self._changed = 0
        self._dropped = 0

    def gives(self, other: "Tenant | None") -> int:
        """Return how many chunks could be evicted now for a tenant."""
        evictable = len(self.evictable)
        return evictable if self is other else min(evictable, max(0, self.resident - self.share))

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Count these chunks, which were not, as evictable."""
        self.evictable.update(keys)
        self._note(1, keys)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Count these chunks, which were evictable, as not."""
        self.evictable.difference_update(keys)
        self._note(-1, keys)

    def count_of(self, request: Request) -> int:
        """Return how many of the evictable chunks this request has used.

        Costs what has changed since it was asked last, for a request that is refused at every step.
        """
        since = self.changes_since(request)
        if request.tenant is self and since <= min(len(self._changes), len(request.used)):
            for sign, keys in self._changes[request.changes - self._dropped :]:
                request.evictable += sign * sum(map(request.used.__contains__, keys))
        else:
            request.tenant = self
            request.evictable = len(self.evictable.intersection(request.used))
        request.changes = self._dropped + len(self._changes)
        return request.evictable

    def changes_since(self, request: Request) -> int:
        """Return how many changes there were since the request was counted."""
        return self._dropped + len(self._changes) - request.changes

    def clear(self) -> None:
        """Forget all chunks."""
        self.resident = 0
        self.discard(list(self.evictable))
        self.policy.clear()

    def _note(self, sign: int, keys: Sequence[OffloadKey]) -> None:
        self._changes.append((sign, keys))
        self._changed += 1 + len(keys)
        if self._changed > max(_CHANGES, len(self.evictable)):  # now it costs as much to count all
            self._dropped += len(self._changes)
            self._changed = 0
            self._changes.clear()
