"""What an engine counts, and how the counts of several are summed up."""

from dataclasses import replace

import pytest

from kvtiers.config import load_config
from kvtiers.metrics import EngineMetrics, Histogram, TierMetrics
from kvtiers.types import TransferResult
from kvtiers_replay.engine.measures import (
    LOAD_LINK,
    STORE_LINK,
    Curve,
    Measures,
    Progress,
    hits_by_origin,
    total_progress,
)
from kvtiers_replay.options import ReplayOptions
from kvtiers_replay.report.summary import summarize
from kvtiers_replay.results import Link
from kvtiers_replay.workload import ReplayRequest, Workload

CONFIG = load_config({"version": 1, "primary": {"capacity": "1MiB"}})
WORKLOAD = Workload("w", 16, [ReplayRequest(33, [b"a", b"b"])])


def stats(primary: int = 0, seconds: tuple[float, ...] = (), **tiers: int) -> dict:
    """Figures as the manager gives them, with these hits in chunks."""
    seen = Histogram()
    for each in seconds:
        seen.observe(each)
    latency = seen.as_data()
    of_tiers = {
        name: dict.fromkeys(TierMetrics.__slots__, 0)
        | {"hits": hits, "own": {}, "promotion_latency": latency, "cascade_latency": latency}
        for name, hits in tiers.items()
    }
    engine = dict.fromkeys(EngineMetrics.__slots__, 0) | {"primary_hits": primary}
    return {"engine": engine, "primary": {"rows": 1000}, "tiers": of_tiers}


def measured(**figures) -> Measures:
    made = Measures(has_prefix_cache=False)
    for name, value in figures.items():
        setattr(made, name, value)
    return made


def test_with_one_block_a_chunk_every_hit_is_where_it_came_from() -> None:
    assert hits_by_origin(100, stats(60, fs=30, far=10)) == {"primary": 60, "fs": 30, "far": 10}


