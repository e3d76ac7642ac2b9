"""Child processes of our own: spawned from this interpreter, tied to the life of their parent, and reaped once.

==========  ==========================================================================================
parent      ``spawn``, ``spawn_bare``; then ``end``, or ``wait_unreaped`` on a thread of its own and ``kill_unreaped``
child       ``die_with_parent``, before it loads anything else: loading takes a while
both        ``hand_over`` and ``take_over``: descriptors that a child must not have until it is tied
==========  ==========================================================================================

A child that is tied ends with its parent, by ``kill -9`` too. The kernel's signal follows the *thread* that spawned it:
that thread has to live as long as the child is to. Until a child has been reaped no other process gets its id, so that
a signal cannot reach a wrong one.

What such a child starts in turn is in its process group, which is killed with the child and with its parent, however
either ends (``lifeline``).
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    import subprocess
    import threading

__all__ = [
    "die_with_parent", "end", "end_group_with", "hand_over", "hold_standard_descriptors", "kill_unreaped",
    "lifeline", "receive_fds", "spawn", "spawn_bare", "take_over", "wait_unreaped",
]  # fmt: skip

_PR_SET_PDEATHSIG = 1
_MOST_HANDED_OVER = 8
KILLED_SECONDS = 10.0  # it has no say in it: longer takes only one that waits in the kernel
_LONGEST_ARGUMENT = 100_000  # Linux takes 131,071 bytes; build systems make paths of thousands of parts
# The parent's path, whatever the environment says: a child must not find another kvtiers.
_START = """
import json, sys
path = sys.argv[-2]
sys.path[:] = json.load(open(int(path))) if path.isdigit() else json.loads(path)
try:
    from {module} import main
except ImportError as error:
    sys.exit(f"kvtiers: {{sys.argv[-1]}} cannot be started: {{error}}; if its files were replaced, restart the engine")
main()
"""


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    name: str,
    pass_fds: Sequence[int],
    process_group: int | None = None,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a process that runs ``main()`` of a module, with these in ``sys.argv[1:]`` and then this process's id.

    ``name``: what `ps` shows last. ``pass_fds``: descriptors that the child gets, under the same numbers; they stay the
    caller's. ``process_group``: 0 for a group of its own, which Ctrl-C does not reach. ``stdin``, ``stdout``,
    ``stderr``: as for Popen. Without them it reads nothing, and what it prints goes to our standard error, since our
    standard output may be data. OSError if there are no processes to be had.
    """
    import subprocess  # here, since a child, which needs none of it, would load it too

    # -P: nothing in the working directory stands in for a module before sys.path is ours.
    command = [sys.executable, "-P", "-c", _START.format(module=module), *arguments, str(os.getpid())]
    output = 2 if _is_open(2) else subprocess.DEVNULL
    with contextlib.ExitStack() as until_started:
        path, fds = json.dumps([str(path) for path in sys.path]), [*pass_fds]
        if len(path) > _LONGEST_ARGUMENT:
            file = until_started.enter_context(os.fdopen(os.memfd_create("path"), "w+b"))
            file.write(path.encode())
            file.flush()
            file.seek(0)
            path = str(file.fileno())
            fds.append(file.fileno())
        return subprocess.Popen(  # noqa: S603 -- our own interpreter, our own module
            [*command, path, name],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=output if stdout is None else stdout,
            stderr=output if stderr is None else stderr,
            pass_fds=fds,
            process_group=process_group,
        )


