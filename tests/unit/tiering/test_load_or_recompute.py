"""No request waits longer for a tier than is worth it."""

import itertools

import pytest

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.load_or_recompute import LATE
from kvtiers.types import RequestContext

from .harness import HIT, MISS, PENDING, RETRY, Bench, chain

KEYS = chain("k", 8)
_measures = itertools.count()


def bench_with(load_wait, tiers=("a",), rows=64):
    options = TieringOptions(lookup_wait=0.02, load_wait=load_wait, one_tier=0.4, all_tiers=0.5)
    return Bench(rows=rows, tiers={name: {} for name in tiers}, options=options, hold=True)


def waited(bench, keys, ctx, tick=0.005, most=4000):
    """Ask each step until the answer is final; return it and how long that took."""
    begin = bench.clock.now
    for _ in range(most):
        ready, pending, unresolved = bench.lookup(keys, ctx)
        if not pending and not unresolved:
            return ready, bench.clock.now - begin
        bench.step(tick)
    raise AssertionError("it waits for ever")


def test_an_answer_that_does_not_come_is_a_miss_after_lookup_wait_and_for_good():
    bench = bench_with(load_wait=1.0)
    tier = bench.tier["a"]
    tier.answer = RETRY
    ctx = bench.request()
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
    ready, seconds = waited(bench, KEYS, ctx)
    assert ready == 0
    assert seconds == pytest.approx(longest, abs=0.006)


def test_waiting_is_counted_from_the_first_answer_once_a_request():
    bench = bench_with(load_wait=1.0)
    tier = bench.tier["a"]
    tier.answer = RETRY
    ctx = bench.request()
    bench.lookup(KEYS[:4], ctx)
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
    assert bench.manager.lookup(KEYS[0], ctx) is PENDING
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


def by_tier(bench, figure):
    return {name: bench.figures(name)[figure] for name in bench.tier}


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


# -- auto


def prefill(bench, seconds_per_token=0.001):
    bench.step(prefill_tokens=1000, prefill_seconds=1000 * seconds_per_token)


def measure(bench, seconds, name="a", chunks=4):
    """Let a tier load some chunks in this time."""
    tier = bench.tier[name]
    keys = chain(f"measured-{next(_measures)}-", chunks)
    tier.put(keys)
    tier.seconds = seconds
    bench.lookup(keys, ctx := bench.request())
    bench.step()
    tier.end_all()
    bench.step()
    bench.manager.on_request_finished(ctx)
    return keys


def roomy(**more):
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.8, all_tiers=0.8)
    bench = Bench(rows=4096, options=options, hold=True, **more)
    prefill(bench)
    return bench


@pytest.mark.parametrize("is_measured", [False, True])
def test_auto_waits_as_long_as_for_an_answer_until_computing_has_been_measured_if_no_prior_says_more(is_measured):
    bench = bench_with(load_wait=None)
    if is_measured:
        measure(bench, 0.001)
    bench.tier["a"].put(KEYS)
    ready, seconds = waited(bench, KEYS, bench.request())
    assert ready == 0
    assert 0.02 <= seconds <= 0.02 + 0.005 + 1e-9


@pytest.mark.parametrize("is_measured", [False, True])
def test_the_first_request_waits_by_the_prior_of_what_computing_takes(is_measured):
    options = TieringOptions(lookup_wait=0.02, load_wait=None, prior_seconds_per_token=0.002)
    bench = Bench(rows=64, options=options, hold=True)
    if is_measured:
        prefill(bench)
    bench.tier["a"].put(KEYS)
    ready, seconds = waited(bench, KEYS, bench.request())
    assert ready == 0
    assert seconds == pytest.approx(LATE * 8 * 16 * (0.001 if is_measured else 0.002), abs=0.006)


def test_an_unmeasured_tier_is_waited_for_as_long_as_computing_takes_and_its_first_load_is_used():
    bench = bench_with(load_wait=None)
    prefill(bench)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step(8 * 16 * 0.001)
    assert bench.lookup(KEYS, ctx) == (0, 8, False), "as long as computing would have taken, and a tenth"
    bench.tier["a"].end_all()
    bench.step()
    assert bench.lookup(KEYS, ctx) == (8, 0, False)


def test_auto_waits_as_long_as_computing_would_take():
    bench = bench_with(load_wait=None)
    prefill(bench)
    measure(bench, 0.001)
    bench.tier["a"].put(KEYS)
    ready, seconds = waited(bench, KEYS, bench.request())
    assert ready == 0
    assert LATE * 8 * 16 * 0.001 <= seconds <= LATE * 8 * 16 * 0.001 + 0.005 + 1e-9


def test_auto_waits_for_all_that_it_has_found_not_only_for_the_first_of_it():
    bench = bench_with(load_wait=None)
    prefill(bench)
    measure(bench, 0.001)
    bench.tier["a"].put(KEYS[:1])
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 1, False)
    bench.step(0.01)
    bench.tier["a"].put(KEYS)
    bench.begin_store(chain("other", 1), bench.request())  # it is looked up again when something has changed
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step(LATE * 8 * 16 * 0.001 - 0.015)
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step(0.006)
    assert bench.lookup(KEYS, ctx) == (0, 0, False)


def test_auto_waits_no_less_for_the_rest_when_most_of_it_has_come():
    bench = bench_with(load_wait=None, tiers=("a", "b"))
    prefill(bench)
    measure(bench, 0.001, "a")
    measure(bench, 0.001, "b")
    bench.tier["a"].put(KEYS[:7])
    bench.tier["b"].put(KEYS[7:])
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    bench.step()
    bench.tier["a"].end_all()
    bench.step(3 * 16 * 0.001)
    assert bench.lookup(KEYS, ctx) == (7, 1, False)


def test_auto_waits_for_all_of_a_long_prefix_however_many_steps_find_it():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.8, all_tiers=0.8)
    bench = Bench(rows=8192, tiers={"a": {}}, options=options, hold=True)
    prefill(bench)
    measure(bench, 0.001)
    tier = bench.tier["a"]
    tier.hold = False
    tier.put(keys := chain("long", 6000))
    ready, seconds = waited(bench, keys, bench.request(), tick=3.0)
    assert ready == 6000
    assert seconds > 448 * 16 * 0.001, "what one call finds takes less long to compute than all steps took"


def test_auto_waits_for_a_windows_chunks_together():
    bench = bench_with(load_wait=None)
    prefill(bench)
    measure(bench, 0.001)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert {bench.manager.lookup(key, ctx) for key in KEYS[:4]} == {PENDING}
    bench.step(3 * 16 * 0.001)
    assert {bench.manager.lookup(key, ctx) for key in KEYS[:4]} == {PENDING}
    bench.step(2 * 16 * 0.001)
    assert {bench.manager.lookup(key, ctx) for key in KEYS[:4]} == {MISS}


def test_auto_computes_what_a_tier_is_too_slow_for_at_once_and_counts_it():
    bench = bench_with(load_wait=None)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 1.1)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.figures()["recomputed_cheaper"] == 8
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.figures()["recomputed_cheaper"] == 8, "the same chunks are counted once"
    assert by_tier(bench, "recomputed_cheaper") == {"a": 8}
    assert not bench.tier["a"].held


def test_all_chunks_of_a_long_prefix_that_a_tier_is_too_slow_for_are_counted():
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 1.1)
    keys = chain("long", 1500)
    bench.manager.complete_store(bench.begin_store([keys[1000]]))
    bench.tier["a"].put(keys)
    assert bench.lookup(keys, bench.request()) == (0, 0, False)
    assert bench.figures()["recomputed_cheaper"] == bench.figures("a")["recomputed_cheaper"] == 1499


def test_chunks_that_two_tiers_are_too_slow_for_are_computed_once():
    bench = roomy(tiers={"a": {}, "b": {}})
    for name, count in (("a", 8), ("b", 5)):
        measure(bench, 4 * 16 * 0.001 * 1.1, name)
        bench.tier[name].put(KEYS[:count])
    assert bench.lookup(chain("k", 32), bench.request()) == (0, 0, False)
    assert by_tier(bench, "recomputed_cheaper") == {"a": 8, "b": 5}
    assert bench.figures()["recomputed_cheaper"] == 8


def test_chunks_that_a_tier_has_lost_are_not_said_to_be_cheaper_to_compute():
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 0.5)
    tier = bench.tier["a"]
    tier.put(KEYS)
    ctx = bench.request()
    bench.lookup(KEYS, ctx)
    bench.step()
    tier.end(min(tier.held), landed=[*KEYS[:3], *KEYS[5:]])
    bench.manager.on_schedule_end()
    bench.manager.on_schedule_end()
    bench.forget()
    measure(bench, 1e6, chunks=40)
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.figures()["recomputed_cheaper"] == 3


