"""The engines of `vllm_ttft.py`, by what they have for a tier, and the workloads that they are given.

Three workloads compare ways. Two are on models with little to compute, since what happens beside that is measured:

    long   2048 tokens of 128 KiB each, as of an 8B model in bfloat16: 256 MiB in 64 values of 4 MiB. A real prefix has
           8k to 32k such tokens; this is the least whose reading takes far longer than vLLM's own steps, and what four
           engines on one small machine hold.
    short  1472 tokens of 8 KiB each, 12 MiB in 46 values: reading takes a millisecond, so this one shows what a load
           costs besides. A token takes 5 kFLOP of prefill for each byte of its KV, one of an 8B model (16 GFLOP and
           128 KiB) 24 times that.

The third has as much to compute for a byte of KV as a model that is served:

    served 796 tokens of 1 KiB and 110 MFLOP each: 107 kFLOP a byte, an 8B model's 122. One KV head, a wide MLP.

And `by tier` is *short* for the whole stack over each tier: memory, fs, a Redis server and Ceph's S3 gateway, all here.
"""

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""Of the engines' environment."""
sys.path.append(str(ROOT / "benchmarks"))  # for what benchmarks are measured beside

from baselines.disk_read import drop_pages, files_of, least_disk_seconds, read_seconds, write_back  # noqa: E402


def run_in_engines_environment() -> None:
    """Return in the engines' environment; elsewhere, run this program there and exit with its status."""
    if not PYTHON.exists():
        sys.exit(f"error: {PYTHON.relative_to(ROOT)} is missing; run: make test-vllm")
    if Path(sys.prefix) != PYTHON.parents[1]:
        sys.exit(subprocess.run([PYTHON, *sys.argv], check=False).returncode)
    sys.path.insert(0, str(ROOT))


BARE, THEIRS, OURS, STACK = "no connector", "vLLM's fs", "kvtiers-fs", "whole stack, fs"
CONTROL = "another without"
"""A second engine without a connector: its ratio to the first is what engines of one kind differ by."""
BY_TIER = {kind: f"whole stack, {kind}" for kind in ("memory", "fs", "redis", "s3")}
DISK, MEMORY = "disk", "memory"
TIER_THREADS = 4  # of kvtiers' tiers; vLLM's has 16
BATCH, ANSWER_TOKENS = 4, 16
SUFFIX = 28  # tokens of a prompt that are no whole block


