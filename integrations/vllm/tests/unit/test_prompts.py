"""Which prompts are loaded under vLLM's own tiering, where a tier is asked chunk by chunk."""

import gc
from dataclasses import dataclass

import pytest

from kvtiers.api import make_offload_key
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.load_or_recompute import LATE
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers.types import RequestContext
from kvtiers_vllm.own_tiering.build import OffTier
from kvtiers_vllm.own_tiering.prompts import Prompts

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(100)]
PER_TOKEN, PER_CHUNK = 0.001, 0.02  # a chunk of 32 tokens: loading takes less than computing, and no fifth of it


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@dataclass(eq=False)
class Request:
    """vLLM's."""

    request_id: str
    num_prompt_tokens: int


class Bench:
    def __init__(self, load_wait=None, *, is_measured=True, per_chunk=PER_CHUNK, groups=1):
        self.clock = Clock()
        self.slot = TierSlot(0, OffTier(), TierOptions("near"))
        options = TieringOptions(0.02, load_wait, prior_seconds_per_token=0.002)
        self.prompts = Prompts(self.slot, options, [32] * groups, self.clock)
        self.waits = self.prompts.waits
        if is_measured:
            self.waits.cost.observe(1000, 1000 * PER_TOKEN)
            self.slot.rate.add(10, 10 * per_chunk, self.clock.now)

    def comes(self, name, tokens):
        shown = Request(name, tokens)
        self.prompts.expect(shown)
        prompt = self.prompts.new(RequestContext(name))
        self.waits.came(prompt.state)
        return prompt

    def waited(self, prompt):
        """Return for how many milliseconds from now on a request waits for its loads."""
        began = self.clock.now
        while not self.prompts.wait_is_over(prompt):
            self.clock.now += 0.001
        return (self.clock.now - began) * 1000


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
    assert decided[:2] == [True, False], "0.2 and 0.4 s, beside 0.32 for computing"
    assert decided[2:] == [True, True, False], "0.4, 0.6 and 0.8 s, beside 0.64: the second is computed as well"
    bench.prompts.end_step()
    assert bench.prompts.loads_chunk(bench.comes("next", 320), KEYS[0]), "what has no jobs by then gets none"


def test_where_others_wait_more_of_them_are_loaded():
    bench = Bench()
    prompts = [bench.comes(str(number), 320) for number in range(24)]
    decided = [bench.prompts.loads_chunk(prompt, KEYS[0]) for prompt in prompts]
    assert decided[:3] == [True] * 3, "up to twice as long as computing one"
    assert not decided[3]


def test_of_a_tier_that_is_fast_a_burst_is_loaded_whole():
    bench = Bench(per_chunk=0.01)
    prompts = [bench.comes(str(number), 320) for number in range(24)]
    assert all(bench.prompts.loads_chunk(prompt, KEYS[0]) for prompt in prompts)


def test_the_first_prompts_of_a_tier_that_has_brought_nothing_are_loaded_and_not_all_at_once():
    bench = Bench(is_measured=False)
    bench.slot.rate.prior = 0.1
    prompts = [bench.comes(str(number), 320) for number in range(24)]
    decided = [bench.prompts.loads_chunk(prompt, KEYS[0]) for prompt in prompts]
    assert decided[0]
    assert 1 < decided.count(True) < 6


@pytest.mark.parametrize("loads", [1, 2])
def test_a_prompt_waits_for_its_loads_as_long_as_computing_what_they_bring_behind_the_others_takes(loads):
    bench = Bench()
    bench.prompts.computes(bench.comes("before", 500))
    prompt = bench.comes("a", 3200)
    assert bench.prompts.loads_chunk(prompt, KEYS[0])
    for _ in range(loads):
        bench.prompts.load_begins(prompt, 10, 320)
    assert bench.waited(prompt) == pytest.approx(LATE * (500 + loads * 320), abs=1.1)


def test_a_request_waits_no_longer_once_computing_is_clearly_sooner():
    bench = Bench()
    prompt = bench.comes("a", 320)
    bench.prompts.load_begins(prompt, 10, 320)
    bench.clock.now += 0.001
    assert not bench.prompts.wait_is_over(prompt)
    bench.slot.rate.add(64, 64 * 1.0, bench.clock.now)
    assert bench.prompts.wait_is_over(prompt)
    assert prompt.state.is_overtaken


def test_loads_behind_a_request_do_not_end_its_wait():
    bench = Bench(per_chunk=0.03)
    first, second = bench.comes("a", 320), bench.comes("b", 320)
    for prompt in (first, second):
        bench.prompts.load_begins(prompt, 10, 320)
    bench.clock.now += 0.001
    assert not bench.prompts.wait_is_over(first), "0.3 s, beside 0.32 for computing"
    assert bench.prompts.wait_is_over(second), "0.6 s"