def test_a_load_wait_that_was_given_is_granted_whatever_computing_would_cost():
    bench = bench_with(load_wait=60.0)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 100)
    bench.tier["a"].put(KEYS)
    assert bench.lookup(KEYS, bench.request()) == (0, 8, False)
    assert bench.figures()["recomputed_cheaper"] == 0


def test_auto_loads_what_is_cheaper_to_load():
    bench = bench_with(load_wait=None)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 0.9)
    bench.tier["a"].put(KEYS)
    assert bench.lookup(KEYS, bench.request()) == (0, 8, False)


def test_auto_counts_a_tiers_queue_as_part_of_its_price():
    bench = bench_with(load_wait=None)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 0.6)
    first, second = chain("first", 8), chain("second", 8)
    bench.tier["a"].put(first + second)
    assert bench.lookup(first, bench.request()) == (0, 8, False)
    assert bench.lookup(second, bench.request()) == (0, 0, False)


def test_auto_does_not_count_what_the_request_has_found_itself_as_a_queue_before_the_rest_of_it():
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 0.6)
    bench.tier["a"].put(keys := chain("long", 1500))
    ctx = bench.request()
    found = []
    for _ in range(4):
        found.append(bench.lookup(keys, ctx))
        bench.step(0.01)
    assert found == [(0, 448, True), (0, 874, True), (0, 1279, True), (0, 1500, False)]
    assert bench.figures()["recomputed_cheaper"] == 0


def test_auto_counts_a_queue_of_others_against_the_rest_of_what_was_found_too():
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 0.6)
    bench.tier["a"].put(chain("found", 12) + chain("other", 40))
    ctx = bench.request()
    assert bench.lookup(chain("found", 8), ctx) == (0, 8, False)
    assert bench.lookup(chain("other", 40), bench.request()) == (0, 40, False)
    assert bench.lookup(chain("found", 12), ctx) == (0, 8, False)
    assert bench.figures()["recomputed_cheaper"] == 4


def test_auto_counts_time_that_the_request_has_waited_already():
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 0.6)
    bench.tier["a"].put(KEYS)
    ctx = bench.request()
    assert bench.lookup(KEYS[:4], ctx) == (0, 4, False)
    bench.step(3 * 16 * 0.001)
    assert bench.lookup(KEYS[:6], ctx) == (0, 4, False), "three of the six chunks' time are left, and six to be loaded"


def test_auto_never_loads_what_costs_more_than_computing_it_however_much_came_for_less():
    bench = roomy(tiers={"fast": {}, "slow": {}})
    measure(bench, 4 * 16 * 0.001 * 0.01, "fast")
    measure(bench, 4 * 16 * 0.001 * 1.1, "slow")
    bench.tier["fast"].put(KEYS[:6])
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 6, False)
    bench.step()
    bench.tier["slow"].put(KEYS)
    assert bench.lookup(KEYS, ctx) == (0, 6, False)


def test_auto_loads_the_window_of_a_prefix_that_the_same_tier_brings():
    bench = roomy(tokens_per_chunk=(16, 16))
    measure(bench, 4 * 16 * 0.001 * 0.1)
    keys, window = chain("k", 100), chain("k", 100, group=1)
    bench.tier["a"].put(keys + window)
    ctx = bench.request()
    assert bench.lookup(keys, ctx) == (0, 100, False)
    assert {bench.manager.lookup(key, ctx) for key in reversed(window[-4:])} == {PENDING}
    assert bench.figures()["recomputed_cheaper"] == 0


def test_auto_loads_a_window_whose_prefix_is_here_as_one():
    bench = roomy(tokens_per_chunk=(16, 16))
    measure(bench, 4 * 16 * 0.001 * 0.6)
    window = chain("k", 8, group=1)
    bench.tier["a"].put(window)
    ctx = bench.request()
    assert {bench.manager.lookup(key, ctx) for key in reversed(window)} == {PENDING}


def test_auto_does_not_load_two_groups_that_together_cost_more_than_computing():
    bench = roomy(tokens_per_chunk=(16, 16))
    measure(bench, 4 * 16 * 0.001 * 0.6)
    other = chain("k", 8, group=1)
    bench.tier["a"].put(KEYS + other)
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 8, False)
    assert bench.lookup(other, ctx) == (0, 0, False)


