"""LMCache's own server and client, end to end on a CPU: stored through the one, found by the next, byte for byte."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

from kvtiers.testing.ports import free_port

from .conftest import params_of

MODEL = "test-model"  # what LMCache's client registers
SHAPE = "(2,64,16,2,32):float16:4"  # objects of 256 KiB are mapped
TOKENS = 512  # two chunks of 256


class Running:
    """A server of LMCache's in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, http: int, log: Path) -> None:
        self.process, self.port, self.http, self.log = process, port, http, log

    def wait(self) -> None:
        until = time.monotonic() + 120
        while not self.answers():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.status())
        return False

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=10) as answer:
            return dict(json.loads(answer.read())["storage_manager"])

    def adapter(self) -> dict[str, Any]:
        (adapter,) = self.status()["l2_adapters"]
        return dict(adapter)

    def until(self, condition: Any) -> None:
        until = time.monotonic() + 60
        while not condition(self):
            assert time.monotonic() < until, self.status()
            time.sleep(0.05)

    @contextmanager
    def client(self, shape: str = SHAPE) -> Iterator[ServerBenchClient]:
        config = BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{self.port}",
            http_url=f"http://127.0.0.1:{self.http}",
            mode="cpu",
            transfer_mode="lmcache_driven",
            use_mla=False,
            tp_size=1,
            num_tokens=TOKENS,
            kvcache_shape_spec=shape,
            num_blocks=64,
            block_size=16,
        )
        client = ServerBenchClient(config, lambda _: None)
        client.start()
        try:
            yield client
        finally:
            client.close()


@contextmanager
def lmcache_server(params: dict[str, Any], folder: Path) -> Iterator[Running]:
    """Start a server; ``wait`` until it answers."""
    port, http = free_port(), free_port()
    spec = {"type": "plugin", "module_path": "kvtiers_lmcache", "class_name": "KvtiersL2Adapter"}
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--l1-size-gb", "0.1", "--eviction-policy", "LRU"]
    command += ["--port", str(port), "--http-port", str(http), "--disable-metrics"]
    name = f"lmcache_l1_pool_{port}"
    command += ["--l2-adapter", json.dumps({**spec, "adapter_params": params}), "--shm-name", name, "--no-l1-use-lazy"]
    log = folder / f"server-{port}.log"
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True) as process,
    ):
        try:
            yield Running(process, port, http, log)
        finally:
            process.kill()
            Path("/dev/shm", name).unlink(missing_ok=True)  # LMCache's own, which a killed server cannot remove


def tensors(client: ServerBenchClient) -> dict[str, torch.Tensor]:
    return client._workers[0].kv_caches


def fill(client: ServerBenchClient, seed: int) -> None:
    torch.manual_seed(seed)
    for tensor in tensors(client).values():
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))


def blocks(client: ServerBenchClient, request: Any) -> list[torch.Tensor]:
    """The request's blocks of every layer, as they are now."""
    first, last = request.block_offset, request.block_offset + request.num_blocks
    return [tensor[:, first:last].clone() for tensor in tensors(client).values()]


def test_what_a_server_has_stored_is_there_after_it_was_killed(config, tmp_path):
    """For one with an empty L1. An engine of another dtype misses, though LMCache's keys and lengths are equal."""
    del config["secondary"][0]["io"]  # its tier hosts map the servers' L1
    params = params_of(config, weights={MODEL: "0123abc"})
    with lmcache_server(params, tmp_path) as first, lmcache_server(params, tmp_path) as second:
        first.wait()
        with first.client() as client:
            request = client.create_request(1, "stores", "store")
            assert client.lookup(request).is_full_miss
            fill(client, 1)
            right = blocks(client, request)
            assert client.store(request, 0, request.num_full_tokens).succeeded
            first.until(lambda it: it.adapter()["stored_keys"] == 2)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
        second.wait()
        with second.client("(2,64,16,2,32):bfloat16:4") as other:
            assert other.lookup(other.create_request(1, "other dtype", "load")).is_full_miss
        with second.client() as client:
            request = client.create_request(1, "loads", "load")
            fill(client, 2)
            assert blocks(client, request)[0].ne(right[0]).any()
            found = client.lookup(request)
            assert found.is_full_hit, (found, second.adapter())
            assert client.retrieve(request, 0, request.num_full_tokens).succeeded
            assert all(map(torch.equal, blocks(client, request), right))
            assert client.lookup(client.create_request(2, "other tokens", "load")).is_full_miss
        assert second.adapter()["is_healthy"]
        assert sum(client["direct_values"] for client in second.adapter()["clients"]) == 2
