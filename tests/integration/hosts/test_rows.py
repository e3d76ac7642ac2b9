"""Rows: never written after their release, never reused before it, and always under the right names."""

import os
import signal
import threading

import pytest

from kvtiers.secondary.supervisor import HostLauncher

HOUR = 3600.0
LONG = {"deadline": "1h", "grace": "200ms", "breaker": {"failures": 100}}
BOTH = pytest.mark.parametrize("io", ["process", "thread"])


def stuck_load(start, faulty, gates, machine, io, **options):
    """An engine with a load that has written half a value and hangs, and that the engine has given up."""
    engine = start(faulty(io=io, threads=1, **LONG), load_wait="99h", **options)
    engine.until_available()
    wanted = machine.keys(0, 4)
    engine.store(wanted)
    engine.forget()
    gates.set("read", "hang")
    ctx = engine.ask_until(lambda: gates.reached("read"), wanted, "the load")
    engine.until(lambda: engine.figures()["expired_jobs"], "the load's failure", wind=2 * HOUR)
    assert engine.resolve(wanted, ctx) == 0
    return engine


def test_no_row_is_written_after_its_release(start, faulty, gates, machine):
    engine = stuck_load(start, faulty, gates, machine, "process")
    pid = engine.host()
    engine.until(lambda: not engine.figures()["quarantined_rows"], "the release of the rows")
    assert machine.state_of(pid) == "", "rows come free only when the process is no more"
    engine.poison()
    machine.release(gates.root / "fifo")
    engine.until_available()
    for _ in range(50):
        engine.step()
    assert engine.written_rows() == []


def test_rows_of_a_call_that_cannot_be_ended_are_not_used_again_until_it_returns(start, faulty, gates, machine):
    engine = stuck_load(start, faulty, gates, machine, "thread", rows=32)
    held = engine.figures()["quarantined_rows"]
    assert held == 4
    others = machine.keys(100, 28)
    engine.put(others)
    assert engine.primary["quarantined_rows"] == 4
    assert engine.manager.prepare_store(machine.keys(200, 29), engine.request()) is None, "there are 28 rows, not 32"
    assert engine.load(others) == 28
    assert machine.release(gates.root / "fifo")
    engine.until(lambda: not engine.figures()["quarantined_rows"], "the release of the rows")
    assert engine.load(others) == 28, "what the late call wrote went into no row of theirs"


def test_a_stopped_host_that_wakes_up_too_late_writes_nothing(start, faulty, gates, machine):
    """It is killed while it is stopped; SIGCONT comes only after the rows are free."""
    engine = start(faulty(threads=1, **LONG))
    engine.until_available()
    wanted = machine.keys(0, 4)
    engine.store(wanted)
    engine.forget()
    pid = engine.host()
    gates.set("read", "stop")
    engine.ask_until(lambda: gates.reached("read"), wanted, "the load")
    engine.until(lambda: engine.figures()["expired_jobs"], "the load's failure", wind=2 * HOUR)
    engine.until(lambda: not engine.figures()["quarantined_rows"], "the release of the rows")
    engine.poison()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    engine.until_available()
    assert engine.written_rows() == []


def test_a_buffer_that_a_store_keeps_costs_its_host_and_then_the_rows_come_free(start, faulty, gates, machine, log):
    engine = start(faulty(**LONG | {"grace": "1h"}))
    engine.until_available()
    wanted = machine.keys(0, 4)
    engine.store(wanted)
    engine.forget()
    gates.set("read", "keeps")
    assert engine.resolve(wanted) < 4
    assert engine.figures()["quarantined_rows"] == 4
    engine.end_grace()
    engine.until(lambda: not engine.figures()["quarantined_rows"], "the release of the rows")
    (line,) = log("plugin: FaultyStore.read_into kept the buffer")
    assert line.startswith("faulty: a bug of the tier's plugin: FaultyStore.read_into kept the buffer")
    assert line.endswith("Copy what is kept: bytes(...)")
    assert log("its host is killed: job ")
    engine.until(lambda: engine.own()["host_starts"] == 2, "its second life")
    engine.until_available()
    assert engine.load(wanted) == 4