@pytest.mark.parametrize(("groups", "is_over"), [(1, True), (2, False)])
def test_what_is_left_of_a_load_is_compared_with_its_own_tokens_or_with_all_where_a_part_is_no_use(groups, is_over):
    bench = Bench(per_chunk=0.05, groups=groups)
    prompt = bench.comes("a", 320)
    for _ in range(2):
        bench.prompts.load_begins(prompt, 5, 160)
    bench.prompts.load_ends(prompt, 5)
    bench.clock.now += 0.001
    assert bench.prompts.wait_is_over(prompt) == is_over, "0.25 s, beside 0.16 or 0.32 for computing"


def test_a_prompt_that_was_preempted_is_decided_anew():
    bench = Bench(per_chunk=0.03)
    prompt = bench.comes("a", 320)
    bench.prompts.load_begins(prompt, 10, 320)
    bench.prompts.load_ends(prompt, 10)
    bench.prompts.computes(prompt)
    prompt = bench.prompts.preempted(prompt)
    bench.clock.now += 100.0
    bench.prompts.end_step()
    assert bench.prompts.loads_chunk(prompt, KEYS[0]), "0.3 s, beside 0.32 for computing"
    bench.prompts.load_begins(prompt, 10, 320)
    bench.clock.now += 0.001
    assert not bench.prompts.wait_is_over(prompt), "what was loaded before is no part of it"


def test_what_came_for_others_while_a_prompt_was_computed_makes_its_next_wait_no_longer():
    bench = Bench(per_chunk=0.01)
    prompt, other = bench.comes("a", 320), bench.comes("b", 32_000)
    bench.prompts.load_begins(prompt, 10, 320)
    bench.prompts.load_ends(prompt, 10)
    bench.prompts.computes(prompt)
    prompt = bench.prompts.preempted(prompt)
    bench.prompts.load_begins(other, 1000, 32_000)
    bench.prompts.load_ends(other, 1000)
    bench.clock.now += 100.0
    bench.prompts.load_begins(prompt, 10, 320)
    assert bench.waited(prompt) == pytest.approx(LATE * 320, abs=1.1)


def test_of_a_session_each_input_is_computed_once_and_all_of_them_are_looked_up_after_a_preemption():
    bench = Bench()
    prompt = bench.comes("a", 3200)
    bench.prompts.computes(prompt)
    assert bench.waits.gpu.ahead == 3200
    bench.clock.now += 3200 * PER_TOKEN
    bench.prompts.expect(Request("a", 64))
    prompt.shown.num_prompt_tokens += 64
    bench.prompts.computes(prompt)
    assert bench.waits.gpu.ahead == pytest.approx(64)
    assert (prompt.before, bench.prompts.preempted(prompt).state.prompt_tokens) == (3200, 3264)
    prompt = bench.prompts.preempted(prompt)
    bench.clock.now += 64 * PER_TOKEN
    prompt.shown.num_prompt_tokens += 32
    bench.prompts.computes(prompt)
    assert bench.waits.gpu.ahead == pytest.approx(32)


def test_the_inputs_that_come_before_a_session_is_announced_do_not_stand_for_it():
    bench = Bench()
    first, second = Request("a", 3200), Request("a", 64)
    for shown in (first, second):
        bench.prompts.expect(shown)
    assert bench.prompts.new(RequestContext("a")).state.prompt_tokens == 3200


def test_a_prompt_of_unknown_length_is_loaded_unless_the_tier_is_silent():
    bench = Bench()
    prompt = bench.prompts.new(RequestContext("never expected"))
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
    prompt = bench.comes("b", 320)
    bench.prompts.load_begins(prompt, 10, 320)
    assert bench.waited(prompt) == pytest.approx(500, abs=1.1)
    bench.slot.rate.begins(bench.clock.now)
    bench.clock.now += 0.6
    assert not bench.prompts.loads_chunk(bench.comes("c", 320), KEYS[0])


def test_what_is_expected_and_never_comes_is_forgotten_and_what_ends_waits_no_longer():
    bench = Bench()
    for number in range(10):
        bench.prompts.expect(Request(str(number), 100))
    gc.collect()
    assert not bench.prompts._expected
    prompt = bench.comes("a", 320)
    assert bench.prompts.loads_chunk(prompt, KEYS[0])
    bench.waits.taken_up(prompt.state)
    bench.prompts.end_step()
    assert (bench.waits.gpu.waiting, bench.slot.promised_chunks) == (0, 0)
