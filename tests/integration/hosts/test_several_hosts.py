"""One tier in several hosts: what happens to one of them costs what it had in flight, and the tier goes on."""

import itertools
import os
import signal
import threading
from pathlib import Path

import pytest

from kvtiers.secondary.supervisor import HostLauncher

HOUR = 3600.0
# A breaker that opens stays open for the whole test, unless a test sets it otherwise.
LONG = {"deadline": "2h", "grace": "200ms", "breaker": {"delay": "1h", "max_delay": "1h"}}


@pytest.fixture
def several(start, faulty):
    """Start an engine with one tier in so many hosts, all of them open."""

    def several(count, **options):
        engine = start(faulty(processes=count, **{"threads": 2, **LONG, **options}), load_wait="99h")
        all_open(engine, count)
        return engine

    return several


def all_open(engine, count):
    engine.until(lambda: engine.own()["hosts_open"] == count, "all its hosts")


def stored(engine, wanted):
    """Have these chunks in the tier, known to be there, and not in the primary."""
    engine.store(wanted)
    engine.forget()
    return wanted


def stored_beside(engine, wanted):
    """Store these while other jobs hang."""
    before = engine.figures()["stored_chunks"]
    engine.put(wanted)
    engine.until(lambda: engine.figures()["stored_chunks"] == before + len(wanted), "the store")


def no_row_is_lost(engine):
    """All rows come free; and what was lost is asked for again, a second later by the engine's clock."""
    engine.until(lambda: not engine.figures()["pinned_rows"], "the release of the rows")
    engine.wind(2.0)
    assert engine.figures()["quarantined_rows"] == 0
    assert engine.primary["quarantined_rows"] == engine.primary["pinned_rows"] == 0


def test_one_request_is_shared_out_and_every_byte_is_right(several, gates, machine):
    engine = several(3)
    hosts = set(engine.each_host().values())
    assert len(hosts) == 3
    for stage in ("write", "read"):
        gates.set(stage, "always sleep 0")
    wanted = stored(engine, machine.keys(0, 96))
    assert set(gates.callers("write")) == hosts
    assert engine.load(wanted) == 96
    assert set(gates.callers("read")) == hosts
    assert len(gates.callers("read")) == 96, "each value once"
    figures = engine.figures()
    assert (figures["stored_chunks"], figures["loaded_bytes"]) == (96, 96 * machine.VALUE)
    assert (figures["own"]["host_starts"], figures["own"]["hosts"]) == (3, 3)


def test_hosts_can_be_distinguished_in_a_list_of_processes(several):
    engine = several(2)
    for name, pid in engine.each_host().items():
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert arguments[-2].decode() == name
    assert list(engine.each_host()) == ["faulty (1 of 2)", "faulty (2 of 2)"]


# -- one of them dies


def test_of_a_load_in_parts_only_what_a_killed_host_had_is_lost(several, gates, machine):
    engine = several(2)
    wanted = stored(engine, machine.keys(0, 64))
    gates.set("read", "always hang")
    ctx = engine.ask_until(lambda: len(set(gates.callers("read"))) == 2, wanted, "both parts")
    victim = engine.each_host()["faulty (2 of 2)"]
    os.kill(victim, signal.SIGKILL)
    killed = engine.group()._hosts[1]
    engine.until(lambda: not killed.values, "it is reaped")
    assert engine.waits(wanted, ctx), "the other part is on its way"
    gates.lift("read")
    with machine.releasing(gates.root.parent):
        engine.until(lambda: not engine.figures()["pinned_rows"], "the load's end")
    figures = engine.figures()
    assert (figures["loaded_chunks"], figures["failed_loads"], figures["expired_jobs"]) == (32, 32, 0)
    no_row_is_lost(engine)
    all_open(engine, 2)
    assert engine.own()["host_starts"] == 3
    assert engine.load(wanted) == 64


def test_rows_of_a_killed_host_are_held_until_it_is_reaped_and_the_others_go_on(several, gates, machine, monkeypatch):
    """Simulated: the process really dies at once, and only the event is late, as from a sleep in the kernel."""
    may_end, honest = threading.Event(), HostLauncher._wait

    def wait(self, host, life):
        assert may_end.wait(machine.PATIENCE)
        honest(self, host, life)

    monkeypatch.setattr(HostLauncher, "_wait", wait)
    engine = several(2)
    wanted, others = stored(engine, machine.keys(0, 1)), stored(engine, machine.keys(100, 40))
    gates.set("read", "hang")
    ctx = engine.ask_until(lambda: gates.reached("read"), wanted, "the load")
    (victim,) = gates.callers("read")
    os.kill(victim, signal.SIGKILL)
    engine.until(lambda: engine.figures()["quarantined_rows"], "the load's failure")
    assert engine.resolve(wanted, ctx) == 0, "failed at once"
    assert engine.load(others) == 40
    stored_beside(engine, machine.keys(200, 40))
    assert engine.figures()["quarantined_rows"] == 1
    assert engine.own()["hosts_open"] == 1
    assert engine.own()["breaker_opened"] == 0
    may_end.set()
    no_row_is_lost(engine)
    all_open(engine, 2)
    assert engine.load(wanted) == 1


def test_a_death_with_many_jobs_in_flight_does_not_keep_the_tier_out_of_use(several, gates, machine):
    """More failures in a row than open the breaker, which would stay open for an hour."""
    engine = several(2)
    wanted = stored(engine, machine.keys(0, 24))
    gates.set("read", "always hang")
    requests = [(chunk, engine.request()) for chunk in wanted]

    def all_pending():
        pending = [engine.lookup([chunk], ctx).pending for chunk, ctx in requests]
        return all(pending)

    engine.until(all_pending, "24 loads")
    engine.until(lambda: len(set(gates.callers("read"))) == 2, "loads in both hosts")
    os.kill(engine.each_host()["faulty (1 of 2)"], signal.SIGKILL)
    engine.until(lambda: engine.own()["breaker_opened"] == 1, "its failures")
    engine.until_available()
    assert engine.own()["hosts_open"] >= 1
    gates.lift("read")
    with machine.releasing(gates.root.parent):
        no_row_is_lost(engine)
    assert engine.figures()["loaded_chunks"] == 12
    assert engine.load(wanted) == 24


def test_hosts_that_die_again_and_again_cost_hits_and_never_a_wrong_byte(several, machine):
    """``load`` compares each byte of what it gets."""
    engine = several(3)
    victims = itertools.cycle(["faulty (2 of 3)", "faulty (3 of 3)", "faulty (1 of 3)"])
    known = []
    for number in range(12):
        engine.until_available()
        fresh = machine.keys(1000 * number, 50)
        engine.put(fresh)
        if pid := engine.each_host().get(next(victims)):
            os.kill(pid, signal.SIGKILL)
        for wanted in known[-3:]:
            engine.until_available()
            ctx = engine.request()
            engine.lookup(wanted, ctx)
            engine.step()
            engine.load(wanted)
            engine.manager.on_request_finished(ctx)
        known.append(fresh)
        engine.forget()
    no_row_is_lost(engine)
    all_open(engine, 3)
    engine.until_available()  # the deaths may have opened its breaker
    wanted = machine.keys(100_000, 64)
    assert engine.load(stored(engine, wanted)) == 64


def test_an_engine_that_is_killed_leaves_none_of_them(party, faulty, gates, machine):
    engine = party()
    engine_id = engine.engine(faulty(processes=3))
    engine.do("engine.until(lambda: engine.own()['hosts_open'] == 3)")
    engine.do("engine.store(keys(0, 96)); engine.forget()")
    gates.set("read", "always hang")
    engine.do("ctx = engine.request(); engine.until(lambda: engine.lookup(keys(0, 96), ctx).pending); engine.step()")
    machine.wait_until(lambda: len(set(gates.callers("read"))) == 3, "a load in all of them")
    hosts = engine.hosts()
    assert len(hosts) == 3
    engine.process.kill()
    for pid in hosts:
        machine.await_end(pid)
    machine.wait_until(lambda: machine.holders(engine_id) == [], "the end of the last mapping")


# -- one of them hangs, or does not open


def test_a_stopped_host_costs_what_it_had_and_comes_back(several, machine, log):
    engine = several(2)
    wanted = stored(engine, machine.keys(0, 20))
    stopped = engine.each_host()["faulty (1 of 2)"]
    os.kill(stopped, signal.SIGSTOP)
    first, second = [(chunk, engine.request()) for chunk in wanted[:2]]
    engine.until(lambda: engine.lookup([first[0]], first[1]).pending, "a load in one of them")
    engine.until(lambda: engine.lookup([second[0]], second[1]).pending, "a load in the other")
    engine.until(lambda: engine.figures()["loaded_chunks"] == 1, "the load that runs")
    for chunk in wanted[2:]:
        assert engine.load([chunk]) == 1, "nothing more is sent to the one that does not answer"
    stored_beside(engine, machine.keys(100, 1))
    assert engine.figures()["running_jobs"] == 1
    engine.wind(3 * HOUR)
    engine.until(lambda: engine.figures()["expired_jobs"] == 1, "the load's failure")
    engine.until(lambda: log.lines("faulty (1 of 2): its host is killed: job "), "its end")
    no_row_is_lost(engine)
    all_open(engine, 2)
    assert engine.own()["breaker_opened"] == 0
    engine.forget()
    assert engine.load(wanted) == 20


def test_a_stopped_host_is_asked_once(several, machine):
    engine = several(2)
    os.kill(engine.each_host()["faulty (1 of 2)"], signal.SIGSTOP)
    waiting = engine.request()
    assert engine.waits(machine.keys(0, 8), waiting)
    engine.step()
    for number in range(1, 20):
        assert engine.resolve(machine.keys(100 * number, 8)) == 0
    assert engine.waits(machine.keys(0, 8), waiting)
    assert engine.own()["open_probes"] == 1


def test_a_tier_goes_on_while_one_of_its_hosts_cannot_open(start, faulty, gates, machine, log):
    tier = faulty(processes=2, threads=2, **LONG)
    gates.set("open", "fail")
    engine = start(tier)
    engine.until_available()
    wanted = stored(engine, machine.keys(0, 64))
    assert engine.load(wanted) == 64
    (line,) = log("out of use: OSError: as the test wants; the tier goes on with its other hosts")
    assert line.startswith(("faulty (1 of 2): ", "faulty (2 of 2): "))
    assert engine.own()["hosts_open"] == 1
    assert not log.lines("its lookups miss")


def test_a_tier_none_of_whose_hosts_can_open_comes_back_with_them(start, faulty, gates, machine, log):
    tier = faulty(processes=2, threads=2, breaker={"delay": "20ms", "max_delay": "50ms"})
    gates.set("open", "always fail")
    engine = start(tier)
    engine.until(lambda: gates.reached("open") >= 6, "its third try")
    assert len(log("faulty: out of use: OSError: as the test wants")) == 1
    assert not engine.in_use()
    gates.lift("open")
    all_open(engine, 2)
    engine.until_available()
    assert engine.load(stored(engine, machine.keys(0, 64))) == 64


def test_a_required_tier_is_there_when_one_of_its_hosts_is(start, faulty, gates, machine):
    tier = faulty(processes=2, threads=2, required=True, **LONG)
    gates.set("open", "fail")
    engine = start(tier)
    engine.manager.wait_ready(machine.PATIENCE)
    engine.step()
    assert engine.in_use()


# -- what holds for all of them together


def test_all_hosts_together_keep_to_the_rate_limit(several, gates, machine):
    """The next turn is minutes away: a value is 256 seconds' worth of each host's bytes."""
    engine = several(2, rate_limit={"bytes_per_second": 32}, deadline="60s")
    engine.store(machine.keys(0, 64))
    assert engine.figures()["stored_chunks"] == len(gates.values()) == 2


def test_all_hosts_have_the_names_of_the_weights(several, gates, machine):
    engine = several(2)
    wanted = machine.keys(0, 64)
    engine.store(wanted)
    engine.new_weights("w2")
    assert engine.load(wanted) == 0
    engine.store(wanted)
    os.kill(engine.each_host()["faulty (2 of 2)"], signal.SIGKILL)
    engine.until(lambda: engine.own()["hosts_open"] == 1, "its death")
    all_open(engine, 2)
    engine.forget()
    assert engine.load(wanted) == 64, "also by the host that was started after the change"
    engine.new_weights("w1")
    assert engine.load(wanted) == 64
    assert len(gates.values()) == 128


def test_a_shutdown_brings_down_what_is_in_flight_in_all_hosts(several, gates, machine, log, unhurried):
    engine = several(2)
    gates.set("write", "always sleep 0.02")
    engine.put(machine.keys(0, 64))
    engine.close(HOUR)
    assert len(gates.values()) == 64
    assert not log.lines("dropped")
    assert not log.lines("killed")
