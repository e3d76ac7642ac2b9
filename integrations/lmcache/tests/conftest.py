"""The real LMCache on a CPU: its factories and memory objects, over real tiers."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtiers._log_queue import flush_logs
from kvtiers.testing.ports import free_port

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # before LMCache is imported: it reports where it runs
os.environ["LMCACHE_DISABLE_BANNER"] = "1"

from .parts import WEIGHTS, Memory, Server


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A config with one tier, a directory; its I/O is in this process, which starts sooner."""
    return config_of({"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0, "io": "thread"})


def config_of(*tiers: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [*tiers]}


def params_of(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Deadlines that a busy machine keeps, too."""
    times = {"lookup_deadline": "60s", "deadline": "60s", "store_deadline": "60s"}
    return {"config": config, "weights": WEIGHTS, "bounce_bytes": "8MiB", **times, **more}


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


@pytest.fixture
def serve(config: dict[str, Any], memory: Memory) -> Iterator[Callable[..., Server]]:
    """Start a server's adapter."""
    with ExitStack() as stack:

        def serve(layout: Any = None, **more: Any) -> Server:
            own = more.pop("memory", memory)
            server = Server(params_of(more.pop("config", config), **more), own, layout)
            stack.callback(server.close)
            return server

        yield serve


@pytest.fixture(params=["memory", "fs", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A tier of each kind."""
    if request.param == "redis":
        return {"type": "redis", "url": request.getfixturevalue("redis_url")}
    if request.param == "memory":
        return {"type": "memory", "capacity": "256MiB"}
    return {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what kvtiers has logged in LMCache, line by line."""

    def said() -> list[str]:
        flush_logs(30.0)  # another thread handles them
        return [it.getMessage() for it in caplog.records if it.name == "kvtiers.lmcache"]

    return said


@pytest.fixture
def unanswered() -> Iterator[int]:
    """A port of this machine that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@contextmanager
def redis_server(port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "redis-server",
        "--port",
        str(port),
        "--save",
        "",
        "--dir",
        str(folder),
        "--bind",
        "127.0.0.1",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None, "redis-server has ended"
                    assert time.monotonic() < until, "redis-server does not listen"
            yield process
        finally:
            process.kill()


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis server of the test's own."""
    port = free_port()
    with redis_server(port, tmp_path):
        yield f"redis://127.0.0.1:{port}/0"
