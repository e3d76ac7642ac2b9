"""A host that the kernel does not release, though it has been killed: its rows are not free until it does.

Two of the ways to have one need no rights: it stands at its exit, or sleeps uninterruptibly (D) for a lock of a pipe.
The third needs the right to mount a file system; where the machine refuses that, the summary of skipped tests says so.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import termios
import threading
from pathlib import Path

import pytest

HOUR = 3600.0
LONG = {"deadline": "1h", "grace": "200ms", "breaker": {"failures": 100}}
PTRACE_DETACH, PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 17, 0x4206, 0x40
REFUSALS = ("Operation not permitted", "Permission denied", "permission denied", "must be superuser")


class AtItsExit:
    """One thread of the host stops in the kernel at its exit. A user who may trace his own children can do that."""

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

    def release(self):
        self._ptrace(PTRACE_DETACH, None)

    def end(self):
        """Nothing is left to take away."""

    def _ptrace(self, request, data):
        trace = ctypes.CDLL(None, use_errno=True).ptrace
        trace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        trace.restype = ctypes.c_long
        return trace(request, self._thread, None, data)


class AsleepAtALock:
    """The host opens a FIFO and sleeps uninterruptibly for its lock. A user who may make a FIFO can do that.

    Linux keeps a pipe locked while it splices from a socket, also while it waits for what the socket does not have.
    """

    state = "D"

    def __init__(self, folder):
        self.root = folder / "locked"
        self._ours, self._theirs = socket.socketpair()
        self._pipe = -1
        self._thread = threading.Thread(target=self._splice)

    def hold(self, pid):
        """Have the process held from now on, when it opens the FIFO."""
        self._pipe = os.open(self.root / "fifo", os.O_RDWR)
        # It comes back with two bytes. When it has taken the one that there is, it has the lock, and waits.
        self._theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 2)
        self._ours.send(b"1")
        self._thread.start()
        while self._is_untouched():
            assert self._thread.is_alive(), "the pipe cannot be kept locked: splice from a socket has failed"

    def release(self):
        self._ours.send(b"2")
        self._thread.join()

    def end(self):
        self._ours.close()
        self._theirs.close()
        if self._pipe >= 0:
            os.close(self._pipe)

    def _splice(self):
        os.splice(self._theirs.fileno(), self._pipe, 2)

    def _is_untouched(self):
        (waiting,) = struct.unpack("i", fcntl.ioctl(self._theirs, termios.FIONREAD, bytes(4)))
        return waiting > 0


class InAFrozenFileSystem:
    """The host writes to a file system that is frozen, and sleeps uninterruptibly. It takes the right to mount one."""

    state = "D"

    def __init__(self, folder):
        run("unshare", "--mount", "true")
        if not Path("/dev/loop-control").exists():
            skip("there are no loop devices")
        self.root = folder / "mounted"
        self.root.mkdir()
        run("truncate", "-s", "16M", folder / "image")
        run("mkfs.ext4", "-q", folder / "image")
        run("mount", "-o", "loop", folder / "image", self.root)

    def hold(self, pid):
        """Have the process held from now on, when it writes."""
        run("fsfreeze", "-f", self.root)

    def release(self):
        run("fsfreeze", "-u", self.root)

    def end(self):
        run("umount", "-l", self.root)


def skip(why):
    pytest.skip(
        f"NOT TESTED: a host in a frozen file system, since none may be mounted here ({why}). It takes root with "
        "CAP_SYS_ADMIN and loop devices. What was tested instead: the same host, asleep at a lock"
    )


def run(*command):
    """Run a command that may need a right: without it, say so and skip. Whatever else goes wrong is a failure."""
    command = list(map(str, command))
    try:
        subprocess.run(
            command, check=True, timeout=500, stderr=subprocess.PIPE, text=True, env=os.environ | {"LC_ALL": "C"}
        )
    except FileNotFoundError:
        pytest.fail(f"{command[0]} is needed: apt-get install e2fsprogs mount util-linux")
    except subprocess.CalledProcessError as error:
        if any(refusal in error.stderr for refusal in REFUSALS):
            skip(error.stderr.strip())
        pytest.fail(f"{' '.join(command)}: {error.stderr.strip()}")


def stuck(machine, pid, state):
    """The threads of a dead process that the kernel has in this state."""
    tasks = {task: machine.state_of(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}
    return [task for task, its in tasks.items() if its == state] if "Z" in tasks.values() else []


def sleeps(machine, pid):
    """Whether a thread of this process is in uninterruptible sleep."""
    return any(machine.state_of(task.name) == "D" for task in Path(f"/proc/{pid}/task").iterdir())


@pytest.fixture(
    params=[AtItsExit, AsleepAtALock, InAFrozenFileSystem],
    ids=["at its exit", "asleep at a lock", "in a frozen file system"],
)
def way(request, tmp_path):
    way = request.param(tmp_path)
    yield way
    way.end()


def test_a_host_held_by_the_kernel_keeps_its_rows_for_as_long(way, start, faulty_at, machine):
    """SIGKILL does not end it."""
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
        held = (lambda: sleeps(machine, pid)) if way.state == "D" else (lambda: gates.reached("write"))
        machine.wait_until(held, "the store's write, or its sleep")
        engine.until(lambda: stuck(machine, pid, way.state), "its death, as far as it goes", wind=2 * HOUR)
        assert machine.state_of(pid) == "Z"
        rows = f"memfd:kvtiers-{engine.manager.engine_id}"
        assert all(rows in (task / "maps").read_text() for task in stuck(machine, pid, way.state)), (
            "it could still write"
        )
        for _ in range(50):
            engine.step()
        assert engine.figures()["quarantined_rows"] == 4
        assert engine.manager.prepare_store(machine.keys(200, 29), engine.request()) is None, "of 32 rows, 28 are free"
        assert engine.load(stored) == 2, "the engine goes on"
    finally:
        way.release()
    engine.until(lambda: not engine.figures()["quarantined_rows"], "the release of the rows")
    engine.until_available()
    engine.store(machine.keys(20, 2))
    engine.close()
