"""The GPU's queue before a request, and the line for a tier's rows."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.load_or_recompute import LATE
from kvtiers.types import RequestContext

from .harness import Bench, chain
from .load_benches import KEYS, measure, prefill, roomy, waited


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


@pytest.mark.parametrize("computed", [0, 48])
def test_a_request_of_which_nothing_can_be_looked_up_is_before_the_others_and_no_longer_behind_them(computed):
    bench = roomy()
    bench.manager.on_new_request(short := RequestContext("short"), 100)
    assert bench.manager._waits.gpu.waiting == 100
    for _ in range(2):
        assert bench.manager.reach((), short, computed)[:3] == (0, 0, False)
    assert bench.manager._waits.gpu.waiting == 0
    assert bench.manager._waits.gpu.ahead == 100 - computed


def test_a_request_whose_prompt_is_not_told_counts_when_its_keys_are_known():
    bench = roomy()
    bench.manager.on_new_request(ctx := RequestContext("grows"))
    assert bench.manager.reach((), ctx, 0)[:3] == (0, 0, False)
    assert bench.manager._waits.gpu.ahead == 0
    bench.lookup(KEYS, ctx)
    assert bench.manager._waits.gpu.ahead > 0


def test_a_prompt_without_keys_is_nothing_whatever_was_computed():
    assert roomy().manager.reach((), RequestContext("r"), -1)[:3] == (0, 0, False)


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


def test_a_request_that_has_stood_in_line_for_long_enough_stands_there_again_once_it_was_preempted():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.25, all_tiers=0.5)
    bench = Bench(rows=64, options=options, hold=True)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 0.1)
    first, second, third = (chain(name, 16) for name in ("first", "second", "third"))
    bench.tier["a"].put(first + second + third)
    assert bench.lookup(first, bench.request()) == (0, 16, False)
    ctx = bench.request()
    assert waited(bench, second, ctx)[0] == 0
    assert bench.figures("a")["budget_misses"] == 1
    bench.tier["a"].end_all()
    bench.step()
    assert bench.lookup(third, bench.request()) == (0, 16, False)
    assert bench.lookup(second, ctx) == (0, 0, False)
    bench.manager.on_request_preempted(ctx)
    assert bench.lookup(second, ctx) == (0, 0, True)


def test_a_request_in_line_notices_that_its_chunks_have_come():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.25, all_tiers=0.5)
    bench = Bench(rows=64, options=options, hold=True)
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 * 0.1)
    first, second = chain("first", 16), chain("second", 16)
    bench.tier["a"].put(first + second)
    bench.lookup(first, bench.request())
    ctx = bench.request()
    assert bench.lookup(second, ctx) == (0, 0, True)
    bench.manager.complete_store(bench.begin_store(second))
    bench.step(0.001)
    assert bench.lookup(second, ctx) == (16, 0, False)


def test_a_request_in_line_gets_what_is_missing_when_its_turn_comes():
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
    bench.tier["a"].end_all()
    bench.step()
    assert bench.lookup(second, ctx) == (3, 13, False), "it is not there any more, and comes with the others"


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


@settings(max_examples=15)
@given(
    large=st.integers(9, 40),
    small=st.integers(1, 8),
    others=st.integers(0, 5),
    speed=st.sampled_from([1.2, 5.0, 20.0]),
    windows=st.booleans(),
)
def test_behind_smaller_loads_that_never_end_a_large_one_waits_for_a_bounded_time(large, small, others, speed, windows):
    """It may be larger than the tier's rows, which it then gets part by part; each time others may have them.

    The bound is twice what computing it takes behind the prompts ahead: in line, then while it loads.
    """
    groups = 2 if windows else 1
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.0625, all_tiers=0.5)
    bench = Bench(256, {"a": {}}, (16,) * groups, options, hold=True, windows=(0, 2)[:groups])
    prefill(bench)
    measure(bench, 4 * 16 * 0.001 / speed)
    tier, names = bench.tier["a"], itertools.count()

    def ask_for(chunks):
        prompt = [chain(f"p{next(names)}-", chunks, group) for group in range(groups)]
        for keys in prompt:
            tier.put(keys)
        return bench.request(), prompt

    smaller, own, ends, free_at, most_ahead = [], None, {}, 0.0, 0.0
    for step in range(2000):
        smaller += [ask_for(small) for _ in range(others - len(smaller))]
        if step == 2:
            own, began = ask_for(large), bench.clock.now
        for ctx, prompt in [*smaller[:1], *([own] if own else []), *smaller[1:]]:
            most_ahead = max(most_ahead, bench.manager._waits.gpu.ahead)
            _, pending, unresolved = bench.reach(prompt, ctx)
            if not pending and not unresolved:
                if (ctx, prompt) == own:
                    tokens = 16 * large + most_ahead
                    assert bench.clock.now - began <= LATE * (2 * tokens + 16 * 16) * 0.001 + 0.01
                    return
                smaller.remove((ctx, prompt))
                bench.manager.on_request_finished(ctx)
        bench.step(0.004)
        for number, held in list(tier.held.items()):
            if number not in ends:
                free_at = max(free_at, bench.clock.now) + len(held.job.keys) * 16 * 0.001 / speed
                ends[number] = free_at
            if ends[number] <= bench.clock.now:
                tier.end(number)
    raise AssertionError("it waits for ever")
