"""The tier type ``faulty``: a real small store on a directory that goes wrong where, and how, the test says.

A file ``gates/STAGE`` under its root says what happens at the next call that comes to this stage (and is taken away by
it, unless it begins with ``always``); each call that does is noted in ``reached``.
"""

import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from pydantic import Field

from kvtiers.api import ChunkStore, Secret, TierConfig, TierPlugin, hookimpl

log = logging.getLogger("faulty")


class FaultyConfig(TierConfig):
    """Options."""

    root: str = Field(description="folder of the values and of the test's commands")
    password: Secret | None = Field(default=None, description="a secret, to see where it goes")


class Gates:
    def __init__(self, root):
        self.root = root
        self.hit = 0
        self.kept = None

    def come_to(self, stage, dst=None):
        gate = self.root / "gates" / stage
        try:
            order, *rest = gate.read_text().split()
            if order == "always":
                order, *rest = rest
            else:
                gate.unlink()
        except (FileNotFoundError, ValueError):
            return
        if order == "hang":  # its end of the FIFO is open before anybody sees that it came: no release is lost
            rest = [os.open(self.root / "fifo", os.O_RDONLY | os.O_NONBLOCK)]
        self.hit += 1
        (self.root / "reached" / f"{stage}.{os.getpid()}.{self.hit}.{time.monotonic_ns()}").touch()
        if dst is not None:
            dst[:16] = b"half of a value."
            self.kept = dst[:16] if order == "keeps" else None
        getattr(self, order)(*rest)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self):
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # by thread, so that this one goes no further

    def segfault(self):
        ctypes.string_at(0)

    def exit(self):
        os._exit(3)

    def fail(self):
        raise OSError("it was told to")

    def transient(self):
        raise ConnectionResetError("it was told to")

    def sleep(self, seconds):
        time.sleep(float(seconds))

    def hang(self, fifo):
        """Block in a system call until somebody has opened the other end."""
        hung_up = select.poll()
        hung_up.register(fifo)
        hung_up.poll()
        os.close(fifo)

    def flood(self):
        for number in range(20_000):
            log.warning("flood %d", number)

    def prints(self):
        sys.stdout.write("a store that prints\n")
        sys.stdout.flush()

    def says(self, *words):
        log.warning(" ".join(words))

    def forks(self):
        """Leave a child behind that was forked without exec."""
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        (self.root / "child").write_text(str(pid))

    def spawns(self):
        """Leave a child behind that inherits whatever can be inherited."""
        child = subprocess.Popen(["sleep", "600"], close_fds=False)
        (self.root / "child").write_text(str(child.pid))

    def keeps(self):
        """The buffer is kept already."""


class FaultyStore(ChunkStore):
    def __init__(self, config):
        self.root = Path(config.root)
        self.values = self.root / "values"
        self.gates = Gates(self.root)
        self.password = config.password.reveal() if config.password else ""
        self.gates.come_to("open")

    def _path(self, name):
        return self.values / name.replace("/", "_")

    def read_into(self, name, dst):
        self.gates.come_to("read", dst)
        try:
            with self._path(name).open("rb") as file:
                return file.readinto(dst) == len(dst)
        except FileNotFoundError:
            return False

    def write(self, name, src):
        self.gates.come_to("write")
        path = self._path(name)
        half = path.with_name(f"{path.name}.{os.getpid()}.half")
        half.write_bytes(src)
        half.rename(path)

    def exists(self, names):
        if not names[0].endswith("/_epoch"):  # what core asks for itself while it opens a store
            self.gates.come_to("exists")
        return [self._path(name).exists() for name in names]

    def delete(self, names):
        self.gates.come_to("delete")
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def stats(self):
        tasks = Path("/proc/self/task").iterdir()
        processors = max(len(os.sched_getaffinity(int(task.name))) for task in tasks)
        return {"pid": os.getpid(), "processors": processors, "password": len(self.password)}

    def close(self):
        self.gates.come_to("close")
        (self.root / "closed").touch()


def open_faulty(config, context):
    return FaultyStore(config)


@hookimpl
def kvtiers_tier():
    return TierPlugin(name="faulty", kind="store", config=FaultyConfig, open=open_faulty, api_version=1)