@dataclass(frozen=True)
class Workload:
    """Prompts, and the model that they are for.

    ``prompts``: how many different ones; 0: another one each round. ``batch_tokens``: of each prompt of a batch; 0: no
    batches. ``states``: where what is read lies. ``life``: rounds after which all engines are restarted; 0: all.
    """

    name: str
    tokens: int
    token_bytes: int
    shape: dict[str, int]
    primary_mib: int
    prompts: int
    batch_tokens: int
    states: tuple[str, ...]
    engines: tuple[str, ...] = (BARE, THEIRS, OURS, STACK)
    life: int = 0

    def life_within(self, rounds: int) -> int:
        """Return after how many rounds the engines are restarted, of so many: two lives at least, or just one."""
        return min(self.life, rounds // 2) or rounds


LONG = Workload(
    "long",
    tokens=2048 + SUFFIX,
    token_bytes=128 << 10,
    shape={
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
    primary_mib=1280,  # a tier of the whole stack may fill a quarter of the rows at a time
    prompts=3,
    batch_tokens=0,
    states=(DISK, MEMORY),
)
SHORT = Workload(
    "short",
    tokens=1472 + SUFFIX,
    token_bytes=8 << 10,
    shape={"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8},
    primary_mib=64,
    prompts=0,
    batch_tokens=0,
    states=(MEMORY,),
)
SERVED = Workload(
    "served",
    tokens=768 + SUFFIX,
    token_bytes=1 << 10,
    shape={
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    primary_mib=64,
    prompts=0,
    batch_tokens=250,
    states=(),
    engines=(BARE, CONTROL, THEIRS, OURS, STACK),
    life=3,
)


TIERS = Workload(
    "by tier",
    tokens=SHORT.tokens,
    token_bytes=SHORT.token_bytes,
    shape=SHORT.shape,
    primary_mib=SHORT.primary_mib,
    prompts=0,
    batch_tokens=0,
    states=(),
    engines=(BARE, *BY_TIER.values()),
)


class Taken(NamedTuple):
    """How long an answer took, and how much of that the model did not run."""

    seconds: float
    beside_model: float


class Bench:
    """The engines of one workload, by what they have for a tier, and what each has stored in which files."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        from integrations.vllm.tests.real_vllm.engines import BLOCK, Engine, Interpreter
        from integrations.vllm.tests.real_vllm.models import make_model
        from integrations.vllm.tests.real_vllm.ways import fs, tiers, whole_stack

        self._workload = workload
        self._value_bytes = BLOCK * workload.token_bytes
        self._stores = {name: folder / str(number) for number, name in enumerate((THEIRS, OURS, STACK))}
        self._files: dict[tuple[str, int], list[Path]] = {}
        options = {"primary": {"capacity": f"{workload.primary_mib}MiB"}, "load_wait": "60s"}
        bytes_of_theirs = {"cpu_bytes_to_use": workload.primary_mib << 20}
        extra = {
            BARE: None,
            CONTROL: None,
            # Not a tier of ours: vLLM's own, by its own name.
            THEIRS: tiers(**bytes_of_theirs)
            | {"secondary_tiers": [{"type": "fs", "root_dir": str(self._stores[THEIRS])}]},
            OURS: tiers(fs(self._stores[OURS], capacity="16GiB", threads=TIER_THREADS), **bytes_of_theirs),
            STACK: whole_stack(fs(self._stores[STACK], capacity="16GiB", threads=TIER_THREADS), options=options),
        }
        self._ends = contextlib.ExitStack()
        model = make_model(folder / "model", seed=0, **workload.shape)
        batch = BATCH * (workload.batch_tokens + ANSWER_TOKENS) if workload.batch_tokens else 0
        blocks = (workload.tokens + batch) // BLOCK + 16
        self._interpreter = Interpreter(folder / "interpreter.log")
        self._engines: dict[str, Any] = {}
        try:
            if workload is TIERS:
                extra |= {BY_TIER[tier["type"]]: whole_stack(tier, options=options) for tier in self._all_tiers(folder)}
            for number, name in enumerate(workload.engines):
                self._engines[name] = Engine(
                    self._interpreter,
                    model,
                    folder / f"{number}.log",
                    extra[name],
                    max_model_len=(blocks - 8) * BLOCK,
                    num_gpu_blocks_override=blocks,
                )
                if workload.batch_tokens:
                    self._engines[name].do("time_model")
        except BaseException:
            self.close()
            raise

    def turn(self, number: int) -> list[str]:
        """Return the engines in the order of this round."""
        names = list(self._engines)
        return names[number % len(names) :] + names[: number % len(names)]

    def first_token_seconds(self, name: str, prompt: int) -> tuple[float, int]:
        """Return how long an engine takes for a prompt and one token, and how many of the prompt's were cached."""
        tokens = self._prompt(prompt, self._workload.tokens)
        begin = time.perf_counter()
        _, (cached,) = self._engines[name].generate(tokens, tokens=1)
        return time.perf_counter() - begin, cached

    def cold_seconds(self, name: str, prompt: int) -> float:
        """Return the same for a prompt that the engine has not seen, and whose values land in its tier then."""
        before = self._files_of(name)
        seconds, cached = self.first_token_seconds(name, prompt)
        assert cached == 0, f"{name} has seen prompt {prompt}"
        self._settle(name)
        self._files[name, prompt] = sorted(self._files_of(name) - before)
        write_back(self._files[name, prompt])
        return seconds

    def warm_seconds(self, name: str, prompt: int, state: str = "") -> float:
        """Return the same for a prompt that is in the tier alone; ``state``: where its files lie, "" for anywhere."""
        if state:
            self._prepare(name, prompt, state)
        seconds, cached = self.first_token_seconds(name, prompt)
        assert cached == self._workload.tokens - SUFFIX, f"{name} has lost part of prompt {prompt}: {cached} are left"
        self._settle(name)
        return seconds

    def unseen_seconds(self, name: str, number: int) -> dict[str, Taken]:
        """Return how long an engine takes for a prompt that it has not seen, and then for several, with answers."""
        engine, taken = self._engines[name], {}
        engine.do("take_model_seconds")
        first = [self._prompt(number, self._workload.tokens)]
        batch = [self._prompt(10_000 + number * BATCH + index, self._workload.batch_tokens) for index in range(BATCH)]
        for kind, prompts, tokens in (("cold", first, 1), ("batch", batch, ANSWER_TOKENS)):
            begin = time.perf_counter()
            _, cached = engine.generate(*prompts, tokens=tokens)
            seconds = time.perf_counter() - begin
            assert not any(cached), f"{name} has seen a prompt of number {number}"
            taken[kind] = Taken(seconds, seconds - engine.do("take_model_seconds")["seconds"])
        self._settle(name)
        return taken

    def limit_seconds(self, name: str, prompt: int, state: str) -> tuple[float, float]:
        """Return how long reading a prompt's values takes, and computing the rest of it."""
        self._prepare(name, prompt, state)
        reading = read_seconds(self._files[name, prompt], TIER_THREADS)
        whole = self._workload.tokens - SUFFIX
        suffix, cached = self.first_token_seconds(BARE, prompt)
        if cached < whole:  # it has no room for all prompts at a time
            suffix, cached = self.first_token_seconds(BARE, prompt)
        assert cached == whole
        return reading, suffix

    def least_seconds(self, prompt: int) -> float:
        """Return how long the disk itself needs for what vLLM's tier reads of a prompt."""
        return least_disk_seconds(self._files[THEIRS, prompt])

    def close(self) -> None:
        """End the engines."""
        with self._ends:
            for engine in self._engines.values():
                engine.kill()
            self._interpreter.close()

    def _all_tiers(self, folder: Path) -> list[dict[str, Any]]:
        """Start the servers; return a tier of each kind, new and empty."""
        from integrations.vllm.tests.real_vllm.servers import Gateway, Redis
        from integrations.vllm.tests.real_vllm.ways import fs

        (folder / "redis").mkdir()
        found = [{"type": "memory", "capacity": "2GiB", "required": True}, fs(self._stores[STACK], capacity="16GiB")]
        for start in (lambda: Redis(folder / "redis"), Gateway):
            server = start()
            self._ends.callback(server.close)
            found.append(server.tier(required=True))
        return found

    def _prompt(self, number: int, tokens: int) -> list[int]:
        from integrations.vllm.tests.real_vllm.models import make_prompt

        return make_prompt(number, tokens)

    def _files_of(self, name: str) -> set[Path]:
        return files_of(self._stores[name], self._value_bytes) if name in self._stores else set()

    def _settle(self, name: str) -> None:
        """Let what an engine stores land in its tier; it and its primary forget it then."""
        if name not in (BARE, CONTROL):
            self._engines[name].forget()

    def _prepare(self, name: str, prompt: int, state: str) -> None:
        files = self._files[name, prompt]
        if state == DISK:
            drop_pages(files)
        else:
            read_seconds(files, 1)