def spawn_bare(program: Path, arguments: Sequence[str], *, stdin: int) -> "subprocess.Popen[bytes]":
    """Start a program of the standard library alone, in a bare interpreter: 15 ms, without site packages.

    It prints by an unbuffered pipe, its errors among the rest. It leads a process group, and has to end by
    itself with its parent, at the end of its standard input; a ``lifeline`` ends it also if it was stopped.
    """
    import subprocess

    return subprocess.Popen(  # noqa: S603 -- our own program
        [sys.executable or "", "-I", "-S", str(program), *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        process_group=0,
    )


def hand_over(ours: "socket.socket", fds: Sequence[int]) -> bool:
    """Send descriptors to a child as soon as it says that it dies with us; False if it ends before.

    For memory: a child that is stopped in its first moment outlives a parent that is killed then, and would hold it.
    Waits for the child, so it needs a thread of its own.
    """
    import socket

    try:
        if not ours.recv(1):
            return False
        socket.send_fds(ours, [b"."], fds)
    except OSError:
        return False
    return True


def take_over(fd: int) -> Callable[[], list[int]]:
    """Say that this process dies with its parent; return what waits for the descriptors of its ``hand_over``.

    Few come, and none is inherited by what this process starts. EOFError if the parent has ended.
    """
    import socket

    theirs = socket.socket(fileno=fd)
    with contextlib.suppress(OSError):  # the parent has ended, which shows below
        theirs.send(b".")

    def take() -> list[int]:
        with theirs:
            said, fds = receive_fds(theirs, 1, _MOST_HANDED_OVER)
        if not said:
            raise EOFError("the parent has ended")
        return fds

    return take


def receive_fds(sock: "socket.socket", nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Return a message of at most ``nbytes``, and the descriptors that came with it, which no child inherits.

    ``socket.recv_fds`` ignores its flags, so that a child would (CPython 3.14 and before).
    """
    import socket

    number = struct.Struct("i")
    data, controls, _, _ = sock.recvmsg(nbytes, socket.CMSG_LEN(most * number.size), socket.MSG_CMSG_CLOEXEC)
    passed = [body for level, kind, body in controls if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
    return data, [fd for body in passed for (fd,) in number.iter_unpack(body[: len(body) // number.size * number.size])]


def hold_standard_descriptors() -> None:
    """Open /dev/null as standard input, output and error where these are closed, as some daemons close them.

    Else the next descriptor gets such a number, and if that is the rows' memory, what any library prints lands in KV.
    """
    for fd in (0, 1, 2):
        if not _is_open(fd):
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when its parent, which had this id, ends; end at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the signal was armed
        os._exit(0)


def run(command: Sequence[str]) -> int:
    """Run a program in this process's group to its end; return its exit status. OSError if it cannot be started."""
    import subprocess

    status = subprocess.run(command, check=False).returncode  # noqa: S603 -- an operator's own, without a shell
    return status if status >= 0 else 128 - status


def wait_unreaped(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process has ended; its status is left for ``Popen.wait``."""
    with contextlib.suppress(OSError):  # other code in this process has reaped it: it has ended, too
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def kill_unreaped(process: "subprocess.Popen[bytes]") -> bool:
    """Kill the process and leave its status, unlike ``Popen.kill``, which may reap it; False if it has ended already.

    Not to be called once ``Popen.wait`` has returned: the id may be another process's.
    """
    try:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        os.kill(process.pid, signal.SIGKILL)
    except (ChildProcessError, ProcessLookupError):  # other code in this process has reaped it
        return False
    return True


def lifeline(process: "subprocess.Popen[bytes]") -> "socket.socket":
    """Return a socket at whose end the kernel kills the process group that a child leads: closed, or with this process.

    So what the child has started ends with it and with its parent, after ``kill -9`` and ``exec`` too; what has left
    the group does not. The kernel knows the group itself, not its number: no later group of that number is killed.
    """
    import socket

    ours, theirs = socket.socketpair()
    with theirs, contextlib.suppress(OSError):  # it has ended and was reaped by other code, or no such signals here
        # Its other end stays open for as long as ours, where it waits to be received; no descriptor refers to it.
        socket.send_fds(theirs, [b"."], [theirs.fileno()])
        fcntl.fcntl(theirs, fcntl.F_SETOWN, -process.pid)
        fcntl.fcntl(theirs, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_ASYNC)
    return ours


def end_group_with(process: "subprocess.Popen[bytes]") -> "threading.Thread":
    """Start a thread that ends when the process has, and what was left of the group that it leads; return it.

    Pipes that the process has inherited reach their end then, whatever it started. It is still to be reaped.
    """
    import threading

    group = lifeline(process)

    def wait() -> None:
        with group:
            wait_unreaped(process)

    thread = threading.Thread(target=wait, name="kvtiers-group", daemon=True)
    thread.start()
    return thread


def end(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Reap the process within so many seconds, and return its status; kill it if it has not ended by then: None.

    Returns at the latest ``KILLED_SECONDS`` later: a killed process that waits in the kernel is left.
    """
    import subprocess

    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_SECONDS)
    return None


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
