"""What is decided costs little beside the better of always loading and always computing, whatever engine and tier are.

The real manager runs in an engine that is played by the clock (``benchmarks/rigs/simulated_engine.py``).
"""

import importlib
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SLACK = 0.05  # seconds: steps of the engine, in which nothing is decided
HARD = {
    "colder than the priors",  # nothing that can be known says that both sides become faster soon
    "burst over fast memory",  # some are computed before the tier has brought anything
    "burst over a slow disk as the first thing",  # all wait until the first load has shown what it is
    "burst over fast memory as the first thing, late answers",  # some are computed before the tier has answered once
    "a disk slower than computing, all known",  # two requests show it; all are slow where nothing is computed
}


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("load_or_recompute")


def played(benchmark, scene):
    return {way: benchmark.play(scene, way) for way in benchmark.WAYS}


def test_in_each_of_twenty_scenes_the_regret_is_at_most_a_twentieth(benchmark):
    scenes = benchmark.scenes(quick=True)
    found = {name: benchmark.regret(played(benchmark, scene)) for name, scene in scenes.items() if name not in HARD}
    assert len(found) == 20
    assert {name: regret for name, regret in found.items() if regret > 1.05} == {}


def test_the_first_known_request_after_a_restart_is_loaded_whether_something_was_computed_before_or_not(benchmark):
    for warm in ([], benchmark.new(2, 16_384, 0.6)):
        scene = benchmark.Scene([*warm, *benchmark.known(1, 16_384, 1.0)], [benchmark.Tier(benchmark.rate(5))])
        assert benchmark.play(scene, "decide").loaded_tokens == 16_384


def test_a_burst_of_known_requests_after_a_restart_keeps_tier_and_gpu_at_work(benchmark):
    """24 prompts of 8,192 tokens, 24 GiB in all, of which the tier may pin a quarter of the primary at a time."""
    found = played(benchmark, benchmark.scenes()["burst after a restart"])
    assert found["decide"].loaded_tokens > 24 * 8192 / 2
    assert found["decide"].end < found["load"].end < found["compute"].end
    assert found["decide"].end - 3.0 < 0.75 * 24 * 8192 * 128 * 1024 / 7e9


def test_a_burst_that_a_fast_tier_has_is_loaded(benchmark):
    """24 prompts over a tier three and a half times as fast as the GPU, as the first thing and later."""
    first = benchmark.Scene(benchmark.known(24, 8_192, 0.0, 0.0), [benchmark.Tier(benchmark.rate(15), 0.02, 0.03)])
    assert benchmark.play(first, "decide").loaded_tokens >= 23 * 8_192
    assert benchmark.play(benchmark.scenes()["burst over fast memory"], "decide").loaded_tokens >= 22 * 8_192


def test_a_prompt_is_computed_in_part_where_a_slower_tier_has_all_so_that_computing_gets_its_price(benchmark):
    scene = benchmark.scenes(quick=True)["a disk slower than computing, all known"]
    found = benchmark.play(scene, "decide")
    assert found.loaded_tokens < 2 * 16_384, "the first two"
    assert found.seconds[2:] == pytest.approx([found.seconds[-1]] * 18, rel=0.05)


@pytest.mark.parametrize("off", [0.67, 1.0, 1.33, 1.5])
@pytest.mark.parametrize("speed", [0.5, 1.0, 1.8])
def test_with_an_estimate_of_computing_the_first_request_finds_out_that_a_tier_is_slow(benchmark, speed, off):
    """Nothing was loaded nor computed before; the estimate is a third too low, right, or too high."""
    arrivals = benchmark.known(10, 16_384, 1.5, 0.0)
    scene = benchmark.Scene(arrivals, [benchmark.Tier(benchmark.rate(speed), 0.005)], estimate=off * 30e-6)
    found = played(benchmark, scene)
    assert max(found["decide"].seconds) <= 1.5 * max(found["compute"].seconds)
    assert benchmark.regret(found) <= 1.07


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("speed", [9, 15])
def test_with_an_estimate_a_first_request_is_loaded_whole_from_a_fast_tier_of_eight_hosts(benchmark, speed, seed):
    """Its jobs run eight at a time, and do not end at once: when the first has landed the tier looks slow."""
    some = random.Random(seed)
    tier = benchmark.Tier(lambda now: benchmark.rate(speed)(now) * some.uniform(0.9, 1.1), 0.005, 0.01, hosts=8)
    scene = benchmark.Scene(benchmark.known(1, 16_384, 0.0, 0.0), [tier], estimate=45e-6)
    assert benchmark.play(scene, "decide").loaded_tokens == 16_384


