"""Engines in processes of their own, models with random weights, and the config that puts tiers under an engine."""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_SECONDS = 180.0
ANSWER_SECONDS = 90.0
BLOCK = 32
"""Tokens in a block: the smallest that vLLM's CPU backend has."""
_numbers = itertools.count()
_UNDER_WAY = re.compile("active_cascade|kvtiers_tier_(running_jobs|storing_chunks)|kvtiers_primary_pending_rows")


def make_model(folder: Path, *, seed: int, **config: Any) -> Path:
    """Write a tiny model whose greedy tokens depend on every token before them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(shape | config))).save_pretrained(folder)
    return folder


def make_window_model(folder: Path, *, seed: int, window: int) -> Path:
    """Write a tiny model of which every other layer sees a window of so many tokens: two KV groups."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    torch.manual_seed(seed)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapter(folder: Path, *, seed: int) -> Path:
    """Write a LoRA adapter for the tiny model."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for module, size in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=numbers) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(size, 8, generator=numbers) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def make_prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt of random tokens."""
    numbers = random.Random(seed)
    return [numbers.randrange(512) for _ in range(tokens)]


def tiers(*secondary: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return vLLM's kv_connector_extra_config for its own tiering, with these tiers.

    A request waits longer for an answer than it would by default: a busy machine is to cost time here, not hits.
    """
    common = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_spec",
        "cpu_bytes_to_use": 64 << 20,
        "kvtiers": {"lookup_wait": "3s", "load_wait": "60s"},
    }
    return common | {"secondary_tiers": list(secondary)} | more


def whole_stack(*secondary: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return vLLM's kv_connector_extra_config for kvtiers' own manager, primary and workers, over these tiers."""
    config = {"version": 1, "primary": {"capacity": "64MiB"}, "lookup_wait": "3s", "load_wait": "10s"}
    config |= {"secondary": list(secondary)}
    return {"spec_name": "KvtiersOffloadingSpec", "kvtiers_config": config} | more


def release_folder(version: str) -> Path:
    """Return the folder in which another release of vLLM lies, to be put before the environment's own."""
    folder = Path(sys.prefix) / "releases" / version
    assert (folder / "vllm").is_dir(), f"vLLM {version} is not there; install it with: make test-vllm"
    return folder


def environment(release: str = "") -> dict[str, str]:
    """Return the environment of an engine's process: small, quiet, on the CPU, of this release."""
    before = [str(release_folder(release))] if release else []
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE / "engine"), *before]),
    }


class EngineError(Exception):
    """What the engine's process answered instead of a result."""


class Engine:
    """One vLLM in a process of its own. ``extra``: its kv_connector_extra_config; None: no connector at all.

    ``release``: another release than the environment's.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        extra: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        release: str = "",
        **options: Any,
    ) -> None:
        self.id = f"kvtiers-test-{os.getpid()}-{next(_numbers)}"
        options = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "seed": 0,
            "enforce_eager": True,
            "max_model_len": 2048,
            "block_size": BLOCK,
            "disable_log_stats": False,
        } | options
        if extra is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "engine_id": self.id,
                "kv_connector_extra_config": extra,
            }
        self.log = log
        answers, theirs = os.pipe()
        settings = environment(release) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [
                    "nice",
                    "-n",
                    "5",
                    sys.executable,
                    str(HERE / "engine" / "serve.py"),
                    str(theirs),
                    json.dumps(options),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                env=settings | (env or {}),
            )
        os.close(theirs)
        os.set_blocking(answers, False)
        self._answers = answers
        self._rest = b""
        try:
            self._answer(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def do(self, command: str, seconds: float = ANSWER_SECONDS, /, **arguments: Any) -> dict[str, Any]:
        """Have the engine do something; its answer, within so many seconds."""
        self.send(command, **arguments)
        return self._answer(seconds)

    def send(self, command: str, /, **arguments: Any) -> None:
        """Have the engine begin something; ``answer`` waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Return the answer to what was sent."""
        return self._answer(seconds)

    def generate(self, *prompts: list[int], tokens: int = 8, **more: Any) -> tuple[list[list[int]], list[int]]:
        """Return the tokens for each prompt, and how many of its tokens were cached."""
        answer = self.do("generate", prompts=list(prompts), max_tokens=tokens, **more)
        return answer["tokens"], answer["cached"]

    def metrics(self) -> dict[str, float]:
        """Return the figures of vLLM's own /metrics; those of a tier as ``name{tier}``."""
        return self.do("metrics")

    def forget(self) -> None:
        """Wipe the engine's own prefix cache and its primary tier, after what is on its way to tiers has landed."""
        self.generate([1, 2, 3], tokens=2)  # the last stores begin in the next step
        self.wait_for(lambda figures: not any(value for name, value in figures.items() if _UNDER_WAY.search(name)))
        assert self.do("reset_prefix_cache", connector=True)["ok"]

    def wait_for(self, condition: Any, seconds: float = 30.0) -> dict[str, float]:
        """Step the engine until its figures meet a condition; return them."""
        until = time.monotonic() + seconds
        while not condition(figures := self.metrics()):
            assert time.monotonic() < until, f"waited in vain; the figures are {figures}"
            self.generate([1, 2, 3], tokens=2)
        return figures

    def lines(self, text: str) -> list[str]:
        """Return the lines of the engine's log with this text in them."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]

    def hosts(self) -> list[int]:
        """Return the process ids of the engine's tier hosts."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and folder.name != str(self.process.pid):
                try:
                    command = (folder / "cmdline").read_bytes()
                    parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                except OSError:
                    continue
                if b"kvtiers.secondary.host_main" in command and int(parent) == self.process.pid:
                    found.append(int(folder.name))
        return found

    def shutdown(self) -> None:
        """End the engine as its user would."""
        self.do("shutdown")
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        """End the engine at once."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        for path in Path("/dev/shm").glob(f"vllm_offload_{self.id}*"):  # vLLM leaves it behind when it is killed
            path.unlink(missing_ok=True)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def _answer(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            try:
                data = os.read(self._answers, 1 << 20)
            except BlockingIOError:
                assert time.monotonic() < until, f"no answer within {seconds:g} s; see {self.log}"
                time.sleep(0.005)
                continue
            if not data:
                raise EngineError(f"the engine has ended; see {self.log}: {self.lines('Error')[-1:]}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer
