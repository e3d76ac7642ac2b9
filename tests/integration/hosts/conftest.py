"""Engines with real tier hosts, a tier that goes wrong on demand, and a look at what they leave behind."""

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtiers.secondary.placement import TierHosts
from kvtiers.secondary.supervisor import HostPace

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("kvtiers_hosts_harness", HERE / "harness.py")
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


def install_faulty(site):
    """Make the tier type ``faulty`` an installed distribution under this folder."""
    site.mkdir()
    shutil.copy(HERE / "faulty_plugin.py", site / "kvtiers_test_faulty.py")
    info = site / "kvtiers_test_faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtiers-test-faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvtiers.tiers]\nfaulty = kvtiers_test_faulty\n")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts") / "site"
    install_faulty(folder)
    return folder


@pytest.fixture(autouse=True)
def _installed(site):
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(site))
    sys.modules.pop("kvtiers_test_faulty", None)
    importlib.invalidate_caches()


def _faulty(root, **options):
    """Its deadline passes only if a test winds the clock on: on a busy machine a write may wait for half a minute."""
    for part in ("values", "gates", "reached"):
        (root / part).mkdir(parents=True)
    os.mkfifo(root / "fifo")
    return {"type": "faulty", "root": str(root), "deadline": "1h", **options}


@pytest.fixture
def faulty(tmp_path):
    """Make the config of a faulty tier; its gates are ``gates`` by name."""

    def make(name="faulty", **options):
        return _faulty(tmp_path / name, **({"name": name} if name != "faulty" else {}), **options)

    return make


@pytest.fixture
def faulty_at():
    """Make the config of a faulty tier whose root is this folder."""
    return _faulty


@pytest.fixture
def gates(tmp_path):
    return bench.Gates(tmp_path / "faulty")


@pytest.fixture
def gates_of(tmp_path):
    return lambda name: bench.Gates(tmp_path / name)


def release(fifo):
    """Let all that wait at the FIFO go on; return whether there were any."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # without a reader
        return False
    return True


@contextlib.contextmanager
def releasing(folder):
    """Meanwhile, let everything go on that is blocked on a FIFO in this folder."""
    done = threading.Event()

    def release_all():
        while not done.wait(0.01):
            for fifo in folder.glob("*/fifo"):
                release(fifo)

    thread = threading.Thread(target=release_all)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def children(pid=None):
    """The process ids of all children of a process."""
    found = []
    for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def state_of(pid):
    """The letter for a process's state; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def holders(engine_id):
    """Every process that maps or holds this engine's memory, in words."""
    found = []
    memfd = f"memfd:kvtiers-{engine_id}"
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if memfd in (process / "maps").read_text():
                found.append(f"process {process.name} maps it")
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if memfd in str(fd.readlink()):
                        found.append(f"process {process.name} holds it")
    return found


def await_end(pid):
    """Wait until a process that is not our child has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([pidfd], [], [], bench.PATIENCE)
        assert ready, f"process {pid} still runs"
    finally:
        os.close(pidfd)


def wait_until(condition, what="it"):
    until = time.monotonic() + bench.PATIENCE
    while not condition():
        assert time.monotonic() < until, f"{what} does not happen"
        time.sleep(0.002)


@contextlib.contextmanager
def winding(client, seconds, when):
    """As soon as this is so, let so many seconds pass for the client's thread; for callers and hosts there are none."""

    def wind():
        wait_until(when)
        client._driver._clock = lambda: time.monotonic() + seconds

    thread = threading.Thread(target=wind)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture
def start(tmp_path, caplog, monkeypatch):
    """Start an engine in this process; at the end it is shut down, and must have left nothing behind."""
    caplog.set_level(logging.INFO, "kvtiers")
    # Seconds after each death, and at each end that hangs, are much for many tests.
    pace = HostPace(first_delay=0.05, close_seconds=0.7, end_seconds=1.0)
    monkeypatch.setattr("kvtiers.tier_set.TierHosts", partial(TierHosts, pace=pace))
    engines = []
    before = set(children())

    def start(*tiers, **options):
        engine = bench.Engine(*tiers, **options)
        engines.append(engine)
        return engine

    yield start
    for gate in tmp_path.glob("*/gates/*"):
        gate.unlink()
    for pid in set(children()) - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    with releasing(tmp_path):
        for engine in engines:
            engine.close()
        for engine in engines:
            wait_until(lambda engine=engine: holders(engine.manager.engine_id) == [], "the end of the last mapping")
    wait_until(lambda: set(children()) <= before, "the end of the last host, and of its zombie,")


@pytest.fixture
def unhurried(start, monkeypatch):
    """At the end, hosts have as long to close their stores as a busy machine needs."""
    pace = HostPace(first_delay=0.05, close_seconds=bench.PATIENCE, end_seconds=bench.PATIENCE)
    monkeypatch.setattr("kvtiers.tier_set.TierHosts", partial(TierHosts, pace=pace))


class Party:
    """An engine in another process, driven line by line."""

    def __init__(self, site, stuck_stderr=subprocess.PIPE, **options):
        ours, theirs = os.pipe()
        command = [sys.executable, str(HERE / "peer_process.py"), str(site), str(theirs)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stuck_stderr, pass_fds=[theirs], **options
        )
        os.close(theirs)
        self._answers = os.fdopen(ours)
        self.pid = self.process.pid

    def do(self, code):
        """Run code there; return the value of its last expression."""
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], bench.PATIENCE)
        assert ready, "the engine does not answer"
        line = self._answers.readline()
        assert line, f"the engine has ended: {self.process.communicate()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def engine(self, *tiers, **options):
        """Have an engine there whose tiers are all in use; return its id."""
        arguments = ", ".join([*map(repr, tiers), *(f"{name}={value!r}" for name, value in options.items())])
        self.do(f"engine = Engine({arguments})\nengine.until_available()")
        return self.do("engine.manager.engine_id")

    def hosts(self):
        return children(self.pid)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=bench.PATIENCE)
        self._answers.close()


@pytest.fixture
def party(site, tmp_path):
    """Start processes to run an engine in; they are killed at the end."""
    parties = []

    def party(**options):
        parties.append(Party(site, **options))
        return parties[-1]

    yield party
    for fifo in tmp_path.glob("*/fifo"):
        release(fifo)
    for started in parties:
        started.end()


@pytest.fixture
def log(caplog):
    """Wait for a text in the log; return all lines that have it."""

    def lines(text):
        return [record.getMessage() for record in caplog.records if text in record.getMessage()]

    def wait(text):
        wait_until(lambda: lines(text), f"{text!r} in the log")
        return lines(text)

    wait.lines = lines
    return wait


@pytest.fixture
def machine():
    """What can be seen and done from outside."""
    return SimpleNamespace(
        PATIENCE=bench.PATIENCE,
        VALUE=bench.VALUE,
        await_end=await_end,
        bench=bench,
        children=children,
        holders=holders,
        key=bench.key,
        keys=bench.keys,
        release=release,
        releasing=releasing,
        state_of=state_of,
        wait_until=wait_until,
        winding=winding,
    )
