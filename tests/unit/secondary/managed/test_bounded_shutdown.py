"""Tiers of the third rung under core's protection: their drain and their close."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from tests.unit.secondary.async_tier import handed_over, job, store

from kvtiers.api import JobResult


def test_a_tier_that_never_opens_does_not_hold_up_the_end(kit, sealed):
    gate = threading.Event()

    def opener():
        gate.wait(kit.PATIENCE)
        raise OSError("late")

    tier, _ = sealed(opener)
    assert not tier.is_available()
    assert tier.drain(0.05)
    gate.set()
    tier.close()


def test_a_drain_reports_every_job_and_says_what_was_dropped(kit, sealed, keys, log_lines):
    tier, inner = sealed()
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    for _ in range(3):
        tier.submit_store(job(keys))
    assert tier.drain(kit.PATIENCE)
    assert len(tier.get_finished_jobs()) == 3
    inner.drain = lambda timeout: False
    tier.submit_store(job(keys))
    assert not tier.drain(0.05)
    assert log_lines("dropped") == "t: shutdown within 0.05s dropped 1 jobs with 4 chunks"


def test_a_drain_that_raises_says_what_was_dropped_all_the_same(kit, sealed, keys, log_lines):
    tier, inner = sealed()

    def drain(timeout):
        raise OSError("no way")

    inner.drain = drain
    tier.submit_store(job(keys))
    assert not tier.drain(kit.PATIENCE)
    assert log_lines("no way") == "t: its drain() failed: OSError: no way"
    assert "dropped 1 jobs with 4 chunks" in log_lines("dropped")


@pytest.mark.parametrize("method", ["drain", "get_finished_jobs"])
def test_a_tier_that_would_end_the_thread_that_drains_it_does_not_end_the_engines(kit, sealed, keys, log_lines, method):
    tier, inner = sealed()

    def stop(*_timeout):
        raise asyncio.CancelledError("enough")

    setattr(inner, method, stop)
    tier.submit_store(job(keys))
    assert not tier.drain(kit.PATIENCE)
    assert "CancelledError: enough" in log_lines("enough")
    tier.close()
    assert inner.closed == 1


def test_close_closes_the_tier_once_on_its_own_thread(kit, sealed):
    tier, inner = sealed()
    threads = []
    inner.close = lambda: threads.append(threading.current_thread().name)
    tier.close()
    assert threads == ["kvtiers-t-seal"]
    assert not tier.is_available()


def test_a_tier_whose_close_hangs_is_left_behind(kit, sealed):
    gate, closing, ended = threading.Event(), threading.Event(), threading.Event()
    tier, inner = sealed(waits={"close_seconds": 0.05})
    inner.close = lambda: closing.set() or (gate.wait() and ended.set())
    tier.close()
    assert closing.wait(kit.PATIENCE)
    assert not ended.is_set()
    gate.set()


def test_a_drain_that_hangs_is_left_behind_and_the_tier_asked_nothing_more(kit, sealed, keys, log_lines):
    tier, inner = sealed()
    gate, calls = threading.Event(), []
    tier.submit_store(job(keys))
    handed_over(kit, tier, inner)
    inner.drain = lambda timeout: calls.append(timeout) or gate.wait(kit.PATIENCE)
    for name in ("get_finished_jobs", "get_started_jobs", "on_schedule_end", "is_available", "close"):
        setattr(inner, name, lambda name=name: calls.append(name))
    begin = time.monotonic()
    assert not tier.drain(0.1)
    assert time.monotonic() - begin < kit.PATIENCE / 2
    assert not tier.is_available()
    assert tier.get_finished_jobs() == []
    tier.on_schedule_end()
    tier.close()
    gate.set()
    (given,) = calls
    assert 0 <= given <= 0.1
    assert "its drain(" in log_lines("does not return")
    assert log_lines("dropped") == "t: shutdown within 0.1s dropped 1 jobs with 4 chunks"


def test_a_drain_that_takes_all_its_time_is_none_that_hangs(kit, sealed, keys):
    tier, inner = sealed(waits={"late_seconds": kit.PATIENCE})
    tier.submit_store(job(keys))
    handed_over(kit, tier, inner)
    inner.drain = lambda timeout: time.sleep(timeout) or inner.move()
    assert tier.drain(0.2)
    tier.close()
    assert inner.closed == 1


def test_what_was_brought_before_a_drain_that_hangs_is_neither_lost_nor_counted(kit, sealed, keys, log_lines):
    tier, inner = sealed()
    store(kit, tier, inner, keys)
    loading = job(keys, promotion=True)
    tier.submit_load(loading)
    inner.move()
    tier.get_finished_jobs()
    gate = threading.Event()
    inner.drain = lambda _timeout: gate.wait(kit.PATIENCE)
    tier.submit_store(job(keys[:1]))
    tier._sealer.settle(kit.PATIENCE)
    assert not tier.drain(0.1)
    (result,) = tier.get_finished_jobs()
    assert (result.job_id, result.success) == (loading.job_id, True)
    assert log_lines("dropped") == "t: shutdown within 0.1s dropped 1 jobs with 1 chunks"
    gate.set()


def test_results_that_raise_in_a_drain_say_what_was_dropped_all_the_same(kit, sealed, keys, log_lines):
    tier, inner = sealed()
    tier.submit_store(job(keys))
    inner.get_finished_jobs = lambda: 1 / 0
    assert not tier.drain(kit.PATIENCE)
    assert "t: its get_finished_jobs() failed: ZeroDivisionError" in log_lines("division")
    assert "dropped 1 jobs with 4 chunks" in log_lines("dropped")
    tier.close()
    assert inner.closed == 1


@pytest.mark.parametrize(
    "lie",
    [None, "done", JobResult([1], success=True), JobResult(10**9, success=True)],
    ids=["none", "a word", "no id", "another's id"],
)
def test_a_tier_that_lies_in_a_drain_is_logged_with_what_was_dropped(kit, sealed, keys, log_lines, lie):
    tier, inner = sealed()
    tier.submit_store(job(keys))
    inner.drain = lambda _timeout: inner.results.append(lie)
    assert not tier.drain(kit.PATIENCE)
    assert "dropped 1 jobs with 4 chunks" in log_lines("dropped")
    (reported,) = tier.get_finished_jobs()
    assert reported is lie, "the manager refuses it, if it still asks"


def test_what_has_a_job_s_id_but_is_no_result_ends_no_job_and_hides_no_result(kit, sealed, keys, log_lines):
    tier, inner = sealed()
    for _ in range(2):
        tier.submit_store(job(keys))

    def drain(_timeout):
        first, second = inner.waiting
        lie = SimpleNamespace(job_id=first.job_id, success=True)
        inner.results += [JobResult(second.job_id, success=True), lie]
        return True

    inner.drain = drain
    assert not tier.drain(kit.PATIENCE)
    assert "dropped 1 jobs with 4 chunks" in log_lines("dropped")


@pytest.mark.parametrize(
    ("named", "times", "dropped"),
    [
        (lambda keys: keys[:2], 2, 2),
        (lambda keys: [keys[0]] * 2, 1, 3),
        (lambda _keys: [b"another's"], 1, 4),
    ],
    ids=["twice the same result", "twice the same key", "another's key"],
)
def test_what_is_claimed_twice_or_of_another_job_is_not_counted_as_done(
    kit, sealed, keys, log_lines, named, times, dropped
):
    tier, inner = sealed()
    tier.submit_store(job(keys))
    results = []

    def drain(_timeout):
        (storing,) = inner.waiting
        results.extend([JobResult(storing.job_id, success=False, successful_keys=named(storing.keys))] * times)
        return True

    inner.drain = drain
    inner.get_finished_jobs = lambda: [results.pop()] if results else []
    tier.drain(kit.PATIENCE)
    assert f"dropped 1 jobs with {dropped} chunks" in log_lines("dropped")
