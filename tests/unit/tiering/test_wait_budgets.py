"""A request waits for answers and for loads no longer than the options say."""

import pytest

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.load_or_recompute import LATE, LOOKUP
from kvtiers.types import RequestContext

from .harness import RETRY, Bench, chain
from .load_benches import KEYS, bench_with, by_tier, prefill, waited


def test_an_answer_that_does_not_come_is_a_miss_after_lookup_wait_and_for_good():
    bench = bench_with(load_wait=1.0)
    tier = bench.tier["a"]
    tier.answer = RETRY
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.step()
    ready, seconds = waited(bench, KEYS, ctx)
    assert ready == 0
    assert 0.02 <= seconds <= 0.02 + 0.005 + 1e-9
    assert bench.figures()["wait_expired"] == 1
    tier.answer = None
    tier.put(KEYS)
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.lookup(KEYS, bench.request()) == (0, 8, False)


@pytest.mark.parametrize(("tokens", "longest"), [(64, 0.02), (1_000, 0.15)], ids=["short", "long"])
def test_an_answer_may_take_a_share_of_what_computing_the_prompt_takes(tokens, longest):
    """Hosts that load a burst answer later than in 20 ms; a long prompt that is computed for that costs far more."""
    options = TieringOptions(lookup_wait=0.02, load_wait=None)
    bench = Bench(rows=64, options=options, hold=True)
    prefill(bench)  # a millisecond a token
    bench.tier["a"].answer = RETRY
    ctx = RequestContext("long")
    bench.manager.on_new_request(ctx, tokens)
    bench.lookup(KEYS, ctx)
    bench.step()
    ready, seconds = waited(bench, KEYS, ctx)
    assert ready == 0
    assert seconds == pytest.approx(longest, abs=0.006)


def test_while_its_own_loads_run_a_request_waits_for_answers_too_and_no_longer():
    """It waits for those anyway; what was struck out meanwhile would be computed for nothing."""
    bench = bench_with(load_wait=None)
    prefill(bench, seconds_per_token=0.01)
    tier, ctx = bench.tier["a"], RequestContext("a")
    tier.put(KEYS)
    bench.manager.on_new_request(ctx, 128)
    assert bench.lookup(KEYS[:4], ctx) == (0, 4, False)
    tier.answer = RETRY
    assert bench.lookup(KEYS, ctx) == (0, 4, True)
    bench.step()
    bench.step(LOOKUP * 128 * 0.01 + 0.001)
    assert bench.lookup(KEYS, ctx) == (0, 4, True)
    tier.end_all()
    bench.step()
    assert bench.lookup(KEYS, ctx) == (4, 0, False)


@pytest.mark.parametrize(("silent", "share"), [("answers", LOOKUP), ("loads", LATE)])
def test_after_hits_alone_a_silent_tier_is_waited_for_by_what_computing_takes_and_not_by_what_tail_steps_take(
    silent, share
):
    """8k tokens at 18.7 us: 23 and 169 ms; by the 44 ms of a step with 16 tokens behind a hit 3.4 and 24.8 s."""
    options = TieringOptions(
        load_wait=None, prior_seconds_per_token=147e-6, estimated_seconds_per_token=18.7e-6, one_tier=0.9, all_tiers=0.9
    )
    bench = Bench(rows=2048, options=options, hold=True)
    for _ in range(6):
        bench.step(prefill_tokens=16, prefill_seconds=0.044)
    tier, keys = bench.tier["a"], chain("long", 512)
    tier.put(keys)
    tier.answer = RETRY if silent == "answers" else None
    bench.manager.on_new_request(ctx := RequestContext("long"), 8192)
    bench.lookup(keys, ctx)
    bench.step()
    ready, seconds = waited(bench, keys, ctx, tick=0.001)
    assert ready == 0
    assert seconds == pytest.approx(share * 8192 * 18.7e-6, abs=0.003)


def test_the_wait_for_an_answer_begins_when_the_question_was_sent_however_long_the_lookups_of_the_step_take():
    bench = bench_with(load_wait=1.0)
    bench.tier["a"].answer = RETRY
    ctx = bench.request()
    for _ in range(50):
        assert bench.lookup(KEYS[:1], ctx) == (0, 0, True)
        bench.clock.now += 0.01
    bench.step()
    bench.clock.now += 0.019
    assert bench.lookup(KEYS[:1], ctx) == (0, 0, True)
    bench.clock.now += 0.002
    assert bench.lookup(KEYS[:1], ctx) == (0, 0, False)


