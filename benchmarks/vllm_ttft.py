"""Time to first token and throughput in the real vLLM on the CPU: bare, over vLLM's own `fs` tier, over kvtiers' `fs`.

All engines live at the same time and take turns with the same prompts, so that a busy machine slows all alike; what
is compared is the ratio within a round. *Cold*: a prompt that nobody has seen. *Batch*: several such prompts at once,
each with some tokens of answer; the ratio of the times is that of the throughputs. What they have stored lands before
the next engine's turn. *Warm*: what the engine and its primary have forgotten and the tier has. Beside it the limit:
reading as many values' files, and computing what is left of the prompt with all else in the engine's own cache. Needs
the environment of `make test-vllm`.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
GOAL_COLD, GOAL_OWN_FS, GOAL_LIMIT = 1.01, 0.8, 1.1
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
BARE = "no connector"
TOKENS = 1500
BATCH, BATCH_TOKENS, ANSWER_TOKENS = 4, 500, 16


def seconds_of(engine: Any, prompt: list[int], tokens: int = 1) -> tuple[float, int]:
    """Return how long an engine takes for a prompt and so many tokens, and how many of the prompt's were cached."""
    begin = time.perf_counter()
    _, (cached,) = engine.generate(prompt, tokens=tokens)
    return time.perf_counter() - begin, cached


def batch_seconds(engine: Any, prompts: list[list[int]]) -> float:
    """Return how long an engine takes for prompts that it has not seen, all at once, and their answers."""
    begin = time.perf_counter()
    _, cached = engine.generate(*prompts, tokens=ANSWER_TOKENS)
    assert not any(cached), "a prompt of the batch was seen before"
    return time.perf_counter() - begin


def read_seconds(store: Path, count: int) -> float:
    """Return how long it takes to read so many values in a directory, from a warm page cache."""
    files = random.sample(list(store.rglob("*00000000")), count)
    begin = time.perf_counter()
    for file in files:
        file.read_bytes()
    return time.perf_counter() - begin


def start_engines(folder: Path) -> dict[str, Any]:
    """Return the engines by what they have for a tier."""
    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    from engines import Engine, make_model, tiers

    model = make_model(folder / "model", seed=0, **SHAPE)
    extra = {
        BARE: None,
        "vLLM's fs": tiers({"type": "fs", "root_dir": str(folder / "theirs")}),
        "kvtiers-fs": tiers({"type": "kvtiers-fs", "path": str(folder / "ours"), "capacity": "4GiB", "required": True}),
    }
    return {
        name: Engine(model, folder / f"{number}.log", config, max_model_len=4096)
        for number, (name, config) in enumerate(extra.items())
    }


