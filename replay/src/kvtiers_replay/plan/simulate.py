"""One case of a plan: a keys-only stack serves a whole workload, and no byte is moved.

Admission, budgets, promotion and eviction are those of an engine (``kvtiers_policies.what_if.keys_only``).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from kvtiers.api import ConfigError, OffloadKey
from kvtiers.api.keys import make_offload_key
from kvtiers.layout.tenants import Tenants
from kvtiers.metrics import budget_advice
from kvtiers.types import TENANT_FIELD
from kvtiers_policies.what_if.keys_only import STEP_TOKENS, KeysOnlyStack, ServedRequest
from kvtiers_policies.what_if.keys_only import Case as PlanCase
from kvtiers_policies.what_if.keys_only import CaseTier as PlanTier
from kvtiers_replay.workload import Workload

__all__ = ["PlanCase", "PlanPoint", "PlanTier", "PlanTrace", "simulate", "tenant_in"]

_REPORT_EVERY = 64  # requests


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """The result of a case, in chunks. ``hits``: of prompts' prefixes, by where they were (``primary`` or a tier).

    ``written``: what the tiers did not have yet and took; ``promoted``: what came back from them. ``budgets``: by tier,
    which budget of the primary's rows has cost it hits (``kvtiers.metrics.budget_advice``); "": none. ``tenants``: hits
    of the requests that name a tenant, by its name. All of them are of the requests that count (``counted_from``).
    """

    case: PlanCase
    references: int
    hits: Mapping[str, int]
    written: Mapping[str, int]
    promoted: Mapping[str, int]
    budgets: Mapping[str, str] = field(default_factory=dict)
    tenants: Mapping[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Prefix hits as a share of all full chunks asked for."""
        return sum(self.hits.values()) / self.references


class PlanTrace:
    """A workload as offload keys, made once for all cases: one chunk a block.

    ``requests``: arrival (seconds), keys, and how many of them may be hits: the last token is always computed.
    ``hints``: the parameters of each, and the tokens of its answer. ``apart``: tenants that have a share or a quota.
    ``tenants``: the engine's rule; requests whose tenant it does not allow are counted, and served as the others: a
    recording has ids instead of names. ``second_half``: the first half of the requests fills the caches and does not
    count.
    """

    requests: list[tuple[float, list[OffloadKey], int]]

    def __init__(
        self,
        workload: Workload,
        apart: Collection[str] = frozenset(),
        tenants: Tenants | None = None,
        *,
        second_half: bool = False,
    ) -> None:
        per_block = workload.tokens_per_block
        self.tokens_per_chunk = per_block
        self.requests = []
        self.hints = [(request.params, request.output_tokens) for request in workload.requests]
        known: dict[bytes, OffloadKey] = {}  # so that equal keys are one object: less memory, faster comparisons
        self.counted_from = len(workload.requests) // 2 if second_half else 0
        self.references = self.infinite_hits = 0
        self.references_of: Counter[str] = Counter()
        """Full chunks asked for by the requests that name a tenant, by its name."""
        self.refused, self.refusal = 0, ""
        """Requests that an engine with this rule would serve without tiers, and why, of the first."""
        for number, request in enumerate(workload.requests):
            hashes = request.block_hashes
            usable = min(len(hashes), (request.num_tokens - 1) // per_block)
            named = tenant_in(request.params)
            # Two tenants' hashes differ, so that keys need no others.
            made = [make_offload_key(each, 0, named if named in apart else "") for each in hashes]
            if number >= self.counted_from:
                self.references += len(hashes)
                self.infinite_hits += next((i for i in range(usable) if made[i] not in known), usable)
                if named:
                    self.references_of[named] += len(hashes)
            self.requests.append((request.arrival, [known.setdefault(key, key) for key in made], usable))
        self.unique = len(known)
        if tenants is not None:
            self._count_refused(tenants)

    def _count_refused(self, tenants: Tenants) -> None:
        for params, _ in self.hints:
            try:
                tenants.named(params)
            except ConfigError as error:
                self.refused += 1
                self.refusal = self.refusal or str(error)


def simulate(
    trace: PlanTrace, case: PlanCase, *, progress: Callable[[int], None] = lambda _requests: None
) -> PlanPoint:
    """Serve all requests, one after the other, and return what was hit and written. Blocks for seconds.

    ``progress`` is called now and then with the number of further requests served; its exceptions end the simulation.
    """
    stack = KeysOnlyStack(case, STEP_TOKENS // trace.tokens_per_chunk)
    served = zip(trace.requests, trace.hints, strict=True)
    hits_of = dict.fromkeys(trace.references_of, 0)
    before = _figures(stack, case)
    for number, ((arrival, keys, usable), (params, output_tokens)) in enumerate(served):
        if number == trace.counted_from:
            before = _figures(stack, case)
        hits = stack.serve(ServedRequest(arrival, keys, usable, params, output_tokens))
        if number >= trace.counted_from and (tenant := tenant_in(params)):
            hits_of[tenant] += hits
        if not (number + 1) % _REPORT_EVERY:
            progress(_REPORT_EVERY)
    progress(len(trace.requests) % _REPORT_EVERY)
    counted = {
        name: {what: count - before[name][what] for what, count in figures.items()}
        for name, figures in _figures(stack, case).items()
    }
    tiers = {tier.name: counted[tier.name] for tier in case.tiers}
    return PlanPoint(
        case,
        trace.references,
        {"primary": counted[""]["primary_hits"]} | {name: figures["hits"] for name, figures in tiers.items()},
        {name: figures["written"] for name, figures in tiers.items()},
        {name: figures["loaded_chunks"] for name, figures in tiers.items()},
        {name: budget_advice(figures, trace.references) for name, figures in tiers.items()},
        hits_of,
    )


def _figures(stack: KeysOnlyStack, case: PlanCase) -> dict[str, dict[str, int]]:
    """Return what has been counted so far: of the engine under "", of each tier under its name."""
    stats = stack.stats()
    found = {"": stats["engine"]} | {tier.name: stats["tiers"][tier.name] for tier in case.tiers}
    counts = {name: {what: n for what, n in each.items() if isinstance(n, int)} for name, each in found.items()}
    return counts | {name: counts[name] | {"written": store.written} for name, store in stack.stores.items()}


def tenant_in(params: Mapping[str, object]) -> str:
    """Return the tenant that a request names; "" if it names none."""
    tenant = params.get(TENANT_FIELD)
    return tenant if isinstance(tenant, str) else ""
