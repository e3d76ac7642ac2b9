"""The whole stack hits what an LRU hits that evicts leaves first; every byte that comes back is right."""

import json
from pathlib import Path

import pytest

from kvtiers.config import load_config
from kvtiers.primary import tier
from kvtiers.primary.eviction import BUILT_IN, make_policy
from kvtiers_replay.plan import PlanCase, PlanTrace, simulate
from kvtiers_replay.results import ReplayResults
from kvtiers_replay.run import ReplayOptions, replay
from kvtiers_replay.trace import read_trace
from kvtiers_replay.workload import Workload

from . import leaf_first_lru

VALUE_BYTES = 4096
POINTS = 0.003


def run(
    workload: Workload, primary_chunks: int, secondary_chunks: int = 0, policy: str = "lru", **more: object
) -> ReplayResults:
    # This tier evicts behind its users' backs: what is believed of it must be young.
    options = {"io": "thread", "threads": 1, "exists_ttl": "200ms"}
    tiers = [{"type": "memory", "capacity": secondary_chunks * VALUE_BYTES, **options}]
    config = load_config(
        {
            "version": 1,
            "primary": {"capacity": "1MiB", "eviction": policy},
            "secondary": tiers if secondary_chunks else [],
            "lookup_wait": "60s",
            "load_wait": "60s",
            "budgets": {"one_tier": "50%"},  # a small primary must still take a whole request's promotion
            **more,
        }
    )
    report = replay(config, workload, ReplayOptions(primary_chunks=primary_chunks))
    assert report.wrong_bytes == 0
    assert not [name for name in report.errors if name.startswith("gpu")]
    assert report.prefix_hits == sum(report.hits.values())
    assert report.requests == len(workload.requests)
    return report


def compare(workload: Workload, primary_share: float, secondary_share: float = 0.0) -> tuple[float, float]:
    blocks = [request.block_hashes for request in workload.requests]
    unique = len(set().union(*blocks))
    sizes = int(unique * primary_share), int(unique * secondary_share)
    report = run(workload, *sizes)
    truth = leaf_first_lru.replay(blocks, *sizes)
    assert report.references == truth.references
    return report.prefix_hits / report.references, truth.share


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.5, 1.0])
def test_the_primary_alone_hits_exactly_what_a_leaf_first_lru_hits(trace_file: Path, share: float) -> None:
    hits, truth = compare(read_trace(trace_file), share)
    assert hits == truth
    assert 0.1 < truth < 0.9


@pytest.mark.parametrize("policy", [*BUILT_IN, "turn-hazard"])
def test_a_replay_hits_what_the_plan_says_with_each_policy(trace_file: Path, policy: str, monkeypatch) -> None:
    # For both the time stands still: a replay is as fast as it can be, a plan goes by the trace's clock.
    monkeypatch.setattr(tier, "make_policy", lambda name, rows, _clock: make_policy(name, rows, lambda: 0.0))
    workload = read_trace(trace_file)
    trace = PlanTrace(workload)
    chunks = trace.unique // 10
    report = run(workload, chunks, policy=policy)
    planned = simulate(trace, PlanCase(chunks, policy)).rate
    assert planned > 0.1
    # An engine stores a long prompt in parts, a plan at once: that is one use with lru, and nearly so with the others.
    assert report.prefix_hits / report.references == pytest.approx(planned, abs=0 if policy == "lru" else POINTS)


@pytest.mark.parametrize("policy", [*BUILT_IN, "turn-hazard"])
def test_a_replay_hits_of_each_tenant_what_the_plan_says_with_shares(
    trace_file: Path, tmp_path: Path, policy: str, monkeypatch
) -> None:
    monkeypatch.setattr(tier, "make_policy", lambda name, rows, _clock: make_policy(name, rows, lambda: 0.0))
    lines = [json.loads(line) for line in trace_file.read_text(encoding="utf-8").splitlines()]
    whose = ["blue", "", "red", "green", "", ""]
    for place, line in enumerate(lines):
        line["tenant"] = whose[place % len(whose)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    workload, shares = read_trace(tmp_path / "trace.jsonl", limit=120), {"blue": 0.4, "red": 0.2}
    trace = PlanTrace(workload, shares)
    chunks = trace.unique // 6
    tenants = {"named": {name: {"share": share} for name, share in shares.items()}}
    report = run(workload, chunks, policy=policy, tenants=tenants)
    planned = simulate(trace, PlanCase(chunks, policy, shares=tuple(shares.items())))
    assert {name: counts["hits"] for name, counts in report.tenants.items()} == planned.tenants
    assert {name: counts["references"] for name, counts in report.tenants.items()} == trace.references_of
    assert (report.prefix_hits, report.references) == (planned.hits["primary"], planned.references)
    without = simulate(trace, PlanCase(chunks, policy))
    assert planned.tenants["blue"] > without.tenants["blue"] > 0, "the shares make a difference here"


def test_an_unbounded_cache_hits_what_an_infinite_one_would(trace_file: Path) -> None:
    report = run(read_trace(trace_file), primary_chunks=5000)
    assert report.prefix_hits == report.infinite_hits == report.hits["primary"]


def test_a_secondary_tier_adds_the_hits_that_the_primary_has_evicted(trace_file: Path) -> None:
    hits, truth = compare(read_trace(trace_file), 0.1, 0.5)
    alone, _ = compare(read_trace(trace_file), 0.1)
    assert hits == pytest.approx(truth, abs=POINTS)
    assert hits > alone + 0.05


def test_a_tier_that_holds_everything_makes_any_primary_as_good_as_an_infinite_cache(trace_file: Path) -> None:
    report = run(read_trace(trace_file), primary_chunks=200, secondary_chunks=5000)
    assert report.prefix_hits == report.infinite_hits
    assert report.hits["memory"] > 0.1 * report.prefix_hits


def test_the_recorded_conversations_hit_what_a_leaf_first_lru_hits(conversation_trace: Path) -> None:
    workload = read_trace(conversation_trace, limit=2000)
    for primary, secondary in ((0.1, 0.0), (0.1, 0.5)):
        hits, truth = compare(workload, primary, secondary)
        assert hits == pytest.approx(truth, abs=POINTS), (primary, secondary)
