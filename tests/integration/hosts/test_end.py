"""An orderly end: within its bound, whatever the hosts do, and it says what was dropped."""

import os
import signal
import threading

import pytest

BOTH = pytest.mark.parametrize("io", ["process", "thread"])
HOUR = 3600.0  # a wait of the allowed length would never end here


@BOTH
def test_a_shutdown_brings_down_what_is_in_flight_and_closes_the_store(
    start, faulty, gates, machine, log, unhurried, io
):
    engine = start(faulty(io=io))
    engine.until_available()
    gates.set("write", "sleep 0.2")
    engine.put(machine.keys(0, 32))
    engine.close(HOUR)
    assert len(gates.values()) == 32
    assert (gates.root / "closed").exists()
    assert not log.lines("dropped")


@BOTH
def test_a_shutdown_says_how_many_jobs_and_chunks_it_dropped(start, faulty, gates, machine, log, io):
    engine = start(faulty(io=io, threads=1))
    engine.until_available()
    gates.set("write", "always hang")
    for number in range(3):
        engine.put(machine.keys(10 * number, 4))
    machine.wait_until(lambda: gates.reached("write"), "the first store")
    engine.close(0.3)
    assert log("dropped") == ["faulty: shutdown within 0.3s dropped 3 jobs with 12 chunks"]
    gates.lift("write")
    with machine.releasing(gates.root.parent):
        machine.wait_until(lambda: not machine.holders(engine.manager.engine_id), "its very end")


def test_that_hosts_are_killed_for_jobs_dropped_at_the_end_is_not_said_again(start, faulty, gates, machine, log):
    engine = start(faulty(threads=1, grace="50ms"))
    engine.until_available()
    pid = engine.host()
    gates.set("write", "hang")
    engine.put(machine.keys(0, 4))
    machine.wait_until(lambda: gates.reached("write"), "the store")
    tier = next(slot.tier for slot in engine.manager._slots)
    tier.drop_jobs(list(engine.group().jobs()))
    engine.until(lambda: engine.own()["host_starts"] == 2, "another host in the place of the one that was killed")
    assert machine.state_of(pid) == ""
    engine.until_available()
    gates.set("write", "hang")
    engine.put(machine.keys(10, 4))
    machine.wait_until(lambda: gates.reached("write") == 2, "the next store")
    engine.close(0.3)
    assert log("dropped") == ["faulty: shutdown within 0.3s dropped 2 jobs with 8 chunks"]
    assert not log.lines("its host")


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        ("write", "kill"),
        ("write", "stop"),
        ("write", "hang"),
        ("write", "fail"),
        ("write", "segfault"),
        ("write", "sleep 2"),
        ("write", "flood"),
        ("close", "kill"),
        ("close", "stop"),
        ("close", "hang"),
        ("close", "fail"),
        ("close", "segfault"),
        ("close", "sleep 2"),
        ("close", "flood"),
    ],
)
def test_whatever_a_host_does_during_the_shutdown_it_ends_within_its_bound(
    start, faulty, gates, machine, log, stage, order
):
    engine = start(faulty(threads=1))
    engine.until_available()
    pid = engine.host()
    gates.set(stage, order)
    engine.put(machine.keys(0, 4))
    engine.close(0.5)
    machine.wait_until(lambda: machine.state_of(pid) == "", "its end, and its being reaped")
    if len(gates.values()) < 4:
        assert log("dropped")


def test_an_idle_host_that_is_stopped_is_killed_at_the_end(start, faulty, machine):
    engine = start(faulty())
    engine.until_available()
    pid = engine.host()
    os.kill(pid, signal.SIGSTOP)
    engine.close(0.5)
    machine.wait_until(lambda: machine.state_of(pid) == "", "its end, and its being reaped")


def test_one_hanging_tier_does_not_cost_another_its_stores(start, faulty, gates_of, machine, log):
    """The other has all the time it needs: the hanging one's process is ended when that has stored and closed."""
    engine = start(faulty("stuck"), faulty("fine"))
    engine.until_available()
    stuck, fine, pid = gates_of("stuck"), gates_of("fine"), engine.host("stuck")
    for gates in (stuck, fine):
        gates.set("write", "always hang")
    engine.put(machine.keys(0, 16))
    machine.wait_until(lambda: stuck.reached("write") and fine.reached("write"), "the stores")
    closing = threading.Thread(target=engine.close, args=(HOUR,))
    closing.start()
    machine.wait_until(lambda: engine.manager._closed, "the shutdown's begin")
    assert not fine.values()
    fine.lift("write")
    machine.wait_until(lambda: [machine.release(fine.root / "fifo")] and (fine.root / "closed").exists(), "its end")
    assert len(fine.values()) == 16
    assert closing.is_alive()
    os.kill(pid, signal.SIGKILL)
    closing.join(machine.PATIENCE)
    assert not closing.is_alive()
    assert log("dropped") == ["stuck: shutdown within 3.6e+03s dropped 1 jobs with 16 chunks"]


def test_a_shutdown_right_after_the_start_waits_for_nothing(start, faulty):
    start(*(faulty(f"tier-{number}") for number in range(3))).close(HOUR)


def test_a_shutdown_waits_for_no_store_that_is_still_opening(start, faulty, gates_of, machine, caplog):
    names = ["first", "second"]
    tiers = [faulty(name) for name in names]
    for name in names:
        gates_of(name).set("open", "hang")
    engine = start(*tiers)
    machine.wait_until(lambda: all(gates_of(name).reached("open") for name in names), "both hanging")
    engine.close(HOUR)
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


def test_the_last_words_of_a_store_reach_the_log(start, faulty, gates, machine, log, unhurried):
    engine = start(faulty())
    engine.until_available()
    gates.set("close", "says goodbye")
    engine.close(HOUR)
    assert log.lines("goodbye") == ["faulty: goodbye"]


def test_an_end_without_trouble_is_no_warning(start, faulty, machine, caplog, unhurried):
    engine = start(faulty())
    engine.until_available()
    engine.store(machine.keys(0, 4))
    engine.close(HOUR)
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