def test_waiting_is_counted_from_the_first_question_once_a_request():
    bench = bench_with(load_wait=1.0)
    tier = bench.tier["a"]
    tier.answer = RETRY
    ctx = bench.request()
    bench.lookup(KEYS[:4], ctx)
    bench.step()
    bench.step(0.015)
    tier.answer = None
    assert bench.lookup(KEYS[:4], ctx) == (0, 0, False)
    tier.answer = RETRY
    assert bench.lookup(KEYS, ctx) == (0, 0, True)
    bench.step(0.006)
    assert bench.lookup(KEYS, ctx) == (0, 0, False)


def test_a_promotion_that_does_not_come_is_a_miss_after_load_wait_for_good_but_lands_for_others():
    bench = bench_with(load_wait=0.5)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    ready, seconds = waited(bench, KEYS, ctx)
    assert ready == 0
    assert 0.5 <= seconds <= 0.5 + 0.005 + 1e-9
    assert bench.figures()["wait_expired"] == 8
    bench.tier["a"].end_all()
    bench.step()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.lookup(KEYS, bench.request()) == (8, 0, False)


@pytest.mark.parametrize("late", ["load", "answer"])
def test_a_request_that_is_preempted_is_decided_anew_and_waits_as_long_as_at_first(late):
    """Also for chunks that it has given up, which may be in the primary since it has computed them."""
    bench = bench_with(load_wait=0.5)
    tier, ctx = bench.tier["a"], RequestContext("a")
    tier.answer = RETRY if late == "answer" else None
    tier.put(KEYS)
    bench.manager.on_new_request(ctx, 128)
    first = waited(bench, KEYS, ctx)
    assert first[0] == 0
    for _ in range(2):
        assert bench.lookup(KEYS, ctx) == (0, 0, False)
        bench.manager.on_request_preempted(ctx)
        again = waited(bench, KEYS, ctx)
        assert again == (0, pytest.approx(first[1], abs=0.006))
    bench.manager.on_request_preempted(ctx)
    tier.answer = None
    tier.end_all()
    bench.step()
    bench.manager.complete_store(bench.begin_store(KEYS))
    assert bench.lookup(KEYS, ctx) == (8, 0, False)


def test_a_request_that_is_preempted_is_given_what_was_lost_for_it_and_counts_for_the_gpu_again():
    bench = bench_with(load_wait=None)
    prefill(bench)
    tier, ctx, gpu = bench.tier["a"], RequestContext("a"), bench.manager._waits.gpu
    tier.put(KEYS)
    bench.manager.on_new_request(ctx, 128)
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step()
    tier.end(min(tier.held), landed=KEYS[:4])
    bench.step()
    assert bench.lookup(KEYS, ctx) == (4, 0, False)
    assert gpu.ahead == 64
    bench.step(prefill_tokens=64)
    bench.manager.on_request_preempted(ctx)
    assert bench.lookup(KEYS, ctx) == (4, 4, False)
    bench.step()
    tier.end(min(tier.held), landed=[])
    bench.step()
    assert bench.lookup(KEYS, ctx) == (4, 0, False)
    assert gpu.ahead == 64


@pytest.mark.parametrize("seconds", [0.001, 0.014], ids=["by what it loads now", "not as one that has most of it"])
def test_after_a_preemption_a_load_is_weighed_by_its_own_chunks(seconds):
    bench = bench_with(load_wait=None)
    prefill(bench)
    tier, ctx = bench.tier["a"], RequestContext("a")
    bench.slots[0].rate.add(10, 10 * seconds, bench.clock.now)
    tier.put(KEYS)
    bench.manager.on_new_request(ctx, 128)
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step()
    tier.end_all()
    bench.step()
    more = chain("more", 1)
    tier.put(more)
    bench.manager.on_request_preempted(ctx)
    assert bench.lookup(more, ctx) == (0, 1, False)
    ready, waits = waited(bench, more, ctx, tick=0.001)
    assert (ready, waits) == (0, pytest.approx(LATE * 16 * 0.001, abs=0.0015))


