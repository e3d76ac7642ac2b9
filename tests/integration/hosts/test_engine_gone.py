"""However an engine ends, and whatever its process does besides: nothing of it stays behind."""

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest

from kvtiers.testing.running import descriptors_left_since, open_descriptors, threads_left_since


def await_nothing_left(machine, engine_id, hosts):
    for pid in hosts:
        machine.await_end(pid)
    machine.wait_until(lambda: machine.holders(engine_id) == [], "the end of the last mapping")
    assert [pid for pid in hosts if machine.state_of(pid) not in {"", "Z"}] == []


class Places:
    """Everywhere that a process may leave a file by itself."""

    def __init__(self, folder):
        self._places = [folder / "tmp", folder / "home", folder / "here"]
        for place in self._places:
            place.mkdir()
        self.here = self._places[2]
        self.environment = os.environ | {"TMPDIR": str(self._places[0]), "HOME": str(self._places[1])}

    def files(self, engine_id):
        """What lies in these places, and of this engine in shared memory."""
        shared = [path for path in Path("/dev/shm").iterdir() if engine_id in path.name]
        return [*shared, *(path for place in self._places for path in place.iterdir())]


@pytest.fixture
def places(tmp_path):
    return Places(tmp_path)


@pytest.fixture
def two_tiers(faulty):
    return faulty(), faulty("second")


