"""Which prompts are loaded under vLLM's own tiering, where a tier is asked chunk by chunk."""

import pytest

from kvtiers.api import make_offload_key
from kvtiers.tiering.estimates import PrefillCost
from kvtiers.tiering.load_or_recompute import LATE
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers_vllm.own_tiering.build import OffTier
from kvtiers_vllm.own_tiering.prompts import Prompts

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(100)]
PER_TOKEN, PER_CHUNK = 0.001, 0.01  # a chunk of 32 tokens: loading takes a third of computing


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Bench:
    def __init__(self, load_wait=None, *, is_measured=True):
        self.clock = Clock()
        self.slot = TierSlot(0, OffTier(), TierOptions("near"))
        self.cost = PrefillCost(0.002)
        self.prompts = Prompts(self.slot, self.cost, [32], 0.02, load_wait, self.clock)
        if is_measured:
            self.cost.observe(1000, 1000 * PER_TOKEN)
            self.slot.rate.add(10, 10 * PER_CHUNK, self.clock.now)

    def comes(self, name, tokens):
        self.prompts.expect(name, tokens)
        prompt = self.prompts.new(name)
        self.prompts.came(prompt)
        return prompt


def test_a_prompt_is_loaded_as_a_whole_if_the_tier_has_it_sooner():
    bench = Bench()
    prompt = bench.comes("a", 320)
    assert all(bench.prompts.loads_chunk(prompt, key) for key in KEYS[:10])
    bench.slot.rate.add(64, 64 * 0.1, bench.clock.now)
    assert bench.prompts.loads_chunk(prompt, KEYS[9]), "what was decided in a step holds in it"
    bench.prompts.end_step()
    assert not bench.prompts.loads_chunk(prompt, KEYS[9])
    prompt.loading = 320
    prompt.is_loaded = True
    assert bench.prompts.loads_chunk(prompt, KEYS[9]), "and for as long as it has loads"


def test_what_one_step_decides_to_load_counts_as_the_tiers_queue_before_its_jobs_are_there():
    bench = Bench()
    decided = [bench.prompts.loads_chunk(bench.comes(str(number), 320), KEYS[0]) for number in range(5)]
    assert decided[:4] == [True, True, True, False], "0.1, 0.2, 0.3 and 0.4 s, beside 0.32 for computing"
    assert decided[4], "computing it takes 0.64 s, since the fourth is computed as well"


def test_where_others_wait_more_of_them_are_loaded():
    bench = Bench()
    prompts = [bench.comes(str(number), 320) for number in range(24)]
    decided = [bench.prompts.loads_chunk(prompt, KEYS[0]) for prompt in prompts]
    assert decided[:6] == [True] * 6, "up to twice as long as computing one"
    assert not decided[6]


def test_the_first_prompts_of_a_tier_that_has_brought_nothing_are_loaded_and_not_all_at_once():
    bench = Bench(is_measured=False)
    bench.slot.rate.prior = 0.05
    prompts = [bench.comes(str(number), 320) for number in range(24)]
    decided = [bench.prompts.loads_chunk(prompt, KEYS[0]) for prompt in prompts]
    assert decided[0]
    assert 1 < decided.count(True) < 6


def test_a_prompt_waits_for_its_loads_as_long_as_computing_what_they_bring_behind_the_others_takes():
    bench = Bench()
    bench.prompts.computes(bench.comes("before", 500))
    prompt = bench.comes("a", 3200)
    assert bench.prompts.loads_chunk(prompt, KEYS[0])
    assert bench.prompts.loads(prompt, 320) == pytest.approx(LATE * (500 + 320) * PER_TOKEN)
    assert bench.prompts.loads(prompt, 320) == pytest.approx(LATE * (500 + 640) * PER_TOKEN)


def test_a_prompt_of_unknown_length_is_loaded_unless_the_tier_is_silent():
    bench = Bench()
    prompt = bench.prompts.new("never expected")
    assert bench.prompts.loads_chunk(prompt, KEYS[0])
    bench.slot.rate.begins(bench.clock.now)
    bench.clock.now += 1.0
    bench.prompts.end_step()
    assert not bench.prompts.loads_chunk(prompt, KEYS[0])


def test_a_tier_that_is_too_slow_is_tried_with_some_chunks_of_one_prompt_every_five_seconds():
    bench = Bench()
    bench.slot.rate.add(64, 64 * 1.0, bench.clock.now)
    assert not bench.prompts.loads_chunk(bench.comes("a", 3200), KEYS[0])
    bench.clock.now += 5.0
    prompt = bench.comes("b", 3200)
    assert [bench.prompts.loads_chunk(prompt, key) for key in KEYS[:20]] == [True] * 16 + [False] * 4
    assert not bench.prompts.loads_chunk(bench.comes("c", 3200), KEYS[0])


def test_a_load_wait_that_was_given_loads_all_but_from_a_tier_that_is_silent_for_longer():
    bench = Bench(load_wait=0.5)
    bench.slot.rate.add(64, 64 * 10.0, bench.clock.now)
    assert bench.prompts.loads_chunk(bench.comes("a", 320), KEYS[0])
    assert bench.prompts.loads(bench.comes("b", 320), 320) == 0.5
    bench.slot.rate.begins(bench.clock.now)
    bench.clock.now += 0.6
    assert not bench.prompts.loads_chunk(bench.comes("c", 320), KEYS[0])


def test_what_is_expected_and_never_comes_is_forgotten_and_what_ends_waits_no_longer():
    bench = Bench()
    for number in range(10_000):
        bench.prompts.expect(str(number), 100)
    assert len(bench.prompts._expected) < 5_000
    prompt = bench.comes("a", 320)
    assert bench.prompts.loads_chunk(prompt, KEYS[0])
    bench.prompts.taken_up(prompt)
    assert (bench.prompts._gpu.waiting, bench.prompts._promised) == (0, 0)
