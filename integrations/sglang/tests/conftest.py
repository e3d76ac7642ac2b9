"""The real SGLang on CPU tensors: its pools of every kind and layout, its factory, its hashes, over real tiers."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtiers.testing.ports import free_port

from . import without_torchvision  # noqa: F401 -- before anything of SGLang

if TYPE_CHECKING:  # SGLang takes long to import, and pytest loads this in the process that runs no test, too
    from .parts import Server


@pytest.fixture(scope="session")
def hooks_applied() -> None:
    """Have SGLang load its plugins and apply their hooks, as each of its processes does at its start."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(autouse=True)
def unchanged_weights(hooks_applied: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test begin as a process does, in which no update of the weights has come."""
    monkeypatch.setattr("kvtiers_sglang.weight_updates._begun", "")


@pytest.fixture
def publish() -> Iterator[Callable[..., Any]]:
    """Publish a server's arguments as SGLang does, real ones; call it again with other fields for another server."""
    from .parts import published

    with ExitStack() as stack:

        def publish(**fields: Any) -> None:
            stack.close()
            stack.enter_context(published(**fields))

        publish()
        yield publish


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A config with one tier, a directory."""
    tier = {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0, "processes": 1}
    return {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [tier]}


@pytest.fixture
def serve(publish: Callable[..., Any], config: dict[str, Any]) -> Iterator["Callable[..., Server]"]:
    """Start a server: SGLang's factory makes the backend for a pool, as its cache controller does. Options by name."""
    from .parts import Server, mha_pool

    with ExitStack() as stack:

        def serve(pool: Any = None, **more: Any) -> Server:
            extra = {"config": config, "bounce_bytes": "4MiB", "deadline": "20s"}
            extra |= {
                name: more.pop(name) for name in ("deadline", "weights", "draft_weights", "tenant") if name in more
            }
            server = Server(pool if pool is not None else mha_pool(), extra, **more)
            stack.callback(server.close)
            return server

        yield serve


@pytest.fixture
def unanswered() -> Iterator[int]:
    """A port of this machine that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


class RedisServer:
    """A Redis server that can be killed and started again, with nothing kept."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "redis-server",
            "--port",
            str(self.port),
            "--save",
            "",
            "--dir",
            str(self._folder),
        ]
        self._process = subprocess.Popen([*command, "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                assert self._process.poll() is None, "redis-server has ended"
                assert time.monotonic() < until, "redis-server does not listen"

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep the server from answering: its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server of the test's own."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
