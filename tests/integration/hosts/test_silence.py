"""A store that fails or hangs is never silent: a line names the method, and its tier is taken out of use."""

import pytest

BREAKER = {"failures": 3, "delay": "2h", "max_delay": "8h"}


@pytest.mark.parametrize("io", ["process", "thread"])
def test_a_store_of_which_no_value_can_be_read_is_named_and_taken_out_of_use_though_it_takes_all(
    start, faulty, gates, machine, log, io
):
    engine = start(faulty(io=io, breaker=BREAKER))
    engine.until_available()
    engine.store(machine.keys(0, 8))
    gates.set("read", "always fail")
    for number in range(BREAKER["failures"]):
        assert engine.in_use()
        engine.forget()
        engine.store(machine.keys(100 * (number + 1), 1))
        assert engine.load(machine.keys(number, 1)) == 0
    assert not engine.in_use()
    assert len(log("faulty: its store's read_into failed: OSError: as the test wants")) == 1
    assert len(log("faulty: taken out of use after OSError: as the test wants")) == 1


def test_a_read_that_hangs_is_named_before_its_host_is_killed(start, faulty, gates, machine, log):
    engine = start(faulty(deadline="4s", breaker={"failures": 1000, "min_calls": 1000}))
    engine.until_available()

    def is_stored():  # within the deadline, on a busy machine
        engine.forget()
        engine.store(machine.keys(0, 1))
        return gates.values()

    engine.until(is_stored, "its value")
    engine.forget()
    gates.set("read", "hang")
    ctx = engine.ask_until(lambda: gates.reached("read"), machine.keys(0, 1), "its read")
    engine.until(lambda: log.lines("faulty: its store has not answered for 2 s"), "the line")
    (line,) = log("faulty: its store has not answered for 2 s")
    assert "it is in FaultyStore.read_into (kvtiers_test_faulty.py:" in line
    assert machine.release(gates.root / "fifo") or log.lines("its host is killed")
    engine.resolve(machine.keys(0, 1), ctx)


def test_an_opening_that_hangs_is_named(start, faulty, gates, log):
    tier = faulty(deadline="4s")
    gates.set("open", "hang")
    engine = start(tier)
    engine.until(lambda: log.lines("faulty: its store has not answered for 2 s"), "the line")
    (line,) = log("faulty: its store has not answered for 2 s")
    assert "it is in open_faulty (kvtiers_test_faulty.py:" in line
