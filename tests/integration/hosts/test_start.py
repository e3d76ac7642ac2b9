"""How hosts start, what they are sent and what they inherit, and what a tier that is not there costs."""

import contextlib
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from kvtiers.api import StartError
from kvtiers.config import load_config

BOTH = pytest.mark.parametrize("io", ["process", "thread"])
SOON = {"breaker": {"delay": "20ms", "max_delay": "50ms"}}


@BOTH
def test_an_engine_runs_though_no_tier_can_be_reached_and_hits_begin_when_they_can(
    start, faulty, gates_of, machine, log, io
):
    tiers = [faulty(name, io=io, **SOON) for name in ("first", "second", "third")]
    for tier in tiers:
        gates_of(tier["name"]).set("open", "always fail")
    engine = start(*tiers)
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    assert engine.load(wanted) == 8, "from the primary"
    assert not engine.waits(machine.keys(100, 8), engine.request())
    for name in ("first", "second", "third"):
        engine.until(lambda name=name: gates_of(name).reached("open") >= 3, "its third try")
        assert len(log(f"{name}: out of use: OSError: as the test wants")) == 1
        gates_of(name).lift("open")
    engine.until_available()
    engine.store(machine.keys(200, 8))
    engine.forget()
    assert engine.load(machine.keys(200, 8)) == 8
    assert {engine.figures(name)["stored_chunks"] for name in ("first", "second", "third")} == {8}


def test_hosts_start_side_by_side_behind_the_back_of_open_manager(start, faulty, gates_of, machine):
    names = ["first", "second", "third", "fourth"]
    tiers = [faulty(name) for name in names]
    for name in names:
        gates_of(name).set("open", "hang")
    engine = start(*tiers)
    assert not any(map(engine.in_use, engine.manager.stats()["tiers"]))
    machine.wait_until(lambda: all(gates_of(name).reached("open") for name in names), "all four hanging at once")
    for name in names:
        assert machine.release(gates_of(name).root / "fifo")
    engine.until_available()


def test_a_store_that_hangs_while_it_opens_holds_up_no_other_tier(start, faulty, gates_of, machine):
    stuck, fine = faulty("stuck"), faulty("fine")
    gates_of("stuck").set("open", "hang")
    engine = start(stuck, fine)
    engine.until_available("fine")
    engine.store(machine.keys(0, 4))
    engine.forget()
    assert engine.load(machine.keys(0, 4)) == 4


@pytest.mark.parametrize("wait", ["1h", "0s"])
def test_the_start_waits_for_tiers_to_open_as_long_as_the_config_says(start, faulty, gates_of, machine, wait):
    """The first requests find what is stored."""
    tier = faulty("slow")
    gates_of("slow").set("open", "hang")
    engine = start(tier, start_wait=wait)
    waiting = threading.Thread(target=engine.manager.wait_ready, args=(60,))
    waiting.start()
    machine.wait_until(lambda: gates_of("slow").reached("open"), "opening")
    waiting.join(0.1 if wait == "1h" else 60)
    assert waiting.is_alive() == (wait == "1h")
    assert machine.release(gates_of("slow").root / "fifo")
    waiting.join(60)
    assert not waiting.is_alive()
    engine.until_available()


# -- where its I/O runs


@pytest.mark.parametrize(
    ("options", "io"), [({}, "process"), ({"io": "process"}, "process"), ({"io": "thread"}, "thread")]
)
def test_a_tiers_io_runs_in_another_process_unless_the_config_says_otherwise(
    start, faulty, gates, machine, options, io
):
    before = set(machine.children())
    engine = start(faulty(**options))
    assert load_config(engine.config).secondary[0].io == io
    engine.until_available()
    for stage in ("write", "read"):
        gates.set(stage, "always sleep 0")
    engine.store(machine.keys(0, 4))
    engine.forget()
    assert engine.load(machine.keys(0, 4)) == 4
    moved_in = {*gates.callers("write"), *gates.callers("read")}
    if io == "thread":
        assert moved_in == {os.getpid()}
    else:
        assert moved_in == {engine.host()} == set(machine.children()) - before
        assert engine.host() != os.getpid()


