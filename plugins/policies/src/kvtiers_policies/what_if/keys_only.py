"""A keys-only stack: the real manager, primary and policy serve requests one after the other, and no byte is moved.

The primary has rows of no bytes. Each secondary tier is an LRU of keys that answers at once. So admission, budgets,
promotion and eviction are those of an engine; what is left out is time: a tier that is slow, full queues, values that
grow too old.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvtiers.api import (
    JobResult,
    LookupResult,
    OffloadKey,
    TenantRoom,
    TierRequest,
    TransferJob,
)
from kvtiers.api.config import Admission, quota_of
from kvtiers.config import BudgetConfig
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.manager import TieringManager
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers.types import TENANT_FIELD, PromptGroup, RequestContext

__all__ = ["STEP_TOKENS", "Case", "CaseTier", "KeysOnlyStack", "ServedRequest"]

STEP_TOKENS = 8192
"""What an engine usually computes in a step, at most."""
_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class CaseTier:
    """A secondary tier of a case. ``chunks``: the most that it holds; None: no limit, as for ``writes_per_hour``.

    ``quotas``: the most chunks of a tenant, by its name, or of each other one (``EACH_OTHER_TENANT``).
    """

    name: str
    chunks: int | None = None
    admission: Admission = "all"
    read_only: bool = False
    may_lose: float = 0.01
    writes_per_hour: float | None = None
    quotas: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """The sizes and rules of one stack; ``primary`` in chunks, tiers in the order of lookup.

    ``shares``: tenants and their shares of the primary, which are more than 0.
    """

    primary: int
    policy: str = "lru"
    tiers: tuple[CaseTier, ...] = ()
    budgets: BudgetConfig = field(default_factory=BudgetConfig)
    clean_reserve: float = 0.05
    shares: tuple[tuple[str, float], ...] = ()


class ServedRequest(NamedTuple):
    """A request: arrival (seconds), keys, how many of them may be hits, parameters, tokens of its answer.

    The keys have the request's tenant in them if it has a share or a quota. That of any other may be left out, if the
    hashes of its chunks are no other tenant's.
    """

    arrival: float
    keys: Sequence[OffloadKey]
    usable: int
    params: Mapping[str, object]
    output_tokens: int


class KeysOnlyStack:
    """The stack of one case. One thread at a time.

    ``step_chunks``: how many chunks an engine computes in a step, and stores at once. It counts where tenants have
    shares: whose chunks leave depends on how many are wanted at a time. Without shares all of a request are stored at
    once, which is one use for the policy, as it is nearly so in an engine.
    """

    def __init__(self, case: Case, step_chunks: int = _NO_LIMIT) -> None:
        self._now = 0.0
        self._served = 0
        self._at_once = max(1, step_chunks) if case.shares else _NO_LIMIT
        self.stores = {tier.name: _KeyStore(tier.chunks, dict(tier.quotas)) for tier in case.tiers}
        self._manager = self._open(case)

    def serve(self, request: ServedRequest) -> int:
        """Do what an engine's scheduler does for one request: look up, load what is there, store the rest.

        Return how many of the leading keys were hits. Requests come in the order of their arrival, or nearly so.
        """
        self._now = max(self._now, request.arrival)
        self._served += 1
        manager, keys = self._manager, request.keys
        params = request.params
        if TENANT_FIELD in params:  # whose the chunks are shows in the keys, as far as it matters here
            params = {name: value for name, value in params.items() if name != TENANT_FIELD}
        context = RequestContext(str(self._served), params)
        with manager.lock:
            manager.on_new_request(context)
            wanted = keys[: request.usable]
            hits = manager.reach([PromptGroup(wanted)], context).in_chunks(manager.tokens_per_chunk[0])
            while hits.waits:
                manager.on_schedule_end()
                hits = manager.reach([PromptGroup(wanted)], context).in_chunks(manager.tokens_per_chunk[0])
            loading = manager.prepare_load(wanted[: hits.ready], context) if hits.ready else None
            if loading is not None:
                manager.complete_load(loading)
            self._store(keys[hits.ready :], context)
            manager.on_request_finished(context, request.output_tokens)
            manager.on_schedule_end()
        return hits.ready

    def _store(self, keys: Sequence[OffloadKey], context: RequestContext) -> None:
        for start in range(0, len(keys), self._at_once):
            wanted = part = keys[start : start + self._at_once]
            while part:
                storing = self._manager.prepare_store(part, context)
                if storing is not None:
                    self._manager.complete_store(storing)
                    break
                part = part[: len(part) // 2]  # no room for all: the head of a prefix is worth more than its tail
            if len(part) < len(wanted):
                return

    def stats(self) -> dict[str, Any]:
        """Return the manager's figures."""
        return self._manager.stats()

    def _open(self, case: Case) -> TieringManager:
        budgets = case.budgets
        primary = CPUPrimaryTier(
            case.primary,
            0,
            memoryview(b""),
            policy=case.policy,
            protected_share=budgets.protected,
            protect_seconds=budgets.protect_for,
            record_events=False,
            shares=dict(case.shares),
            clock=self._clock,
        )
        options = TieringOptions(
            store_reserve=budgets.store_reserve,
            all_tiers=budgets.all_tiers,
            one_tier=budgets.one_tier,
            clean_reserve=case.clean_reserve,
        )
        slots = [TierSlot(index, self.stores[tier.name], _options(tier)) for index, tier in enumerate(case.tiers)]
        return TieringManager("keys only", primary, slots, [1], _NoEngine(), options, self._clock)

    def _clock(self) -> float:
        return self._now


