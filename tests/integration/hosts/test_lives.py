"""A host that dies, stops or goes wrong, at every stage of its life: the engine loses hits, and nothing else."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

HOUR = 3600.0
LONG = {"deadline": "2h", "grace": "200ms", "breaker": {"failures": 3, "delay": "50ms"}}
DEATHS = pytest.mark.parametrize("death", ["kill", "segfault", "exit"])


def hits_resume(engine, machine, first=1000):
    """The tier comes back by itself, and stores and loads again."""
    engine.until_available("faulty")
    wanted = machine.keys(first, 8)
    engine.store(wanted)
    engine.forget()
    assert engine.load(wanted) == 8


def no_row_is_lost(engine):
    engine.until(lambda: not engine.figures()["quarantined_rows"], "the release of the rows")
    assert engine.figures()["pinned_rows"] == 0
    assert engine.primary["quarantined_rows"] == engine.primary["pinned_rows"] == 0


def damage(gates):
    """Change a byte of every value: what reads one deletes it."""
    for path in (gates.root / "values").iterdir():
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("stage", ["open", "exists", "read", "write", "delete"])
@pytest.mark.parametrize("what", ["kill", "stop", "sleep 2", "flood"])
def test_whatever_a_host_does_at_whatever_stage_costs_hits_and_nothing_else(start, faulty, gates, machine, stage, what):
    tier, wanted = faulty(**LONG), machine.keys(0, 8)
    if stage == "open":
        gates.set(stage, what)
    engine = start(tier)
    if stage != "open":
        engine.until_available()
        engine.store(wanted)
        engine.forget()
        gates.set(stage, what)
    if stage == "delete":
        damage(gates)
    if stage == "write":
        engine.put(machine.keys(100, 8))
    asked = [*wanted, *machine.keys(50, 2)]
    ctx = engine.ask_until(lambda: gates.reached(stage), asked, "the call")
    engine.put(machine.keys(200, 8))
    for _ in range(100):
        engine.step()
    engine.waits(asked, ctx)  # for an hour for an answer, from now at the latest, and for another for a load
    engine.wind(HOUR)
    engine.waits(asked, ctx)
    engine.wind(HOUR)
    assert not engine.waits(asked, ctx)
    engine.step()
    if (stage, what) == ("open", "stop"):
        engine.end_grace()
    engine.until(lambda: not engine.figures()["pinned_rows"], "the end of its jobs", wind=HOUR)
    no_row_is_lost(engine)
    hits_resume(engine, machine)


@DEATHS
def test_a_host_that_dies_while_it_opens_is_started_again(start, faulty, gates, machine, log, death):
    tier = faulty()
    gates.set("open", death)
    engine = start(tier)
    hits_resume(engine, machine)
    assert gates.reached("open") == 1
    (line,) = log("a new one starts")
    assert line.startswith("faulty: its host ended (")
    assert ("signal" in line) == (death != "exit")


@pytest.mark.parametrize("death", ["kill", "segfault"])
def test_a_host_that_dies_in_the_middle_of_a_load_fails_it_at_once(start, faulty, gates, machine, death):
    engine = start(faulty(**LONG))
    engine.until_available()
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    engine.forget()
    gates.set("read", death)
    assert engine.resolve(wanted) < 8
    no_row_is_lost(engine)
    engine.until_available("faulty")
    engine.forget()
    assert engine.load(wanted) == 8


def test_a_host_that_dies_in_the_middle_of_a_store_drops_it(start, faulty, gates, machine):
    engine = start(faulty())
    engine.until_available()
    gates.set("write", "kill")
    wanted = machine.keys(0, 8)
    engine.put(wanted)
    engine.until(lambda: engine.figures()["failed_stores"], "the store's failure")
    no_row_is_lost(engine)
    assert engine.load(wanted) == 8, "in the primary the chunks stay readable"
    hits_resume(engine, machine)


def test_a_host_that_dies_at_a_question_makes_it_a_miss(start, faulty, gates, machine):
    engine = start(faulty(**LONG))
    engine.until_available()
    gates.set("exists", "segfault")
    assert engine.resolve(machine.keys(0, 8)) == 0
    hits_resume(engine, machine)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_idle_host_that_is_killed_from_outside_is_started_again(start, faulty, machine, number):
    engine = start(faulty())
    engine.until_available()
    os.kill(engine.host(), number)
    engine.until(lambda: not engine.in_use(), "its becoming unavailable")
    hits_resume(engine, machine)
    assert engine.own()["host_starts"] == 2


def test_a_host_is_deaf_to_what_is_meant_for_the_engine(start, faulty, machine):
    engine = start(faulty())
    engine.until_available()
    pid = engine.host()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    engine.store(machine.keys(0, 4))
    assert engine.host() == pid
    assert engine.own()["host_starts"] == 1


@pytest.mark.parametrize("stage", ["read", "write"])
def test_a_host_that_is_stopped_in_a_job_is_killed_after_deadline_and_grace(start, faulty, gates, machine, log, stage):
    engine = start(faulty(**LONG), load_wait="99h")
    engine.until_available()
    wanted = machine.keys(0, 4)
    if stage == "read":
        engine.store(wanted)
        engine.forget()
    pid = engine.host()
    gates.set(stage, "stop")
    if stage == "read":
        ctx = engine.ask_until(lambda: gates.reached(stage), wanted, "the load")
        assert engine.waits(wanted, ctx)
        assert engine.resolve(wanted, ctx, wind=HOUR) < 4
    else:
        engine.put(wanted)
        machine.wait_until(lambda: gates.reached(stage), "the store")
    engine.until(
        lambda: machine.state_of(pid) in {"", "Z"} or engine.life() is None,
        "its end",
        wind=HOUR if stage == "write" else 0.0,
    )
    assert log("its host is killed: job ")
    no_row_is_lost(engine)
    hits_resume(engine, machine)


def test_an_idle_host_that_is_stopped_is_found_out_by_its_silence_and_killed(start, faulty, machine, log):
    engine = start(faulty(**LONG))
    engine.until_available()
    pid = engine.host()
    os.kill(pid, signal.SIGSTOP)
    asked = 0

    def is_killed():
        nonlocal asked
        asked += 1
        ctx = engine.request()
        engine.lookup([machine.key(10_000 + asked)], ctx)
        engine.manager.on_request_finished(ctx)
        return log.lines("its host is killed: it has not answered for 7200s")

    engine.until(is_killed, "its end", wind=HOUR)
    hits_resume(engine, machine)


@pytest.mark.parametrize("stage", ["read", "write"])
def test_a_call_that_hangs_in_the_kernel_costs_its_host_and_nothing_more(start, faulty, gates, machine, stage):
    """Blocked in a read of a FIFO without a writer: no exception and no signal handler gets it out of there."""
    engine = start(faulty(threads=1, **LONG))
    engine.until_available()
    wanted = machine.keys(0, 4)
    if stage == "read":
        engine.store(wanted)
        engine.forget()
    gates.set(stage, "hang")
    if stage == "read":
        engine.ask_until(lambda: gates.reached(stage), wanted, "the load")
    else:
        engine.put(wanted)
        machine.wait_until(lambda: gates.reached(stage), "the store")
    engine.until(lambda: engine.figures()["expired_jobs"], "the job's failure", wind=HOUR)
    engine.until(lambda: engine.own()["host_starts"] == 2, "its second life")
    no_row_is_lost(engine)
    hits_resume(engine, machine)


def test_a_queued_job_that_a_busy_host_never_begins_costs_hits_but_not_the_host(start, faulty, gates, machine):
    engine = start(faulty(threads=1, deadline="2h", grace="1h", breaker={"failures": 100}), load_wait="99h")
    engine.until_available()
    for number in range(6):
        engine.store(machine.keys(10 * number, 1))
    engine.forget()
    gates.set("read", "hang")
    requests = [engine.request() for _ in range(6)]

    def ask():
        return [engine.waits(machine.keys(10 * n, 1), ctx) for n, ctx in enumerate(requests)]

    engine.until(lambda: all(ask()) and engine.figures()["running_jobs"] == 6, "six jobs")
    machine.wait_until(lambda: gates.reached("read"), "the first of them")
    engine.until(lambda: engine.figures()["expired_jobs"] == 6, "their failure", wind=HOUR)
    assert not any(ask())
    assert machine.release(gates.root / "fifo")
    no_row_is_lost(engine)
    assert engine.own()["host_starts"] == 1


def test_after_a_death_the_next_start_is_delayed_more_and_more(start, faulty, gates, machine, log):
    gates_set = faulty()
    gates.set("open", "always exit")
    engine = start(gates_set)
    engine.until(lambda: len(log.lines("a new one starts in")) >= 4, "its fourth death")
    delays = [line.rpartition(" in ")[2] for line in log.lines("a new one starts in")[:4]]
    assert delays == ["0.05s", "0.1s", "0.2s", "0.4s"]
    assert len(log.lines("out of use")) == 1, "one warning"
    gates.lift("open")
    hits_resume(engine, machine)


def test_a_host_that_was_killed_does_not_drag_its_successor_along(start, faulty, machine):
    """The engine sleeps through a death and a new start; what it does about the old life then must not hit the new."""
    engine = start(faulty())
    engine.until_available()
    first = engine.host()
    os.kill(first, signal.SIGKILL)
    machine.wait_until(lambda: engine.life() is not None and engine.life().process.pid != first, "its second life")
    second = engine.life()
    engine.until(lambda: engine.linked_life() is second, "its notice of the second life")
    hits_resume(engine, machine)
    assert engine.life() is second
    assert engine.own()["host_starts"] == 2


@pytest.mark.parametrize("how", ["forks", "spawns"])
def test_what_a_store_starts_keeps_neither_the_host_alive_nor_the_memory(start, faulty, gates, machine, how):
    tier = faulty()
    engine = start(tier)
    engine.until_available()
    gates.set("write", how)
    engine.store(machine.keys(0, 1))
    child = int((gates.root / "child").read_text())
    try:
        machine.wait_until(  # a forked child closes what it has inherited once it runs
            lambda: not any(str(child) in line for line in machine.holders(engine.manager.engine_id)), "its letting go"
        )
        if how == "spawns":
            assert not [fd for fd in Path(f"/proc/{child}/fd").iterdir() if "socket:" in str(fd.readlink())]
        pid = engine.host()
        os.kill(pid, signal.SIGKILL)
        engine.until(lambda: not engine.in_use(), "its becoming unavailable")
        hits_resume(engine, machine)
        engine.until(lambda: machine.state_of(child) in {"", "Z"}, "its end with the host")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_the_engines_thread_never_waits_while_its_hosts_are_stopped(start, faulty, machine):
    """Stores, loads and questions go on into a socket that is not read, until the outbox is full and beyond."""
    engine = start(faulty(store_queue=100_000, deadline="2h"), rows=2048)
    engine.until_available()
    pid = engine.host()
    os.kill(pid, signal.SIGSTOP)
    for number in range(200):
        ctx = engine.request()
        engine.lookup(machine.keys(1_000_000 + 1000 * number, 1000), ctx)
        engine.manager.on_request_finished(ctx)
        if number < 150:
            engine.put(machine.keys(10 * number, 10))
        else:
            engine.step()
    assert machine.state_of(pid) == "T", "a wait for it would not end"
    figures = engine.own()
    assert figures["open_probes"] <= 128
    os.kill(pid, signal.SIGCONT)
    engine.until_idle()