def test_a_host_that_cannot_be_reaped_for_a_while_holds_its_rows_for_as_long(
    start, faulty, gates, machine, monkeypatch
):
    """Simulated: the process really dies at once, and only the event is late, as from a sleep in the kernel."""
    may_end, lives = threading.Event(), []
    honest = HostLauncher._wait

    def wait(self, host, life):
        lives.append(life)
        if life is lives[0]:
            assert may_end.wait(machine.PATIENCE)
        honest(self, host, life)

    monkeypatch.setattr(HostLauncher, "_wait", wait)
    engine = stuck_load(start, faulty, gates, machine, "process", rows=32)
    pid = engine.host()
    engine.until(lambda: machine.state_of(pid) == "Z", "its death")
    again = threading.Event()
    link = engine.link()
    link.launcher.kill(link.host, link.host.life, "once more")
    link.launcher._requests.put(again.set)
    assert again.wait(machine.PATIENCE)
    assert machine.state_of(pid) == "Z", "only its reaper reaps it, however often it is killed"
    engine.until(lambda: not engine.in_use(), "its becoming unavailable")
    for _ in range(50):
        engine.step()
    assert engine.figures()["quarantined_rows"] == 4
    assert engine.manager.prepare_store(machine.keys(200, 29), engine.request()) is None
    may_end.set()
    engine.until(lambda: not engine.figures()["quarantined_rows"], "the release of the rows")
    engine.until_available()
    assert engine.load(machine.keys(0, 4)) == 4


@BOTH
def test_a_thousand_jobs_in_flight_each_end_once(start, faulty, gates, machine, io):
    engine = start(faulty(io=io, deadline="1h"), rows=1400)
    engine.until_available()
    gates.set("write", "always hang")
    wanted = machine.keys(0, 1000)
    for chunk in wanted:
        ctx = engine.request()
        plan = engine.manager.prepare_store([chunk], ctx)
        engine.fill(plan)
        engine.manager.complete_store(plan)
        engine.manager.on_request_finished(ctx)
    assert engine.figures()["running_jobs"] == 1000
    gates.lift("write")
    with machine.releasing(gates.root.parent):
        engine.until_idle()
    figures = engine.figures()
    assert (figures["stored_chunks"], figures["failed_stores"], figures["pinned_rows"]) == (1000, 0, 0)
    engine.forget()
    waiting = [(chunk, engine.request()) for chunk in wanted]

    def all_landed():
        waiting[:] = [(chunk, ctx) for chunk, ctx in waiting if not engine.lookup([chunk], ctx).ready]
        return not waiting

    engine.until(all_landed, "a thousand loads")
    assert engine.figures()["loaded_chunks"] == 1000
    assert engine.load(wanted) == 1000
    assert engine.figures()["refused_results"] == 0


@BOTH
def test_names_change_in_order_with_the_jobs(start, faulty, gates, machine, io):
    """A store that began before the weights changed ends under their old name, the next one under the new."""
    engine = start(faulty(io=io, threads=1))
    engine.until_available()
    gates.set("write", "hang")
    wanted = machine.keys(0, 2)
    engine.put(wanted)
    machine.wait_until(lambda: gates.reached("write"), "the first store")
    engine.new_weights("w2")
    engine.put(wanted)
    assert machine.release(gates.root / "fifo")
    engine.until_idle()
    names = gates.values()
    assert len({name.rpartition("_")[0] for name in names}) == 2
    assert len(names) == 4
    engine.forget()
    assert engine.load(wanted) == 2, "the bytes of the new weights"
    engine.new_weights("w1")
    assert engine.load(wanted) == 2, "and those of the old, under theirs"


def test_a_load_of_the_old_weights_never_becomes_readable_under_the_new(start, faulty, gates, machine):
    engine = start(faulty(threads=1))
    engine.until_available()
    wanted = machine.keys(0, 2)
    engine.store(wanted)
    engine.forget()
    gates.set("read", "hang")
    ctx = engine.request()
    engine.until(lambda: engine.lookup(wanted, ctx).pending, "the promotion")
    engine.step()
    machine.wait_until(lambda: gates.reached("read"), "the load")
    engine.new_weights("w2")
    assert machine.release(gates.root / "fifo")
    assert engine.load(wanted) == 0
    engine.until_idle()
    assert engine.load(wanted) == 0


def test_a_host_that_starts_after_the_weights_changed_has_the_new_names(start, faulty, gates, machine):
    engine = start(faulty())
    engine.until_available()
    pid = engine.host()
    engine.store(machine.keys(0, 2))
    engine.new_weights("w2")
    os.kill(pid, signal.SIGKILL)
    engine.until(lambda: engine.linked_life() is not None and engine.host() != pid, "its second life")
    engine.until_available()
    engine.store(machine.keys(0, 2))
    engine.forget()
    assert engine.load(machine.keys(0, 2)) == 2
    assert len(gates.values()) == 4