def _options(tier: CaseTier) -> TierOptions:
    return TierOptions(
        tier.name,
        tier.read_only,
        tier.admission,
        may_lose=tier.may_lose,
        writes_per_hour=tier.writes_per_hour,
        chunks=tier.chunks,
    )


class _KeyStore(EventTier):
    """A tier of keys alone: an LRU of at most ``capacity`` chunks, whose jobs have ended when they are submitted.

    ``quotas`` are kept as tier hosts keep them (``host/quotas.py``), by deletions that take no time.
    """

    def __init__(self, capacity: int | None, quotas: Mapping[str, int]) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[OffloadKey, None] = OrderedDict()  # the least recently used first
        self._room = TenantRoom(partial(quota_of, quotas), 1) if quotas else None
        self._results: list[JobResult] = []
        self.written = 0

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:  # noqa: ARG002 -- the contract's signature
        """Answer at once; being asked for is no use."""
        held = self._keys
        hits = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        return [LookupResult.HIT] * hits + [LookupResult.MISS] * (hits < len(keys))

    def submit_store(self, job: TransferJob) -> None:
        """Store the absent chunks; a host writes nothing that its store has, so that is no use either."""
        held = self._keys
        new = [key for key in job.keys if key not in held]
        if self._room is not None:
            new = [key for key in new if self._add(key, self._room)]
        else:
            held.update(dict.fromkeys(new))
        self.written += len(new)
        if self._capacity is not None:
            for _ in range(len(held) - self._capacity):
                evicted, _ = held.popitem(last=False)
                if self._room is not None:
                    self._room.leave(evicted)
        self._results.append(JobResult(job.job_id, success=True))

    def _add(self, key: OffloadKey, room: TenantRoom) -> bool:
        """Add a new chunk, for which its tenant loses its oldest ones if it has no room; False: its quota is 0."""
        evicted = room.take(key)
        if evicted is None:
            return False
        for old in evicted:
            del self._keys[old]
        self._keys[key] = None
        return True

    def submit_load(self, job: TransferJob) -> None:
        """Read the chunks: they become the most recently used."""
        there = [key for key in job.keys if key in self._keys]
        for key in there:
            self._keys.move_to_end(key)
        self._results.append(JobResult(job.job_id, success=len(there) == len(job.keys), successful_keys=there))

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return the results of all jobs since the last call."""
        results, self._results = self._results, []
        return results

    def drain(self, timeout: float) -> bool:  # noqa: ARG002 -- the contract's signature
        """Do nothing: no job is ever in flight."""
        return True


class _NoEngine:
    """The engine's side of a manager that has neither ranks nor a region."""

    def ready(self) -> bool:
        return True

    def take_lost_ranks(self) -> Collection[int]:
        return ()

    def dma_may_run(self) -> bool:
        return False

    def wait_ready(self, timeout: float) -> None:
        pass

    def new_weights(self, version: str) -> None:
        pass

    def fingerprint(self) -> str:
        """Nothing is stored under any."""
        return ""

    def tier_stats(self, name: str) -> dict[str, float]:  # noqa: ARG002 -- the protocol's signature
        return {}

    def close_tiers(self, timeout: float) -> None:
        pass

    def close_region(self) -> None:
        pass
