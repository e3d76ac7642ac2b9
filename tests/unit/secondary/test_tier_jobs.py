"""What a third-rung tier's getters return, as one stream."""

import pytest
from tests.unit.secondary.async_tier import AsyncTier

from kvtiers.api import JobResult
from kvtiers.secondary.tier_jobs import EventTier, JobFailed, JobReleased, JobStarted, poll_getters

RESULT = JobResult(1, success=True)


@pytest.fixture
def tier(kit):
    return AsyncTier(kit.rows, kit.VALUE)


def returns(tier, started, failed, finished):
    tier.get_started_jobs = lambda: started
    tier.get_failed_jobs = lambda: failed
    tier.get_finished_jobs = lambda: finished


def test_starts_come_before_failures_and_failures_before_results(tier):
    returns(tier, [1, 2], [2], [RESULT])
    assert list(poll_getters(tier)) == [JobStarted(1), JobStarted(2), JobFailed(2, ""), RESULT]


def test_a_tier_that_does_not_report_starts_or_has_nothing_to_report_yields_nothing(tier):
    returns(tier, None, (), [])
    assert list(poll_getters(tier)) == []


def test_a_getter_that_raises_keeps_the_others_from_nothing_and_is_heard_of_last(tier):
    returns(tier, None, [3], [RESULT])
    tier.get_started_jobs = lambda: 1 / 0
    events = []
    with pytest.raises(ZeroDivisionError):
        events.extend(poll_getters(tier))
    assert events == [JobFailed(3, ""), RESULT]


def test_what_is_no_result_is_passed_on_for_the_manager_to_judge(tier):
    returns(tier, None, (), ["done", RESULT])
    assert list(poll_getters(tier)) == ["done", RESULT]


def test_who_wants_results_alone_gets_them_from_the_stream(monkeypatch):
    class Streams(EventTier):
        def poll(self):
            return [JobStarted(1), JobFailed(2, "kept"), JobReleased(1, b""), RESULT]

    monkeypatch.setattr(Streams, "__abstractmethods__", frozenset())
    assert Streams().get_finished_jobs() == [RESULT]


def test_a_tier_without_a_stream_and_getters_is_an_error_and_no_recursion(monkeypatch):
    class Neither(EventTier):
        pass

    monkeypatch.setattr(Neither, "__abstractmethods__", frozenset())
    with pytest.raises(NotImplementedError):
        list(Neither().poll())
    with pytest.raises(NotImplementedError):
        Neither().get_finished_jobs()
