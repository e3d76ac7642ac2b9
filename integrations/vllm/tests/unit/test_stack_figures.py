"""What the whole stack says of itself, and how it reckons what it saves."""

import math
from collections import defaultdict

import pytest

from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.status import Troubles, ask
from kvtiers_vllm.stack.figures import StackFacts, StackFigures, definitions, open_stack_status
from kvtiers_vllm.stack.steps import PassLimit, StepClock

LAYOUT = CacheLayout(ModelIdentity("model"), (KVGroup("full", 16),), (KVTensor("a", 0, 4096),), blocks_per_chunk=4)
TIER = dict.fromkeys(("loaded_bytes", "stored_chunks", "stored_bytes", "unread_bytes", "loading_chunks"), 0)

WHAT_IF = {
    "policy": "lru", "rows": 8, "sampled": 0.5, "chunks": 100, "infinite": 0.5, "hit_rates": {"lru": {"0.25": 0.125}},
    "adds": {"near": 0.25}, "capacity": 1, "dropped": 4, "seconds": 0.5,
}  # fmt: skip


class Collection:
    def __init__(self):
        self.counters = defaultdict(float)
        self.gauges = {}

    def increase_counter(self, name, value, labels):
        self.counters[name, labels] += value

    def set_gauge(self, name, value, labels):
        self.gauges[name, labels] = value


@pytest.fixture
def stats():
    late = {"wait_expired": 5, "recomputed_cheaper": 6}
    own = {"open": 1, "breaker_state": 0, "lookup_seconds": 0.25}
    tier = TIER | late | {"hits": 3, "prefix_hits": 3, "load_seconds": 0.5, "own": own}
    tier |= {"loads": 2, "computing_seconds": 1.92, "saved_seconds": 1.5}
    return {"engine": {"lookups": 8}, "primary": {"rows": 16, "free_rows": 5}, "tiers": {"near": tier}}


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def steps(clock):
    return StepClock(clock)


@pytest.fixture
def facts(stats):
    return StackFacts(lambda: stats, LAYOUT, shared=True)


def test_tokens_are_a_prompts_and_not_those_of_each_of_its_groups(stats):
    """A window group has few chunks of a long prompt: 100 of the one and 4 of the other are 100 chunks' tokens."""
    groups = (KVGroup("window", 32, "sliding_window", 128), KVGroup("full", 16))
    hybrid = CacheLayout(ModelIdentity("model"), groups, (KVTensor("a", 0, 64), KVTensor("b", 1, 64)))
    facts = StackFacts(lambda: stats, hybrid, shared=True)
    assert facts.tokens({"hits": 104, "prefix_hits": 100}) == 1600


def test_counters_are_what_was_added_and_gauges_what_is(facts, stats, clock):
    report = StackFigures(facts, Collection, clock)
    first = report()
    assert first.counters["kvtiers_tier_hits", ("near",)] == 3
    assert first.counters["kvtiers_lookups", ()] == 8
    assert first.counters["kvtiers_tier_lookup_seconds", ("near",)] == 0.25
    assert first.gauges["kvtiers_primary_free_rows", ()] == 5
    assert first.gauges["kvtiers_tier_shared", ("near",)] == 1
    stats["tiers"]["near"]["hits"] = 4
    stats["primary"]["free_rows"] = 0
    assert report() is None, "a moment ago it was done"
    clock.now += 0.1
    second = report()
    assert dict(second.counters) == {("kvtiers_tier_hits", ("near",)): 1}
    assert second.gauges == {("kvtiers_primary_free_rows", ()): 0}


def test_a_detached_tier_has_no_trouble_any_more_and_counts_on_when_it_is_attached_again(facts, stats, clock):
    report = StackFigures(facts, Collection, clock)
    near = stats["tiers"]["near"]
    near["own"] = {"open": 0, "breaker_state": 1, "full": 1, "hosts": 8, "hosts_open": 7, "odd": 5}
    report()
    del stats["tiers"]["near"]
    clock.now += 0.1
    gone = report()
    assert not gone.counters, "which are those of the engine's whole life"
    assert math.isnan(gone.gauges.pop(("kvtiers_tier_open", ("near",)))), "neither open nor not"
    assert math.isnan(gone.gauges.pop(("kvtiers_tier_shared", ("near",))))
    assert gone.gauges["kvtiers_tier_breaker_state", ("near",)] == 0
    assert gone.gauges["kvtiers_tier_own_figure", ("near", "odd")] == 0
    assert set(gone.gauges.values()) == {0}
    clock.now += 0.1
    assert not report().gauges, "it is said once"
    stats["tiers"]["near"] = near | {"hits": 2, "own": {"open": 1}}
    clock.now += 0.1
    again = report()
    assert again.gauges["kvtiers_tier_open", ("near",)] == 1
    assert again.counters["kvtiers_tier_hits", ("near",)] == 2


def test_the_shadow_caches_figures_are_reported_once_there_are_any(facts, stats, clock):
    report = StackFigures(facts, Collection, clock)
    stats["what_if"] = {}
    assert not [name for name, _ in report().gauges if "what_if" in name]
    stats["what_if"] = WHAT_IF
    clock.now += 1.0
    changes = report()
    assert changes.gauges["kvtiers_what_if_hit_rate", ("lru", "0.25")] == 0.125
    assert changes.gauges["kvtiers_what_if_adds", ("near",)] == 0.25
    assert changes.counters["kvtiers_what_if_dropped", ()] == 4


