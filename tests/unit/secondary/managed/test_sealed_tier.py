"""Tiers of the third rung under core's protection: what they store and load."""

import threading

import numpy as np
import pytest
from tests.unit.secondary.async_tier import HIT, MISS, REQUEST, finish, handed_over, job, store

from kvtiers.api import JobResult, make_offload_key, tenant_of
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.tier_jobs import is_of


def test_stores_are_sealed_off_the_engines_thread_and_loads_come_back(kit, sealed, keys):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    assert all(value[-64:-57] == b"kvtSEAL" for value in inner.values.values())
    tier.submit_load(job(keys, promotion=True))
    inner.move()
    (result,) = finish(kit, tier)
    assert result.success
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))


def test_a_damaged_value_is_left_out_of_the_result(kit, sealed, keys):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    name = list(inner.values)[1]
    inner.values[name] = inner.values[name][:100] + b"?" + inner.values[name][101:]
    tier.submit_load(job(keys, promotion=True))
    inner.move()
    (result,) = finish(kit, tier)
    assert (result.success, list(result.successful_keys)) == (False, [keys[0], *keys[2:]])
    assert tier.stats()["seal_failures"] == 1
    assert tier.is_available()


def test_values_under_other_names_are_other_values(kit, sealed, keys):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    assert list(tier.lookup_many(keys, REQUEST)) == [HIT] * 4
    tier.set_names(StorageNames("test/other-0123456789abcdef01234567/", b"layout-2"))
    assert list(tier.lookup_many(keys, REQUEST)) == [MISS]


def test_two_values_that_a_tier_swapped_are_both_left_out(kit, sealed, keys):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    first, second, *_ = list(inner.values)
    inner.values[first], inner.values[second] = inner.values[second], inner.values[first]
    tier.submit_load(job(keys, promotion=True))
    inner.move()
    (result,) = finish(kit, tier)
    assert list(result.successful_keys) == keys[2:]


def test_a_tier_that_keeps_quotas_sees_whose_a_chunk_is_and_may_decline_it(kit, sealed):
    tier, inner = sealed()
    keys = [make_offload_key(bytes([number]) * 32, 0, tenant) for number, tenant in enumerate(["blue", "", "red"])]
    for _ in range(10):
        tier.submit_store(job(keys))
        handed_over(kit, tier, inner)
        seen = inner.waiting[0].keys
        assert [tenant_of(key) for key in seen] == ["blue", "", "red"]
        inner.move(success=False, keys=seen[1:])
        (result,) = finish(kit, tier)
        assert (result.success, list(result.successful_keys)) == (False, keys[1:])
    assert tier.is_available(), "declined chunks do not count against the tier"


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("named", ["another's", "the engine's", "some of each", "none at all", "a number"])
def test_keys_that_are_not_of_the_job_reach_the_manager_which_refuses_them(kit, sealed, keys, named, success):
    """Above all the engine's own keys, which no tier is given: the manager has them, and nothing was checked."""
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    good = list(inner.values)
    inner.values = {name: bytes(kit.VALUE) for name in inner.values}
    ours = {
        "another's": [b"never heard of"],
        "the engine's": keys,
        "some of each": [good[0], keys[1]],
        "none at all": [[]],
        "a number": 5,
    }
    inner.move(success=success, keys=ours[named])
    (result,) = finish(kit, tier)
    assert result.job_id == loading.job_id
    assert not is_of(loading, result)
    assert tier.drain(kit.PATIENCE), "a job is in flight"


def test_a_second_result_never_passes_unchecked_and_reaches_the_manager(kit, sealed, keys):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    inner.values = {name: bytes(kit.VALUE) for name in inner.values}
    inner.move()
    inner.results *= 2
    results = list(tier.get_finished_jobs())
    kit.wait_until(lambda: results.extend(tier.get_finished_jobs()) or len(results) == 2, "two results")
    assert [result.job_id for result in results] == [loading.job_id] * 2
    assert not any(result.success or result.successful_keys for result in results)


@pytest.mark.parametrize(
    "lie",
    [None, "done", JobResult([1], success=True), JobResult(memoryview(bytearray(2)), success=True)],
    ids=["none", "a word", "no id", "a buffer for an id"],
)
def test_what_is_no_result_reaches_the_manager_and_the_results_beside_it_are_not_lost(kit, sealed, keys, lie):
    tier, inner = sealed()
    for _ in range(2):
        tier.submit_store(job(keys))
    kit.wait_until(lambda: tier.on_schedule_end() or len(inner.waiting) == 2, "both jobs' hand-over")
    inner.move()
    inner.results.append(lie)
    inner.move()
    first, between, last = tier.get_finished_jobs()
    assert between is lie
    assert [first.success, last.success] == [True, True]
    assert tier.drain(kit.PATIENCE), "a job is in flight"


