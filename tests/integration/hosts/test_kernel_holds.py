"""A host that the kernel does not let go, though it has been killed: its rows are nobody's until it does."""

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

import pytest

HOUR = 3600.0
LONG = {"deadline": "1h", "grace": "200ms", "breaker": {"failures": 100}}
PTRACE_DETACH, PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 17, 0x4206, 0x40
TRY_TO_FREEZE = (
    "set -e; truncate -s 16M i && mkfs.ext4 -q i && mkdir m && mount -o loop i m && fsfreeze -f m && fsfreeze -u m"
)


class AtItsExit:
    """One thread of the host stops in the kernel at its exit. Whoever may trace a child of his own can have that."""

    state = "t"

    def __init__(self, folder):
        self.root = folder / "traced"
        self._thread = 0

    def hold(self, pid):
        """Have the process held from now on, when it is killed."""
        self._thread = next(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid))
        refused = self._ptrace(PTRACE_SEIZE, PTRACE_O_TRACEEXIT)
        assert not refused, (
            f"{os.strerror(ctypes.get_errno())}: may a child be traced? sysctl kernel.yama.ptrace_scope=1"
        )

    def let_go(self):
        self._ptrace(PTRACE_DETACH, None)

    def _ptrace(self, request, data):
        trace = ctypes.CDLL(None, use_errno=True).ptrace
        trace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        trace.restype = ctypes.c_long
        return trace(request, self._thread, None, data)


class InAFrozenFileSystem:
    """The host writes to a file system that is frozen, and sleeps uninterruptibly. It takes the right to mount one."""

    state = "D"

    def __init__(self, folder):
        self.root = folder / "mounted"
        self.root.mkdir()
        run("truncate", "-s", "16M", folder / "image")
        run("mkfs.ext4", "-q", folder / "image")
        run("mount", "-o", "loop", folder / "image", self.root)

    def hold(self, pid):
        """Have the process held from now on, when it writes."""
        run("fsfreeze", "-f", self.root)

    def let_go(self):
        run("fsfreeze", "-u", self.root)


def stuck(machine, pid, state):
    """The threads of a dead process that the kernel has in this state."""
    tasks = {task: machine.state_of(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}
    return [task for task, its in tasks.items() if its == state] if "Z" in tasks.values() else []


def sleeps(machine, pid):
    """Whether a thread of this process is in uninterruptible sleep."""
    return any(machine.state_of(task.name) == "D" for task in Path(f"/proc/{pid}/task").iterdir())


def run(*command):
    subprocess.run(list(map(str, command)), check=True, timeout=500)


@pytest.fixture
def ways(tmp_path):
    """Every way that this machine lets us hold a process. What is tried here ends with its mount namespace."""
    found = [AtItsExit(tmp_path)]
    trial = tmp_path / "trial"
    trial.mkdir()
    with contextlib.suppress(FileNotFoundError):
        command = ["unshare", "--mount", "sh", "-c", TRY_TO_FREEZE]
        if subprocess.run(command, cwd=trial, capture_output=True, timeout=500, check=False).returncode == 0:
            found.append(InAFrozenFileSystem(tmp_path))
    yield found
    for way in found[1:]:
        run("umount", "-l", way.root)


def test_a_host_that_the_kernel_does_not_let_go_holds_its_rows_for_as_long(ways, start, faulty_at, machine):
    """SIGKILL does not end it. Everywhere: it stands at its exit. Where we may mount: in uninterruptible sleep too."""
    for way in ways:
        engine = start(faulty_at(way.root, **LONG), rows=32)
        engine.until_available()
        stored = machine.keys(0, 2)
        engine.store(stored)
        pid = engine.host()
        gates = machine.bench.Gates(way.root)
        gates.set("write", "hang")
        way.hold(pid)
        try:
            engine.put(machine.keys(10, 4))
            machine.wait_until(lambda pid=pid, gates=gates: gates.reached("write") or sleeps(machine, pid), "the store")
            engine.until(
                lambda pid=pid, way=way: stuck(machine, pid, way.state), "its death, as far as it goes", wind=2 * HOUR
            )
            assert machine.state_of(pid) == "Z"
            rows = f"memfd:kvtiers-{engine.manager.engine_id}"
            assert all(rows in (task / "maps").read_text() for task in stuck(machine, pid, way.state)), (
                "it could still write"
            )
            for _ in range(50):
                engine.step()
            assert engine.figures()["quarantined_rows"] == 4
            assert engine.manager.prepare_store(machine.keys(200, 29), engine.request()) is None, (
                "of 32 rows, 28 are free"
            )
            assert engine.load(stored) == 2, "the engine goes on"
        finally:
            way.let_go()
        engine.until(lambda engine=engine: not engine.figures()["quarantined_rows"], "the release of the rows")
        engine.until_available()
        engine.store(machine.keys(20, 2))
        engine.close()
