"""No request waits longer for a tier than computing its prompt would take."""

import pytest

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.load_or_recompute import LATE

from .harness import HIT, RETRY, Bench, chain
from .load_benches import KEYS, bench_with, by_tier, measure, prefill, roomy, waited


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


def test_auto_waits_for_all_of_a_prefix_that_is_longer_than_one_call_reserves_or_a_tier_may_pin():
    options = TieringOptions(lookup_wait=0.02, load_wait=None, one_tier=0.4, all_tiers=0.8)
    bench = Bench(rows=8192, tiers={"a": {}}, options=options, hold=True)
    prefill(bench)
    measure(bench, 0.001)
    tier = bench.tier["a"]
    tier.hold = False
    tier.put(keys := chain("long", 6000))
    ready, seconds = waited(bench, keys, bench.request(), tick=1.0)
    assert ready == 6000
    assert [len(job.keys) for job in tier.loads[1:]] == [448] * 13 + [176]
    assert seconds < LATE * 6000 * 16 * 0.001


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
    for found in (448, 896, 1344, 1500, 1500):
        assert bench.lookup(keys, ctx) == (0, found, found < 1500)
        bench.step(0.01)
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


def test_auto_loads_the_window_of_a_prefix_with_it():
    bench = hybrid(windows=(0, 4))
    measure(bench, 4 * 16 * 0.001 * 0.1)
    prompt = [chain("k", 100), chain("k", 100, group=1)]
    bench.tier["a"].put(prompt[0] + prompt[1])
    assert bench.reach(prompt, bench.request()) == (0, 1600, False)
    assert bench.figures()["recomputed_cheaper"] == 0


def test_auto_does_not_load_two_groups_that_together_cost_more_than_computing():
    for share, loads in ((0.45, True), (0.6, False)):
        bench = roomy(tokens_per_chunk=(16, 16))
        measure(bench, 4 * 16 * 0.001 * share)
        prompt = [KEYS, chain("k", 8, group=1)]
        bench.tier["a"].put(prompt[0] + prompt[1])
        assert bench.reach(prompt, bench.request()) == (0, 128 if loads else 0, False)


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


@pytest.mark.parametrize("windows", [(), (0, 4)], ids=["one group", "windows"])
def test_a_slow_tier_is_measured_again_once_in_a_while_with_a_few_chunks_and_no_request_waits_for_them(windows):
    bench = bench_with(load_wait=None, rows=256, windows=windows, tokens_per_chunk=(16, 16))
    prefill(bench)
    measure(bench, 40.0)
    tier, keys = bench.tier["a"], chain("many", 60)
    tier.put(keys)
    assert bench.lookup(keys, bench.request()) == (0, 0, False)
    bench.step(5.1)
    ctx = bench.request()
    assert bench.lookup(keys, ctx) == (0, 0, False)
    bench.step()
    assert [job.keys for job in tier.loads[1:]] == [tuple(keys[:16])]
    assert bench.lookup(keys, ctx) == (0, 0, False), "it is computed meanwhile"
    assert bench.lookup(chain("x", 1), bench.request()) == (0, 0, False)
    tier.seconds = 16 * 0.001
    tier.end_all()
    bench.step()
    assert bench.lookup(keys, bench.request()) == (16, 44, False)
    assert bench.unused_rows() + 44 == 256


def hybrid(windows=(0, 8, 8), rows=4096, **more):
    """A bench of a model with full attention and groups of windows, whose chunks hold 16 tokens each."""
    return roomy(tokens_per_chunk=(16,) * len(windows), windows=windows, rows=rows, **more)


def prompt_of(bench, name="k", chunks=8):
    """A prompt's keys by group, of which a tier has those that its end needs."""
    prompt = [chain(name, chunks, group) for group in range(len(bench.windows))]
    for keys, window in zip(prompt, bench.windows, strict=True):
        bench.tier["a"].put(keys[-window:])
    return prompt


