"""A step that computes nothing while loads run rests, and is not late for it."""

import threading

import pytest

from kvtiers_vllm.own_tiering.idle_backoff import IdleBackoff, LoadWatch, Wakeup


class Time:
    def __init__(self):
        self.now = 1000.0
        self.rests = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.rests.append(seconds)
        self.now += seconds


def test_a_rest_is_a_twentieth_of_what_was_waited_and_at_most_a_millisecond():
    time = Time()
    backoff = IdleBackoff(time, time.sleep)
    backoff.step(idle=True)
    assert time.rests == [0.0001]
    time.now = 1000.01
    backoff.step(idle=True)
    assert time.rests[1:] == [pytest.approx(0.0005)]
    time.now = 1003.0
    backoff.step(idle=True)
    assert time.rests[2:] == [0.001]


def test_a_step_that_computes_does_not_rest_and_resets_the_time_waited():
    time = Time()
    backoff = IdleBackoff(time, time.sleep)
    backoff.step(idle=True)
    time.now += 1.0
    backoff.step(idle=False)
    assert len(time.rests) == 1
    backoff.step(idle=True)
    assert time.rests[1:] == [0.0001]


def test_a_pass_rests_for_answers_at_most_two_milliseconds_in_all():
    time = Time()
    backoff = IdleBackoff(time, time.sleep)
    while backoff.for_answer():
        assert len(time.rests) < 100
    assert time.now == pytest.approx(1000.002)
    assert max(time.rests) == 0.0001
    rests = len(time.rests)
    assert not backoff.for_answer()
    assert len(time.rests) == rests
    backoff.step(idle=False)
    assert backoff.for_answer(), "another step"


def test_a_rest_may_be_longer_where_the_end_of_a_load_ends_it():
    time = Time()
    backoff = IdleBackoff(time, time.sleep)
    backoff.step(idle=True, watched=True)
    assert time.rests == [0.005]


def test_the_end_of_a_load_ends_the_rest():
    wakeup, ended = Wakeup(), threading.Event()
    watch = LoadWatch(lambda _jobs: ended.wait(60), wakeup)
    watch.watch(7)
    assert wakeup.watched == 1
    resting = threading.Thread(target=wakeup.wait, args=(600,))
    resting.start()
    ended.set()
    resting.join(60)
    assert not resting.is_alive()
    watch.close()
    assert wakeup.watched == 0


def test_what_was_announced_before_the_rest_ends_it_at_once():
    wakeup = Wakeup()
    wakeup.announce()
    resting = threading.Thread(target=wakeup.wait, args=(600,))
    resting.start()
    resting.join(60)
    assert not resting.is_alive()


def test_a_wait_that_fails_is_announced_too_and_the_next_load_is_watched():
    wakeup, asked = Wakeup(), []

    def fails(jobs):
        asked.append(jobs)
        raise RuntimeError

    watch = LoadWatch(fails, wakeup)
    watch.watch(1)
    watch.watch(2)
    watch.close()
    assert (asked, wakeup.watched) == ([{1}, {2}], 0)
