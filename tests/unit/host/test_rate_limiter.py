import pytest

from kvtiers.api import RateLimit
from kvtiers.host.store_calls import RateLimiter

NEVER = float("inf")


def limiter(clock, **limits):
    return RateLimiter(RateLimit.model_validate(limits), clock, clock)


def test_without_a_limit_no_call_waits(clock):
    assert limiter(clock).wait(1 << 40, urgent=True, give_up_at=-NEVER)
    assert clock.waits == []


def test_bytes_pass_at_the_rate_and_no_faster(clock):
    limit = limiter(clock, bytes_per_second="1MiB")
    begin = clock.now
    for _ in range(31):
        assert limit.wait(1 << 20, urgent=True, give_up_at=NEVER)
    # The first passes on the second's worth that is kept; thirty more take a second each, but for the last one's own.
    assert clock.now - begin == pytest.approx(29.0)


def test_calls_pass_at_the_rate(clock):
    limit = limiter(clock, requests_per_second=10)
    begin = clock.now
    for _ in range(111):
        assert limit.wait(0, urgent=False, give_up_at=NEVER)
    assert clock.now - begin == pytest.approx(10.0)


def test_the_tighter_of_two_limits_holds(clock):
    limit = limiter(clock, bytes_per_second="1MiB", requests_per_second=1)
    begin = clock.now
    for _ in range(12):
        limit.wait(4 << 20, urgent=True, give_up_at=NEVER)
    assert clock.now - begin == pytest.approx(43.0)


def test_an_unused_rate_is_kept_for_one_second_only(clock):
    limit = limiter(clock, requests_per_second=10)
    clock.now += 3600
    begin = clock.now
    for _ in range(31):
        limit.wait(0, urgent=True, give_up_at=NEVER)
    assert clock.now - begin == pytest.approx(2.0)


def test_a_turn_after_the_deadline_is_refused_at_once_and_costs_nothing(clock):
    limit = limiter(clock, bytes_per_second="1MiB")
    assert limit.wait(10 << 20, urgent=True, give_up_at=NEVER)
    assert not limit.wait(1 << 20, urgent=True, give_up_at=clock.now + 5)
    assert not limit.wait(1 << 20, urgent=False, give_up_at=clock.now + 5)
    assert clock.waits == []
    begin = clock.now
    assert limit.wait(1, urgent=True, give_up_at=NEVER)
    assert clock.now - begin == pytest.approx(9.0)


def test_a_call_that_moves_no_bytes_waits_for_the_rate_of_calls_alone(clock):
    limit = limiter(clock, bytes_per_second="1MiB", requests_per_second=1)
    begin = clock.now
    assert limit.wait(100 << 20, urgent=True, give_up_at=NEVER)
    assert limit.wait(0, urgent=True, give_up_at=NEVER)
    assert limit.wait(0, urgent=False, give_up_at=NEVER)
    assert clock.now - begin == pytest.approx(1.0)
    assert limit.wait(1, urgent=True, give_up_at=NEVER)
    assert clock.now - begin == pytest.approx(99.0), "bytes wait for those before them"


def test_closing_a_tier_ends_every_wait(clock):
    limit = limiter(clock, bytes_per_second="1MiB")
    limit.wait(10 << 20, urgent=True, give_up_at=NEVER)
    clock.stopped = True
    assert not limit.wait(1, urgent=True, give_up_at=NEVER)
    assert not limit.wait(1, urgent=False, give_up_at=NEVER)


def test_loads_go_before_stores_that_have_waited_longer(clock):
    """A store waits until its turn is paid for; a load that comes meanwhile takes its turn ahead of it."""
    waited = {"store": [], "load": []}

    class Waits:
        who = "store"

        def wait(self, seconds):
            waited[self.who].append(seconds)
            if waited == {"store": [seconds], "load": []}:
                self.who = "load"
                for _ in range(4):
                    assert limit.wait(0, urgent=True, give_up_at=NEVER)
                self.who = "store"
            if self.who == "store":
                clock.now += seconds
            return False

    limit = RateLimiter(RateLimit(requests_per_second=20), Waits(), clock)
    for _ in range(21):  # the kept second and one more call: from now on there is debt
        assert limit.wait(0, urgent=True, give_up_at=NEVER)
    assert limit.wait(0, urgent=False, give_up_at=NEVER)
    assert waited["load"] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert waited["store"] == pytest.approx([0.05, 0.2])


def test_another_limit_holds_from_the_next_call_on_and_none_is_none(clock):
    limit = limiter(clock, bytes_per_second="1MiB")
    limit.wait(10 << 20, urgent=True, give_up_at=NEVER)
    limit.set(RateLimit(bytes_per_second=10 << 20))
    begin = clock.now
    for _ in range(31):
        assert limit.wait(10 << 20, urgent=False, give_up_at=NEVER)
    assert clock.now - begin == pytest.approx(29.0)
    limit.set(RateLimit())
    clock.waits.clear()
    assert limit.wait(1 << 40, urgent=False, give_up_at=clock.now)
    assert clock.waits == []