def test_a_faster_tier_serves_what_the_first_one_is_too_slow_for():
    bench = bench_with(load_wait=None, tiers=("slow", "fast"))
    prefill(bench)
    measure(bench, 10.0, "slow")
    measure(bench, 0.001, "fast")
    bench.tier["slow"].put(KEYS)
    bench.tier["fast"].put(KEYS[:5])
    assert bench.lookup(KEYS, bench.request()) == (0, 5, False)
    assert by_tier(bench, "recomputed_cheaper") == {"slow": 3, "fast": 0}, "what the first brings was not computed"
    bench.step()
    assert not bench.tier["slow"].held
    assert [list(held.job.keys) for held in bench.tier["fast"].held.values()] == [KEYS[:5]]


def test_what_one_tier_is_too_slow_for_is_not_given_up_while_another_may_have_it():
    bench = bench_with(load_wait=None, tiers=("slow", "silent"))
    prefill(bench)
    measure(bench, 10.0, "slow")
    measure(bench, 0.001, "silent")
    bench.tier["slow"].put(KEYS)
    bench.tier["silent"].answer = RETRY
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == (0, 0, True)
    bench.tier["silent"].answer = None
    bench.tier["silent"].put(KEYS)
    assert bench.lookup(KEYS, ctx) == (0, 8, False)


def test_a_slow_tier_is_measured_again_once_in_a_while_with_a_few_chunks():
    bench = bench_with(load_wait=None, rows=256)
    prefill(bench)
    measure(bench, 40.0)
    keys = chain("many", 60)
    bench.tier["a"].put(keys)
    assert bench.lookup(keys, bench.request()) == (0, 0, False)
    bench.step(5.1)
    assert bench.lookup(keys, bench.request()) == (0, 16, False)
    assert bench.lookup(chain("x", 1), bench.request()) == (0, 0, False)
    bench.tier["a"].seconds = 16 * 0.001
    bench.step()
    bench.tier["a"].end_all()
    bench.step()
    assert bench.lookup(keys, bench.request()) == (16, 44, False)


def test_a_load_that_never_ended_makes_the_tier_look_as_slow_as_it_is():
    bench = bench_with(load_wait=None)
    prefill(bench)
    here = measure(bench, 0.001)
    bench.tier["a"].put(KEYS)
    bench.lookup(KEYS, bench.request())
    bench.step(0.1)
    bench.step(31.0)
    assert bench.slots[0].rate.seconds_per_chunk > 0.5
    assert bench.lookup(here, bench.request()) == (4, 0, False)
    other = chain("other", 4)
    bench.tier["a"].put(other)
    assert bench.lookup(other, bench.request()) == (0, 0, False)


@pytest.mark.parametrize("measured", [False, True])
def test_a_tier_that_needs_ten_seconds_a_load_costs_a_request_little_before_and_after_it_was_measured(measured):
    bench = bench_with(load_wait=None)
    prefill(bench)
    if measured:
        measure(bench, 40.0)
    bench.tier["a"].put(KEYS)
    assert bench.tier["a"].answer in {None, HIT}
    ready, seconds = waited(bench, KEYS, bench.request(), tick=0.01)
    assert ready == 0
    assert seconds <= 0.02 + 8 * 16 * 0.001 + 0.01 + 1e-9


def test_a_step_of_a_few_tokens_says_little_of_what_a_token_costs():
    bench = bench_with(load_wait=None)
    for _ in range(3):  # a prompt in two steps, the second of which has what was left of it
        bench.step(prefill_tokens=8192, prefill_seconds=8.192)
        bench.step(prefill_tokens=8, prefill_seconds=0.03)
    measure(bench, 0.001)
    bench.tier["a"].put(KEYS)
    assert waited(bench, KEYS, bench.request())[1] == pytest.approx(LATE * 8 * 16 * 0.001, abs=0.006)


def test_an_engine_whose_speed_changes_is_believed_within_some_steps():
    bench = bench_with(load_wait=None)
    prefill(bench, 0.001)
    for _ in range(20):
        prefill(bench, 0.01)
    measure(bench, 0.001)
    bench.tier["a"].put(KEYS)
    assert waited(bench, KEYS, bench.request())[1] == pytest.approx(LATE * 8 * 16 * 0.01, rel=0.02)


def test_no_time_of_the_engines_is_believed_that_is_none():
    bench = bench_with(load_wait=None)
    for tokens, seconds in [(0, 1.0), (5, 0.0), (-5, 1.0), (5, float("nan")), (5, float("inf"))]:
        bench.step(prefill_tokens=tokens, prefill_seconds=seconds)
    measure(bench, 0.001)
    bench.tier["a"].put(KEYS)
    assert waited(bench, KEYS, bench.request())[1] < 0.03


