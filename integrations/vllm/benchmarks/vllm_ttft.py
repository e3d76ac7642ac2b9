"""Time to first token and throughput in the real vLLM on the CPU: bare, vLLM's own `fs` tier, kvtiers' `fs` both ways.

All engines live at the same time and take turns with the same prompts, so that a busy machine slows all alike; what
is compared is the ratio within a round.

Three workloads (`vllm_engines.py`). *Served* is for the goals without hits, *long* for those of loads; *short*,
whose figures have no goals, shows what a store and a load cost where there is little else to do.

**No hits**: *cold* is a new prompt, *batch* several such at once, each with some tokens of answer: the
ratio of the times is that of the throughputs. The goals are those of *served*, which computes about as much for a byte
of KV as an 8B model does. *Short* computes a 24th of that: its *cold* compares storing with little beside it. But a
value of *served* is small: beside it there are as many bytes to store as beside an 8B model, and fewer values. What a
request costs once, as the question to the tiers, is compared with the half second that its prompt takes.

Computing alone differs by 5 % from one run to the next: a round of *served* takes the better of two, the second in the
opposite order. And engines of one kind differ for as long as they live: so all are restarted every few rounds, and
there is *another* engine *without* a connector, whose ratio to the first shows what is significant. A ratio is the
geometric mean over the lives of the median within each. Its 95 % interval is Student's over the lives: rounds of one
life share what its engines differ by, and a test that took each for an independent one would promise too much. What an
engine has stored lands before the next one's turn.

On two processors of a shared machine the control's interval was 0.96 to 1.07 for *cold* and 0.93 to 1.09 for *batch*:
there, these ratios do not show the goals' 1 %. So *model alike*, without goals, is what the times would be if the model
had run as long in each engine as in the one without a connector. What engines differ by is mostly in there: the
control's were 1.000 to 1.001 and 0.994 to 1.006. They show what the engine's own thread does besides, and not what
others take from the model.

Traced, of the 10 ms that a *batch* of 0.8 s has beside the model with a tier and not without a connector, calls of the
connector are 7: 3.7 ms are vLLM's connector's own, as it takes them with no tier below it, and kvtiers' are as many.
The others are spent between calls, most in the two steps after the prompts, when values are copied and stored.

**Warm**: what the engine and its primary have forgotten and the tier has, as the median ratio over the rounds with its
95 % interval by the sign test. Its limit is the sum of two: reading the bytes of the same values' files, by as many
threads as a tier has, with the page cache as it was for the tier; and computing what is left of the prompt with all
else in the engine's own cache. *Long* has 256 MiB in 64 values, *short* 12 MiB in 46. What is read lies on *disk*,
since the page cache was made to forget it, or in *memory*, where the page cache keeps it as it does on a machine with
memory to spare. vLLM's tier goes around the page cache where it can: it reads the disk either way. kvtiers' goes around
it for what is not in it.

The limit is a goal on disk: from memory, reading costs no more than a copy, and a load has to copy once more, into the
engine's blocks, which on a CPU is the processor's work. From disk no tier is faster than the disk. So what *the disk
alone* needs for the values of vLLM's tier, past the page cache at the best of three queue depths, is measured in each
round; with the suffix, which is computed when all has been loaded, it is the least that an engine could take, and
stands beside that goal. No tier comes down to it: what has been read is copied into the engine's blocks, 36 ms of
*long*, before the suffix begins. Where it is more than the goal less that copy, no tier can reach the goal: as on the
disk that this was written on, which gives many readers no more than one. Disk and suffix took 0.71 of the time of
vLLM's tier there in one run of twenty rounds, 0.99 in another; with the copy, 0.85 at the least. Tiers of 4, 8, 12 and
16 threads took the same time, and so did reading into memory of huge pages and copying from there.

**By tier**: the whole stack over each tier, with real servers, beside no connector: *cold* as above, and *warm*, when
the tier alone has the prompt, as a share of computing it. No goals: a share says as much of the model as of the tier.

LMCache (0.5.6, with numba, sortedcontainers, aiofile and cryptography) installs beside vLLM's CPU build and has no
connector for it: in a trial every request waited three seconds for it and hit nothing. What it says is printed.

Needs the environment and the servers of `make test-vllm`.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_engines import (
    BARE,
    DISK,
    LONG,
    MEMORY,
    OURS,
    PYTHON,
    SERVED,
    SHORT,
    STACK,
    THEIRS,
    TIERS,
    Bench,
    Workload,
    run_in_engines_environment,
)

GOAL_COLD, GOAL_OWN_FS, GOAL_LIMIT = 1.01, 0.8, 1.1
OURS_ALL = (OURS, STACK)
WORKLOADS = {workload.name: workload for workload in (SERVED, LONG, SHORT, TIERS)}
LMCACHE = """
import lmcache.integration.vllm.vllm_v1_adapter
from types import SimpleNamespace
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import CreateGPUConnector, EngineType
CreateGPUConnector(LMCacheEngineConfig.from_defaults(), SimpleNamespace(local_worker_id=0), EngineType.VLLM)
"""
DISK_ALONE = "the disk alone"
LEAST = "disk alone + suffix"
SECOND = 1000
"""What is added to a prompt's number for another one of the same kind."""
STUDENT = {2: 12.706, 7: 2.447}
"""Student's t at 97.5 %, by how many lives the engines have in a quick run and in a whole one."""
Figures = dict[str, list[float]]
Medians = dict[str, dict[str, float]]
Ratios = dict[str, dict[str, float]]


