"""A whole SGLang server on the CPU, with a small Llama on random weights: one continues what another has stored."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtiers.testing.ports import free_port

pytestmark = [pytest.mark.whole_server, pytest.mark.timeout(1800)]
PATIENCE = 600.0
PROMPT = [(place * 7 + 3) % 500 + 3 for place in range(300)]
PAGE = 16
ARGUMENTS = (
    "--device cpu --host 127.0.0.1 --skip-tokenizer-init --grammar-backend none --skip-server-warmup "
    f"--disable-overlap-schedule --max-total-tokens 4096 --mem-fraction-static 0.2 --page-size {PAGE} "
    "--hicache-io-backend direct --hicache-mem-layout layer_first --hicache-size 1 "
    "--hicache-storage-prefetch-policy wait_complete"
).split()


class WholeServer:
    """A server's processes, started by the variable alone."""

    def __init__(self, model: Path, config: Path, log: Path) -> None:
        self._port = free_port()
        here = Path(__file__).parent
        path = os.pathsep.join([str(here / "whole_server"), str(here)])
        command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model)]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *ARGUMENTS, "--port", str(self._port)],
                env={**os.environ, "PYTHONPATH": path, "KVTIERS_CONFIG": str(config)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self) -> None:
        until = time.monotonic() + PATIENCE
        while b"ready to roll" not in self._log.read_bytes():
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < until, self._log.read_text()[-3000:]
            time.sleep(0.2)

    def generate(self) -> tuple[list[int], int, int]:
        """Continue the prompt; return the tokens, and how many of the prompt's were cached at all, and by a tier."""
        greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = json.loads(self.post("generate", {"input_ids": PROMPT, "sampling_params": greedy}))
        facts = answer["meta_info"]
        return answer["output_ids"], facts["cached_tokens"], (facts["cached_tokens_details"] or {}).get("storage", 0)

    def post(self, what: str, body: dict[str, object]) -> bytes:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/{what}", data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.read()

    def has_its_pool_in_a_memfd(self) -> bool:
        """Return whether one of the server's processes maps a pool that tier hosts can map as well."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):  # it has ended, or is no process
                is_its = os.getsid(int(entry.name)) == self._process.pid
                if is_its and "memfd:sglang_host_pool" in (entry / "maps").read_text():
                    return True
        return False

    def kill(self) -> None:
        """Kill all processes of the server but Python's tracker, which then removes their semaphores."""
        for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]:
            with contextlib.suppress(OSError):
                is_its = os.getsid(pid) == self._process.pid  # it was started with a session of its own
                if is_its and b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    config = LlamaConfig(vocab_size=512, num_attention_heads=4, num_key_value_heads=2, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def start(model, tmp_path):
    servers = []

    def start(config: Path) -> WholeServer:
        servers.append(WholeServer(model, config, tmp_path / f"log{len(servers)}"))
        servers[-1].wait()
        return servers[-1]

    known = set(Path("/dev/shm").glob("sglang_loads_*"))
    yield start
    for server in servers:
        server.kill()
    for left in set(Path("/dev/shm").glob("sglang_loads_*")) - known:
        left.unlink()  # SGLang's own, which a killed server cannot remove


def values(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= 8192]


def test_a_killed_servers_prompt_is_continued_from_a_tier_with_the_same_tokens_and_damage_is_computed(start, tmp_path):
    tier = f"type: fs\n    path: {tmp_path / 'fs'}\n    capacity: 1GiB\n    min_free: 0\n    processes: 1"
    config = tmp_path / "tiers.yaml"
    config.write_text(f"version: 1\nprimary: {{capacity: 1MiB}}\nsecondary:\n  - {tier}\n")
    pages = len(PROMPT) // PAGE
    first = start(config)
    tokens, cached, _ = first.generate()
    assert cached == 0
    assert first.has_its_pool_in_a_memfd(), "the variable alone has SGLang make it so"
    until = time.monotonic() + PATIENCE
    while len(values(tmp_path / "fs")) < pages:
        assert time.monotonic() < until, "the prompt is not backed up"
        time.sleep(0.1)
    first.kill()

    second = start(config)
    assert second.generate() == (tokens, pages * PAGE, pages * PAGE)
    assert second.generate()[0] == tokens

    for path in values(tmp_path / "fs"):
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    second.post("flush_cache", {})
    assert second.generate() == (tokens, 0, 0)
