from kvtiers.api import BreakerConfig
from kvtiers.secondary.breaker import Breaker, BreakerState

CLOSED, OPEN, PROBING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.PROBING


def breaker(clock, **options):
    written = {
        name: f"{value}s" if isinstance(value, float) and name != "error_rate" else value
        for name, value in options.items()
    }
    return Breaker(BreakerConfig.model_validate(written), clock)


def record(tested, *calls):
    for ok in calls:
        tested.record(ok=bool(ok))


def test_failures_in_a_row_open_it(clock):
    tested = breaker(clock, failures=3)
    record(tested, 0, 0, 1, 0, 0)
    assert tested.state is CLOSED
    record(tested, 0)
    assert tested.state is OPEN
    assert tested.opened == 1


def test_an_error_rate_opens_it_though_no_failures_follow_each_other(clock):
    tested = breaker(clock, failures=100, error_rate=0.5, min_calls=20)
    record(tested, *[1, 0] * 9, 1)
    assert tested.state is CLOSED, "fewer calls than min_calls"
    record(tested, 0)
    assert tested.state is OPEN


def test_an_error_rate_below_the_limit_does_not(clock):
    tested = breaker(clock, failures=100, error_rate=0.5, min_calls=20)
    record(tested, *[1, 1, 0] * 100)
    assert tested.state is CLOSED


def test_what_lies_before_the_window_does_not_count(clock):
    tested = breaker(clock, failures=100, error_rate=0.5, min_calls=20, window=30.0)
    record(tested, *[0] * 19)
    clock.now += 31.0
    record(tested, *[1] * 2, *[0] * 17)
    assert tested.state is CLOSED
    record(tested, 0)
    assert tested.state is OPEN


def test_the_window_moves_on_and_its_memory_is_bounded(clock):
    tested = breaker(clock, failures=1000, window=30.0)
    for _ in range(10_000):
        clock.now += 0.01
        record(tested, 1, 1, 1, 0)
    assert len(tested._all._spans) <= 32
    assert tested.state is CLOSED


def test_successes_alone_never_open_it(clock):
    tested = breaker(clock, failures=1000, error_rate=0.01, min_calls=1)
    record(tested, *[1] * 100)
    assert tested.state is CLOSED


def test_one_probe_is_due_after_the_delay_and_closes_it(clock):
    tested = breaker(clock, failures=1, delay=1.0)
    record(tested, 0)
    assert not tested.wants_probe()
    clock.now += 0.99
    assert not tested.wants_probe()
    clock.now += 0.02
    assert tested.wants_probe()
    assert not tested.wants_probe(), "one probe, not two"
    assert tested.state is PROBING
    tested.probed(ok=True)
    assert tested.state is CLOSED
    record(tested, 0)
    assert tested.opened == 2


def test_each_failed_probe_doubles_the_delay_up_to_the_longest(clock):
    tested = breaker(clock, failures=1, delay=1.0, max_delay=10.0)
    record(tested, 0)
    delays = []
    for _ in range(6):
        begin = clock.now
        while not tested.wants_probe():
            clock.now += 0.25
        delays.append(clock.now - begin)
        tested.probed(ok=False)
        assert tested.state is OPEN
    assert delays == [1, 2, 4, 8, 10, 10]


def test_a_success_brings_the_first_delay_back(clock):
    tested = breaker(clock, failures=1, delay=1.0)
    record(tested, 0)
    for ok in (False, False, False, True):
        while not tested.wants_probe():
            clock.now += 1
        tested.probed(ok=ok)
    record(tested, 0)
    clock.now += 1.0
    assert tested.wants_probe()


def test_after_it_closed_the_past_does_not_count(clock):
    tested = breaker(clock, failures=3, error_rate=0.5, min_calls=4)
    record(tested, 0, 0, 0)
    clock.now += 2
    assert tested.wants_probe()
    tested.probed(ok=True)
    record(tested, 0, 1, 0, 1, 1)
    assert tested.state is CLOSED


def test_while_it_is_open_only_the_probe_counts(clock):
    tested = breaker(clock, failures=1, delay=5.0)
    record(tested, 0)
    record(tested, 1, 1, 1)
    assert tested.state is OPEN
    record(tested, 0, 0, 0)
    clock.now += 5
    assert tested.wants_probe()
    record(tested, 1)
    assert tested.state is PROBING


def test_a_tier_that_is_known_to_be_gone_trips_it_at_once_and_one_that_is_back_is_probed_at_once(clock):
    tested = breaker(clock, failures=100, delay=30.0)
    tested.trip()
    tested.trip()
    assert (tested.state, tested.opened) == (OPEN, 1)
    assert not tested.wants_probe()
    tested.probe_soon()
    assert tested.wants_probe()


def test_loads_that_fail_open_it_though_everything_else_succeeds_in_between(clock):
    tested = breaker(clock, failures=3)
    for _ in range(3):
        assert tested.state is CLOSED
        record(tested, 1, 1)
        tested.record(ok=False, is_load=True)
    assert tested.state is OPEN


def test_a_rate_of_loads_that_fail_opens_it_however_many_other_calls_succeed(clock):
    tested = breaker(clock, failures=100, error_rate=0.5, min_calls=20)
    for number in range(20):
        assert tested.state is CLOSED
        record(tested, *[1] * 50)
        tested.record(ok=number % 2 == 0, is_load=True)
    assert tested.state is OPEN


def test_writes_that_fail_as_often_as_loads_succeed_do_not_open_it(clock):
    tested = breaker(clock, failures=3, error_rate=0.6, min_calls=20)
    for _ in range(100):
        record(tested, 0)
        tested.record(ok=True, is_load=True)
    assert tested.state is CLOSED


def relapse(tested, clock):
    """Let the probe succeed and the next load fail; return how long the probe was waited for."""
    begin = clock.now
    while not tested.wants_probe():
        clock.now += 0.25
    tested.probed(ok=True)
    assert tested.state is CLOSED
    record(tested, 1)
    tested.record(ok=False, is_load=True)
    assert tested.state is OPEN
    return clock.now - begin


def test_loads_that_go_on_failing_after_good_probes_are_tried_at_growing_distances(clock):
    tested = breaker(clock, failures=3, delay=1.0, max_delay=10.0)
    for _ in range(3):
        tested.record(ok=False, is_load=True)
    assert [relapse(tested, clock) for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert tested.relapses == 6


def test_one_load_that_succeeds_ends_the_trial(clock):
    tested = breaker(clock, failures=3, delay=1.0)
    for _ in range(3):
        tested.record(ok=False, is_load=True)
    relapse(tested, clock)
    clock.now += 10
    assert tested.wants_probe()
    tested.probed(ok=True)
    tested.record(ok=True, is_load=True)
    assert (tested.on_trial, tested.relapses) == (False, 0)
    tested.record(ok=False, is_load=True)
    assert tested.state is CLOSED, "one failure of three"


def test_its_age_is_that_of_the_outage_and_not_of_the_latest_probe(clock):
    tested = breaker(clock, failures=1, delay=1.0)
    clock.now += 100
    record(tested, 0)
    for _ in range(3):
        clock.now += 40
        assert tested.wants_probe()
        tested.probed(ok=False)
    assert tested.seconds == 120
    clock.now += 40
    assert tested.wants_probe()
    tested.probed(ok=True)
    assert tested.seconds == 0