def measure(workload: Workload, rounds: int, folder: Path | None) -> dict[str, Figures]:
    """Return the seconds of each round by kind and engine; of so many rounds, or those that fill the last life."""
    found: dict[str, Figures] = {}
    life = workload.life_within(rounds)
    for before in range(0, rounds, life):
        with tempfile.TemporaryDirectory(prefix="kvtiers-ttft-", dir=folder) as place:
            bench = Bench(workload, Path(place))
            try:
                for number in range(life + 1):
                    turn = bench.turn(before + number)
                    for kind, name, seconds in one_round(bench, workload, number, turn):
                        if number:  # the first round compiles and warms, and is not counted
                            found.setdefault(kind, {}).setdefault(name, []).append(seconds)
            finally:
                bench.close()
    return found


def one_round(bench: Bench, workload: Workload, number: int, turn: list[str]) -> Iterator[tuple[str, str, float]]:
    """Measure a round; yield what was measured, of which engine, and the seconds."""
    if workload is TIERS:
        return each_tier(bench, number, turn)
    return no_hits(bench, number, turn) if workload.batch_tokens else loads(bench, workload, number, turn)


def each_tier(bench: Bench, number: int, turn: list[str]) -> Iterator[tuple[str, str, float]]:
    """Measure one round of a prompt that no engine has seen, and of the same when each engine's tier alone has it."""
    for name in turn:
        yield "cold", name, bench.cold_seconds(name, number)
    for name in turn:
        if name != BARE:
            yield "warm", name, bench.warm_seconds(name, number)


def no_hits(bench: Bench, number: int, turn: list[str]) -> Iterator[tuple[str, str, float]]:
    """Measure one round of prompts that no engine has seen: the better of two runs; the round that warms has one."""
    runs = [{name: bench.unseen_seconds(name, number) for name in turn}]
    if number:
        runs.append({name: bench.unseen_seconds(name, SECOND + number) for name in reversed(turn)})
    for kind in ("cold", "batch"):
        seconds = {name: min(run[name][kind].seconds for run in runs) for name in turn}
        beside = {name: min(run[name][kind].beside_model for run in runs) for name in turn}
        model = seconds[BARE] - beside[BARE]
        for name in turn:
            yield kind, name, seconds[name]
            yield f"{kind}, model alike", name, model + beside[name]


def loads(bench: Bench, workload: Workload, number: int, turn: list[str]) -> Iterator[tuple[str, str, float]]:
    """Measure one round of loads."""
    prompt = number % workload.prompts if workload.prompts else number
    for name in turn if prompt == number else ():
        yield "cold", name, bench.cold_seconds(name, prompt)
    for state in workload.states:
        for name in [name for name in turn if name != BARE]:
            yield f"warm, {state}", name, bench.warm_seconds(name, prompt, state)
        for name in OURS_ALL:
            reading, suffix = bench.limit_seconds(name, prompt, state)
            yield f"reading, {state}", name, reading
            yield f"limit, {state}", name, reading + suffix
        if state == DISK:
            alone = bench.least_seconds(prompt)
            yield f"reading, {state}", DISK_ALONE, alone
            yield f"warm, {state}", LEAST, alone + suffix


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median ratio within a round, and the median's 95 % interval by the sign test.

    Of fewer than six rounds it is the whole range, which covers less: 87.5 % of four rounds, half of two.
    """
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    rounds, outside, skipped = len(ratios), 0.0, 0
    while (outside := outside + 2 * math.comb(rounds, skipped) / 2**rounds) <= 0.05:
        skipped += 1
    skipped = max(0, skipped - 1)
    return {"value": statistics.median(ratios), "low": ratios[skipped], "high": ratios[-1 - skipped]}


def ratio_of_lives(ours: list[float], theirs: list[float], life: int) -> dict[str, float]:
    """Return the geometric mean of each life's median ratio, and its 95 % interval by Student's t over the lives."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    lives = [statistics.median(logs[begin : begin + life]) for begin in range(0, len(logs), life)]
    mean, aside = statistics.mean(lives), STUDENT[len(lives)] * statistics.stdev(lives) / math.sqrt(len(lives))
    return {"value": math.exp(mean), "low": math.exp(mean - aside), "high": math.exp(mean + aside)}