def test_every_figure_that_is_reported_is_defined(facts, stats):
    stats["what_if"] = WHAT_IF
    report = StackFigures(facts, Collection)()
    reported = {name for name, _ in (*report.counters, *report.gauges)}
    known = definitions(lambda text, labels=(): (text, labels), lambda text, labels=(): (text, labels))
    assert reported <= set(known)
    for name, labels in (*report.counters, *report.gauges):
        assert len(known[name][1]) == len(labels)


def test_status_says_what_a_tier_brought_and_saved(facts):
    socket = open_stack_status(facts, Troubles(["near"]), "vLLM 0.32.0")
    answer = ask(socket.name)
    socket.close()
    assert (answer["engine"], answer["model"]) == ("vLLM 0.32.0", "model")
    near = answer["tiers"]["near"]
    assert (near["open"], near["shared"], near["tokens"]) == (True, True, 192)
    assert (near["wait_expired"], near["recomputed_cheaper"]) == (5, 6), "which say why it does not pay"
    assert (near["loads"], near["computing_seconds"], near["saved_seconds"]) == (2, 1.92, 1.5)


def test_a_step_with_a_prompt_is_measured_once(steps, clock):
    steps.begins(1000, 2)
    clock.now += 2.0
    steps.ends()
    assert steps.take_computed()[:2] == (1000, 2.0)
    assert steps.take_computed() == (0, 0.0, 0.0)


def test_a_decoding_step_measures_nothing(steps, clock):
    steps.begins(4, 4)
    clock.now += 2.0
    steps.ends()
    steps.ends()
    assert steps.take_computed() == (0, 0.0, 0.0)


def test_a_step_that_was_scheduled_ahead_is_computed_when_the_one_before_has_been(steps, clock):
    steps.begins(1000, 1)
    steps.begins(500, 1)
    clock.now += 2.0
    steps.ends()
    assert steps.take_computed()[:2] == (1000, 2.0)
    clock.now += 1.0
    steps.ends()
    assert steps.take_computed()[:2] == (500, 1.0)


@pytest.mark.parametrize("before", [0, 1, 4], ids=["waits for loads", "computes a loaded prompt's end", "decodes"])
def test_a_short_step_takes_nothing_from_the_next(before, steps, clock):
    """Its end is seen when the next has been launched: by then most of that may have been computed."""
    steps.begins(before, before)
    steps.begins(8192, 1)
    clock.now += 0.30
    steps.ends()
    clock.now += 0.02
    steps.ends()
    assert steps.take_computed()[:2] == (8192, pytest.approx(0.32))


def test_steps_that_end_between_two_looks_are_taken_together(steps, clock):
    for tokens, seconds in ((1000, 1.0), (4, 0.5), (3000, 2.0)):
        steps.begins(tokens, 1)
        clock.now += seconds
        steps.ends()
    assert steps.take_computed()[:2] == (4000, 3.0)


def test_steps_that_are_taken_together_have_the_mean_position_of_their_tokens(steps, clock):
    for tokens, position in ((1000, 500.0), (4, 90_000.0), (3000, 2500.0)):
        steps.begins(tokens, 1, position)
        clock.now += 1.0
        steps.ends()
    assert steps.take_computed() == (4000, 2.0, pytest.approx(2000.0))


def test_a_pass_that_has_found_loads_ends_so_that_they_begin(steps, clock):
    limit = PassLimit(steps, clock)
    assert not limit.is_reached(idle=True)
    clock.now += 1.0
    assert not limit.is_reached(idle=True), "without a load there is nothing to begin"
    limit.load_found()
    assert limit.is_reached(idle=True)
    assert limit.pass_ends(), "so the next pass comes at once"
    assert not limit.is_reached(idle=True), "it has a time of its own"
    limit.load_found()
    assert not limit.is_reached(idle=True), "a short pass ends by itself"
    assert not limit.pass_ends()


def test_a_pass_beside_computed_prompts_is_not_cut_short(steps, clock):
    """The next pass would come when their step has ended."""
    limit = PassLimit(steps, clock)
    steps.begins(8192, 1)
    assert not limit.is_reached(idle=False)
    limit.load_found()
    clock.now += 1.0
    assert not limit.is_reached(idle=False)
    assert limit.is_reached(idle=True), "they have been computed, and no other request runs"


@pytest.mark.parametrize("seconds", [0.008, 0.1])
def test_a_pass_beside_decoding_takes_no_longer_than_a_step_of_it(seconds, steps, clock):
    steps.begins(3, 3)
    clock.now += seconds
    steps.ends()
    steps.begins(3, 3)
    limit = PassLimit(steps, clock)
    limit.load_found()
    assert not limit.is_reached(idle=False)
    clock.now += 0.05
    assert limit.is_reached(idle=False) == (seconds < 0.05)
    clock.now += 0.06
    assert limit.is_reached(idle=False)


def test_a_pass_that_has_scheduled_a_loaded_prompt_is_as_long_as_the_step_that_computes_its_end(steps, clock):
    """What it leaves over would wait for that step."""
    limit = PassLimit(steps, clock)
    steps.begins(0, 0)
    limit.load_found()
    assert not limit.is_reached(idle=True)
    clock.now += 0.1
    assert not limit.is_reached(idle=False), "how long its step takes is not known yet"