def test_blocks_of_larger_chunks_are_shared_out_in_proportion_and_none_is_lost() -> None:
    shared = hits_by_origin(203, stats(25, fs=20, far=7))
    assert shared == {"primary": 203 - 78 - 27, "fs": 203 * 20 // 52, "far": 203 * 7 // 52}


def test_tiers_that_are_attached_or_detached_meanwhile_are_in_the_curve_and_the_figures() -> None:
    made = measured(references=10)
    made.note(1.0, stats(1, fs=2), 0)
    made.note(2.0, stats(1, far=3), 0)
    made.note(3.0, stats(1, far=3, fs=1), 0)
    assert made.curve.seconds == [1.0, 2.0, 3.0]
    assert {len(column) for column in (*made.curve.counts.values(), *made.curve.depths.values())} == {3}
    assert made.curve.depths["far: chunks to load"] == [0.0, 0, 0]
    made.note(4.0, stats(1), 0)
    assert set(made.stats["tiers"]) == {"fs", "far"}, "what a tier has done stays counted when it is detached"


def test_nothing_loaded_is_no_hit_though_chunks_were_pinned() -> None:
    assert hits_by_origin(0, stats(5, fs=3)) == {"primary": 0, "fs": 0}


def test_a_curve_of_any_length_keeps_few_points_from_its_beginning_to_its_end() -> None:
    curve = Curve()
    added = 0
    for step in range(100_000):
        now = step * 0.01
        if curve.is_due(now):
            curve.add(now, {"references": step}, {"waiting": 1})
            added += 1
            assert curve.seconds[-1] == now
    assert added < 6000
    assert 200 <= len(curve.seconds) <= 512
    assert curve.seconds[0] == 0.0
    assert curve.seconds[-1] == pytest.approx(1000, rel=0.02)
    assert curve.counts["references"] == [round(at * 100) for at in curve.seconds]
    assert len(curve.depths["waiting"]) == len(curve.seconds)


def test_the_time_of_ranks_that_copy_side_by_side_counts_once() -> None:
    made = measured()
    for _rank in range(2):
        made.take_loads([TransferResult(1, True, 100, 0.5)], ranks=2)
        made.take_stores([TransferResult(2, False, 10, 0.1, "why")], ranks=2)
    assert made.links == {STORE_LINK: Link(20, pytest.approx(0.1)), LOAD_LINK: Link(200, 0.5)}
    assert made.failed_stores == 2


def test_several_engines_are_as_far_as_all_of_them_together() -> None:
    parts = [
        Progress(1, 10, 100, 0, {"fs": 5}),
        Progress(2, 11, 50, 3, {"fs": 1, "primary": 2}),
        Progress(0, 9, 0, 0, {}),
    ]
    assert total_progress(parts) == Progress(3, 30, 150, 3, {"fs": 6, "primary": 2})


def summed(*measures: Measures, **options):
    return summarize(WORKLOAD, CONFIG, replace(ReplayOptions(), **options), measures)


def test_the_sum_of_engines_has_all_their_hits_bytes_and_times() -> None:
    first = measured(requests=2, references=40, loaded=30, infinite_hits=35, seconds=2.0, tokens=640, tokens_saved=480)
    second = measured(requests=1, references=20, loaded=10, infinite_hits=10, seconds=3.0, tokens=320, tokens_saved=160)
    first.stats, second.stats = stats(20, (0.001, 0.003), fs=10), stats(10, (1.5,), fs=0)
    first.stats["tiers"]["fs"] |= {"stored_bytes": 4096, "store_seconds": 0.5, "dropped_cascades": 2, "failed_loads": 1}
    second.stats["tiers"]["fs"] |= {"stored_bytes": 4096, "store_seconds": 0.5, "dropped_cascades": 1}
    first.note(2.0, first.stats, 0)
    second.note(3.0, second.stats, 0)
    results = summed(first, second)
    assert (results.requests, results.references, results.prefix_hits, results.seconds) == (3, 60, 40, 3.0)
    assert results.hits == {"primary": 30, "fs": 10}
    assert results.links["primary -> fs"] == Link(8192, 1.0)
    assert results.dropped_cascades == {"fs": 3}
    assert results.own_figures == {"fs": [{}, {}]}
    assert results.errors == {
        "fs: chunks not loaded, since they were not there, damaged or late": 1,
        "fs: chunks not sent down, since its pin budget was used up (budgets.one_tier, or a larger primary)": 3,
    }
    assert results.latencies["promotion from fs"].count == 3
    assert results.latencies["promotion from fs"].worst == 2.0  # the upper edge of the bucket


def test_chunks_that_a_tier_did_not_get_are_counted_by_their_cause() -> None:
    made = measured()
    made.stats = stats(fs=1)
    made.stats["tiers"]["fs"] |= {
        "failed_stores": 20,
        "dropped_cascades": 4,
        "own": {"dropped_full": 9, "dropped_queue": 5, "dropped_shutdown": 3, "breaker_opened": 1, "held_bytes": 7.5},
    }
    made.note(1.0, made.stats, 0)
    made.last_troubles = {"fs": "write failed: OSError: no space"}
    results = summed(made)
    assert results.errors == {
        "fs: chunks not stored, since the store is full": 9,
        "fs: chunks not stored, since its queue was full": 5,
        "fs: chunks not stored, since the replay ended before their turn": 3,
        "fs: chunks not stored, since a call failed or was too late": 3,
        "fs: chunks not sent down, since it was out of use, or its pin budget was used up (budgets.one_tier, or a "
        "larger primary)": 4,
        "fs: breaker opened": 1,
    }
    assert results.own_figures["fs"][0]["held_bytes"] == 7.5
    assert results.last_troubles == {"fs": "write failed: OSError: no space"}


def test_the_shares_of_an_interval_are_no_more_than_all_hits_of_it() -> None:
    made = measured()
    # At the second point, more of what was loaded before is found to have come from the tier.
    for now, loaded, primary, tier in ((1.0, 50, 50, 0), (2.0, 100, 40, 60)):
        made.references, made.loaded = 2 * loaded, loaded
        made.note(now, stats(primary, fs=tier), 0)
    rates = summed(made).over_time.hit_rates
    assert [sum(column) for column in zip(*rates.values(), strict=True)] == pytest.approx([0.5, 0.5])


def test_a_store_that_was_warm_is_known_by_hits_that_no_request_can_have_left() -> None:
    cold = measured(loaded=30, infinite_hits=35, references=40, stats=stats(30))
    warm = measured(loaded=30, infinite_hits=35, references=40, foreign_hits=2, stats=stats(30))
    for made in (cold, warm):
        made.note(1.0, made.stats, 0)
    assert (summed(cold).warm, summed(warm).warm) == (False, True)
    # Each of several engines hits what the others have stored; only the sum can show it.
    assert not summed(warm, cold).warm
    cold.loaded = 45
    assert summed(warm, cold).warm


def test_hit_rates_over_time_are_of_what_was_asked_for_in_each_interval() -> None:
    made = measured(stats=stats(0, fs=0))
    for second in range(5):
        made.references = 100 * min(second, 3)
        made.loaded = 50 * min(second, 2)
        made.note(float(second), stats(made.loaded, fs=0), waiting=second)
    made.seconds = 4.0
    over_time = summed(made).over_time
    assert over_time.seconds == pytest.approx([0.8, 1.6, 2.4, 3.2, 4.0])
    assert over_time.hit_rates["primary"] == [0.5, 0.5, pytest.approx(0.25), 0.0, None]
    assert over_time.queue_depths["engine: requests waiting"] == pytest.approx(over_time.seconds)


def test_the_estimate_adds_measured_waits_to_what_is_left_to_compute() -> None:
    made = measured(stats=stats())
    made.prompts.extend([1000, 3000])
    made.computed.extend([1000, 500])
    made.delays.extend([0.0, 0.25])
    made.note(1.0, made.stats, 0)
    estimate = summed(made, prefill_speed=1000.0).first_token
    assert estimate.without.total == 4.0
    assert estimate.with_tiers.total == 1.0 + 0.5 + 0.25
    assert estimate.with_tiers.worst == 1.0


def test_wrong_bytes_are_the_verdict_whatever_else_there_is() -> None:
    made = measured(wrong_bytes=7, interrupted=True, stats=stats())
    made.note(1.0, made.stats, 0)
    assert summed(made).verdict == ["WRONG: 7 bytes that came back are not those that were stored."]


BUDGET = {"over_one_tier": 900, "dropped_promotions": 900, "lookups": 1000}


def of_a_tier(own: dict[str, float], last_trouble: str = "", **figures: int):
    """Sum up one engine with a tier of these figures."""
    made = measured(last_troubles={"far": last_trouble} if last_trouble else {})
    made.stats = stats(far=0)
    made.stats["engine"]["lookups"] = 1000
    made.stats["tiers"]["far"] |= figures | {"own": own}
    made.note(1.0, made.stats, 0)
    return summed(made)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"seal_failures": 205}, "205 were damaged."),
        ({"missing": 205}, "205 were not there."),
        ({"errors": 9}, "205 failed or came too late."),
        (
            {"seal_failures": 5, "missing": 150, "errors": 1},
            "5 were damaged, 150 were not there, 50 failed or",
        ),
    ],
)
def test_a_tier_of_which_nothing_could_be_read_is_named_before_any_advice_and_fails_the_command(own, why) -> None:
    results = of_a_tier(own, "its store's read_into failed: ValueError: bad", failed_loads=205, **BUDGET)
    assert results.verdict[1].startswith(f"Of 205 chunks that far said it has, none could be read: {why}")
    assert results.verdict[1].endswith("Its last warning: its store's read_into failed: ValueError: bad")
    assert len(results.verdict) == 2, "a larger budget would bring nothing"
    assert results.unreadable_tiers == ["far"]


