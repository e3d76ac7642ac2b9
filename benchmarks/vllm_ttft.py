"""Time to first token and throughput in the real vLLM on the CPU: bare, vLLM's own `fs` tier, kvtiers' `fs` both ways.

All engines live at the same time and take turns with the same prompts, so that a busy machine slows all alike; what
is compared is the ratio within a round, whose median is given with its 95 % interval. *Cold*: a prompt that nobody
has seen. *Batch*: several such prompts at once, each with some tokens of answer; the ratio of the times is that of
the throughputs. Of these two *short* takes the better of two runs a round, the second in the opposite order:
computing alone differs by 5 % from one run to the next. What they have stored lands before the next engine's turn.
*Warm*: what the engine and its primary have forgotten and the tier has. Its limit is the sum of two: reading the
bytes of the same values' files, by as many threads as a tier has, with the page cache as it was for the tier; and
computing what is left of the prompt with all else in the engine's own cache.

Two workloads (`peers/vllm_engines.py`): *long*, 256 MiB in 64 values, and *short*, 12 MiB in 46. What is read lies on
*disk*, since the page cache was made to forget it, or in *memory*, where the page cache keeps it as it does on a
machine with memory to spare. vLLM's tier goes around the page cache where it can: it reads the disk either way.
kvtiers' goes around it for what is not in it.

The goals of warm are those of *long*; *short* is shown beside them. The limit is a goal on disk: from memory, reading
costs no more than a copy, and a load has to copy once more, into the engine's blocks, which on a CPU is the
processor's work. vLLM's tier reads one value after the other. Where a disk gives sixteen threads no more than one, as
the one of the machine that this was written on, both tiers wait for it, and what is left to gain from disk is the
processor's. Needs the environment of `make test-vllm`.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.vllm_engines import BARE, DISK, LONG, MEMORY, OURS, ROOT, SHORT, STACK, THEIRS, Bench, Workload

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
GOAL_COLD, GOAL_OWN_FS, GOAL_LIMIT = 1.01, 0.8, 1.1
OURS_ALL = (OURS, STACK)
SECOND = 1000
"""What is added to a prompt's number for another one of the same kind."""
Figures = dict[str, list[float]]


def measure(workload: Workload, rounds: int, folder: Path) -> dict[str, Figures]:
    """Return the seconds of each round by kind and engine."""
    bench = Bench(workload, folder)
    found: dict[str, Figures] = {}

    def note(kind: str, name: str, seconds: float) -> None:
        found.setdefault(kind, {}).setdefault(name, []).append(seconds)

    def note_better(kind: str, seconds: Callable[[str, int], float], turn: list[str], number: int) -> None:
        first = {name: seconds(name, number) for name in turn}
        second = {name: seconds(name, SECOND + number) for name in reversed(turn)}
        for name in turn:
            note(kind, name, min(first[name], second[name]))

    try:
        for number in range(rounds + 1):
            turn = bench.turn(number)
            prompt = number % workload.prompts if workload.prompts else number
            if not workload.prompts:
                note_better("cold", bench.cold_seconds, turn, prompt)
            for name in turn if workload.prompts and prompt == number else ():
                note("cold", name, bench.cold_seconds(name, prompt))
            if workload.with_batches:
                note_better("batch", bench.batch_seconds, turn, number)
            for state in workload.states:
                for name in [name for name in turn if name != BARE]:
                    note(f"warm, {state}", name, bench.warm_seconds(name, prompt, state))
                for name in OURS_ALL:
                    reading, suffix = bench.limit_seconds(name, prompt, state)
                    note(f"reading, {state}", name, reading)
                    note(f"limit, {state}", name, reading + suffix)
    finally:
        bench.close()
    # The first round compiles and warms, and is not counted.
    return {kind: {name: taken[1:] for name, taken in by_name.items()} for kind, by_name in found.items()}


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median ratio within a round, and the median's 95 % interval by the sign test."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    rounds, outside, skipped = len(ratios), 0.0, 0
    while (outside := outside + 2 * math.comb(rounds, skipped) / 2**rounds) <= 0.05:
        skipped += 1
    skipped = max(0, skipped - 1)
    return {"median": statistics.median(ratios), "low": ratios[skipped], "high": ratios[-1 - skipped]}


