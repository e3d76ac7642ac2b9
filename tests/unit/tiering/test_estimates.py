"""What computing and loading cost is estimated from measurements, and no single outlier decides for long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.tiering.estimates import LEAST_STEP, LoadRate, PrefillCost, prior_seconds_per_token


def load(rate, now, chunks, seconds):
    """One job that has the tier to itself; return when it has ended."""
    ticket = rate.begins(now)
    rate.ends(ticket, chunks, seconds, now + seconds)
    rate.look_ends(now + seconds)
    return now + seconds


def test_a_prior_stands_until_something_was_computed_and_no_longer():
    cost = PrefillCost(131e-6)
    assert (cost.seconds_per_token, cost.is_measured) == (131e-6, False)
    cost.observe(8192, 0.25)
    assert cost.seconds_per_token == pytest.approx(0.25 / 8192)


def test_an_estimate_that_is_dearer_than_the_prior_is_the_prior_and_a_cheaper_one_is_not():
    """Of an engine on a CPU: by a GPU's prior its first loads would be given up at once."""
    dear, cheap = PrefillCost(prior=2e-6, estimate=7e-4), PrefillCost(prior=2e-6, estimate=1e-6)
    assert (dear.seconds_per_token, dear.estimate) == (7e-4, 7e-4)
    assert (cheap.seconds_per_token, cheap.estimate) == (2e-6, 1e-6)
    assert PrefillCost(prior=2e-6).estimate == 2e-6


def test_the_prior_is_an_engine_that_makes_a_gigabyte_of_kv_a_second():
    page = 16 * 4096  # of 16 tokens, in each of 32 tensors: Llama 3.1 8B in bfloat16
    tensors = tuple(KVTensor(f"t{number}", 0, page) for number in range(32))
    layout = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), tensors)
    assert prior_seconds_per_token(layout) == pytest.approx(131e-6, rel=0.01)


def test_slow_steps_at_the_start_do_not_decide_once_there_is_one_good_one_for_two_of_them():
    cost = PrefillCost()
    for seconds in (3.6, 3.6, 0.25):
        cost.observe(8192, seconds)
    assert cost.seconds_per_token == pytest.approx(0.25 / 8192)


def test_steps_after_hits_which_compute_few_tokens_do_not_make_tokens_dear_however_many_there_are():
    cost = PrefillCost()
    cost.observe(8192, 0.25)
    for _ in range(100):
        cost.observe(16, 0.02)
    assert cost.seconds_per_token == pytest.approx(0.25 / 8192)


def test_a_step_of_a_few_tokens_is_no_price_however_many_there_are_and_whatever_they_take():
    cost = PrefillCost(prior=150e-6, estimate=20e-6)
    for _ in range(100):
        cost.observe(16, 0.044)
    assert not cost.is_measured
    assert cost.seconds_per_token == pytest.approx(60e-6)
    assert cost.seconds(8192, 4096) is None


steps = st.lists(
    st.tuples(st.integers(1, 16_384), st.floats(0.0001, 10.0), st.floats(0.0, 100_000.0)), min_size=1, max_size=40
)


@settings(max_examples=100, deadline=None)
@given(steps)
def test_no_step_of_fewer_than_512_tokens_changes_the_price(seen):
    of_all, of_the_long = PrefillCost(1e-4), PrefillCost(1e-4)
    for tokens, seconds, position in seen:
        of_all.observe(tokens, seconds, position)
        if tokens >= LEAST_STEP:
            of_the_long.observe(tokens, seconds, position)
        assert of_all.seconds_per_token == of_the_long.seconds_per_token
        assert of_all.is_measured is of_the_long.is_measured
        assert of_all.seconds(100, 50.0) == of_the_long.seconds(100, 50.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 8_192), min_size=1, max_size=40), st.floats(0.0, 0.1), st.floats(1e-6, 1e-3))
def test_the_price_is_that_of_a_token_without_the_steps_fixed_cost_once_two_lengths_were_seen(lengths, fixed, token):
    cost = PrefillCost(1e-4)
    for tokens in lengths:
        cost.observe(tokens, fixed + token * tokens)
    said = [tokens for tokens in lengths if tokens >= LEAST_STEP]
    if not said:
        assert cost.seconds_per_token == 1e-4
        return
    assert token * (1 - 1e-6) <= cost.seconds_per_token <= (token + fixed / min(said)) * (1 + 1e-6)
    if len(said) < 9 and max(said) >= 2 * min(said):
        assert cost.seconds_per_token <= max(token, (token + fixed / min(said)) / 8) * (1 + 1e-6)


def test_a_fixed_cost_of_steps_is_no_tokens_price():
    """Six hundred new tokens a turn, as of a chat whose history is loaded; one long prompt was computed before."""
    cost = PrefillCost()
    for tokens in (8192, *[600] * 30):
        cost.observe(tokens, 0.04 + 18.7e-6 * tokens)
    assert cost.seconds_per_token == pytest.approx(18.7e-6)


@pytest.mark.parametrize(("estimate", "seconds"), [(20e-6, 10e-6), (1.0, 0.13 / 5440), (0.0, 0.13 / 8 / 5440)])
def test_steps_that_take_the_same_for_few_tokens_as_for_many_do_not_make_tokens_cheaper_than_they_can_be(
    estimate, seconds
):
    """The last tokens of bursts that were loaded, in an engine that launches for .1 s whatever the step computes."""
    cost = PrefillCost(150e-6, estimate)
    for tokens in (544, 816, 2720, 5440):
        cost.observe(tokens, 0.13)
    assert cost.seconds_per_token == pytest.approx(seconds)


