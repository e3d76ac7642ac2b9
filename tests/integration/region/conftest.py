"""Real processes that play the parties of a region, and a look at what they leave behind."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

PEER = Path(__file__).with_name("peer_process.py")
PATIENCE = 60.0


class PartyError(AssertionError):
    """The code that was sent raised; the text is the other process's ``Type: message``."""


class Parties:
    """What processes of tests are forked from. ``command``: what it is started by, such as ``unshare``."""

    def __init__(self, command=()):
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([*command, sys.executable, str(PEER)], stdin=theirs, stdout=2)

    def start(self):
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._requests, [b"."], [theirs.fileno()])
        return Party(ours)

    def close(self):
        self._requests.close()
        self._process.wait(PATIENCE)


class Party:
    """One process of a test, driven line by line. ``pid``: in its own PID namespace."""

    def __init__(self, sock):
        self._sock = sock
        self._sock.settimeout(PATIENCE)
        [self._pidfd] = socket.recv_fds(sock, 1, 1)[1]
        self._answers = sock.makefile("r")
        self.pid = self.do("os.getpid()")

    def send(self, code):
        """Send code without waiting for its answer; ``answer`` must follow."""
        self._sock.sendall(json.dumps(code).encode() + b"\n")

    def answer(self):
        line = self._answers.readline()
        assert line, "the process has ended"
        answer = json.loads(line)
        if "error" in answer:
            raise PartyError(answer["error"])
        return answer["value"]

    def do(self, code):
        """Run code there; return the value of its last expression."""
        self.send(code)
        return self.answer()

    def kill(self):
        """``kill -9``, and wait until the process has ended."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        wait_for(self._pidfd)

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        os.close(self._pidfd)
        self._answers.close()
        self._sock.close()


def wait_for(pidfd):
    assert select.select([pidfd], [], [], PATIENCE)[0], "the process still runs"


def wait_for_exit(pid):
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        wait_for(pidfd)
    finally:
        os.close(pidfd)


class Machine:
    """What the tests of this folder share: an engine id of their own, parties, and what can be seen from outside."""

    def __init__(self, processes):
        self.engine_id = f"test-{uuid.uuid4().hex}"
        self.processes = processes
        self.parties = []

    def party(self, processes=None):
        party = (processes or self.processes).start()
        self.parties.append(party)
        party.do(f"engine_id = {self.engine_id!r}")
        return party

    def manager(self, *, rows=8, world_size=1, options="", processes=None):
        """A process that has created a region of 36 KiB rows (for one rank; 8 KiB pages of 4 layers and the seal)."""
        party = self.party(processes)
        party.do(f"cache = layout({world_size})")
        party.do(f"region = SharedOffloadRegion.create(engine_id, cache, {rows} * cache.row_stride, {options})")
        return party

    def rank(self, rank=0, world_size=1, *, wait=True, options="", processes=None):
        """A process that has begun to join, or has joined."""
        party = self.party(processes)
        party.do(f"join = RegionJoin.start(engine_id, layout({world_size}), {rank}, {options})")
        if wait:
            party.do("join.wait(PATIENCE)")
        return party

    def leftovers(self):
        """Every process that maps or holds this engine's memory, and every socket of its name."""
        found = [f"process {pid} {how}" for pid, how in self.holders()]
        unix = Path("/proc/net/unix").read_text()
        return found + [line for line in unix.splitlines() if self.engine_id in line]

    def holders(self):
        """(pid, how) of every process that maps or holds this engine's memory."""
        found = []
        memfd = f"memfd:kvtiers-{self.engine_id}"
        for process in Path("/proc").iterdir():
            if not process.name.isdecimal():
                continue
            with contextlib.suppress(OSError):  # it has just ended
                if memfd in (process / "maps").read_text():
                    found.append((int(process.name), "maps it"))
            with contextlib.suppress(OSError):
                for fd in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        if memfd in str(fd.readlink()):
                            found.append((int(process.name), "holds it"))
        return found

    def end(self):
        """End all parties; what they started must end by itself, soon, and leave nothing."""
        for party in self.parties:
            party.end()
        try:
            for pid, _ in self.holders():
                wait_for_exit(pid)
            assert self.leftovers() == []
        finally:  # a broken promise must not fill the machine's memory
            for pid, _ in self.holders():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def processes():
    processes = Parties()
    yield processes
    processes.close()


@pytest.fixture
def machine(processes):
    machine = Machine(processes)
    yield machine
    machine.end()


@pytest.fixture
def namespaces():
    """What starts processes in two PID namespaces beside each other, as in two containers."""
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here: it takes root")
    found = [Parties(command) for _ in range(2)]
    yield found
    for processes in found:
        processes.close()


@pytest.fixture
def wait_until_gone():
    """Wait until a process that is not our child has ended."""

    return wait_for_exit


@pytest.fixture
def populate_with(tmp_path):
    """Code that makes a manager's pre-fault program run these lines first; ``real`` is its module."""

    def make(lines):
        program = tmp_path / "changed_populate.py"
        program.write_text(
            "import importlib.util, mmap, os, sys\n"
            "spec = importlib.util.spec_from_file_location('real', os.environ['KVTIERS_TEST_POPULATE'])\n"
            "real = importlib.util.module_from_spec(spec)\n"
            "spec.loader.exec_module(real)\n"
            f"{lines}\n"
            "sys.exit(real.main(sys.argv[1:]))\n"
        )
        return (
            "os.environ['KVTIERS_TEST_POPULATE'] = populate.__file__\n"
            f"prefault.Prefault.program = Path({str(program)!r})\n"
            "prefault.Prefault.piece_bytes = 1 << 20\n"
        )

    return make


@pytest.fixture
def stuck_populate(populate_with):
    """Code that makes a manager's pre-fault program stand still for ever once the first piece is populated."""
    return populate_with(
        "say = real.say\n"
        "def say_and_stand_still(line):\n"
        "    say(line)\n"
        "    if line.startswith('populated') and line != 'populated 0':\n"
        "        real.threading.Event().wait()\n"
        "real.say = say_and_stand_still"
    )