def settle(engine: Any, name: str) -> None:
    """Let what an engine stores land in its tier; it and its primary forget it then."""
    if name != BARE:
        engine.forget()


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of each round by kind and engine."""
    engines = start_engines(folder)
    from engines import BLOCK, make_prompt

    cold: dict[str, list[float]] = {name: [] for name in engines}
    batch: dict[str, list[float]] = {name: [] for name in engines}
    warm: dict[str, list[float]] = {name: [] for name in engines}
    limit: list[float] = []
    names = list(engines)
    try:
        for number in range(rounds + 1):
            prompt = make_prompt(number, TOKENS)
            turn = names[number % len(names) :] + names[: number % len(names)]
            for name in turn:
                taken, cached = seconds_of(engines[name], prompt)
                assert cached == 0, f"{name} has seen prompt {number}"
                cold[name].append(taken)
                settle(engines[name], name)
            prompts = [make_prompt((number + 1) * 1000 + index, BATCH_TOKENS) for index in range(BATCH)]
            for name in turn:
                batch[name].append(batch_seconds(engines[name], prompts))
                settle(engines[name], name)
            for name in [name for name in turn if name != BARE]:
                taken, cached = seconds_of(engines[name], prompt)
                assert cached, f"{name} has lost prompt {number}"
                warm[name].append(taken)
            suffix, _ = seconds_of(engines[BARE], prompt)
            limit.append(suffix + read_seconds(folder / "ours", TOKENS // BLOCK))
    finally:
        for engine in engines.values():
            engine.kill()
    # The first round compiles and warms, and is not counted.
    return {
        "cold": {name: taken[1:] for name, taken in cold.items()},
        "batch": {name: taken[1:] for name, taken in batch.items()},
        "warm": {name: taken[1:] for name, taken in warm.items() if taken},
        "limit": limit[1:],
    }


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median ratio within a round, and the 95 % interval of the mean."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    spread = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
    mean = statistics.mean(ratios)
    return {"median": statistics.median(ratios), "low": mean - 1.96 * spread, "high": mean + 1.96 * spread}


def results(rounds: int) -> dict[str, Any]:
    """Return the figures and the goals."""
    with tempfile.TemporaryDirectory(prefix="kvtiers-ttft-") as folder:
        found = measure(rounds, Path(folder))
    cold, batch, warm = found["cold"], found["batch"], found["warm"]
    ratios = {
        "cold, kvtiers-fs / no connector": ratio(cold["kvtiers-fs"], cold[BARE]),
        "cold, vLLM's fs / no connector": ratio(cold["vLLM's fs"], cold[BARE]),
        "batch, kvtiers-fs / no connector": ratio(batch["kvtiers-fs"], batch[BARE]),
        "batch, vLLM's fs / no connector": ratio(batch["vLLM's fs"], batch[BARE]),
        "warm, kvtiers-fs / vLLM's fs": ratio(warm["kvtiers-fs"], warm["vLLM's fs"]),
        "warm, kvtiers-fs / (reading + suffix)": ratio(warm["kvtiers-fs"], found["limit"]),
        "warm / cold, kvtiers-fs": ratio(warm["kvtiers-fs"], cold["kvtiers-fs"]),
    }
    wanted = {
        "cold, kvtiers-fs / no connector": GOAL_COLD,
        "batch, kvtiers-fs / no connector": GOAL_COLD,
        "warm, kvtiers-fs / vLLM's fs": GOAL_OWN_FS,
        "warm, kvtiers-fs / (reading + suffix)": GOAL_LIMIT,
    }
    goals = [
        {"name": name, "value": ratios[name]["median"], "goal": goal, "met": ratios[name]["median"] <= goal}
        for name, goal in wanted.items()
    ]
    medians = {
        kind: {name: statistics.median(taken) for name, taken in found[kind].items()}
        for kind in ("cold", "batch", "warm")
    }
    return {
        "rounds": rounds,
        "tokens": TOKENS,
        "seconds": medians,
        "ratios": ratios,
        "not run": {"LMCache": lmcache()},
        "goals": goals,
    }


def lmcache() -> str:
    """Return why LMCache is not among the engines."""
    code = "import importlib.util; print(importlib.util.find_spec('lmcache') is not None)"
    there = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"
    return "installed, but its connector needs a GPU" if there else "not installed beside vLLM on this machine"


def report(found: dict[str, Any]) -> None:
    """Print the figures."""
    for kind, seconds in found["seconds"].items():
        print(f"  {kind:6}" + "".join(f"{name:>16} {taken:7.3f} s" for name, taken in seconds.items()))
    for name, value in found["ratios"].items():
        print(f"  {name:42} {value['median']:.3f}  ({value['low']:.3f} to {value['high']:.3f})")
    for name, why in found["not run"].items():
        print(f"  {name}: {why}")
    for goal in found["goals"]:
        print(f"{goal['name']}: {goal['value']:.3f}; goal {goal['goal']:g}: {'met' if goal['met'] else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 20")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not PYTHON.exists():
        sys.exit(f"error: {PYTHON.relative_to(ROOT)} is missing; run: make test-vllm")
    if Path(sys.prefix) != PYTHON.parents[1]:  # the engines' environment, not this one
        sys.exit(subprocess.run([PYTHON, __file__, *sys.argv[1:]], check=False).returncode)
    found = results(5 if options.quick else 20)
    print(json.dumps(found)) if options.json else report(found)


if __name__ == "__main__":
    main()