@pytest.mark.parametrize(
    ("own", "figures", "count"),
    [({}, {"failed_stores": 289, "dropped_cascades": 11}, 300), ({"breaker_state": 1}, {"dropped_cascades": 500}, 500)],
    ids=["its stores fail", "it does not open"],
)
def test_a_tier_that_takes_nothing_is_named_before_any_advice(own, figures, count) -> None:
    results = of_a_tier(own, "READONLY You can't write against a read only replica.", **figures | BUDGET)
    said = f"Of {count} chunks that far was to store, none was. Its last warning: READONLY You can't write against"
    assert results.verdict[1].startswith(said)
    assert ["budgets" in line for line in results.verdict[2:]] == [True] * (count == 500)


def test_a_tier_that_takes_a_part_or_was_sent_nothing_for_a_budget_is_not_said_to_take_nothing() -> None:
    for figures in ({"stored_chunks": 1, "failed_stores": 9}, {"dropped_cascades": 9}):
        assert not any("none was" in line for line in of_a_tier({}, **figures).verdict)


def test_a_tier_that_brings_a_part_is_named_with_the_part_and_is_no_failure() -> None:
    results = of_a_tier({"missing": 50}, failed_loads=50, loaded_chunks=150, **BUDGET)
    assert results.verdict[1] == "Of 200 chunks that far said it has, only 150 could be read: 50 were not there."
    assert "budgets" in results.verdict[2]
    assert results.unreadable_tiers == []


@pytest.mark.parametrize(
    ("own", "failed"), [({"missing": 7}, 7), ({}, 205), ({"errors": 3}, 0)], ids=["evicted", "late", "other calls"]
)
def test_values_that_were_evicted_meanwhile_or_came_too_late_do_not_fail_the_command(own, failed) -> None:
    assert of_a_tier(own, failed_loads=failed).unreadable_tiers == []