def test_a_load_is_weighed_with_the_chunks_of_all_windows_and_states_before_its_end():
    """Of 8 chunks' tokens 24 chunks come: at three times what each may cost it is computed, and nothing is loaded."""
    for share, loads in ((0.3, True), (0.4, False)):
        bench = hybrid()
        measure(bench, 4 * 16 * 0.001 * share)
        assert bench.reach(prompt_of(bench), bench.request()) == (0, 128 if loads else 0, False)
        bench.step()
        assert bool(bench.tier["a"].held) is loads


def test_a_prompt_with_windows_is_decided_once_and_loaded_whole_or_not_at_all():
    """A long prefix was found in parts; with 85 % of it on its way the rest looked too slow, and all was dropped."""
    bench = hybrid(windows=(0, 8))
    measure(bench, 4 * 16 * 0.001 * 0.9)
    prompt = prompt_of(bench, "long", 1500)
    ctx = bench.request()
    for _ in range(4):
        assert bench.reach(prompt, ctx)[0] == 0
        bench.step(0.3)
    assert bench.reach(prompt, ctx) == (0, 24_000, False)
    slow = hybrid(windows=(0, 8))
    measure(slow, 4 * 16 * 0.001 * 0.997)
    assert slow.reach(prompt_of(slow, "long", 1500), slow.request()) == (0, 0, False), (
        "its prefix alone would have paid"
    )


def test_no_prompt_with_windows_is_computed_in_part_as_a_trial():
    options = TieringOptions(load_wait=None, prior_seconds_per_token=0.001, one_tier=0.8, all_tiers=0.8)
    keys = chain("long", 600)
    for windows, loaded in (((), 563), ((0, 8), 600)):
        bench = Bench(rows=4096, options=options, hold=True, tokens_per_chunk=(16, 16), windows=windows)
        measure(bench, 0.004)
        prompt = [keys, chain("long", 600, group=1)[: 600 if windows else 0]]
        bench.tier["a"].put(prompt[0] + prompt[1])
        ctx = bench.request()
        for _ in range(3):
            found = bench.reach(prompt[: max(1, len(windows))], ctx)
            bench.step()
        assert found == (0, 16 * loaded, False)


@pytest.mark.parametrize(("estimate", "loaded"), [(0.0, 563), (0.001, 600)])
def test_no_prompt_is_computed_in_part_as_a_trial_where_the_engine_has_an_estimate(estimate, loaded):
    options = TieringOptions(
        load_wait=None,
        prior_seconds_per_token=0.001,
        estimated_seconds_per_token=estimate,
        one_tier=0.8,
        all_tiers=0.8,
    )
    bench = Bench(rows=4096, options=options, hold=True)
    measure(bench, 0.004)
    keys = chain("long", 600)
    bench.tier["a"].put(keys)
    ctx = bench.request()
    for _ in range(3):
        found = bench.reach([keys], ctx)
        bench.step()
    assert found == (0, 16 * loaded, False)


@pytest.mark.parametrize("chunks", [8, 100])
def test_the_windows_of_a_prefix_are_waited_for_as_long_as_computing_the_prefix_takes(chunks):
    """However few chunks they are, or many: 40 of five groups, of a prefix that is here."""
    bench = hybrid(windows=(0, 8, 8, 8, 8, 8))
    prompt = [chain("k", chunks, group) for group in range(6)]
    bench.manager.complete_store(bench.begin_store(prompt[0]))
    bench.tier["a"].put([key for keys in prompt[1:] for key in keys[-8:]])
    ctx = bench.request()
    assert bench.reach(prompt, ctx)[1] > 0
    bench.step()
    bench.step(LATE * chunks * 16 * 0.001 - 0.01)
    assert bench.reach(prompt, ctx)[1] > 0
    bench.step(0.02)
    assert bench.reach(prompt, ctx) == (0, 0, False)


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