def test_chunks_that_a_request_has_given_up_may_be_there_under_other_weights():
    bench = bench_with(load_wait=0.5)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert waited(bench, KEYS, ctx)[0] == 0
    bench.manager.set_weights_version("new")
    bench.manager.complete_store(bench.begin_store(KEYS))
    assert bench.lookup(KEYS, ctx) == (8, 0, False)


def test_other_weights_make_no_request_wait_for_longer():
    bench = bench_with(load_wait=0.5)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert waited(bench, KEYS, ctx)[0] == 0
    bench.manager.set_weights_version("new")
    bench.tier["a"].put(KEYS)
    assert bench.lookup(KEYS, ctx) == (0, 0, False), "it has waited as long as it may"
    bench.tier["a"].answer = RETRY
    assert bench.lookup(KEYS, bench.request()) == (0, 0, True)


def test_chunks_whose_load_failed_for_a_request_are_loaded_under_other_weights_if_it_has_time_to_wait():
    bench = bench_with(load_wait=5.0)
    tier = bench.tier["a"]
    tier.put(KEYS)
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.step()
    tier.values.clear()
    tier.end_all()
    bench.step()
    tier.put(KEYS)
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    bench.manager.set_weights_version("new")
    tier.put(KEYS)
    assert bench.lookup(KEYS, ctx) == (0, 8, False)


def test_what_came_in_time_counts_though_the_rest_did_not():
    bench = bench_with(load_wait=0.5)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    bench.lookup(KEYS[:3], ctx)
    bench.step(0.1)
    bench.lookup(KEYS, ctx)
    bench.step(0.1)
    bench.tier["a"].end(min(bench.tier["a"].held))
    assert waited(bench, KEYS, ctx)[0] == 3


def test_a_request_that_has_waited_enough_waits_no_more_whatever_it_asks():
    bench = bench_with(load_wait=0.5)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    waited(bench, KEYS[:2], ctx)
    asked = len(bench.tier["a"].asked)
    assert bench.lookup(chain("other", 3), ctx) == (0, 0, False)
    assert len(bench.tier["a"].asked) == asked
    bench.store_plan = bench.begin_store(chain("mine", 2))
    assert bench.lookup(chain("mine", 2), ctx) == (0, 0, False)


def test_a_chunk_that_another_request_is_storing_is_not_waited_for_without_end():
    bench = bench_with(load_wait=0.5)
    plan = bench.begin_store(KEYS[:2])
    ctx = bench.request()
    assert bench.lookup(KEYS[:1], ctx) == (0, 1, False)
    ready, seconds = waited(bench, KEYS, ctx)
    assert (ready, round(seconds, 2)) == (0, 0.5)
    bench.manager.complete_store(plan)
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.lookup(KEYS, bench.request()) == (2, 0, False)


def test_a_tier_that_never_answers_and_one_that_never_loads_cost_at_most_both_waits_and_a_step():
    bench = bench_with(load_wait=0.5, tiers=("silent", "stuck"))
    bench.tier["silent"].answer = RETRY
    bench.tier["stuck"].put(KEYS[:4])
    ready, seconds = waited(bench, KEYS, bench.request(), tick=0.01)
    assert ready == 0
    assert seconds <= 0.02 + 0.5 + 0.01 + 1e-9


def test_what_was_not_waited_for_counts_for_the_tier_that_was_late():
    bench = bench_with(load_wait=0.5, tiers=("a", "b", "other"))
    bench.tier["a"].put(KEYS[:4])
    bench.tier["b"].put(KEYS[4:7])
    plan = bench.begin_store(KEYS[7:])
    assert waited(bench, KEYS, bench.request())[0] == 0
    assert by_tier(bench, "wait_expired") == {"a": 4, "b": 3, "other": 0}
    assert bench.figures()["wait_expired"] == 8, "and the chunk that the engine writes"
    bench.manager.complete_store(plan)


def test_an_answer_that_was_not_waited_for_counts_for_each_tier_that_has_it_in_flight():
    bench = bench_with(load_wait=0.5, tiers=("silent", "has", "deaf"))
    bench.tier["silent"].answer = bench.tier["deaf"].answer = RETRY
    bench.tier["has"].put(KEYS[1:])
    assert waited(bench, KEYS, bench.request())[0] == 0
    assert by_tier(bench, "wait_expired") == {"silent": 1, "has": 0, "deaf": 1}
    assert bench.figures()["wait_expired"] == 1
