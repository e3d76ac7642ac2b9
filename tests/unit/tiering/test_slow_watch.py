"""A tier whose answers or loads come too late: said once with what to do, and once when they come in time again."""

import pytest

from kvtiers.metrics import TierMetrics
from kvtiers.tiering.tier_slot import SlowWatch


class Watched:
    def __init__(self):
        self.metrics = TierMetrics()
        self.own = {"lookup_questions": 4, "lookup_seconds": 0.8}
        self.watch = SlowWatch("far", self.metrics, lambda: self.own)
        self.now = 0.0

    def second(self, late=0, cheaper=0, brought=0):
        self.metrics.wait_expired += late
        self.metrics.recomputed_cheaper += cheaper
        self.metrics.loaded_chunks += brought
        self.now += 1.0
        return self.watch.look(self.now)


@pytest.fixture
def far():
    return Watched()


def test_a_tier_that_brings_nothing_in_time_is_said_once_with_what_its_answers_take(far):
    lines = [line for _ in range(10) if (line := far.second(late=10, cheaper=10))]
    (line,) = lines
    assert line == (
        "far: too slow: 60 of its answers and loads came too late (an answer takes it 200 ms), and what it may have "
        "was computed; look at the way to its store, or give it longer by 'lookup_wait' and 'load_wait'"
    )
    assert far.metrics.too_slow == 1


def test_the_first_request_after_a_start_or_a_pause_says_nothing(far):
    for _ in range(10):
        assert not far.second(late=100)
        assert not far.second(late=0, brought=100)
    assert far.metrics.too_slow == 0


def test_a_few_say_nothing(far):
    assert not any(far.second(late=1) for _ in range(7))


def test_a_tier_that_mostly_comes_in_time_is_not_too_slow(far):
    assert not any(far.second(late=100, brought=10) for _ in range(20))


def test_the_end_says_how_many_came_too_late(far):
    for _ in range(5):
        far.second(late=20)
    assert not far.second(brought=5, late=20), "one second is no end"
    lines = [line for _ in range(4) if (line := far.second(brought=20))]
    assert lines == ["far: fast enough again; 120 of its answers and loads came too late meanwhile"]
    assert far.metrics.too_slow == 0


def test_an_idle_tier_stays_what_it_was(far):
    for _ in range(4):
        far.second(late=20)
    assert not any(far.second() for _ in range(100))
    assert far.metrics.too_slow == 1


def test_a_store_that_does_not_answer_at_all_is_not_called_slow_and_no_longer_wait_is_advised(far):
    far.own |= {"silent_seconds": 17.0, "waiting_calls": 9.0}
    (line,) = [line for _ in range(10) if (line := far.second(late=10))]
    assert line == (
        "far: no answer for 17 s: 9 calls wait for its store, and what it may have was computed; look whether its "
        "backend hangs, and at the way to it"
    )


def test_what_was_too_slow_long_ago_in_an_idle_engine_is_not_known_any_more_and_that_is_no_line(far):
    for _ in range(5):
        far.second(late=20)
    assert far.metrics.too_slow == 1
    assert not any(far.second() for _ in range(299))
    assert far.metrics.too_slow == 1
    assert not far.second()
    assert far.metrics.too_slow == 0
    assert not far.second(late=20), "and what was counted before is not counted again"
