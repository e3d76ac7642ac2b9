"""The shadow caches: what they estimate from a sample of the chunks, beside a plan that serves all of them."""

import hashlib
import heapq
import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvtiers.api import block_hash_of
from kvtiers_policies.what_if.keys_only import Case, CaseTier
from kvtiers_policies.what_if.shadows import TIMES, Asked, Shadows
from kvtiers_replay.plan import PlanCase, PlanTier, PlanTrace, simulate
from kvtiers_replay.trace import chain_hashes, read_trace
from kvtiers_replay.workload import ReplayRequest, Workload

pytestmark = pytest.mark.slow


def generated_trace(requests: int = 6_000, tenants=("",), shares=()) -> PlanTrace:
    """Chats of some turns over three system prompts: 250,000 chunks are asked for, of which 40,000 are different.

    ``tenants``: whose each chat is, in turn.
    """
    chance, ids = random.Random(1), itertools.count()
    systems = [[next(ids) for _ in range(8)] for _ in range(3)]
    coming: list[tuple[float, int, list[int], float]] = []
    now = 0.0
    for number in range(requests // 5):
        now += chance.expovariate(0.4)
        opening = [next(ids) for _ in range(int(chance.lognormvariate(2.0, 1.0)) + 1)]
        heapq.heappush(coming, (now, number, chance.choice(systems) + opening, chance.choice([20.0, 120.0, 600.0])))
    found = []
    while coming and len(found) < requests:
        when, number, blocks, pause = heapq.heappop(coming)
        tenant = tenants[number % len(tenants)]
        params = {"kvtiers_tenant": tenant} if tenant else {}
        found.append(ReplayRequest(len(blocks) * 512 + 10, chain_hashes(blocks, tenant), when, params))
        if chance.random() < 0.85 and len(blocks) < 200:
            more = [next(ids) for _ in range(int(chance.lognormvariate(1.2, 0.8)) + 1)]
            heapq.heappush(coming, (when + chance.expovariate(1 / pause), number, blocks + more, pause))
    return PlanTrace(Workload("generated", 512, found), shares)


def shadows_of(trace: PlanTrace, now: Case, policies, share: float) -> Shadows:
    """Serve a trace."""
    shadows = Shadows(now, policies, share, step_chunks=16)
    for (arrival, keys, usable), (params, output_tokens) in zip(trace.requests, trace.hints, strict=True):
        taken = shadows.take(Asked(arrival, [block_hash_of(key) for key in keys], usable, params, output_tokens))
        for name in shadows.names() if taken is not None else ():
            shadows.serve(name, taken)
    return shadows


def off_by(trace: PlanTrace, rows: int, share: float, sizes=TIMES) -> list[float]:
    """How many points of hits the sample is off, by size."""
    rates = shadows_of(trace, Case(rows), ["lru"], share).report()["hit_rates"]["lru"]
    return [100 * (rates[f"{times:g}"] - simulate(trace, PlanCase(round(rows * times))).rate) for times in sizes]


@pytest.mark.skipif("KVTIERS_TRACES" not in os.environ, reason="KVTIERS_TRACES is not set")
def test_a_sample_of_a_hundredth_is_within_a_point_of_the_plan_of_a_recorded_trace() -> None:
    trace = PlanTrace(read_trace(Path(os.environ["KVTIERS_TRACES"]) / "conversation_trace.jsonl.gz"))
    assert trace.unique > 100_000
    off = off_by(trace, trace.unique // 20, 0.01, (0.25, 4.0))
    assert max(map(abs, off)) < 1.0, off


def test_a_small_sample_is_within_a_point_of_the_plan_of_a_generated_trace() -> None:
    trace = generated_trace()
    assert trace.references > 100_000
    off = off_by(trace, trace.unique // 5, 0.05, (0.5, 2.0))
    assert max(map(abs, off)) < 1.0, off


def test_a_sample_of_everything_is_the_plan_for_each_policy_and_tier() -> None:
    trace = generated_trace(300)
    rows = trace.unique // 10
    tiers = (CaseTier("near", rows), CaseTier("far", 4 * rows))
    report = shadows_of(trace, Case(rows, "lru", tiers), ["lru", "arc", "turn-hazard"], 1.0).report()
    assert list(report["hit_rates"]["lru"]) == [f"{times:g}" for times in TIMES]
    for policy in ("lru", "arc", "turn-hazard"):
        planned = simulate(trace, PlanCase(2 * rows, policy, tiers)).rate
        assert report["hit_rates"][policy]["2"] == pytest.approx(planned, abs=0.003)
    now = simulate(trace, PlanCase(rows, "lru", tiers)).rate
    without_far = simulate(trace, PlanCase(rows, "lru", (PlanTier("near", rows),))).rate
    assert report["adds"]["far"] == pytest.approx(now - without_far, abs=0.003)
    assert abs(report["adds"]["near"]) < 0.01 < report["adds"]["far"]


def test_shares_of_tenants_are_shares_of_each_shadow() -> None:
    shares = {"blue": 0.5, "red": 0.2}
    trace = generated_trace(120, tenants=("blue", "red", "green", ""), shares=shares)
    now = Case(trace.unique // 10, shares=tuple(shares.items()))
    rates = shadows_of(trace, now, ["lru"], 1.0).report()["hit_rates"]["lru"]
    for times in (1, 2):
        case = replace(now, primary=times * now.primary)
        assert rates[f"{times}"] == pytest.approx(simulate(trace, case).rate, abs=0.003)
    assert abs(rates["1"] - simulate(trace, replace(now, shares=())).rate) > 0.02, "they make a difference here"


def test_a_system_prompt_counts_though_none_of_its_chunks_is_in_the_sample() -> None:
    shared, share = [b"\xff" * 16] * 1, 0.01  # the highest hash: never in the sample
    shadows = Shadows(Case(1000), ["lru"], share, step_chunks=16)
    for number in range(2000):
        own = hashlib.sha256(bytes([number & 255, number >> 8])).digest()
        taken = shadows.take(Asked(float(number), [*shared, own], 2, {}, 0))
        for name in shadows.names() if taken is not None else ():
            shadows.serve(name, taken)
    assert shadows.rates()["lru 1"] == pytest.approx(0.5, abs=0.01)


def test_what_was_long_ago_counts_less() -> None:
    shadows = Shadows(Case(100), ["lru"], 1.0, step_chunks=16, halved_at=300)

    def ask(first: int, count: int) -> None:
        for number in range(first, first + count):
            taken = shadows.take(Asked(0.0, [hashlib.sha256(str(number).encode()).digest()], 1, {}, 0))
            for name in shadows.names():
                shadows.serve(name, taken)

    ask(0, 900)  # none comes again
    assert shadows.rates()["lru 1"] < 0.1
    for _ in range(2000):
        ask(7, 1)
    assert shadows.rates()["lru 1"] > 0.9
    assert shadows.chunks == 2900