def test_a_tier_that_comes_with_kvtiers_moves_its_values_in_another_process(start, machine, tmp_path):
    """By the kernel's account of what each process has read and written."""
    engine = start({"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB"})
    engine.until_available()
    wanted = machine.keys(0, 128)
    moved = 2 * len(wanted) * machine.VALUE
    hosts, others = moved_by(machine.children()), moved_by([os.getpid()])
    engine.store(wanted)
    engine.forget()
    assert engine.load(wanted) == len(wanted)
    assert moved_by(machine.children()) - hosts >= moved
    assert moved_by([os.getpid()]) - others < moved / 2


def moved_by(processes):
    """The bytes that these have read and written."""
    accounts = [
        dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines()) for pid in processes
    ]
    return sum(int(account["rchar"]) + int(account["wchar"]) for account in accounts)


# -- required


@BOTH
def test_a_required_tier_that_cannot_be_opened_is_named_with_the_reason(start, faulty, gates, machine, io):
    tier = faulty(io=io, required=True)
    gates.set("open", "always fail")
    engine = start(tier)
    with pytest.raises(StartError, match=r"faulty: required, but cannot be opened: OSError: as the test wants"):
        engine.manager.wait_ready(machine.PATIENCE)


@BOTH
def test_wait_ready_waits_until_required_tiers_are_open(start, faulty, gates, machine, io):
    tier = faulty(io=io, required=True)
    gates.set("open", "sleep 0.3")
    engine = start(tier)
    engine.manager.wait_ready(machine.PATIENCE)
    engine.step()
    assert engine.in_use()


def test_wait_ready_from_another_thread_does_not_disturb_an_engine_that_steps(start, faulty, gates, machine):
    tier = faulty(required=True)
    gates.set("open", "sleep 0.5")
    engine = start(tier)
    errors = []

    def wait():
        try:
            engine.manager.wait_ready(machine.PATIENCE)
        except Exception as error:  # noqa: BLE001 -- raised below
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    number = 0
    while any(thread.is_alive() for thread in threads):
        number += 1
        engine.resolve(machine.keys(10_000 + 10 * number, 4))
        engine.put(machine.keys(20 * number, 2))
    for thread in threads:
        thread.join()
    assert not errors
    engine.store(machine.keys(500_000, 4))
    engine.forget()
    assert engine.load(machine.keys(500_000, 4)) == 4
    assert engine.own()["host_starts"] == 1
    assert engine.figures()["raised"] == 0


# -- what a host gets


def of_each(folder, what):
    """What this gives for each entry of a folder, but for those that have gone since it was listed."""
    found = []
    for entry in Path(folder).iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(what(entry))
    return found


def of_each_thread(pid, what):
    return of_each(f"/proc/{pid}/task", lambda task: what(int(task.name)))


def test_a_host_runs_on_the_processors_that_it_is_given(start, faulty):
    allowed = sorted(os.sched_getaffinity(0))
    engine = start(faulty(cpus=allowed[:1]))
    engine.until(lambda: "processors" in engine.own(), "its figures")
    assert engine.own()["processors"] == 1


def test_processors_that_are_not_there_are_a_warning(start, faulty, log, machine):
    engine = start(faulty(cpus=[4095]))
    engine.until_available()
    engine.until(lambda: log.lines("cannot be used"), "the warning")
    engine.store(machine.keys(0, 1))


def read_of(pid, name):
    return Path(f"/proc/{pid}/{name}").read_bytes()


def test_secrets_travel_neither_on_the_command_line_nor_in_the_environment(start, faulty, machine):
    engine = start(faulty(password="swordfish-1234"))
    engine.until(lambda: "password" in engine.own(), "its figures")
    assert engine.own()["password"] == len("swordfish-1234"), "the store has it"
    seen = read_of(engine.host(), "cmdline") + read_of(engine.host(), "environ")
    assert b"PATH=" in seen, "it is the host's"
    for pid in machine.children():  # one that has ended meanwhile has nothing to be read
        with contextlib.suppress(OSError):
            seen += read_of(pid, "cmdline") + read_of(pid, "environ")
    assert b"swordfish" not in seen


def test_a_host_inherits_the_engines_environment_unchanged(start, faulty, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "test")
    engine = start(faulty())
    engine.until_available()  # a program that has just begun seems to have none
    environment = Path(f"/proc/{engine.host()}/environ").read_bytes().split(b"\0")
    expected = {f"{name}={value}".encode() for name, value in os.environ.items()}
    assert {entry for entry in expected if not entry.startswith(b"PYTEST")} <= set(environment)
    assert not [entry for entry in environment if b"KVTIERS" in entry and entry not in expected]