# -- the GPU's queue, and the line for a tier's rows


def test_the_prompts_that_lookups_have_left_to_be_computed_stand_before_a_request_until_they_are():
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 1.5)
    bench.tier["a"].put(KEYS)
    assert bench.lookup(chain("new", 64), bench.request()) == (0, 0, False)
    assert bench.lookup(KEYS, bench.request()) == (0, 8, False), "the GPU has 1,024 tokens to compute before it"
    bench.step(64 * 16 * 0.001)
    other = chain("other", 8)
    bench.tier["a"].put(other)
    bench.tier["a"].seconds *= 2
    bench.tier["a"].end_all()
    bench.step()
    assert bench.lookup(other, bench.request()) == (0, 0, False), "by the clock they have been computed"


@pytest.mark.parametrize("waits", [0, 128])
def test_where_others_want_the_gpu_a_load_may_take_as_long_as_computing_the_request_and_the_next_one(waits):
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 1.5)
    bench.tier["a"].put(KEYS)
    if waits:
        bench.manager.on_new_request(RequestContext("another"), waits)
    ctx = bench.request()
    assert bench.lookup(KEYS, ctx) == ((0, 8, False) if waits else (0, 0, False))


def test_a_request_that_ends_before_its_turn_waits_for_the_gpu_no_longer():
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 1.5)
    bench.tier["a"].put(KEYS)
    bench.manager.on_new_request(other := RequestContext("another"), 128)
    bench.manager.on_new_request(other, 128)  # a misuse, which counts nothing
    bench.manager.on_request_finished(other)
    assert bench.lookup(KEYS, bench.request()) == (0, 0, False)


def test_a_request_stands_in_line_while_other_loads_have_the_tiers_rows_and_is_loaded_then():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.25, all_tiers=0.5)
    bench = Bench(rows=64, options=options, hold=True)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 0.1)
    first, second = chain("first", 16), chain("second", 16)
    bench.tier["a"].put(first + second)
    assert bench.lookup(first, bench.request()) == (0, 16, False)
    ctx = bench.request()
    assert bench.lookup(second, ctx) == (0, 0, True)
    bench.step(0.005)
    assert bench.lookup(second, ctx) == (0, 0, True)
    bench.tier["a"].end_all()
    bench.step()
    assert bench.lookup(second, ctx) == (0, 16, False)
    assert bench.figures("a")["budget_misses"] == 0


def test_a_request_in_line_is_answered_with_what_is_there_now():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.25, all_tiers=0.5)
    bench = Bench(rows=64, options=options, hold=True)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 0.1)
    first, second = chain("first", 16), chain("second", 16)
    bench.manager.complete_store(bench.begin_store(second[:3]))
    bench.tier["a"].end_all()
    bench.step()
    writing = bench.begin_store(second[3:4])
    bench.tier["a"].put(first + second)
    assert bench.lookup(first, bench.request()) == (0, 16, False)
    bench.step()
    ctx = bench.request()
    assert bench.lookup(second, ctx) == (3, 1, True)
    bench.manager.complete_store(writing, False)
    ready, pending, _ = bench.lookup(second, ctx)
    assert (ready, pending) == (3, 0), "it is not there any more, nor on its way"


def test_after_a_reset_a_request_in_line_is_not_answered_with_chunks_that_are_gone():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.25, all_tiers=0.5)
    bench = Bench(rows=64, options=options, hold=True)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 0.1)
    first, second = chain("first", 16), chain("second", 16)
    plan = bench.begin_store(second[:4])
    bench.manager.complete_store(plan)
    bench.tier["a"].end_all()
    bench.step()
    bench.tier["a"].put(first + second)
    assert bench.lookup(first, bench.request()) == (0, 16, False)
    bench.step()
    ctx = bench.request()
    assert bench.lookup(second, ctx) == (4, 0, True)
    bench.manager.reset_cache()
    ready, _, _ = bench.lookup(second, ctx)
    assert ready == 0
    assert not bench.manager.stats()["engine"]["misuse"]


def test_a_request_in_line_computes_when_the_loads_before_it_do_not_end():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.25, all_tiers=0.5)
    bench = Bench(rows=64, options=options, hold=True)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 0.1)
    first, second = chain("first", 16), chain("second", 16)
    bench.tier["a"].put(first + second)
    bench.lookup(first, bench.request())
    bench.step()
    ready, seconds = waited(bench, second, bench.request())
    assert ready == 0
    assert seconds <= LATE * 16 * 16 * 0.001 + 0.005 + 1e-9


