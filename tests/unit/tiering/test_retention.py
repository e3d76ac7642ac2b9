"""Hints of requests to keep their prompt, by the manager's calls: which chunks, until when, and what is not kept."""

import pytest

from .harness import Bench, chain

SYSTEM = chain("system", 3)


def crowd(bench, requests=8):
    """Other requests' chunks, more than there are rows."""
    for number in range(requests):
        bench.store(chain(f"o{number}-", 4))


def here(bench, keys):
    return bench.primary.resident_run(keys)[0]


@pytest.mark.parametrize("policy", ["lru", "arc", "turn-hazard"])
@pytest.mark.parametrize("params", [{"ttl": "1h"}, {"ttl": 3600, "priority": "high"}])
def test_the_prompt_of_a_request_with_a_ttl_stays_for_that_long(policy, params):
    bench = Bench(rows=16, policy=policy, tiers={})
    bench.primary.store_everything()
    ctx = bench.request(**params)
    assert bench.lookup(SYSTEM, ctx) == (0, 0, False)
    bench.store([*SYSTEM, *chain("answer", 2)], ctx)
    bench.manager.on_request_finished(ctx)
    crowd(bench)
    assert here(bench, SYSTEM) == 3
    assert here(bench, chain("answer", 2)) == 0, "the prompt, not its answer"
    bench.step(3599.0)
    crowd(bench)
    assert here(bench, SYSTEM) == 3
    bench.step(2.0)
    crowd(bench)
    assert here(bench, SYSTEM) == 0


def test_what_is_loaded_for_such_a_request_is_kept_after_its_first_read():
    bench = Bench(rows=16)
    bench.tier["a"].put(SYSTEM)
    ctx = bench.request(ttl="1h")
    assert bench.lookup(SYSTEM, ctx)[1] == 3
    bench.settle()
    assert bench.load(SYSTEM, ctx)
    bench.manager.on_request_finished(ctx)
    bench.tier["a"].values.clear()
    crowd(bench)
    assert here(bench, SYSTEM) == 3
    assert bench.manager.stats()["primary"]["kept_rows"] == 3


def test_a_request_of_low_priority_leaves_first():
    bench = Bench(rows=16, tiers={})
    normal, low = chain("n", 8), chain("l", 8)
    bench.store(normal)
    ctx = bench.request(priority="low")
    bench.lookup(low, ctx)
    bench.store(low, ctx)
    bench.manager.on_request_finished(ctx)
    bench.store(chain("x", 6))
    assert (here(bench, normal), here(bench, low)) == (8, 2)


def test_an_engine_names_the_part_of_a_prompt_that_it_has_itself():
    bench = Bench(rows=16, tiers={})
    bench.store(SYSTEM)
    bench.manager.keep(SYSTEM, bench.request(ttl=60))
    bench.manager.keep(chain("other", 2), bench.request())
    crowd(bench)
    assert here(bench, SYSTEM) == 3
    assert bench.manager.stats()["primary"]["kept_rows"] == 3


def test_a_waiting_request_is_hinted_at_once_and_other_weights_keep_nothing():
    bench = Bench(rows=16, hold=True)
    bench.tier["a"].put(SYSTEM)
    ctx = bench.request(ttl="1h")
    for _ in range(10):
        bench.lookup(SYSTEM, ctx)
        bench.step()
    assert len(bench.primary._kept._until[0]) == 3
    bench.manager.set_weights_version("other")
    assert not bench.primary._kept.is_active