@pytest.mark.parametrize("off", [1.2, 1.5])
@pytest.mark.parametrize("answer", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("speed", [9, 17])
def test_with_an_estimate_too_a_burst_that_a_fast_tier_of_eight_hosts_has_is_loaded_whole(
    benchmark, speed, answer, off
):
    tier = benchmark.Tier(benchmark.rate(speed), 0.02, answer, hosts=8)
    scene = benchmark.Scene(benchmark.known(24, 8_192, 0.0, 0.0), [tier], estimate=off * 30e-6)
    found = played(benchmark, scene)
    assert found["decide"].loaded_tokens == 24 * 8_192
    assert found["decide"].end <= 1.05 * found["load"].end
    assert benchmark.regret(found) <= 1.1


def test_a_tier_faster_than_any_gpu_is_loaded_from_without_a_trial(benchmark):
    scene = benchmark.Scene(benchmark.known(10, 16_384, 1.0, 0.0), [benchmark.Tier(benchmark.rate(8))])
    assert benchmark.play(scene, "decide").loaded_tokens == 10 * 16_384


@pytest.mark.parametrize("answer", [0.0, 0.01, 0.1])
def test_a_burst_is_decided_alike_however_late_the_tiers_answer(benchmark, answer):
    """A request without an answer still counts as one that waits for the GPU."""
    tier = benchmark.Tier(benchmark.waking_tier, 0.02, answer)
    found = benchmark.play(benchmark.Scene(benchmark.known(24, 8_192, 0.0, 0.0), [tier]), "decide")
    assert found.loaded_tokens > 24 * 8_192 / 2
    assert found.end < 2.7


anything = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
gigabytes = st.floats(0.2, 20)
latencies = st.floats(0.0001, 0.05)


@anything
@given(gigabytes, latencies, st.sampled_from([512, 2_048, 8_192, 32_768]), st.floats(1.3, 4.0))
def test_one_at_a_time_all_cost_a_twentieth_more_than_the_better_way_and_what_finding_out_takes(
    benchmark, speed, latency, tokens, gap
):
    computing = tokens * 30e-6 + 0.004 * -(-tokens // 8192)
    arrivals = [*benchmark.new(2, 8_192, 0.6), *benchmark.known(30, tokens, gap * computing)]
    found = played(benchmark, benchmark.Scene(arrivals, [benchmark.Tier(benchmark.rate(speed), latency)]))
    best = min(found["load"].total, found["compute"].total)
    # It is found out once: a load that is too slow costs its request 1.1 times, and one that came meanwhile waits too.
    assert found["decide"].total <= 1.05 * best + 3 * computing + SLACK


@anything
@given(gigabytes, latencies, st.lists(st.sampled_from([512, 2_048, 8_192, 16_384]), min_size=2, max_size=24))
def test_no_request_takes_much_longer_than_twice_what_it_takes_where_all_are_computed(
    benchmark, speed, latency, prompts
):
    """Waiting 1.1 times as long as computing, and then computing, is 2.1 times: the bound of one that was misled."""
    arrivals = [benchmark.Arrival(2.0, tokens, (tokens,)) for tokens in prompts]
    scene = benchmark.Scene(
        [*benchmark.new(2, 8_192, 0.6), *arrivals], [benchmark.Tier(benchmark.rate(speed), latency)]
    )
    decided, computed = benchmark.play(scene, "decide"), benchmark.play(scene, "compute")
    longest = max(computed.seconds)
    assert all(one <= 2.1 * longest + SLACK for one in decided.seconds)
    assert decided.end <= computed.end + 1.1 * 16_384 * 30e-6 + SLACK


@anything
@given(gigabytes, latencies, st.integers(2, 24))
def test_a_burst_takes_little_longer_than_the_better_way_and_what_finding_out_takes(benchmark, speed, latency, count):
    arrivals = [*benchmark.new(2, 8_192, 0.6), *benchmark.known(count, 8_192, 0.0)]
    found = played(benchmark, benchmark.Scene(arrivals, [benchmark.Tier(benchmark.rate(speed), latency)]))
    computing = 8_192 * 30e-6 + 0.004
    assert found["decide"].end <= min(found["load"].end, found["compute"].end) + 2.2 * computing + SLACK


SHAPES = {"one group": (), "five windows": (8,) * 5, "three states": (1,) * 3, "a window and a state": (32, 1)}
SILENT = 1e6  # seconds


def computing(tokens, per_token=30e-6):
    """What a prompt takes to compute that has the engine to itself."""
    return tokens * per_token + 0.004 * -(-tokens // 8192)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(SHAPES)),
    st.one_of(st.floats(0.05, 40), st.just(0.0)),
    st.sampled_from([0.0001, 0.005, 0.05]),
    st.sampled_from([0.0, 0.01, SILENT]),
    st.sampled_from([512, 2_048, 8_192, 32_768]),
    st.sampled_from([30e-6, 300e-6]),
)
def test_no_request_of_any_shape_takes_longer_than_computing_it_once_the_tier_has_shown_its_speed(
    benchmark, shape, speed, latency, answer, tokens, per_token
):
    """A tier's speed may be anything, 0 for one that never brings a chunk; so may be the time that it takes to answer.

    The wait for an answer is beside it: 0.15 times computing, or 20 ms. Before it was measured a tier is waited for at
    most 1.1 times as long as computing takes; that is one request, or two that have come by then.
    """
    tier = benchmark.Tier(benchmark.rate(speed) if speed else lambda _now: SILENT, latency, answer)
    alone = computing(tokens, per_token)
    arrivals = [*benchmark.new(2, 8_192, 6.0), *benchmark.known(12, tokens, 2.5 * alone + 0.2, 12.0)]
    scene = benchmark.Scene(arrivals, [tier], lambda _now: per_token, rows=4096, windows=SHAPES[shape])
    seconds = benchmark.play(scene, "decide").seconds[2:]
    asking = (max(0.02, 0.15 * alone) if answer == SILENT else answer) + SLACK / 5
    assert max(seconds) <= 2.1 * alone + asking
    assert max(seconds[3:]) <= 1.05 * alone + asking
    assert sum(seconds) <= 12 * (1.05 * alone + asking) + 2 * 1.1 * alone
