"""Prefetches of several engines over one near tier: what one has loaded from behind it, a later one finds there."""

import pytest

from .harness import RETRY, Bench, chain
from .test_prefetch import warm

KEYS = chain("h", 40)


class Engines:
    """Engines with one near tier and one far tier, each in the same state."""

    def __init__(self, count):
        tiers = {"near": {"shareable": True}, "far": {"read_only": True}}
        self.benches = [Bench(rows=128, tiers=tiers) for _ in range(count)]
        for bench in self.benches:
            for name in tiers:
                bench.tier[name].values = self.benches[0].tier[name].values
        self.benches[0].tier["far"].put(KEYS)

    def run(self, *benches, rounds=400):
        for _ in range(rounds):
            for bench in benches:
                bench.step(0.01)
        return [bench.figures()["prefetched_chunks"] for bench in benches]


def fetched(bench, tier="far"):
    return [key for job in bench.tier[tier].loads for key in job.keys]


@pytest.fixture
def engines():
    made = []

    def make(count):
        made.append(Engines(count))
        return made[-1]

    yield make
    for bench in (bench for one in made for bench in one.benches):
        bench.manager.shutdown(0.0)


def test_an_engine_that_is_warmed_up_later_loads_from_the_near_tier_what_the_first_has_loaded(engines):
    both = engines(2)
    first, second = both.benches
    warm(first, KEYS, tier="far")
    assert both.run(first) == [40]
    assert sorted(fetched(first)) == sorted(KEYS)
    warm(second, KEYS, tier="far")
    assert both.run(second) == [40]
    assert fetched(second) == []
    assert sorted(fetched(second, "near")) == sorted(KEYS)
    assert second.load(KEYS, second.request())


@pytest.mark.parametrize(("answers_after", "tier"), [(0.5, "near"), (20.0, "far")])
def test_the_near_tier_is_waited_for_a_while_where_the_far_one_answers_first(engines, answers_after, tier):
    (bench,) = engines(1).benches
    near = bench.tier["near"]
    near.put(KEYS)
    answer, until = near.lookup_many, bench.clock.now + answers_after
    near.lookup_many = lambda keys, ctx: answer(keys, ctx) if bench.clock.now >= until else [RETRY] * len(keys)
    warm(bench, KEYS[:8], tier="far")
    for _ in range(300):
        bench.step(0.01)
    assert sorted(fetched(bench, tier)) == sorted(KEYS[:8])


def test_engines_that_are_warmed_up_at_once_load_each_chunk_themselves_and_none_waits_for_another(engines):
    both = engines(2)
    for bench in both.benches:
        warm(bench, KEYS, tier="far")
    assert both.run(*both.benches) == [40, 40]
    for bench in both.benches:
        assert sorted(fetched(bench) + fetched(bench, "near")) == sorted(KEYS)


def test_a_prefix_of_a_request_is_stored_in_the_near_tier_as_well(engines):
    one = engines(1)
    (bench,) = one.benches
    assert bench.manager.prefetch(KEYS)
    assert one.run(bench) == [40]
    assert sorted(key for job in bench.tier["near"].stores for key in job.keys) == sorted(KEYS)


def test_a_prefix_that_may_come_from_the_far_tier_alone_is_stored_in_no_other(engines):
    one = engines(1)
    (bench,) = one.benches
    assert bench.manager._prefetches.prefix(KEYS, ("far",))
    assert one.run(bench) == [40]
    assert bench.tier["near"].stores == []


@pytest.mark.parametrize("what", ["no near tier", "it is off", "it takes nothing"])
def test_without_a_near_tier_that_takes_stores_the_far_one_serves_alone(engines, what):
    one = engines(1)
    (bench,) = one.benches
    if what == "no near tier":
        bench.slots[0].options = type(bench.slots[0].options)("near")
    elif what == "it is off":
        bench.tier["near"].available = False
    else:
        bench.tier["near"].raises.add("submit_store")
    warm(bench, KEYS, tier="far")
    assert one.run(bench) == [40]
    assert sorted(fetched(bench)) == sorted(KEYS)
    assert not bench.manager.has_pending_work()