def ratios_of(found: dict[str, Figures], life: int) -> Ratios:
    """Return the ratios that matter, each named after what is compared. ``life``: rounds of each, 0: there is one."""
    ratios = {}
    for kind, seconds in found.items():
        if BARE in seconds:
            for name in [name for name in seconds if name != BARE]:
                both = seconds[name], seconds[BARE]
                found_ratio = ratio_of_lives(*both, life) if life else ratio(*both)
                ratios[f"{kind}, {name} / {BARE}"] = found_ratio
        elif kind == "warm":
            for name, taken in seconds.items():
                ratios[f"warm, {name} / cold, {BARE}"] = ratio(taken, found["cold"][BARE])
        elif THEIRS in seconds:
            limit = found[kind.replace("warm", "limit")]
            if LEAST in seconds:
                ratios[f"{kind}, {LEAST} / {THEIRS}"] = ratio(seconds[LEAST], seconds[THEIRS])
            for name in OURS_ALL:
                ratios[f"{kind}, {name} / {THEIRS}"] = ratio(seconds[name], seconds[THEIRS])
                ratios[f"{kind}, {name} / (reading + suffix)"] = ratio(seconds[name], limit[name])
    return ratios


def goals_of(ratios: dict[str, Ratios]) -> list[dict[str, Any]]:
    """Return the goals of the workloads that there are. ``ratios``: by workload."""
    wanted = [("served", f"{kind}, {name} / {BARE}", GOAL_COLD) for kind in ("cold", "batch") for name in OURS_ALL]
    wanted += [
        ("long", f"warm, {state}, {name} / {THEIRS}", GOAL_OWN_FS) for state in (DISK, MEMORY) for name in OURS_ALL
    ]
    wanted += [("long", f"warm, {DISK}, {name} / (reading + suffix)", GOAL_LIMIT) for name in OURS_ALL]
    goals = []
    for workload, name, goal in wanted:
        if workload not in ratios:
            continue
        found = ratios[workload][name]
        goals.append({"name": f"{workload}: {name}", "goal": goal, "met": found["value"] <= goal} | found)
        if name.startswith(f"warm, {DISK}, ") and name.endswith(THEIRS):
            goals[-1][LEAST] = ratios[workload][f"warm, {DISK}, {LEAST} / {THEIRS}"]["value"]
    return goals


def results(
    workloads: Sequence[Workload], rounds: int, folder: Path | None, report: Callable[[str, Medians, Ratios], None]
) -> dict[str, Any]:
    """Return the figures and the goals. ``report`` gets the figures of each workload as soon as they are there."""
    medians: dict[str, Medians] = {}
    ratios: dict[str, Ratios] = {}
    for workload in workloads:
        name, found = workload.name, measure(workload, rounds, folder)
        medians[name] = {
            kind: {engine: statistics.median(taken) for engine, taken in by_engine.items()}
            for kind, by_engine in found.items()
        }
        ratios[name] = ratios_of(found, workload.life and workload.life_within(rounds))
        report(name, medians[name], ratios[name])
    return {
        "rounds": rounds,
        "seconds": medians,
        "ratios": ratios,
        "not run": {"LMCache": lmcache()},
        "goals": goals_of(ratios),
    }


def lmcache() -> str:
    """Return why LMCache is not among the engines: what it says when it is to copy between this vLLM and itself."""
    tried = subprocess.run([PYTHON, "-c", LMCACHE], capture_output=True, text=True, check=False)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else "it would run here, and has no lane yet"


def report_workload(workload: str, medians: Medians, ratios: Ratios) -> None:
    """Print the figures of a workload."""
    print(workload)
    for kind, seconds in medians.items():
        print(f"  {kind:18}" + "".join(f"  {name:>18} {taken:6.3f} s" for name, taken in seconds.items()))
    for name, value in ratios.items():
        print(f"  {name:54} {value['value']:.3f}  ({value['low']:.3f} to {value['high']:.3f})", flush=True)


def report_goals(found: dict[str, Any]) -> None:
    """Print what comes after the figures."""
    for name, why in found["not run"].items():
        print(f"{name}: {why}")
    for goal in found["goals"]:
        beside = f" ({LEAST} take {goal[LEAST]:.3f} of it)" if LEAST in goal else ""
        verdict = "met" if goal["met"] else f"MISSED{beside}"
        interval = f"{goal['low']:.3f} to {goal['high']:.3f}"
        print(f"{goal['name']}: {goal['value']:.3f} ({interval}); goal {goal['goal']:g}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 rounds instead of 20: too few for the intervals")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured; the system's temporary one")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="this workload; may be given again")
    options = parser.parse_args()
    run_in_engines_environment()
    report = (lambda *_: None) if options.json else report_workload
    workloads = [WORKLOADS[name] for name in options.only or WORKLOADS]
    found = results(workloads, 4 if options.quick else 20, options.folder, report)
    print(json.dumps(found)) if options.json else report_goals(found)


if __name__ == "__main__":
    main()
