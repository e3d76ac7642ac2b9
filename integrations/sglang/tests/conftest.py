"""The real SGLang on CPU tensors: its host pools of every kind and layout, its factory, its hashes, over real tiers."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .parts import Server, mha_pool

WEIGHTS = "0" * 40


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang publishes of a server's arguments; change a field to have another server."""
    published = SimpleNamespace(
        model_path="test/model",
        revision=WEIGHTS,
        load_format="auto",
        kv_cache_dtype="auto",
        quantization=None,
        quantization_param_path=None,
        json_model_override_args="{}",
        speculative_algorithm=None,
        speculative_draft_model_path=None,
        speculative_draft_model_revision=None,
    )
    monkeypatch.setattr("kvtiers_sglang.backend.server_arguments", lambda: published)
    return published


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A config with one tier, a directory."""
    tier = {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0}
    return {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [tier]}


@pytest.fixture
def serve(arguments: SimpleNamespace, config: dict[str, Any]) -> Iterator[Callable[..., Server]]:
    """Start a server: SGLang's factory makes the backend for a pool, as its cache controller does."""
    with ExitStack() as stack:

        def serve(pool: Any = None, **more: Any) -> Server:
            extra = {"config": config, "bounce_bytes": "4MiB", "deadline": more.pop("deadline", "20s")}
            server = Server(pool if pool is not None else mha_pool(), extra, **more)
            stack.callback(server.close)
            return server

        yield serve


@pytest.fixture
def unanswered() -> Iterator[int]:
    """A port of this machine that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis server of the test's own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path), "--bind", "127.0.0.1"]
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
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
