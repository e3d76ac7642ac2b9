import pytest

from kvtiers.api import RateLimit
from kvtiers.host.store_calls import Attempts, NoTimeLeft, RateLimiter

NEVER = float("inf")


class Flaky:
    """Fails so many times, then answers."""

    def __init__(self, failures, error=None):
        self.failures, self.error, self.calls = failures, error or ConnectionError("reset"), 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "answer"


def attempts(clock, retries=3, transient=(ConnectionError, TimeoutError), **limits):
    limiter = RateLimiter(RateLimit.model_validate(limits), clock, clock)
    return Attempts(transient, retries, limiter, clock, clock)


def test_a_transient_error_is_tried_again_and_the_retries_are_counted(clock):
    assert attempts(clock).call(Flaky(0), give_up_at=NEVER) == ("answer", 0)
    assert attempts(clock).call(Flaky(2), give_up_at=NEVER) == ("answer", 2)


def test_after_the_last_attempt_its_error_is_raised(clock):
    call = Flaky(99)
    with pytest.raises(ConnectionError, match="reset"):
        attempts(clock, retries=3).call(call, give_up_at=NEVER)
    assert call.calls == 4


def test_zero_retries_are_one_attempt(clock):
    call = Flaky(1)
    with pytest.raises(ConnectionError):
        attempts(clock, retries=0).call(call, give_up_at=NEVER)
    assert call.calls == 1
    assert clock.waits == []


def test_an_error_that_is_not_transient_is_not_tried_again(clock):
    call = Flaky(1, ValueError("wrong password"))
    with pytest.raises(ValueError, match="wrong password"):
        attempts(clock).call(call, give_up_at=NEVER)
    assert call.calls == 1


def test_pauses_grow_and_stay_bounded(clock):
    with pytest.raises(ConnectionError):
        attempts(clock, retries=12).call(Flaky(99), give_up_at=NEVER)
    for number, pause in enumerate(clock.waits):
        longest = min(0.02 * 2**number, 2.0)
        assert longest / 2 <= pause <= longest


def test_no_attempt_begins_after_the_deadline(clock):
    call = Flaky(99)
    with pytest.raises(ConnectionError):
        attempts(clock, retries=1000).call(call, give_up_at=clock.now + 1.0)
    assert sum(clock.waits) < 1.0
    assert 1 < call.calls < 20


def test_a_tier_that_is_being_closed_tries_nothing_again(clock):
    clock.stopped = True
    call = Flaky(99)
    with pytest.raises(ConnectionError):
        attempts(clock).call(call, give_up_at=NEVER)
    assert call.calls == 1


def test_every_attempt_counts_against_the_rate_limit(clock):
    limited = attempts(clock, retries=5, requests_per_second=1)
    begin = clock.now
    limited.call(Flaky(5), give_up_at=NEVER)
    assert clock.now - begin >= 4.0


def test_a_call_whose_turn_comes_too_late_is_not_made(clock):
    limited = attempts(clock, bytes_per_second="1MiB")
    limited.call(Flaky(0), give_up_at=NEVER, nbytes=100 << 20)
    call = Flaky(0)
    with pytest.raises(NoTimeLeft):
        limited.call(call, give_up_at=clock.now + 10, nbytes=1)
    assert call.calls == 0
