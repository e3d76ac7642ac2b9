"""One case of a plan hits what slow and obvious models hit, and what is known of the recorded trace."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtiers.api import ConfigError, LookupResult, tenant_of
from kvtiers.config import BudgetConfig
from kvtiers.config.tenants import TenantsConfig
from kvtiers.primary.eviction import BUILT_IN
from kvtiers.types import RequestContext
from kvtiers_policies.what_if.keys_only import KeysOnlyStack, ServedRequest
from kvtiers_replay.plan import (
    Plan,
    PlanCase,
    PlanSizes,
    PlanTier,
    PlanTrace,
    cases_of_interest,
    change_line,
    changes,
    simulate,
)
from kvtiers_replay.trace import chain_hashes, read_trace
from kvtiers_replay.workload import ReplayRequest, Workload

from .synthetic import WIDE

POINTS = 0.003
TRACES = os.environ.get("KVTIERS_TRACES")


class SlowCaches:
    """A leaf-first LRU over an LRU, in lists and a few obvious lines."""

    def __init__(self, primary: int, secondary: int) -> None:
        self.sizes = primary, secondary
        self.primary: list[bytes] = []  # coldest first
        self.secondary: list[bytes] = []
        self.hits = {"primary": 0, "tier": 0}
        self.written = 0

    def serve(self, blocks: list[bytes]) -> None:
        found = list(itertools.takewhile(lambda block: block in self.primary or block in self.secondary, blocks))
        for block in found:
            self.hits["primary" if block in self.primary else "tier"] += 1
        for block in found:
            if block not in self.primary:
                self.secondary.remove(block)
                self.secondary.append(block)
        for block in blocks[len(found) :]:
            if block not in self.primary and block not in self.secondary and self.sizes[1]:
                self.secondary.append(block)
                self.written += 1
        self.primary = [block for block in self.primary if block not in blocks] + blocks[::-1]
        self.primary = self.primary[-self.sizes[0] :]
        self.secondary = self.secondary[-self.sizes[1] :] if self.sizes[1] else []


def slow(workload: Workload, primary: int, secondary: int = 0) -> SlowCaches:
    caches = SlowCaches(primary, secondary)
    for request in workload.requests:
        caches.serve(list(request.block_hashes))
    return caches


@pytest.mark.parametrize("primary", [70, 150, 400, 3000])
def test_a_primary_alone_hits_exactly_what_a_slow_model_hits(workload, trace, primary):
    point = simulate(trace, PlanCase(primary))
    assert dict(point.hits) == {"primary": slow(workload, primary).hits["primary"]}
    assert point.references == sum(len(request.block_hashes) for request in workload.requests)
    assert 0.1 < point.rate < 0.9


@pytest.mark.parametrize(("primary", "secondary"), [(150, 0), (150, 600)])
def test_the_second_half_counts_what_is_hit_and_written_after_the_first_has_filled_the_caches(
    workload, primary, secondary
):
    half = PlanTrace(workload, second_half=True)
    first = Workload("first half", workload.tokens_per_block, workload.requests[: half.counted_from])
    case = PlanCase(primary, tiers=(PlanTier("tier", secondary),) if secondary else (), budgets=WIDE)
    point, whole, before = (simulate(each, case) for each in (half, PlanTrace(workload), PlanTrace(first)))
    assert point.hits == {name: hits - before.hits[name] for name, hits in whole.hits.items()}
    assert point.written == {name: count - before.written[name] for name, count in whole.written.items()}
    assert point.promoted == {name: count - before.promoted[name] for name, count in whole.promoted.items()}
    assert point.references == whole.references - before.references
    assert half.unique == PlanTrace(workload).unique  # what shares of it mean stays
    assert half.counted_from == len(workload.requests) // 2


@pytest.mark.parametrize(("primary", "secondary"), [(110, 300), (110, 1000), (150, 600), (200, 9999)])
def test_a_tier_adds_what_a_slow_model_says_and_is_written_as_often(workload, trace, primary, secondary):
    point = simulate(trace, PlanCase(primary, tiers=(PlanTier("tier", secondary),), budgets=WIDE))
    model = slow(workload, primary, secondary)
    for origin in ("primary", "tier"):
        assert point.hits[origin] / point.references == pytest.approx(model.hits[origin] / point.references, abs=POINTS)
    assert point.written["tier"] == pytest.approx(model.written, rel=0.01)
    assert point.promoted["tier"] == point.hits["tier"] > 0


def test_an_unbounded_primary_hits_what_an_infinite_cache_would(trace):
    point = simulate(trace, PlanCase(trace.unique))
    assert point.hits["primary"] == trace.infinite_hits


@pytest.mark.parametrize("policy", [*BUILT_IN, "turn-hazard"])
def test_a_tier_without_bounds_makes_any_primary_as_good_as_an_infinite_cache(trace, policy):
    point = simulate(trace, PlanCase(100, policy, tiers=(PlanTier("big"),), budgets=WIDE))
    assert sum(point.hits.values()) == trace.infinite_hits
    assert point.written == {"big": trace.unique}


def test_the_second_of_two_tiers_serves_what_the_first_has_lost(trace):
    tiers = PlanTier("small", 200), PlanTier("big")
    point = simulate(trace, PlanCase(100, tiers=tiers, budgets=WIDE))
    assert sum(point.hits.values()) == trace.infinite_hits
    assert point.hits["small"] > 0 < point.hits["big"]
    alone = simulate(trace, PlanCase(100, tiers=tiers[:1], budgets=WIDE))
    assert alone.rate < point.rate - 0.02


def test_admission_decides_what_a_tier_gets(trace):
    def with_admission(**options):
        return simulate(trace, PlanCase(150, tiers=(PlanTier("tier", None, **options),), budgets=WIDE))

    everything, second, late, never = (
        with_admission(),
        with_admission(admission="second_access"),
        with_admission(admission="on_eviction"),
        with_admission(read_only=True),
    )
    assert 0 < second.written["tier"] < everything.written["tier"]
    assert 0 < late.written["tier"] <= everything.written["tier"]
    assert (never.written["tier"], never.hits["tier"]) == (0, 0)
    assert never.rate <= second.rate < everything.rate


def test_expected_reuse_writes_less_than_what_leaves(trace):
    def with_admission(**options):
        return simulate(trace, PlanCase(150, tiers=(PlanTier("tier", None, **options),), budgets=WIDE))

    everything, likely = with_admission(), with_admission(admission="expected-reuse", may_lose=0.05)
    assert 0 < likely.written["tier"] < 0.95 * everything.written["tier"]
    assert likely.rate > 0.93 * everything.rate


def test_the_policies_are_the_real_ones(trace):
    lru, arc = (simulate(trace, PlanCase(150, policy)) for policy in ("lru", "arc"))
    assert lru.hits != arc.hits
    with pytest.raises(ConfigError, match="unknown eviction policy 'lrru'"):
        simulate(trace, PlanCase(150, "lrru"))


def test_what_another_policy_changes_is_priced_where_the_primary_is_scarce(trace):
    cases = [PlanCase(int(trace.unique * share)) for share in (0.005, 0.05, 0.1, 0.5)]
    more = cases_of_interest(trace, cases)
    assert [(case.primary, case.policy) for case in more] == [
        (cases[1].primary, "turn-hazard"),
        (cases[2].primary, "turn-hazard"),
    ]
    points, learnt = [simulate(trace, case) for case in cases], [simulate(trace, case) for case in more]
    found = changes(trace, points, learnt, prefill_speed=100.0)
    assert [(change.before, change.after) for change in found] == list(zip(points[1:3], learnt, strict=True))
    for change in found:
        more_hits = sum(change.after.hits.values()) - sum(change.before.hits.values())
        assert change.gpu_seconds == pytest.approx(more_hits * trace.tokens_per_chunk / 100)
        assert change.points == pytest.approx(100 * more_hits / trace.references)
    line = change_line([replace(found[0], after=replace(found[0].after, hits={"primary": 10**6}))], trace, 100.0)
    assert "turn-hazard' instead of lru, in points of hits by the primary's share of all different chunks: +" in line
    worse = change_line([replace(found[0], after=found[0].before)], trace, 100.0)
    assert worse == "'primary.eviction: turn-hazard' would not pay: +0.0 points over lru at best."
    assert change_line([], trace, 100.0) == ""


def test_a_plan_goes_by_the_hints_of_its_trace():
    requests = []
    for number in range(40):
        for turn in (1, 2):
            blocks = [f"{number} {block}".encode() for block in range(4 * turn)]
            params = {"session": str(number), "session_ends": turn == 2}
            requests.append(ReplayRequest(len(blocks) * 16 + 1, blocks, number + 0.4 * (turn == 2), params))
    requests = [*requests[::2], *requests[1::2]]  # all first turns, then all last ones
    requests = [replace(request, arrival=float(place)) for place, request in enumerate(requests)]
    with_hints = PlanTrace(Workload("w", 16, requests))
    without = PlanTrace(Workload("w", 16, [replace(request, params={}) for request in requests]))
    case = PlanCase(165, "turn-hazard")  # 160 are the first turns': those that end must not evict them
    assert simulate(with_hints, case).hits == {"primary": 160}
    assert simulate(without, case).hits["primary"] < 160


def test_a_tenants_share_is_kept_for_it_and_what_does_not_fit_the_trace_is_said():
    """Blue asks for the same 8 chunks now and then; red asks for 5 others each time, 100 in between."""
    requests = []
    for number in range(84):
        whose, blocks = (
            ("blue", list(range(8))) if number % 21 == 20 else ("red", list(range(5 * number, 5 * number + 5)))
        )
        params = {"kvtiers_tenant": whose}
        requests.append(ReplayRequest(len(blocks) * 16 + 1, chain_hashes(blocks, whose), float(number), params))
    config = TenantsConfig(unknown=False, named={"blue": {"share": 0.1}, "green": {"share": 0.2}})
    trace = PlanTrace(Workload("w", 16, requests), config.shares(), config.rule(""))
    kept, without = (simulate(trace, PlanCase(80, shares=shares)) for shares in (tuple(config.shares().items()), ()))
    assert (kept.tenants, without.tenants) == ({"red": 0, "blue": 24}, {"red": 0, "blue": 0})
    plan = Plan("w", trace, PlanSizes(trace.unique), points=[kept])
    assert plan.columns()[-1] == "hits of blue"
    assert plan.rows([kept])[0][-1] == "75.0 %"
    assert plan.as_data()["points"][0]["tenants"]["blue"] == {"references": 32, "hits": 24}
    unused, refused = plan.tenant_lines()
    assert unused.startswith("tenants: the trace has no request of green, whose share or quota has no effect; ")
    assert refused.startswith("tenants: 80 of 84 requests would run without tiers in an engine with this config, ")
    assert "tenant 'red' is not among 'tenants.named'" in refused
    assert Plan("w", trace, PlanSizes(trace.unique), points=[without]).columns()[-1] == "hits"


def test_a_quota_bounds_what_a_tenant_has_in_a_tier_and_its_oldest_chunks_go():
    """A primary of 4 chunks; blue asks for 12 and then for each of these again, red for 12 others in between."""
    requests = []
    for number, (whose, blocks) in enumerate(
        [("blue", [block]) for block in range(12)]
        + [("red", [block]) for block in range(12)]
        + [("blue", [block]) for block in range(11, -1, -1)]
        + [("red", [block]) for block in range(12)]
    ):
        params = {"kvtiers_tenant": whose}
        requests.append(ReplayRequest(17, chain_hashes(blocks, whose), float(number), params))
    workload = Workload("w", 16, requests)
    trace = PlanTrace(workload, {"blue", "red"})
    tier = PlanTier("fs", quotas=(("blue", 10),))
    assert simulate(trace, PlanCase(4, tiers=(PlanTier("fs"),))).tenants == {"blue": 12, "red": 12}
    # The 11th finds no room, so the oldest of ten goes, and so does the next one for the 12th.
    found = simulate(trace, PlanCase(4, tiers=(tier,)))
    assert found.tenants == {"blue": 10, "red": 12}
    for_all = simulate(trace, PlanCase(4, tiers=(PlanTier("fs", quotas=(("*", 5),)),)))
    assert for_all.tenants["blue"] < 10
    assert for_all.tenants["red"] < 12
    none = simulate(trace, PlanCase(4, tiers=(PlanTier("fs", quotas=(("blue", 0),)),)))
    assert none.tenants["red"] == 12
    assert none.written == {"fs": 12}
    plan = Plan("w", trace, PlanSizes(trace.unique), points=[found])
    assert plan.columns()[-2:] == ["hits of blue", "to fs (chunks)"]


def test_a_tiers_capacity_and_a_quota_hold_at_the_same_time():
    requests = [
        ReplayRequest(17, chain_hashes([block], whose), float(block), {"kvtiers_tenant": whose})
        for block in range(200)
        for whose in ("blue", "red")
    ]
    stack = KeysOnlyStack(PlanCase(4, tiers=(PlanTier("fs", 12, quotas=(("blue", 10),)),)))
    store, asked = stack.stores["fs"], []
    for arrival, keys, usable in PlanTrace(Workload("w", 16, requests), {"blue"}).requests:
        stack.serve(ServedRequest(arrival, keys, usable, {}, 0))
        asked += keys
        held = [key for key in asked if store.lookup_many([key], RequestContext("r")) == [LookupResult.HIT]]
        assert len(held) <= 12
        assert sum(tenant_of(key) == "blue" for key in held) <= 10
    assert len(held) == 12


def test_the_last_token_is_always_computed():
    blocks = [b"1", b"2", b"3"]
    twice = Workload("w", 16, [ReplayRequest(48, blocks), ReplayRequest(48, blocks)])
    trace = PlanTrace(twice)
    assert trace.infinite_hits == 2
    assert simulate(trace, PlanCase(9)).hits == {"primary": 2}


def test_a_prompt_longer_than_the_primary_keeps_its_head():
    blocks = [bytes([number]) for number in range(1, 9)]
    twice = PlanTrace(Workload("w", 16, [ReplayRequest(129, blocks)] * 2))
    # Room for 5: half of the 8 are stored, then half of what is left; loaded ones are in use meanwhile.
    assert simulate(twice, PlanCase(5)).hits == {"primary": 4}


def test_progress_hears_of_every_request_and_may_end_the_simulation(trace):
    served = []
    simulate(trace, PlanCase(100), progress=served.append)
    assert sum(served) == len(trace.requests)

    def stop(_requests):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        simulate(trace, PlanCase(100), progress=stop)


# The recorded trace is more cases where there is one, not a test that is skipped elsewhere.
if TRACES:

    @pytest.fixture(scope="module")
    def conversations() -> PlanTrace:
        return PlanTrace(read_trace(Path(TRACES) / "conversation_trace.jsonl.gz"))

    @pytest.mark.parametrize(
        ("primary", "secondary", "percent"),
        [(0.05, 0, 20.2), (0.1, 0, 28.8), (0.2, 0, 35.8), (1.0, 0, 38.2), (0.1, 0.5, 37.8)],
    )
    def test_the_recorded_conversations_hit_what_is_known_of_them(conversations, primary, secondary, percent):
        assert (conversations.unique, conversations.references) == (170_899, 276_491)
        tiers = (PlanTier("tier", int(secondary * conversations.unique)),) if secondary else ()
        point = simulate(conversations, PlanCase(int(primary * conversations.unique), tiers=tiers))
        assert 100 * point.rate == pytest.approx(percent, abs=0.3)


@pytest.mark.parametrize(("budgets", "named"), [({}, "one_tier"), ({"one_tier": 0.5, "all_tiers": 0.5}, "")])
def test_the_budget_that_costs_hits_is_named(budgets, named):
    """Prompts of 400 chunks over a primary of 868: a quarter of it is less than one prompt."""
    prompts = [[f"{prompt} {block}" for block in range(400)] for prompt in range(4)]
    requests = [ReplayRequest(401 * 16, chain_hashes(prompts[turn % 4]), turn) for turn in range(12)]
    trace = PlanTrace(Workload("w", 16, requests))
    point = simulate(trace, PlanCase(868, tiers=(PlanTier("fs"),), budgets=BudgetConfig(**budgets)))
    plan = Plan("w", trace, PlanSizes(trace.unique), points=[point])
    if not named:
        assert point.rate == pytest.approx(8 / 12)
        assert plan.budget_lines() == []
        return
    assert point.rate < 0.55
    (line,) = plan.budget_lines()
    assert line.startswith(f"fs, with a primary of 54.2 % (868): 'budgets.{named}' costs hits: ")
    assert line.endswith("raise 'budgets.one_tier' (at most to 'all_tiers'), or raise 'primary.capacity'.")
    assert plan.as_data()["points"][0]["budgets"]["fs"]
