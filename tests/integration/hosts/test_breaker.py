"""A tier that fails now and then, never often in a row: the share of its failures takes it out of use."""

import pytest

from kvtiers.secondary.breaker import BreakerState

IN_A_ROW = 3
RATE = {"failures": IN_A_ROW, "error_rate": 0.4, "min_calls": 10, "window": "6h", "delay": "2h", "max_delay": "8h"}
HOUR = 3600.0


@pytest.fixture(params=["process", "thread"])
def engine(start, faulty, request):
    engine = start(faulty(io=request.param, breaker=RATE))
    engine.until_available()
    return engine


@pytest.fixture
def outcomes(engine, gates, machine):
    """Let stores of one chunk each succeed ("+") or fail ("-") one after the other."""
    numbers = iter(range(1_000_000))

    def outcomes(what):
        for outcome in what:
            before = engine.figures()
            if outcome == "-":
                gates.set("write", "fail")
            engine.store([machine.key(next(numbers))])
            after = engine.figures()
            assert after["failed_stores"] - before["failed_stores"] == (outcome == "-")
            assert after["stored_chunks"] - before["stored_chunks"] == (outcome == "+")

    return outcomes


def is_available(engine):
    engine.step()
    return engine.in_use()


def test_failures_that_do_not_follow_each_other_take_it_out_of_use(engine, gates, machine, outcomes, log):
    outcomes("-+--+-++-"[: RATE["min_calls"] - 1])
    assert is_available(engine), "too few calls for a rate"
    outcomes("-")
    assert not is_available(engine)
    assert engine.own()["breaker_state"] == BreakerState.OPEN
    assert log("faulty: taken out of use after OSError: as the test wants")
    asked = gates.reached("write")
    engine.store(machine.keys(2_000_000, 4))
    assert gates.reached("write") == asked
    assert engine.figures()["stored_chunks"] == 4, "nothing more goes down to it"


def test_one_probe_puts_it_back_into_use_by_itself(engine, gates, machine, outcomes, log):
    outcomes("-+--+-++--")
    assert not is_available(engine)
    gates.set("exists", "always sleep 0")
    assert engine.own()["breaker_state"] == BreakerState.OPEN, "before its time"
    assert gates.reached("exists") == 0
    engine.wind(2.5 * HOUR)
    engine.until_available()
    assert gates.reached("exists") == 1
    assert engine.own()["breaker_state"] == BreakerState.CLOSED
    assert log("faulty: answers again; back in use")
    gates.lift("exists")
    outcomes("--+")
    assert is_available(engine), "what was before it closed does not count"
    engine.forget()
    assert engine.load(machine.keys(1, 1)) == 1
    assert engine.own()["breaker_opened"] == 1


def test_a_probe_that_fails_leaves_it_out_of_use_until_a_later_one(engine, gates, outcomes):
    outcomes("-+--+-++--")
    gates.set("exists", "fail")
    engine.wind(2.5 * HOUR)
    engine.until(lambda: gates.reached("exists"), "the probe")
    engine.until(lambda: engine.own()["breaker_state"] == BreakerState.OPEN, "its failure")
    gates.set("exists", "always sleep 0")
    engine.wind(2.5 * HOUR)
    assert engine.own()["breaker_state"] == BreakerState.OPEN, "the delay has doubled"
    assert gates.reached("exists") == 1
    engine.wind(2 * HOUR)
    engine.until_available()
    assert gates.reached("exists") == 2


def test_fewer_failures_than_the_rate_leave_it_in_use(engine, outcomes):
    outcomes("++++" + "-++" * 6)
    assert is_available(engine)
    assert engine.own()["breaker_opened"] == 0


def test_failures_that_lie_before_the_window_do_not_count(engine, outcomes):
    outcomes("-+--+-+-+")
    engine.wind(6.5 * HOUR)
    outcomes("+-+-+-+--")
    assert is_available(engine), "nine calls in its window"
    assert engine.own()["breaker_opened"] == 0
