"""Child processes: what they are given, that they die with their parent, and that they are reaped once."""

import ast
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtiers._process import end, kill_unreaped, lifeline, receive_fds, spawn, wait_unreaped
from kvtiers.testing.running import open_descriptors

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
# What a child does: say what it was given, or spawn another one, and wait until it is killed.
CHILD = """
import os, sys, time
from kvtiers._process import die_with_parent, spawn

def main():
    fd, what, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    die_with_parent(parent)
    if what == "parent":
        spawn("child_of_the_test", [str(fd), "child"], name="grandchild", pass_fds=[fd])
    else:
        print("printed", flush=True)
        os.write(fd, f"{parent} {os.getppid()} {sys.argv[-1]}\\n".encode())
    if what != "brief":
        time.sleep(PATIENCE)
""".replace("PATIENCE", str(PATIENCE))


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Start a child that does this; return it and the end of a pipe of which it has the other one."""
    (tmp_path / "child_of_the_test.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    processes, pipes = [], []

    def child(what):
        ours, theirs = os.pipe()
        pipes.append(ours)
        processes.append(spawn("child_of_the_test", [str(theirs), what], name="the test's", pass_fds=[theirs]))
        os.close(theirs)
        return processes[-1], ours

    yield child
    for process in processes:
        process.kill()
        process.wait()
    for pipe in pipes:
        os.close(pipe)


def test_a_path_that_is_longer_than_an_argument_may_be_gets_to_the_child(child, monkeypatch):
    more = [f"/nowhere/{'long/' * 20}{number}" for number in range(1_500)]
    monkeypatch.setattr(sys, "path", [*sys.path, *more])
    assert sum(map(len, sys.path)) > 131_072
    before = open_descriptors()
    process, ours = child("brief")
    assert said(ours).endswith(b"the test's\n")
    assert process.wait(PATIENCE) == 0
    assert len(open_descriptors() - before) == 1, "more than our end of the pipe is left open"


def said(pipe):
    """What comes next over the pipe; b"" once every process that had its other end has ended."""
    assert select.select([pipe], [], [], PATIENCE)[0], "nothing comes"
    return os.read(pipe, 1 << 16)


def test_a_child_has_our_path_the_descriptor_and_our_id_and_its_name_comes_last(child):
    process, pipe = child("brief")
    assert said(pipe) == f"{os.getpid()} {os.getpid()} the test's\n".encode()
    assert process.wait(PATIENCE) == 0


def test_what_a_child_prints_goes_to_our_standard_error(child, capfd):
    process, _ = child("brief")
    assert process.wait(PATIENCE) == 0
    assert capfd.readouterr() == ("", "printed\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
def test_a_child_dies_with_a_parent_that_is_killed(child):
    parent, pipe = child("parent")
    assert said(pipe).startswith(f"{parent.pid} {parent.pid} ".encode())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(PATIENCE)
    assert said(pipe) == b"", "the grandchild has ended, and its descriptor with it"


def test_killing_leaves_the_status_and_says_whether_there_was_anything_to_kill(child):
    process, pipe = child("child")
    said(pipe)
    assert kill_unreaped(process)
    wait_unreaped(process)
    assert process.returncode is None
    assert not kill_unreaped(process), "it has ended"
    assert process.wait(PATIENCE) == -signal.SIGKILL


def test_a_child_that_other_code_has_reaped_has_ended(child):
    process, pipe = child("brief")
    said(pipe)
    os.waitpid(process.pid, 0)
    wait_unreaped(process)
    assert not kill_unreaped(process)


def test_the_end_of_a_child_that_does_not_end_in_time_is_forced(child):
    process, pipe = child("child")
    said(pipe)
    begin = time.monotonic()
    end(process, 0.05)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - begin < PATIENCE / 2


def test_a_child_does_not_load_what_only_a_parent_needs():
    code = "import sys; before = set(sys.modules); import kvtiers._process; print('subprocess' in set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


SOURCES = [
    path
    for place in ("core", "replay", "integrations", "libraries", "plugins")
    for path in ROOT.glob(f"{place}/**/src/**/*.py")
]
STARTERS = {
    "Popen",
    "fork",
    "forkpty",
    "posix_spawn",
    "posix_spawnp",
    "popen",
    "system",
    "Process",
    "Pool",
    "run",
    "call",
}
STARTERS |= {"check_call", "check_output", "getoutput", "ProcessPoolExecutor", "execv", "spawnv"}
MODULES = {"subprocess", "os", "multiprocessing", "concurrent.futures"}
RUN_TO_THEIR_END = {
    "testing/tier_plugin.py",  # subprocess.run: the kit imports a tier's entry module in a new interpreter
    "cli/trial.py",  # os.fork: an import that may hang or exit, ended within seconds
    "cli/report.py",  # what the machine says of its GPUs and of torch, within a few seconds
}


def starts(path: Path) -> list[str]:
    """Calls of the standard library in a file that start a process."""
    tree = ast.parse(path.read_text("utf-8"))
    named = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if alias.name in STARTERS
    }
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [ast.unparse(call) for call in calls if isinstance(call, ast.Attribute) and call.attr in STARTERS]
    return [call for call in found if call.split(".")[0] in MODULES] + sorted(named)


def test_nothing_but_this_module_starts_a_process():
    assert len(SOURCES) > 200
    found = {path: calls for path in SOURCES if (calls := starts(path))}
    elsewhere = {path: calls for path, calls in found.items() if path.name != "_process.py"}
    assert {path.relative_to(ROOT / "core/src/kvtiers").as_posix() for path in elsewhere} == RUN_TO_THEIR_END
    assert {call for calls in elsewhere.values() for call in calls} == {"subprocess.run", "os.fork"}
    assert any(path.name == "_process.py" for path in found), "the search finds nothing"


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_group_ends_with_its_lifeline_and_what_is_left_of_it_after_its_first_process():
    """However the first process has ended, and whoever has reaped it."""
    first = subprocess.Popen(
        [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    with lifeline(first), first:
        left = int(first.stdout.readline())
        first.stdin.close()
        first.wait()
        assert is_running(left)
    deadline = time.monotonic() + PATIENCE
    while is_running(left):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_child_inherits_a_descriptor_that_was_received():
    left, right = socket.socketpair()
    with left, right, Path(os.devnull).open("rb") as one, Path(os.devnull).open("rb") as other:
        socket.send_fds(left, [b"two"], [one.fileno(), other.fileno()])
        data, fds = receive_fds(right, 10, 4)
        assert (data, len(fds)) == (b"two", 2)
        assert not any(os.get_inheritable(fd) for fd in fds)
        for fd in fds:
            os.close(fd)
