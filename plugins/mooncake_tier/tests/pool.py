"""A real pool for tests: a master and processes that contribute segments, on free ports."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtiers.testing.ports import free_port

PATIENCE = 60.0
_SEGMENT_OWNER = """
import sys
from kvtiers_mooncake.config import MooncakeConfig
from kvtiers_mooncake.store import MooncakeStore
config = MooncakeConfig(type="mooncake", master=sys.argv[1], segment=int(sys.argv[2]))
store = MooncakeStore(config, region=memoryview(b""))
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


def program(name: str) -> str:
    """Return a program of the client's distribution, beside the interpreter."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, f"{name!r} is missing: pip install mooncake-transfer-engine-non-cuda"
    return found


def wait_until(true, what: str, patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not true():
        assert time.monotonic() < until, f"{what}: not within {patience:g} s"
        time.sleep(0.01)


def pause(pid: int) -> None:
    """Stop a process, all of its threads."""
    os.kill(pid, signal.SIGSTOP)

    def is_stopped(task: Path) -> bool:
        try:
            return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:  # a thread that has just ended
            return True

    wait_until(lambda: all(map(is_stopped, Path(f"/proc/{pid}/task").iterdir())), f"process {pid} is stopped")


class Master:
    """One ``mooncake_master``. It can be killed, stopped for a while, and started again on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "master.log"
        self.port, http_port = free_port(), free_port()
        self.http = f"127.0.0.1:{http_port}"
        self.command = [
            program("mooncake_master"),
            f"--rpc_port={self.port}",
            f"--metrics_port={http_port}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            "--enable_metric_reporting=false",
            *options,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "Master":
        with self._log.open("ab") as log:
            # Ends with the tests' process: the signal follows the thread, so only where that is the main one.
            is_main = threading.current_thread() is threading.main_thread()
            command = [*(["setpriv", "--pdeathsig", "KILL"] if is_main else []), *self.command]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(self._answers, f"the master on port {self.port}")
        except BaseException:
            self.kill()
            raise
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"it has ended: {self._log.read_text()[-2000:]}"
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def pause(self) -> None:
        assert self.process is not None
        pause(self.process.pid)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class SegmentOwner:
    """A process that contributes memory and does nothing else: another machine of the pool."""

    def __init__(self, master: str, segment: int) -> None:
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", _SEGMENT_OWNER, master, str(segment)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        try:
            assert self.process.stdout.readline() == b"ready\n", "a process with a segment did not start"
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def pause(self) -> None:
        pause(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def stop(self) -> None:
        """Leave the pool in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.kill()

    def _end(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def shared_pool(folder: Path, segment: int = 1 << 30) -> Iterator[Master]:
    """Run a master, and one segment of this many bytes in another process."""
    master = Master(folder).start()
    try:
        owner = SegmentOwner(master.address, segment)
        try:
            yield master
        finally:
            owner.kill()
    finally:
        master.kill()