def test_a_request_goes_over_to_computing_when_the_tier_has_become_slower_before_its_time_is_over():
    bench = roomy()
    measure(bench, 4 * 16 * 0.001 * 0.1)
    keys = chain("long", 64)
    bench.tier["a"].put(keys)
    ctx = bench.request()
    assert bench.lookup(keys, ctx) == (0, 64, False)
    bench.step(0.01)
    for _ in range(2):
        bench.slots[0].rate.add(64, 64 * 16 * 0.001 * 1.2, bench.clock.now)
    assert bench.lookup(keys, ctx) == (0, 64, False), "a little: it stays"
    for _ in range(3):
        bench.slots[0].rate.add(64, 64 * 16 * 0.001 * 2, bench.clock.now)
    assert bench.lookup(keys, ctx) == (0, 0, False)
    assert bench.figures()["recomputed_cheaper"] == bench.figures("a")["recomputed_cheaper"] == 64
    assert bench.figures()["wait_expired"] == 0


def load(bench, keys, first=0, seconds=0.008):
    """Let a tier load these chunks, of which the first is the request's chunk ``first``; return the request."""
    tier = bench.tier["a"]
    tier.put(keys)
    tier.seconds = seconds
    bench.manager.lookup_prefix(keys, ctx := bench.request(), first)
    bench.step()
    tier.end_all()
    bench.step()
    return ctx


def test_what_a_load_saved_is_priced_once_when_it_lands():
    bench = roomy()  # a millisecond a token
    keys = chain("saved-", 8)
    ctx = load(bench, keys)
    figures = bench.figures("a")
    assert figures["computing_seconds"] == pytest.approx(8 * 16 * 0.001), "it has landed, and was not read yet"
    saved = figures["saved_seconds"]
    assert 0.0 < saved <= 8 * 16 * 0.001
    for _ in range(12):
        prefill(bench, seconds_per_token=0.01)  # dearer now: nothing is valued again
    assert bench.load(keys, ctx)
    assert bench.figures("a")["computing_seconds"] == figures["computing_seconds"]
    assert bench.figures("a")["saved_seconds"] == saved


@pytest.mark.parametrize("first", [0, 100, 300])
def test_what_a_load_saved_is_priced_by_the_position_of_its_tokens(first):
    bench = roomy()
    for position in range(500, 8500, 1000):  # a prompt of 8,000 tokens, in parts: each dearer than the one before
        seconds = 1000 * (0.001 + 1e-6 * position)
        bench.step(prefill_tokens=1000, prefill_seconds=seconds, prefill_position=position)
    load(bench, chain("far-", 8), first)
    middle = 16 * (first + 4)
    assert bench.figures("a")["computing_seconds"] == pytest.approx(8 * 16 * (0.001 + 1e-6 * middle))


def test_parts_of_a_load_have_positions_of_their_own_and_what_did_not_come_is_not_priced():
    bench = roomy()
    for position in range(500, 8500, 1000):
        bench.step(prefill_tokens=1000, prefill_seconds=1.0 + position / 1000, prefill_position=position)
    keys = chain("parts-", 8)
    tier = bench.tier["a"]
    tier.put(keys[:4])
    tier.answer = HIT
    bench.manager.lookup_prefix(keys, bench.request(), 100)
    tier.answer = None
    bench.step()
    tier.end_all()
    bench.step()
    assert bench.figures("a")["loaded_chunks"] == 4
    assert bench.figures("a")["computing_seconds"] == pytest.approx(4 * 16 * (0.001 + 1e-6 * 16 * 102))


def test_a_load_that_no_request_waits_for_has_saved_nothing():
    bench = roomy()
    measure(bench, 0.004)
    before = bench.figures("a")
    keys = chain("late-", 8)
    bench.tier["a"].put(keys)
    assert waited(bench, keys, bench.request())[0] == 0, "it has gone over to computing"
    bench.tier["a"].end_all()
    bench.step()  # of the last lookup, which has seen the tier's results already
    bench.step()
    after = bench.figures("a")
    assert after["loaded_chunks"] == before["loaded_chunks"] + 8
    assert after["computing_seconds"] == before["computing_seconds"]
    assert after["saved_seconds"] == before["saved_seconds"]