def test_a_step_whose_end_was_seen_with_that_of_the_one_before_says_nothing():
    """The last step of a burst that was loaded, launched before the report of the last but one was read."""
    cost = PrefillCost(150e-6, 24.5e-6)
    for tokens, seconds in ((816, 0.122), (816, 0.153), (1_088, 0.09), (3_808, 0.0135)):
        cost.observe(tokens, seconds, 7_900.0)
    assert 12.25e-6 <= cost.seconds_per_token <= 0.153 / 816
    assert cost.seconds(16_384, 7_900.0) >= 16_384 * 12.25e-6


def test_an_estimate_that_most_steps_refute_is_not_believed():
    """Of an engine that computes in 4 bits, say; a step in three is disturbed."""
    cost = PrefillCost(150e-6, 80e-6)
    for tokens, factor in ((8_192, 10), (8_192, 1), (4_096, 1), (8_192, 3), (8_192, 1), (4_096, 1)):
        cost.observe(tokens, factor * 20e-6 * tokens)
    assert cost.seconds_per_token == pytest.approx(20e-6)


@pytest.mark.parametrize("seconds", [0.13, 0.3])
def test_the_launch_of_a_burst_s_last_tokens_makes_neither_waits_long_nor_savings_large(seconds):
    """The first step after a restart: 544 tokens of two prompts that were loaded, all of it launches and first uses."""
    cost = PrefillCost(150e-6, 20e-6)
    cost.observe(544, seconds, 7_900.0)
    assert cost.seconds_per_token == 20e-6
    assert cost.seconds(24 * 7_920, 4_000.0) == pytest.approx(24 * 7_920 * 20e-6)


def test_an_engine_slower_than_its_estimate_is_believed_by_steps_that_are_no_launches():
    cost = PrefillCost(150e-6, 20e-6)
    cost.observe(2_048, 1.0)
    assert cost.seconds_per_token == 1.0 / 2_048
    cost = PrefillCost(150e-6, 20e-6)
    cost.observe(600, 0.3)
    cost.observe(1_200, 0.6)
    assert cost.seconds_per_token == pytest.approx(0.5e-3)


@pytest.mark.parametrize("estimate", [0.0, 20e-6, 1.0])
def test_the_prior_is_not_far_above_the_engines_own_estimate(estimate):
    cost = PrefillCost(150e-6, estimate)
    assert cost.seconds_per_token == pytest.approx({0.0: 150e-6, 20e-6: 60e-6, 1.0: 1.0}[estimate])


def test_of_jobs_that_run_side_by_side_the_clock_counts_and_not_the_sum_of_their_own_seconds():
    rate = LoadRate()
    tickets = [rate.begins(10.0) for _ in range(8)]
    for ticket in tickets:
        rate.ends(ticket, 64, 0.16, 10.16)
    rate.look_ends(10.16)
    assert rate.seconds_per_chunk == pytest.approx(0.16 / (8 * 64))


def test_of_a_job_alone_its_own_seconds_count_and_not_when_the_engine_has_seen_its_end():
    rate = LoadRate()
    ticket = rate.begins(10.0)
    rate.ends(ticket, 64, 0.02, 10.5)
    rate.look_ends(10.5)
    assert rate.seconds_per_chunk == pytest.approx(0.02 / 64)


def test_loads_of_several_lengths_separate_latency_and_rate():
    rate, now = LoadRate(), 10.0
    for chunks in (4, 64, 16, 32):
        now = load(rate, now + 0.1, chunks, 0.05 + chunks * 0.001)
    assert rate.latency == pytest.approx(0.05, rel=0.01)
    assert rate.seconds_per_chunk == pytest.approx(0.001, rel=0.01)
    assert rate.expected(1000, 0, now) == pytest.approx(1.05, rel=0.01)


def test_one_load_that_takes_far_longer_changes_nothing():
    rate, now = LoadRate(), 10.0
    for seconds in (0.01, 0.01, 5.0, 0.01):
        now = load(rate, now, 64, seconds)
    assert rate.seconds_per_chunk == pytest.approx(0.01 / 64)


def test_a_trial_outweighs_what_was_before_it():
    rate = LoadRate()
    now = load(rate, 10.0, 512, 5.0)
    load(rate, now + 5.0, 16, 0.0016)
    assert rate.seconds_per_chunk == pytest.approx(0.0001)


def test_a_tier_that_brings_nothing_counts_as_at_least_as_slow_as_it_has_been_silent():
    rate = LoadRate()
    load(rate, 10.0, 64, 0.01)
    hung = rate.begins(20.0)
    assert rate.stalled(20.7) == pytest.approx(0.7)
    assert rate.expected(1, 0, 20.7) == pytest.approx(0.7)
    newer = rate.begins(20.8)
    rate.ends(newer, 64, 0.01, 20.9)
    assert rate.stalled(25.0) == 0.0, "a single job that hangs is none of the others' concern"
    rate.drop(hung)
    assert rate.stalled(25.0) == 0.0


def test_before_the_first_load_others_stand_before_a_request_by_a_prior_and_its_own_chunks_by_nothing():
    rate = LoadRate(prior=0.008)
    assert rate.expected(1000, 0, 10.0) == 0.0
    assert rate.expected(1000, 64, 10.0) == pytest.approx(0.512)