def test_a_host_has_no_descriptor_of_the_engine_but_its_two(start, faulty, tmp_path):
    with (tmp_path / "engines own").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        engine = start(faulty())
        engine.until_available()
        links = of_each(f"/proc/{engine.host()}/fd", lambda fd: str(fd.readlink()))
    assert not [link for link in links if "engines own" in link]
    assert sum("socket:" in link for link in links) == 1
    assert not [link for link in links if "memfd" in link], "mapped, and closed"


def test_a_host_does_not_put_the_engine_off_its_processor(start, faulty):
    engine = start(faulty())
    engine.until_available()
    assert set(of_each_thread(engine.host(), os.sched_getscheduler)) == {os.SCHED_BATCH}


@pytest.mark.parametrize(("options", "below"), [({}, 5), ({"nice": 0}, 0), ({"nice": 10}, 10)])
def test_a_host_gives_way_to_the_engine_as_far_as_its_options_say(start, faulty, options, below):
    engine = start(faulty(**options))
    engine.until_available()
    assert set(of_each_thread(engine.host(), partial(os.getpriority, os.PRIO_PROCESS))) == {min(19, os.nice(0) + below)}


def test_a_host_that_gives_way_in_nothing_is_no_batch_process(start, faulty):
    engine = start(faulty(nice=0))
    engine.until_available()
    assert set(of_each_thread(engine.host(), os.sched_getscheduler)) == {os.SCHED_OTHER}


def test_a_host_loads_no_numpy_and_few_threads(start, faulty, machine):
    """Every library there is times the number of tiers, in memory."""
    engine = start(faulty(threads=2))
    engine.until_available()
    maps = Path(f"/proc/{engine.host()}/maps").read_text()
    assert "numpy" not in maps
    assert "_yaml" not in maps
    threads = Path(f"/proc/{engine.host()}/task")
    machine.wait_until(lambda: len(list(threads.iterdir())) <= 5, "the end of those that opened the store")


# -- replicas


def test_replicas_do_not_write_what_another_has_written(start, faulty, machine):
    tier = faulty()
    first, second = start(tier), start(tier)
    for engine in (first, second):
        engine.until_available()
    prompt = machine.keys(0, 16)
    first.store(prompt)
    second.store([*prompt, *machine.keys(100, 4)])
    assert first.own()["already_present"] == 0
    assert second.own()["already_present"] == 16
    assert second.figures()["stored_bytes"] == 4 * machine.VALUE


# -- rates


@BOTH
@pytest.mark.parametrize(("limit", "written"), [({"bytes_per_second": 16}, 1), ({"requests_per_second": 0.001}, 0)])
def test_a_tier_is_used_no_faster_than_its_config_allows(start, faulty, gates, machine, io, limit, written):
    """The next turn is minutes away: a value is 256 seconds' worth of bytes, the question before it all the calls."""
    engine = start(faulty(io=io, rate_limit=limit, deadline="60s"))
    engine.until_available()
    engine.store(machine.keys(0, 4))
    assert engine.figures()["stored_chunks"] == len(gates.values()) == written
    assert engine.figures()["failed_stores"] == 4 - written


# -- the log


def test_a_line_of_a_stores_log_reaches_the_engines_log_with_the_tiers_name(start, faulty, gates, machine, log):
    engine = start(faulty())
    engine.until_available()
    gates.set("write", "says I am slow today")
    engine.store(machine.keys(0, 1))
    assert log("I am slow today") == ["faulty: I am slow today"]


def test_a_store_that_floods_its_log_is_cut_short_and_goes_on(start, faulty, gates, machine, log):
    engine = start(faulty())
    engine.until_available()
    begin = time.monotonic()
    gates.set("write", "flood")
    engine.store(machine.keys(0, 4))
    engine.until(lambda: log.lines("flood"), "its first lines")
    assert len(log.lines("faulty: flood")) <= 50 * (time.monotonic() - begin + 2), "what a host may send in a second"
    assert engine.own()["host_starts"] == 1
    numbers = iter(range(1000, 100_000))

    def heard():
        gates.set("write", "says and that was all")
        engine.store([machine.key(next(numbers))])
        return log.lines("and that was all")

    engine.until(heard, "the line after it")