def ratios_of(found: dict[str, Figures]) -> dict[str, dict[str, float]]:
    """Return the ratios that matter, each named after what is compared."""
    ratios = {}
    for kind, seconds in found.items():
        if BARE in seconds:
            for name in (OURS, STACK, THEIRS):
                ratios[f"{kind}, {name} / {BARE}"] = ratio(seconds[name], seconds[BARE])
        elif THEIRS in seconds:
            limit = found[kind.replace("warm", "limit")]
            for name in OURS_ALL:
                ratios[f"{kind}, {name} / {THEIRS}"] = ratio(seconds[name], seconds[THEIRS])
                ratios[f"{kind}, {name} / (reading + suffix)"] = ratio(seconds[name], limit[name])
    return ratios


def goals_of(long: dict[str, dict[str, float]], short: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the goals."""
    wanted = [(short, f"{kind}, {name} / {BARE}", GOAL_COLD) for kind in ("cold", "batch") for name in OURS_ALL]
    wanted += [
        (long, f"warm, {state}, {name} / {THEIRS}", GOAL_OWN_FS) for state in (DISK, MEMORY) for name in OURS_ALL
    ]
    wanted += [(long, f"warm, {DISK}, {name} / (reading + suffix)", GOAL_LIMIT) for name in OURS_ALL]
    return [
        {
            "name": f"{'long' if ratios is long else 'short'}: {name}",
            "value": ratios[name]["median"],
            "goal": goal,
            "met": ratios[name]["median"] <= goal,
        }
        for ratios, name, goal in wanted
    ]


def results(rounds: int, folder: Path | None) -> dict[str, Any]:
    """Return the figures and the goals."""
    found = {}
    for workload in (LONG, SHORT):
        with tempfile.TemporaryDirectory(prefix="kvtiers-ttft-", dir=folder) as place:
            found[workload.name] = measure(workload, rounds, Path(place))
    ratios = {name: ratios_of(figures) for name, figures in found.items()}
    medians = {
        name: {
            kind: {engine: statistics.median(taken) for engine, taken in by_engine.items()}
            for kind, by_engine in figures.items()
        }
        for name, figures in found.items()
    }
    return {
        "rounds": rounds,
        "seconds": medians,
        "ratios": ratios,
        "not run": {"LMCache": lmcache()},
        "goals": goals_of(ratios["long"], ratios["short"]),
    }


def lmcache() -> str:
    """Return why LMCache is not among the engines."""
    code = "import importlib.util; print(importlib.util.find_spec('lmcache') is not None)"
    there = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"
    return "installed, but its connector needs a GPU" if there else "not installed beside vLLM on this machine"


def report(found: dict[str, Any]) -> None:
    """Print the figures."""
    for workload, ratios in found["ratios"].items():
        print(workload)
        for kind, seconds in found["seconds"][workload].items():
            print(f"  {kind:13}" + "".join(f"{name:>17} {taken:6.3f} s" for name, taken in seconds.items()))
        for name, value in ratios.items():
            print(f"  {name:54} {value['median']:.3f}  ({value['low']:.3f} to {value['high']:.3f})")
    for name, why in found["not run"].items():
        print(f"{name}: {why}")
    for goal in found["goals"]:
        print(f"{goal['name']}: {goal['value']:.3f}; goal {goal['goal']:g}: {'met' if goal['met'] else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 20")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured; the system's temporary one")
    options = parser.parse_args()
    if not PYTHON.exists():
        sys.exit(f"error: {PYTHON.relative_to(ROOT)} is missing; run: make test-vllm")
    if Path(sys.prefix) != PYTHON.parents[1]:  # the engines' environment, not this one
        sys.exit(subprocess.run([PYTHON, __file__, *sys.argv[1:]], check=False).returncode)
    found = results(5 if options.quick else 20, options.folder)
    print(json.dumps(found)) if options.json else report(found)


if __name__ == "__main__":
    main()
