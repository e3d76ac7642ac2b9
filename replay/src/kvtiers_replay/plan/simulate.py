"""One case of a plan: the real manager, primary and policies serve a whole workload, and no byte is moved.

The primary has rows of no bytes. Each secondary tier is an LRU of keys that answers at once. So admission, budgets,
promotion and eviction are those of an engine; what is left out is time: a tier that is slow, full queues, values that
grow too old.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtiers.api import JobResult, LookupResult, OffloadKey, SecondaryTierManager, TierRequest, TransferJob
from kvtiers.api.keys import make_offload_key
from kvtiers.config import BudgetConfig
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.manager import TieringManager
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers.types import RequestContext
from kvtiers_replay.workload import Workload

__all__ = ["PlanCase", "PlanPoint", "PlanTier", "PlanTrace", "simulate"]

_REPORT_EVERY = 64  # requests


@dataclass(frozen=True, slots=True)
class PlanTier:
    """A secondary tier of a case. ``chunks``: the most that it holds; None: no limit."""

    name: str
    chunks: int | None = None
    admission: Literal["all", "second_access", "on_eviction"] = "all"
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class PlanCase:
    """The parameters of one point of a plan; ``primary`` in chunks, tiers in the order of lookup."""

    primary: int
    policy: str = "lru"
    tiers: tuple[PlanTier, ...] = ()
    budgets: BudgetConfig = field(default_factory=BudgetConfig)
    clean_reserve: float = 0.05


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """The result of a case, in chunks. ``hits``: of prompts' prefixes, by where they were (``primary`` or a tier).

    ``written``: what the tiers did not have yet and took; ``promoted``: what came back from them.
    """

    case: PlanCase
    references: int
    hits: Mapping[str, int]
    written: Mapping[str, int]
    promoted: Mapping[str, int]

    @property
    def rate(self) -> float:
        """Prefix hits as a share of all full chunks asked for."""
        return sum(self.hits.values()) / self.references


class PlanTrace:
    """A workload as offload keys, made once for all cases: one chunk a block.

    ``requests``: arrival (seconds), keys, and how many of them may be hits: the last token is always computed.
    ``hints``: the parameters of each, and the tokens of its answer.
    """

    def __init__(self, workload: Workload) -> None:
        per_block = workload.tokens_per_block
        self.tokens_per_chunk = per_block
        self.requests: list[tuple[float, list[OffloadKey], int]] = []
        self.hints = [(request.params, request.output_tokens) for request in workload.requests]
        known: dict[bytes, OffloadKey] = {}  # so that equal keys are one object: less memory, faster comparisons
        self.references = self.infinite_hits = 0
        for request in workload.requests:
            hashes = request.block_hashes
            usable = min(len(hashes), (request.num_tokens - 1) // per_block)
            self.references += len(hashes)
            self.infinite_hits += next((i for i in range(usable) if hashes[i] not in known), usable)
            keys = [known.setdefault(each, make_offload_key(each, 0)) for each in hashes]
            self.requests.append((request.arrival, keys, usable))
        self.unique = len(known)


def simulate(
    trace: PlanTrace, case: PlanCase, *, progress: Callable[[int], None] = lambda _requests: None
) -> PlanPoint:
    """Serve all requests, one after the other, and return what was hit and written. Blocks for seconds.

    ``progress`` is called now and then with the number of further requests served; its exceptions end the simulation.
    """
    now = 0.0
    stores = [_KeyStore(tier.chunks) for tier in case.tiers]
    manager = _manager(case, stores, lambda: now)
    with manager.lock:
        served = zip(trace.requests, trace.hints, strict=True)
        for number, ((arrival, keys, usable), (params, output_tokens)) in enumerate(served, 1):
            now = max(now, arrival)
            _serve(manager, RequestContext(str(number), params), keys, usable, output_tokens)
            if not number % _REPORT_EVERY:
                progress(_REPORT_EVERY)
    progress(len(trace.requests) % _REPORT_EVERY)
    stats = manager.stats()
    names = [tier.name for tier in case.tiers]
    return PlanPoint(
        case,
        trace.references,
        {"primary": stats["engine"]["primary_hits"]} | {name: stats["tiers"][name]["hits"] for name in names},
        {name: store.written for name, store in zip(names, stores, strict=True)},
        {name: stats["tiers"][name]["loaded_chunks"] for name in names},
    )


def _serve(
    manager: TieringManager, context: RequestContext, keys: Sequence[OffloadKey], usable: int, output_tokens: int
) -> None:
    """Do what an engine's scheduler does for one request: look up, load what is there, store the rest."""
    manager.on_new_request(context)
    wanted = keys[:usable]
    hits = manager.lookup_prefix(wanted, context)
    while hits.pending or hits.unresolved:
        manager.on_schedule_end()
        hits = manager.lookup_prefix(wanted, context)
    loading = manager.prepare_load(wanted[: hits.ready], context) if hits.ready else None
    if loading is not None:
        manager.complete_load(loading)
    rest = keys[hits.ready :]
    while rest:
        storing = manager.prepare_store(rest, context)
        if storing is not None:
            manager.complete_store(storing)
            break
        rest = rest[: len(rest) // 2]  # no room for all: the head of a prefix is worth more than its tail
    manager.on_request_finished(context, output_tokens)
    manager.on_schedule_end()


def _manager(case: PlanCase, stores: Sequence["_KeyStore"], clock: Callable[[], float]) -> TieringManager:
    budgets = case.budgets
    primary = CPUPrimaryTier(
        case.primary,
        0,
        memoryview(b""),
        policy=case.policy,
        protected_share=budgets.protected,
        protect_seconds=budgets.protect_for,
        record_events=False,
        clock=clock,
    )
    options = TieringOptions(
        store_reserve=budgets.store_reserve,
        all_tiers=budgets.all_tiers,
        one_tier=budgets.one_tier,
        clean_reserve=case.clean_reserve,
    )
    slots = [
        TierSlot(index, store, TierOptions(tier.name, tier.read_only, tier.admission))
        for index, (tier, store) in enumerate(zip(case.tiers, stores, strict=True))
    ]
    return TieringManager("plan", primary, slots, [1], _NoEngine(), options, clock)


class _KeyStore(SecondaryTierManager):
    """A tier of keys alone: an LRU of at most ``capacity`` chunks, whose jobs have ended when they are submitted."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[OffloadKey, None] = OrderedDict()  # the least recently used first
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
        held.update(dict.fromkeys(new))
        self.written += len(new)
        if self._capacity is not None:
            for _ in range(len(held) - self._capacity):
                held.popitem(last=False)
        self._results.append(JobResult(job.job_id, success=True))

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