@pytest.fixture
def stopped_late(places, tmp_path):
    """How to start an engine whose hosts are stopped just after its end, before they have armed their signal."""
    early = tmp_path / "early"
    early.mkdir()
    (early / "sitecustomize.py").write_text(
        "import os, signal, sys, time\n"
        "if '-P' in sys.orig_argv and any('kvtiers.host.__main__' in word for word in sys.orig_argv):\n"
        "    engine = int(sys.argv[-3])\n"
        "    while os.getppid() == engine:\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    return {"env": places.environment | {"PYTHONPATH": str(early)}, "cwd": places.here}


def test_an_engine_that_is_killed_leaves_no_host_and_no_memory(party, two_tiers, machine):
    engine = party()
    engine_id = engine.engine(*two_tiers)
    engine.do("engine.store(keys(0, 8))")
    hosts = engine.hosts()
    assert len(hosts) == 2
    assert len(machine.holders(engine_id)) >= 3
    engine.process.kill()
    await_nothing_left(machine, engine_id, hosts)


def test_an_engine_that_is_killed_while_its_hosts_are_stopped_in_their_first_moment_leaves_nothing(
    party, two_tiers, machine, places, tmp_path
):
    """Before they have armed their parent-death signal, and can see no socket."""
    early = tmp_path / "early"
    early.mkdir()
    (early / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if '-P' in sys.orig_argv and any('kvtiers.host.__main__' in word for word in sys.orig_argv):\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    engine = party(env=places.environment | {"PYTHONPATH": str(early)}, cwd=places.here)
    engine.do(f"engine = Engine(*{two_tiers!r})")
    engine_id = engine.do("engine.manager.engine_id")
    machine.wait_until(lambda: len(engine.hosts()) == 2, "its hosts")
    hosts = engine.hosts()
    machine.wait_until(lambda: [machine.state_of(pid) for pid in hosts] == ["T", "T"], "their being stopped")
    engine.process.kill()
    await_nothing_left(machine, engine_id, hosts)


def test_a_host_that_has_not_armed_its_signal_ends_with_an_engine_that_is_killed(
    party, two_tiers, machine, stopped_late
):
    """One that is stopped just after the engine's end has no parent whose end could reach it any more."""
    engine = party(**stopped_late)
    engine.do("import kvtiers.secondary.supervisor as module; tied, tie = [], module.lifeline")
    engine.do("module.lifeline = lambda process: (tie(process), tied.append(process.pid))[0]")
    engine.do(f"engine = Engine(*{two_tiers!r})")
    engine_id = engine.do("engine.manager.engine_id")
    machine.wait_until(lambda: len(engine.do("tied")) == 2, "the lifelines of both hosts")
    hosts = engine.do("tied")
    engine.process.kill()
    await_nothing_left(machine, engine_id, hosts)


def test_a_host_that_the_engine_could_not_tie_holds_nothing_and_ends_when_it_may_go_on(
    party, two_tiers, machine, stopped_late
):
    """Linux has no signal that a child is born with, so one that somebody stops before it is tied stays stopped."""
    engine = party(**stopped_late)
    engine.do("import time, kvtiers.secondary.supervisor as module; module.lifeline = lambda _: time.sleep(3600)")
    engine.do(f"engine = Engine(*{two_tiers!r})")
    engine_id = engine.do("engine.manager.engine_id")
    machine.wait_until(engine.hosts, "the first host")
    [host] = engine.hosts()
    engine.process.kill()
    machine.wait_until(lambda: machine.state_of(host) == "T", "its being stopped")
    try:
        machine.wait_until(lambda: machine.holders(engine_id) == [], "the end of the last mapping")
        os.kill(host, signal.SIGCONT)
        machine.await_end(host)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(host, signal.SIGKILL)


@pytest.mark.parametrize("stage", ["read", "write", "exists", "delete", "open"])
def test_an_engine_that_is_killed_while_its_host_hangs_in_the_kernel_leaves_nothing(
    party, faulty, gates, machine, places, stage
):
    tier = faulty()
    engine = party(env=places.environment, cwd=places.here)
    if stage == "open":
        gates.set("open", "hang")
        engine.do(f"engine = Engine({tier!r})")
        engine_id = engine.do("engine.manager.engine_id")
    else:
        engine_id = engine.engine(tier)
        engine.do("engine.store(keys(0, 4)); engine.forget()")
        if stage == "delete":
            for path in (gates.root / "values").iterdir():  # damaged: a reader deletes it
                content = path.read_bytes()
                path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        gates.set(stage, "hang")
        if stage == "write":
            engine.do("None if engine.put(keys(10, 4)) else None")
        elif stage == "exists":
            engine.do("engine.lookup(keys(50, 4), engine.request()).ready; engine.step()")
        else:
            engine.do("ctx = engine.request(); engine.until(lambda: engine.lookup(keys(0, 4), ctx).pending)")
            engine.do("engine.step()")
    machine.wait_until(lambda: gates.reached(stage), "the hang")
    hosts = engine.hosts()
    assert len(hosts) == 1
    engine.process.kill()
    await_nothing_left(machine, engine_id, hosts)
    assert places.files(engine_id) == []


def test_an_engine_that_is_killed_before_its_hosts_have_begun_leaves_nothing(party, two_tiers, machine):
    engine = party()
    engine.do(f"engine = Engine(*{list(two_tiers)!r})")
    engine_id = engine.do("engine.manager.engine_id")
    machine.wait_until(engine.hosts, "the first host")
    hosts = engine.hosts()
    engine.process.kill()
    await_nothing_left(machine, engine_id, hosts)


def test_an_engine_that_is_killed_leaves_no_host_that_cannot_notice_it(party, two_tiers, machine):
    """A stopped process reads no end of a socket: only the kernel, which it has asked to, ends it."""
    engine = party()
    engine_id = engine.engine(*two_tiers)
    hosts = engine.hosts()
    assert len(hosts) == 2
    try:
        for pid in hosts:
            os.kill(pid, signal.SIGSTOP)
        machine.wait_until(lambda: {machine.state_of(pid) for pid in hosts} == {"T"}, "their stop")
        engine.process.kill()
        await_nothing_left(machine, engine_id, hosts)
    finally:
        for pid in hosts:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ending", ["sys.exit(3)", "os._exit(3)", "os.kill(os.getpid(), 15)", "os.abort()"])
def test_an_engine_that_ends_without_a_shutdown_ends_at_once_and_leaves_nothing(party, two_tiers, machine, ending):
    engine = party()
    engine_id = engine.engine(*two_tiers)
    hosts = engine.hosts()
    engine.process.stdin.write(b'"import os, sys; ' + ending.encode() + b'"\n')
    engine.process.stdin.flush()
    engine.process.wait(machine.PATIENCE)
    await_nothing_left(machine, engine_id, hosts)


def test_an_engine_that_becomes_another_program_leaves_no_host_and_no_memory(party, two_tiers, machine):
    """Its process lives on, and with it what it forgot to close on exec; its threads have ended, unheard."""
    engine = party()
    engine_id = engine.engine(*two_tiers)
    hosts = engine.hosts()
    engine.process.stdin.write(b"\"import os; os.execvp('sleep', ['sleep', '600'])\"\n")
    engine.process.stdin.flush()
    await_nothing_left(machine, engine_id, hosts)
    assert machine.state_of(engine.pid) not in {"", "Z"}, "it sleeps"
    # The hosts end with its threads, before its descriptors are closed.
    machine.wait_until(lambda: not sockets_of(engine.pid), "the closing of its sockets")


@pytest.mark.parametrize("end", ["shutdown", "kill"])
def test_no_file_is_made_beside_the_stores_own(party, faulty, machine, places, end):
    engine = party(env=places.environment, cwd=places.here)
    engine_id = engine.engine(faulty())
    engine.do("engine.store(keys(0, 4))")
    hosts = engine.hosts()
    if end == "kill":
        engine.process.kill()
    else:
        engine.do("engine.close()")
    await_nothing_left(machine, engine_id, hosts)
    assert places.files(engine_id) == []


def test_an_engine_that_falls_off_its_end_ends_at_once_and_leaves_nothing(party, two_tiers, machine):
    engine = party()
    engine_id = engine.engine(*two_tiers)
    hosts = engine.hosts()
    _, errors = engine.process.communicate(timeout=machine.PATIENCE)
    assert engine.process.returncode == 0
    assert b"Traceback" not in errors
    await_nothing_left(machine, engine_id, hosts)


def test_ctrl_c_reaches_the_engine_alone_which_still_brings_its_stores_down(party, faulty, gates, machine):
    """The whole group gets the signal, as from a terminal; the engine ends its work in order."""
    engine = party(start_new_session=True)
    engine_id = engine.engine(faulty())
    hosts = engine.hosts()
    gates.set("write", "sleep 0.3")
    engine.do(
        "import os, signal, time\n"
        "plan = engine.put(keys(0, 8))\n"
        "def run():\n"
        "    try:\n"
        "        os.killpg(os.getpid(), signal.SIGINT)\n"
        "        while True: time.sleep(0.01)\n"
        "    except KeyboardInterrupt:\n"
        "        engine.close(60)\n"
        "        return 'closed'\n"
        "None"
    )
    machine.wait_until(lambda: gates.reached("write"), "the store")
    assert engine.do("run()") == "closed"
    assert len(gates.values()) == 8
    await_nothing_left(machine, engine_id, hosts)


def test_a_store_that_prints_does_not_write_into_the_engines_stdout(party, faulty, gates):
    engine = party()
    engine.engine(faulty())
    gates.set("write", "prints")
    engine.do("engine.store(keys(0, 1))")
    engine.do("print('the engine prints', flush=True); engine.close()")
    out, err = engine.process.communicate()
    assert out == b"the engine prints\n"
    assert b"a store that prints" in err


def test_an_engine_without_stderr_has_hosts_too(party, faulty):
    engine = party()
    engine.do("import os; os.close(2)")
    engine.engine(faulty())
    engine.do("engine.store(keys(0, 4)); engine.forget()")
    assert engine.do("engine.load(keys(0, 4))") == 4


def test_nothing_in_the_working_directory_stands_in_for_a_module_of_the_host(party, faulty, tmp_path):
    for name in ("json", "kvtiers", "pydantic", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hijacked')")
    engine = party(cwd=tmp_path)
    engine.engine(faulty())
    engine.do("engine.store(keys(0, 4))")


def sockets_of(pid):
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found += [link for link in [str(fd.readlink())] if "socket:" in link]
    return found


def test_a_fork_in_the_engine_neither_ends_its_hosts_nor_outlives_them_with_the_memory(party, faulty, machine):
    engine = party()
    engine_id = engine.engine(faulty())
    hosts = engine.hosts()
    child = engine.do(
        "import os, time\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(600)\n"
        "    os._exit(0)\n"
        "other = os.fork()\n"
        "if other == 0:\n"
        "    os._exit(0)\n"
        "os.waitpid(other, 0)\n"
        "child"
    )
    try:
        machine.wait_until(lambda: not sockets_of(child), "the closing of what hides the engine's end from it")
        engine.do("engine.store(keys(0, 4)); engine.forget()")
        assert engine.do("engine.load(keys(0, 4))") == 4
        assert set(hosts) <= set(engine.hosts())
        engine.process.kill()
        await_nothing_left(machine, engine_id, hosts)
        assert machine.state_of(child) not in {"", "Z"}, "the forked child is what stays, as it should"
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_engine_that_reaps_children_that_are_not_its_own_breaks_nothing(start, faulty, machine):
    """A library in the engine that waits for any child takes the host's exit status away."""
    engine = start(faulty())
    engine.until_available()
    pid = engine.host()
    stop = threading.Event()

    def reap():
        while not stop.is_set():
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                stop.wait(0.001)

    reaper = threading.Thread(target=reap)
    reaper.start()
    try:
        os.kill(pid, signal.SIGKILL)
        engine.until(lambda: engine.linked_life() is not None and engine.host() != pid, "its second life")
    finally:
        stop.set()
        reaper.join()
    engine.until_available()
    engine.store(machine.keys(0, 4))
    engine.forget()
    assert engine.load(machine.keys(0, 4)) == 4


def test_hosts_that_were_started_from_a_thread_that_ended_live_on(start, faulty, machine):
    engines = []
    thread = threading.Thread(target=lambda: engines.append(start(faulty())))
    thread.start()
    thread.join()
    (engine,) = engines
    engine.until_available()
    pid = engine.host()
    engine.store(machine.keys(0, 4))
    engine.forget()
    assert engine.load(machine.keys(0, 4)) == 4
    assert engine.host() == pid
    assert engine.own()["host_starts"] == 1


def test_many_engines_one_after_the_other_leave_no_thread_and_no_descriptor(start, faulty, machine):
    tier = faulty()
    first = start(tier)
    first.until_available()
    first.close()
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    for _ in range(3):
        engine = start(tier)
        engine.until_available()
        engine.store(machine.keys(0, 4))
        engine.close()
    assert threads_left_since(threads, patience=machine.PATIENCE) == []
    assert descriptors_left_since(descriptors, patience=machine.PATIENCE) == []


def test_a_start_that_fails_leaves_no_host(faulty, machine):
    before = set(machine.children())
    with pytest.raises(Exception, match="eviction"):
        machine.bench.kvtiers.open_manager(
            {
                "version": 1,
                "primary": {"capacity": "1MiB", "eviction": "no such policy", "prefault": False},
                "secondary": [faulty()],
            },
            machine.bench.LAYOUT,
        )
    machine.wait_until(lambda: set(machine.children()) <= before, "the end of all children")
