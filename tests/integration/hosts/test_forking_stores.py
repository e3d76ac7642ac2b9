"""Stores that fork or start programs: no byte is wrong, no child goes on as a second host, and none outlives it."""

import os
from pathlib import Path

import pytest

LONG = {"deadline": "2h", "grace": "200ms"}


def child_of(gates, machine):
    """The process that the store has forked or started."""
    noted = gates.root / "child"
    machine.wait_until(lambda: noted.exists() and noted.read_text(), "the fork")
    return int(noted.read_text())


@pytest.mark.parametrize("io", ["process", "thread"])
@pytest.mark.parametrize("stage", ["open", "exists", "read", "write", "delete"])
def test_a_child_that_comes_back_from_a_call_ends_there_and_no_byte_is_wrong(
    start, faulty, gates, machine, capfd, stage, io
):
    tier, wanted = faulty(**LONG, io=io), machine.keys(0, 96)
    at_once = stage in {"open", "write"}
    if stage == "open":
        gates.set(stage, "doubles")
    engine = start(tier)
    engine.until_available()
    if at_once and stage != "open":
        gates.set(stage, "doubles")
    engine.store(wanted)
    engine.forget()
    if stage == "delete":  # a value that is damaged is deleted by its reader
        path = gates.root / "values" / gates.values()[0]
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    if not at_once:
        gates.set(stage, "doubles")
    if stage == "exists":
        engine.resolve(machine.keys(1000, 4))
    engine.load(wanted)
    child = child_of(gates, machine)
    machine.await_end(child)
    if io == "thread":
        os.waitpid(child, 0)
    said = capfd.readouterr().err
    assert f"its child {child} has come back from the call" in said or f"the child {child} must exec" in said
    # What the child has written, if anything, is there by now.
    engine.forget()
    found = engine.load(wanted)
    if io == "process" and stage != "delete":
        assert found == 96, "the child could write what is in its rows: nothing"


@pytest.mark.parametrize("how", ["forks", "spawns"])
def test_a_child_that_a_store_leaves_ends_with_its_host(start, faulty, gates, machine, how):
    engine = start(faulty())
    engine.until_available()
    gates.set("write", how)
    engine.store(machine.keys(0, 4))
    child = child_of(gates, machine)
    assert machine.state_of(child) not in {"", "Z"}
    engine.close()
    machine.await_end(child)


@pytest.mark.parametrize("how", ["forks", "spawns"])
def test_a_child_that_a_store_leaves_ends_with_a_host_that_is_killed(start, faulty, gates, machine, how):
    engine = start(faulty())
    engine.until_available()
    gates.set("write", how)
    engine.store(machine.keys(0, 4))
    child = child_of(gates, machine)
    os.kill(engine.host(), 9)
    machine.await_end(child)


@pytest.mark.parametrize("how", ["forks", "spawns"])
def test_a_child_that_a_store_leaves_ends_with_an_engine_that_is_killed(party, faulty, gates, machine, how):
    engine = party()
    engine.engine(faulty())
    gates.set("write", how)
    engine.do("engine.store(keys(0, 4))")
    child = child_of(gates, machine)
    assert machine.state_of(child) not in {"", "Z"}
    engine.process.kill()
    machine.await_end(child)


def test_a_forked_child_has_none_of_the_hosts_sockets_and_none_of_its_rows(start, faulty, gates, machine):
    engine = start(faulty())
    engine.until_available()
    host = engine.host()
    gates.set("write", "forks")
    engine.store(machine.keys(0, 4))
    child = child_of(gates, machine)

    def held_by(pid):
        return {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}

    sockets = {link for link in held_by(host) if link.startswith("socket:")}
    assert sockets
    # The parent may name the child before that has run at all.
    machine.wait_until(lambda: not sockets & held_by(child), "the child's closing of the host's sockets")
    assert "kvtiers-" not in Path(f"/proc/{child}/maps").read_text()