@pytest.mark.parametrize("promotion", [True, False])
def test_a_result_that_says_neither_yes_nor_no_reaches_the_manager_which_refuses_it(kit, sealed, keys, promotion):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    odd = job(keys, promotion=promotion)
    (tier.submit_load if promotion else tier.submit_store)(odd)
    handed_over(kit, tier, inner)
    inner.move(success=np.array([True, True]))
    (result,) = finish(kit, tier)
    assert result.job_id == odd.job_id
    assert not is_of(odd, result)
    assert tier.drain(kit.PATIENCE), "a job is in flight"


def test_keys_may_be_named_in_an_array(kit, sealed, keys):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    tier.submit_load(job(keys, promotion=True))
    inner.move(success=False, keys=np.array(list(inner.values)[:2], dtype=object))
    (result,) = finish(kit, tier)
    assert list(result.successful_keys) == keys[:2]


def test_a_tier_may_release_the_buffer_that_names_its_rows(kit, sealed, keys):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    with inner.waiting[0].chunk_ids:
        inner.move()
    (result,) = finish(kit, tier)
    assert result.success
    assert list(loading.chunk_ids) == list(range(len(keys))), "core still reads its own"


def test_results_that_came_before_an_exception_are_not_lost(kit, sealed, keys):
    tier, inner = sealed()
    tier.submit_store(job(keys))
    handed_over(kit, tier, inner)
    inner.move()
    before = list(inner.results)

    def results():
        yield from before
        before.clear()
        raise OSError("no more")

    inner.get_finished_jobs = results
    bad = job(keys[:1], rows=[10_000])
    tier.submit_store(bad)
    tier._sealer.settle(kit.PATIENCE)
    (result,) = tier.get_finished_jobs()
    assert result.success
    (result,) = tier.get_finished_jobs()
    assert result.job_id == bad.job_id, "what comes from core's own thread needs no tier"
    with pytest.raises(OSError, match="no more"):
        tier.get_finished_jobs()


def test_a_submit_that_raises_is_a_failed_job_for_a_store_and_raises_for_a_load(kit, sealed, keys):
    tier, inner = sealed(breaker={"failures": 9})
    inner.refuse = True
    tier.submit_store(job(keys))
    (result,) = finish(kit, tier)
    assert not result.success
    with pytest.raises(OSError, match="no"):
        tier.submit_load(job(keys, promotion=True))
    assert tier.drain(kit.PATIENCE), "what has not begun is not in flight"


def test_a_store_that_is_given_up_before_the_tier_has_it_never_reaches_it(kit, sealed, keys):
    gate = threading.Event()
    tier, inner = sealed()
    tier._sealer._work.put(lambda: gate.wait(kit.PATIENCE))
    waiting = job(keys)
    tier.submit_store(waiting)
    tier.abandon_job(waiting.job_id)
    gate.set()
    (result,) = finish(kit, tier)
    assert not result.success
    assert (inner.waiting, inner.abandoned) == ([], [])


def test_a_job_that_is_given_up_is_reported_to_the_tier_and_its_late_result_frees_the_rows(kit, sealed, keys):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    tier.abandon_job(loading.job_id)
    assert inner.abandoned == [loading.job_id]
    inner.move()
    assert [result.job_id for result in finish(kit, tier)] == [loading.job_id]


def test_a_row_that_cannot_be_sealed_fails_the_store_and_not_the_thread(kit, sealed, keys):
    tier, inner = sealed()
    bad = job(keys[:1], rows=[10_000])
    tier.submit_store(bad)
    (result,) = finish(kit, tier)
    assert not result.success
    store(kit, tier, inner, keys)


def test_figures_of_a_tier_that_raises_or_counts_nonsense_do_no_harm(kit, sealed, clock):
    tier, inner = sealed()

    def figures(stats):
        inner.stats = stats
        clock.now += 1
        tier.on_schedule_end()
        tier._sealer.settle(kit.PATIENCE)
        return tier.stats()

    assert figures(lambda: {"a": 1, "b": 2.5})["b"] == 2.5
    assert figures(lambda: 1 / 0)["open"] == 1
    assert "a" not in figures(lambda: {"a": "many"})


def test_figures_are_read_once_a_second_and_never_on_the_engines_thread(kit, sealed, clock):
    tier, inner = sealed()
    threads = []
    inner.stats = lambda: threads.append(threading.current_thread().name) or {}
    for _ in range(21):
        tier.on_schedule_end()
        tier._sealer.settle(kit.PATIENCE)
        clock.now += 0.1
    assert threads == ["kvtiers-t-seal"] * 3


def test_figures_that_do_not_come_are_not_asked_for_again_meanwhile(kit, sealed, clock):
    tier, inner = sealed()
    calls, go_on = [], threading.Event()
    inner.stats = lambda: calls.append(1) or (go_on.wait(kit.PATIENCE) and {"a": 1})
    for _ in range(5):
        tier.on_schedule_end()
        clock.now += 10
    go_on.set()
    tier._sealer.settle(kit.PATIENCE)
    assert len(calls) <= 2
    assert tier.stats()["a"] == 1
