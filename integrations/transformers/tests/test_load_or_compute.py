"""The rule with numbers, and with a model over a directory that is slower than the model."""

import time

import pytest
import torch
from transformers import StoppingCriteriaList

from kvtiers.api import ConfigError
from kvtiers_transformers.load_or_compute import FirstToken, LoadOrCompute

from .conftest import greedy, loaded
from .models import make, prompt

GB = 1_000_000_000
SMALL = 1 << 20


def rule(*, computes=1.0, loads=None):
    """Return a rule that has measured the seconds for 4,096 tokens, and those for a GB."""
    found = LoadOrCompute()
    found.computed(4096, computes)
    if loads is not None:
        found.loaded(GB, loads)
    return found


def test_a_load_is_made_and_has_no_limit_before_anything_was_computed():
    new = LoadOrCompute()
    assert new.limit(4096, GB) == float("inf")
    new.loaded(GB, 1000.0)
    assert new.limit(4096, GB) == float("inf")
    assert new.skipped == 0


def test_the_few_tokens_behind_a_hit_say_nothing_of_what_a_long_prefix_takes_to_compute():
    found = LoadOrCompute()
    for _ in range(20):
        found.computed(16, 0.04)
    assert found.limit(8192, GB) == float("inf"), "nothing is known, and not 20 s"
    assert found.limit(16, SMALL) == pytest.approx(0.04)
    found.computed(1024, 0.03)
    assert found.limit(8192, GB) == pytest.approx(0.24)


def test_a_load_that_is_faster_may_take_as_long_as_computing():
    assert rule(computes=1.0).limit(4096, GB) == 1.0, "no load was measured"
    assert rule(computes=1.0, loads=0.5).limit(4096, GB) == 1.0
    assert rule(computes=1.0, loads=0.5).limit(4096, 2 * GB) == 1.0


def test_a_load_that_is_slower_is_refused():
    found = rule(computes=1.0, loads=1.5)
    assert found.limit(4096, GB) is None
    assert found.limit(4096, GB // 2) == 1.0
    assert found.skipped == 1


def test_every_16th_refused_load_is_made_within_its_limit():
    found = rule(computes=1.0, loads=4.0)
    answers = [found.limit(4096, GB) for _ in range(48)]
    assert answers == ([None] * 15 + [1.0]) * 3
    assert found.skipped == 45


def test_a_tier_that_is_fast_again_is_used_after_one_try():
    found = rule(computes=1.0, loads=4.0)
    while found.limit(4096, GB) is None:
        pass
    found.loaded(GB, 0.25)
    assert [found.limit(4096, GB) for _ in range(20)] == [1.0] * 20


def test_a_slower_measurement_counts_half():
    found = rule(computes=1.0, loads=0.25)
    found.loaded(GB, 1.0)
    assert found.limit(4096, GB) == 1.0, "0.625 s are expected"
    found.loaded(GB, 2.0)
    assert found.limit(4096, GB) is None, "1.3125 s"
    found.computed(4096, 3.0)
    assert found.limit(4096, GB) == 2.0


def test_small_loads_say_nothing_about_large_ones_and_take_the_same_time_whatever_their_length():
    found = rule(computes=1.0)
    found.loaded(1000, 0.5)
    assert found.limit(4096, GB) == 1.0
    assert found.limit(2048, SMALL) == 0.5
    assert found.limit(1024, SMALL) is None, "computing takes 0.25 s"
    found = rule(computes=1.0, loads=4.0)
    assert found.limit(64, SMALL) == 1 / 64


def test_lengths_are_remembered_by_powers_of_two_since_long_prompts_cost_more_a_token():
    found = LoadOrCompute()
    found.computed(1024, 0.25)
    assert found.limit(8192, GB) == 2.0, "of the longest that was measured"
    found.computed(8192, 8.0)
    assert found.limit(8192, GB) == 8.0
    assert found.limit(10240, GB) == 10.0, "within a power of two as many times as there are tokens"
    assert found.limit(4096, GB) == 4.0, "of the next longer"
    assert found.limit(1024, GB) == 0.25
    assert found.limit(512, GB) == 0.125
    assert found.limit(16384, GB) == 16.0


def test_the_first_token_is_seen_once_and_stops_nothing():
    first = FirstToken(5, torch.device("cpu"))
    assert first.seconds() is None
    assert first(torch.zeros(2, 3), None).tolist() == [False, False]
    seconds = first.seconds()
    assert seconds >= 0
    first(torch.zeros(2, 4), None)
    assert first.seconds() == seconds


@pytest.mark.parametrize("name", ["llama", "granite_hybrid"])
def test_a_prefix_is_not_loaded_where_computing_is_faster(name, open_cache):
    """Of a directory that gives 16 KiB a second: seconds for what these models compute in some hundredths of one."""
    model, ids = make(name), prompt(150)
    truth = greedy(model, ids)
    assert greedy(open_cache(model), ids) == truth
    slow = {"rate_limit": {"bytes_per_second": "16KiB"}}
    cache = open_cache(model, tier=slow, load="when_faster")
    assert greedy(cache, ids) == truth
    assert loaded(cache) == 144, "nothing is known"
    other = prompt(150, seed=2)
    found = cache.generate(other, max_new_tokens=1, do_sample=False)
    assert torch.equal(found, model.generate(other, max_new_tokens=1, do_sample=False))
    assert cache.stats()["skipped_loads"] == 0
    assert greedy(cache, ids) == truth
    assert loaded(cache) == 0
    assert cache.stats()["skipped_loads"] == 1
    always = open_cache(model, tier=slow)
    assert greedy(always, ids) == truth
    assert loaded(always) == 144
    assert always.stats()["skipped_loads"] == 0


def test_a_load_ends_when_computing_would_have_and_counts_as_twice_as_long(open_cache):
    model, ids = make("llama"), prompt(150)
    truth = greedy(open_cache(model), ids)
    cache = open_cache(model, tier={"rate_limit": {"bytes_per_second": "1KiB"}}, load="when_faster")
    assert cache.load(prompt(20, seed=3)).get_seq_length() == 0
    cache._rule.computed(144, 0.5)
    begin = time.monotonic()
    assert cache.load(ids).get_seq_length() == 0
    assert 0.5 <= time.monotonic() - begin < 20, "all of it would take 36 s"
    assert cache._rule._small_load >= 1.0
    assert cache.stats()["skipped_loads"] == 0
    assert cache.load(ids).get_seq_length() == 0
    assert cache.stats()["skipped_loads"] == 1
    assert greedy(model, ids) == truth


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_token_is_measured_and_the_callers_own_criteria_hold(device, open_cache):
    model, ids = make("llama", device=device), prompt(60).to(device)
    cache = open_cache(model, load="when_faster")
    seen = []

    def stops_at_63(input_ids, _scores, **_):
        seen.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= 63, device=device)

    mine = StoppingCriteriaList([stops_at_63])
    assert cache.generate(ids, max_new_tokens=9, do_sample=False, stopping_criteria=mine).shape[1] == 63
    assert seen == [61, 62, 63]
    assert mine == [stops_at_63]
    [(size, seconds)] = cache._rule._compute.items()
    assert size == (60).bit_length()
    assert 0 < seconds * 60 < 60
    assert cache.stats()["failed_calls"] == 0


def test_a_word_for_load_that_there_is_not_is_one_line(open_cache):
    with pytest.raises(ConfigError, match="load is 'never', expected one of: when_faster, always"):
        open_cache(make("llama"), load="never")
