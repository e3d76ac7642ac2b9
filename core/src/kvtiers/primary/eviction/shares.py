"""Shares of tenants: an eviction policy of its own for each tenant that has one, and who of them gives rows up.

A tenant with a share keeps that many rows against all others: eviction for another tenant never takes it below. Rows
above the shares are for all who ask: they are taken from the tenant that is furthest above its share, in rows, until
several are equally far. So one that floods the primary evicts itself. But no prompt evicts its own beginning for its
end (``used_by``): others' rows are taken instead, as of a tenant whose rows are being read. Requests without a tenant,
and tenants without a share, are together one that has none.

Any policy serves, as it is: within a tenant it decides alone which chunk leaves, by hints (``hinted.py``) of that
tenant's requests first, which so never cost another tenant a row. Between tenants it is not asked, since
it has no idea of them. What an eviction costs more than without shares is a look at each tenant that has a share.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import filterfalse, islice

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.primary.eviction.tenant import Request, Tenant
from kvtiers.primary.kept import Kept
from kvtiers.types import RequestHints

__all__ = ["TenantShares"]

_Part = tuple[Tenant, list[OffloadKey]]


class TenantShares(EvictionPolicy):
    """Evicts within tenants as their policies do, and by shares between them.

    ``shares``: by tenant, of ``capacity``; 1 together at most. ``make``: a new policy for ``capacity`` rows. ``hints``:
    chunks that they may keep, in a part of each tenant as large as its share, or for all others what is left of 1.
    """

    def __init__(
        self, capacity: int, shares: Mapping[str, float], make: Callable[[], EvictionPolicy], hints: int = 0
    ) -> None:
        super().__init__(capacity)
        self._rest = Tenant(make(), 0, int(max(0.0, 1 - sum(shares.values())) * hints))
        self._of = {
            name.encode(): Tenant(make(), int(share * capacity), int(share * hints)) for name, share in shares.items()
        }
        self._all = [self._rest, *self._of.values()]
        self.clock = self._rest.policy.clock
        self._for: Tenant | None = self._rest
        """Whose chunks are to be stored; None: of several tenants, none of which may be taken below its share."""
        self._missing = 0
        self._requests: dict[str, Request] = {}  # those that run

    def used_by(self, request_id: str) -> Collection[OffloadKey]:
        """Return what this running request has used, whether it is still here or not."""
        return self._requests.get(request_id, Request()).used.keys()

    def spared(self, request_id: str, present: Sequence[OffloadKey]) -> int:
        """Return how many evictable chunks do not leave for this request: ``present``, and what it has used.

        The latter of the tenant whose chunks are to be stored. ``present``: evictable ones, of any tenant.
        """
        used, own = self.used_by(request_id), self._for
        if own is None:
            return len(set(present).union(*(tenant.evictable.intersection(used) for tenant in self._all)))
        of_used = own.count_of(self._requests[request_id]) if used else 0
        return of_used + sum(key not in used or key not in own.evictable for key in present)

    def obtainable(self) -> int:
        """Return how many chunks could be evicted for what ``on_store_miss`` named last."""
        return sum(tenant.gives(self._for) for tenant in self._all)

    def resident_of(self, name: str) -> int:
        """Return how many rows a tenant with a share has; of another name, how many all others have."""
        return self._of.get(name.encode(), self._rest).resident

    # -- hints

    @property
    def all_kept(self) -> list[Kept]:
        """The hints that hold, of each tenant."""
        return [tenant.policy.kept for tenant in self._all]

    def keep(self, keys: Sequence[OffloadKey], until: float, *, high: bool) -> None:
        """Keep these chunks, none of which is evictable now, until this time, before others of their tenant."""
        for tenant, part in self._split(keys):
            tenant.policy.keep(part, until, high=high)

    def expire(self, now: float) -> None:
        """End the hints whose time is over."""
        for tenant in self._all:
            tenant.policy.expire(now)

    @property
    def first_out(self) -> int:
        """Evictable chunks of low priority, of the tenant whose chunks are to be stored."""
        return 0 if self._for is None else self._for.policy.first_out

    # -- uses

    def on_store_miss(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Note whose chunks are to be stored."""
        parts = self._split(keys)
        self._for = parts[0][0] if len(parts) == 1 else None
        self._missing = len(keys)
        used = self.used_by(request_id)
        for tenant in self._all:
            tenant.policy.stores_for, tenant.policy.spared = request_id, used
        for tenant, part in parts:
            tenant.policy.on_store_miss(part, request_id)

    def access(self, keys: Sequence[OffloadKey], request_id: str, new: Sequence[OffloadKey] = ()) -> None:
        """Count the use with the tenant whose chunks these are."""
        if request_id:
            self._requests.setdefault(request_id, Request()).use(keys)
        fresh = {id(tenant): part for tenant, part in self._split(new)}
        for tenant, part in self._split(keys):
            brought = fresh.get(id(tenant), [])
            tenant.resident += len(brought)
            tenant.policy.access(part, request_id, brought)

    def request_finished(self, request_id: str) -> None:
        """Settle the recency."""
        self._requests.pop(request_id, None)
        for tenant in self._all:
            tenant.policy.request_finished(request_id)

    def hint(self, request_id: str, hints: RequestHints) -> None:
        """Handle what a client says; whose request it is shows with its first use."""
        for tenant in self._all:
            tenant.policy.hint(request_id, hints)

    # -- residents

    def mark_evictable(self, keys: Sequence[OffloadKey]) -> None:
        """Allow these chunks to be evicted."""
        for tenant, part in self._split(keys):
            tenant.add(part)
            tenant.policy.mark_evictable(part)

    def mark_pinned(self, keys: Sequence[OffloadKey]) -> None:
        """Forbid the eviction of these chunks."""
        for tenant, part in self._split(keys):
            tenant.discard(part)
            tenant.policy.mark_pinned(part)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget these chunks."""
        for tenant, part in self._split(keys):
            tenant.resident -= len(part)
            if not tenant.evictable.isdisjoint(part):
                tenant.discard([key for key in part if key in tenant.evictable])
            tenant.policy.remove(part)

    def clear(self) -> None:
        """Forget everything."""
        self._requests.clear()
        for tenant in self._all:
            tenant.clear()

    # -- eviction

    def evict(self, count: int) -> list[OffloadKey] | None:
        """Take from those that are furthest above their share, as their policies choose."""
        if count > self.obtainable():
            return None
        victims: list[OffloadKey] = []
        for tenant, number in self._divide(count):
            victims += self._left(tenant, tenant.policy.evict(number) or [])
        assert len(victims) == count, "a policy evicted another number than it was asked for"
        return victims

    def evict_unused(self, count: int, request_id: str) -> list[OffloadKey]:
        """Do as ``evict``; another tenant's chunks are none that this request uses, so they leave for what it keeps."""
        own = self._for
        if own is None:
            return []
        wanted = min(count, self.obtainable())
        number = next((number for tenant, number in self._divide(wanted) if tenant is own), 0)
        victims: list[OffloadKey] = []
        if number:
            victims += self._left(own, own.policy.evict_unused(number, request_id))
        if (short := number - len(victims)) and own.policy.kept.held:  # its hints cost no other tenant a row
            victims += self._left(own, own.policy.evict_kept(short, request_id))
        if short := number - len(victims):  # nor does a policy that finds none, or not all of them
            victims += self._evict_passing_used(own, short, request_id)
        rest = min(wanted - len(victims), sum(tenant.gives(own) for tenant in self._all if tenant is not own))
        for tenant, number in self._divide(rest, spared=own):
            victims += self._left(tenant, tenant.policy.evict(number) or [])
        return victims

    def worth_storing(self, keys: Sequence[OffloadKey], request_id: str) -> int:
        """Ask the tenant's policy as far as the tenant's own chunks would leave; what others give is for all of it."""
        tenant, missing = self._for, self._missing
        wanted = missing - self.capacity + sum(each.resident for each in self._all)
        if tenant is None or wanted <= 0:
            return len(keys)
        shares = self._divide(min(wanted, self.obtainable()))
        leaving = sum(number for each, number in shares if each is tenant)
        if not leaving:
            return len(keys)
        # As if the tenant's rows were all that there are: the policy counts what would have to leave.
        policy, capacity = tenant.policy, tenant.policy.capacity
        policy.capacity = tenant.resident + missing - leaving
        try:
            return policy.worth_storing(keys, request_id)
        finally:
            policy.capacity = capacity

    def coldest(self) -> Iterator[OffloadKey]:
        """Yield the evictable chunks, of the tenant that is furthest above its share first."""
        line = [
            (tenant.share - tenant.resident, number, tenant.policy.coldest()) for number, tenant in enumerate(self._all)
        ]
        heapq.heapify(line)
        while line:
            below, number, keys = line[0]
            key = next(keys, None)
            if key is None:
                heapq.heappop(line)
                continue
            heapq.heapreplace(line, (below + 1, number, keys))
            yield key

    # -- forecasts

    def forecasts_reuse(self) -> bool:
        """Begin to learn, if all policies do; they are of one kind."""
        learns = [tenant.policy.forecasts_reuse() for tenant in self._all]  # each is to begin
        return all(learns)

    def evict_first(self, seen: Collection[OffloadKey] | None) -> None:
        """Have these leave first."""
        for tenant in self._all:
            tenant.policy.evict_first(seen)

    def expected_reuse(self, keys: Sequence[OffloadKey]) -> list[float]:
        """Return what each tenant's policy expects."""
        expected: dict[OffloadKey, float] = {}
        for tenant, part in self._split(keys):
            expected.update(zip(part, tenant.policy.expected_reuse(part), strict=True))
        return [expected[key] for key in keys]

    def shared_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return what the tenant's policy has seen."""
        return self._whose(keys[0]).policy.shared_prefix(keys) if keys else 0

    # -- inside

    def _evict_passing_used(self, own: Tenant, count: int, request_id: str) -> list[OffloadKey]:
        """Evict up to ``count`` of the tenant's coldest chunks, but none that the request uses.

        Those are passed over, not pinned: each store of a prompt with a window beside full attention may come here, for
        what of the window's group another running request has left, and a pin costs much more than a look.
        """
        count = min(count, len(own.evictable) - self.spared(request_id, ()))
        if count <= 0:
            return []
        used = self.used_by(request_id)
        victims = list(islice(filterfalse(used.__contains__, own.policy.coldest()), count))
        own.policy.mark_pinned(victims)
        own.policy.remove(victims)
        return self._left(own, victims)

    def _whose(self, key: OffloadKey) -> Tenant:
        length = key[-4]
        return self._of.get(key[-4 - length : -4], self._rest) if length else self._rest

    def _split(self, keys: Sequence[OffloadKey]) -> list[_Part]:
        """Return the keys by tenant, each in their order."""
        if not keys:
            return []
        whose = list(map(self._whose, keys))
        first = whose[0]
        if whose.count(first) == len(whose):
            return [(first, list(keys))]
        parts: dict[int, _Part] = {}
        for tenant, key in zip(whose, keys, strict=True):
            parts.setdefault(id(tenant), (tenant, []))[1].append(key)
        return list(parts.values())

    def _left(self, tenant: Tenant, victims: list[OffloadKey]) -> list[OffloadKey]:
        tenant.resident -= len(victims)
        tenant.discard(victims)
        return victims

    def _divide(self, count: int, spared: Tenant | None = None) -> list[tuple[Tenant, int]]:
        """Return how many chunks each tenant gives, ``count`` in all, so that none is left further above its share.

        The one that they are evicted for counts with what it will have. ``spared`` gives none.
        """
        givers = [
            (tenant.resident - tenant.share + (count if tenant is self._for else 0), tenant.gives(self._for), tenant)
            for tenant in self._all
            if tenant is not spared
        ]
        givers = [giver for giver in givers if giver[1]]
        if len(givers) == 1 or not count:
            return [(tenant, count) for _, _, tenant in givers if count]

        def given(level: int) -> int:
            return sum(min(most, max(0, above - level)) for above, most, _ in givers)

        low = min((above - most for above, most, _ in givers), default=0)  # there all give what they can
        high = max((above for above, _, _ in givers), default=0)
        while high - low > 1:  # the highest level at which they give enough
            level = (low + high) // 2
            low, high = (level, high) if given(level) >= count else (low, level)
        too_many = given(low) - count
        shares = []
        for above, most, tenant in givers:
            number = min(most, max(0, above - low))
            if too_many and number > 0 and above - number == low:  # at the level: one fewer is as fair
                number -= 1
                too_many -= 1
            if number:
                shares.append((tenant, number))
        return shares
