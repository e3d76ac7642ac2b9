"""Real vLLM on a GPU, side by side: no connector, vLLM's CPU tier, vLLM's tiering with its fs, kvtiers both ways in.

Every engine is a process of its own (`engine_run.py`), one after the other on one GPU, with the same prompts. Model:
the shape of Llama-3.1-8B (128 KiB of KV a token) with random weights. What a user feels is timed: the start until the
first answers, the first token cold, from the GPU's own cache, from the primary, from a store after a restart, in a
burst, and under a mixed load. The anchor of a goal is another engine of the same run, or bytes over the link,
measured here; those of the burst, the restart and the store are fixed seconds, for one H100.

    python vllm_gpu.py --model FOLDER                 all of it, some 25 minutes
    python vllm_gpu.py --model FOLDER --quick         the scenes that have goals, some 8 minutes
    python vllm_gpu.py --model FOLDER --chat          48 conversations, closed loop, some 10 minutes
    python vllm_gpu.py --model FOLDER --pool          restarts in a pool, and its throughput: some 5 minutes
    python vllm_gpu.py --model FOLDER --pool-starts   starts with a pool of 64 GiB: some 4 minutes
    python vllm_gpu.py --model FOLDER --windows       FOLDER is `gemma-3-shape/`: some 9 minutes
    python vllm_gpu.py --model FOLDER --states        FOLDER is `qwen-3.5-shape/`: some 8 minutes
    python vllm_gpu.py --page RESULTS.json out.html   the page with plots of earlier runs
    python vllm_gpu.py --figure RESULTS.json out.svg  README's figure, of the restarts in the file's first call

FOLDER holds a `config.json`; no weights, no tokenizer (`llama-8b-shape/` beside this). Stores are made in `--stores` (a
memory-backed folder stands for a page cache, a disk for a disk) and are removed. Results are written after each engine,
so that a run that is ended early keeps what it has.
"""

import argparse
import contextlib
import html
import io
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
LABELS = {
    "none": "no connector", "cpu": "vLLM's CPU tier", "tiering_fs": "vLLM's tiering + its fs",
    "tiers_fs": "kvtiers' fs under vLLM's tiering", "stack": "whole stack", "stack_fs": "whole stack + fs",
    "pool": "whole stack in a pool", "simple": "vLLM's SimpleCPUOffload", "lmcache": "LMCache",
}  # fmt: skip


class Run(NamedTuple):
    """One engine: the way in, its scenes in order, its primary in GiB; ``store``: what it shares with other runs.

    ``disk``: its store is on the disk of the temporary folder. ``tier``, ``stack``: more options of kvtiers' fs tier
    and of the whole stack, as JSON. ``gpu_gib``: what the GPU's own cache holds, where it is not most of the GPU;
    decode steps are captured then. ``mtp``: tokens that the model's own MTP layer drafts in a step.
    ``other``: with the build of kvtiers in the folder that ``--against`` names. ``killed``: it ends by SIGKILL.
    """

    mode: str
    scenes: str
    primary: int = 24
    store: str = ""
    disk: bool = False
    tier: str = "{}"
    stack: str = "{}"
    gpu_gib: int = 0
    mtp: int = 0
    other: bool = False
    killed: bool = False


class Limits(NamedTuple):
    """Goals in seconds: a burst from the primary, after a restart from a store in memory, a lone prompt from there."""

    primary: float
    restart: float
    store: float


DENSE, HYBRID = Limits(0.6, 1.6, 0.22), Limits(0.5, 1.0, 0.12)
"""Of Llama's shape, 24 GiB in a burst; of models with windows or states, a third of that."""
WARM_UP = Run("none", "warm_up")
"""The first engine on a fresh machine compiles for half a minute; what it takes is no engine's figure."""
SLOW = '{"rate_limit": {"bytes_per_second": "1GB"}}'
"""Reading 16k tokens takes 2.1 s then, four times as long as computing them."""
ALWAYS = '{"load_wait": "60s", "lookup_wait": "10s"}'
"""Whatever a tier has is loaded: beside it stands what the decision costs or saves."""
WIDE = '{"budgets": {"one_tier": 0.5}}'
"""A tier may load a burst of 24 x 8k of a model with windows or states at once: by default 6 of 24 GiB."""
QUICK = [
    Run("none", "startup,beside_stores,throughput,mixed"),
    Run("stack", "startup", 64),
    Run("stack_fs", "primary,burst,fill", store="ours"),
    Run("stack_fs", "restart", store="ours"),
    Run("stack_fs", "store", store="ours"),
    Run("tiering_fs", "burst,fill", store="theirs"),
    Run("tiering_fs", "restart", store="theirs"),
    Run("stack_fs", "beside_stores,throughput,mixed", store="ours2"),
]
FULL = [
    *QUICK,
    Run("tiering_fs", "store", store="theirs"),
    Run("tiering_fs", "startup,primary,throughput,mixed", store="theirs2"),
    Run("stack_fs", "store", store="ours", tier=SLOW),
    Run("stack_fs", "restart", store="ours", stack=ALWAYS),
    Run("stack_fs", "fill_store", store="ours-disk", disk=True),
    Run("stack_fs", "store", store="ours-disk", disk=True),
    Run("tiering_fs", "fill_store", store="theirs-disk", disk=True),
    Run("tiering_fs", "store", store="theirs-disk", disk=True),
    Run("stack", "long"),
    Run("cpu", "long"),
    Run("simple", "startup,primary,burst"),
    Run("lmcache", "startup,primary,burst"),
    *(Run("stack", "startup", size) for size in (8, 24)),
    *(Run("cpu", "startup", size) for size in (8, 24, 64)),
    Run("cpu", "primary,burst,throughput,mixed"),
    Run("tiers_fs", "startup,primary,burst,fill", store="under"),
    Run("tiers_fs", "restart", store="under"),
    Run("tiers_fs", "store", store="under"),
    Run("tiers_fs", "throughput,mixed", store="under2"),
]
RESTARTS = [
    Run("stack_fs", "burst", store="ours"),
    Run("tiering_fs", "burst", store="theirs"),
    *(3 * [Run("stack_fs", "restart", store="ours"), Run("tiering_fs", "restart", store="theirs")]),
]
"""In turns, over stores that hold the burst alone; ``SETTLE=20``, so that all of it has been written."""
THROUGHPUTS = [
    Run(mode, "throughput", 16, store=f"{mode}-{turn}")
    for turn in range(2)
    for mode in ("none", "tiers_fs", "stack_fs", "tiering_fs")
]
"""In turns, each over an empty store. Each stores 39 GiB; vLLM's primary lies in /dev/shm, too: half of 125 GiB."""

WINDOWS = [
    Run("none", "burst,store", 1),
    Run("stack_fs", "burst,fill", store="ours"),
    *(2 * [Run("stack_fs", "restart", store="ours"), Run("stack_fs", "store", store="ours")]),
    Run("tiering_fs", "burst,fill", store="theirs"),
    Run("tiering_fs", "restart", store="theirs"),
    Run("tiering_fs", "store", store="theirs"),
]
"""``store`` of no connector: the same lone prompts, computed."""
STATES = [
    Run("none", "check,tokens,burst,store", 1),
    Run("stack_fs", "check,tokens,burst,fill", store="ours"),
    Run("stack_fs", "restart,store,tokens", store="ours"),
    Run("tiering_fs", "check,tokens,burst,fill", store="theirs"),
    Run("tiering_fs", "restart,store,tokens", store="theirs"),
    Run("none", "check,tokens,burst,store", 1, mtp=2),
    Run("stack_fs", "check,tokens,burst,fill", store="ours-mtp", mtp=2),
    Run("stack_fs", "restart,store,tokens", store="ours-mtp", mtp=2),
    Run("tiering_fs", "check,tokens,burst,fill", store="theirs-mtp", mtp=2),
    Run("tiering_fs", "restart,store,tokens", store="theirs-mtp", mtp=2),
    Run("stack_fs", "restart,store,tokens", store="ours"),
]
"""The last one: the restart once more; its store is kept until then."""
PAIRS = [
    Run("stack_fs", "fill", store="ours"),
    *(
        2
        * [
            Run("stack_fs", "restart,store", store="ours", other=other, stack=stack)
            for other, stack in ((False, "{}"), (False, WIDE), (True, "{}"), (True, WIDE))
        ]
    ),
]
"""Two builds of kvtiers in turns, over the same store, each also with a larger budget for the tier."""
CHAT = [
    Run("none", "chat", 1, gpu_gib=64),
    Run("stack_fs", "chat", 20, store="ours", gpu_gib=26),
    Run("stack_fs", "resume", 20, store="ours", gpu_gib=26),
    Run("tiering_fs", "chat", 20, store="theirs", gpu_gib=26),
    Run("tiering_fs", "resume", 20, store="theirs", gpu_gib=26),
    Run("none", "chat", 1, gpu_gib=26),
    Run("stack", "chat", 48, gpu_gib=26),
    Run("cpu", "chat", 48, gpu_gib=26),
]
"""The first engine's GPU holds all conversations: the line to reach. A store and its primary take 75 GiB of memory."""
POOL = [
    Run("pool", "fill_pool", 32, killed=True),
    Run("pool", "restart", 32, gpu_gib=48, killed=True),
    Run("pool", "restart", 32, gpu_gib=48, killed=True),
    Run("pool", "restart", 32),
    *(2 * [Run("stack", "throughput", 32, gpu_gib=48), Run("pool", "throughput", 32, gpu_gib=48)]),
]
"""Over one keeper of the primary's size: it holds the burst of 24 GiB whole. Restarts of engines that have captured
their decode steps, as servers have, and of one that has not, whose first steps load kernels beside the copies. The
throughputs in turns, in a full pool."""
POOL_STARTS = [
    Run("none", "startup", 1, gpu_gib=48),
    Run("pool", "startup,fill_pool", 64, gpu_gib=48, killed=True),
    Run("none", "startup", 1, gpu_gib=48),
    *(3 * [Run("pool", "restart", 64, gpu_gib=48, killed=True)]),
    Run("pool", "restart", 64),
]
"""A pool of 64 GiB beside no connector: starts, and what a killed engine's end takes; ``STARTUP=5`` is long enough."""
LISTS = {
    "restarts": RESTARTS, "windows": WINDOWS, "states": STATES, "chat": CHAT, "throughputs": THROUGHPUTS,
    "quick": QUICK, "against": PAIRS, "pool": POOL, "pool_starts": POOL_STARTS,
}  # fmt: skip
"""By the option that asks for it."""


class Keeper:
    """The keeper of a pool, whose engines find it by the variable POOL."""

    def __init__(self, gib: int, folder: Path, engines: int = 1) -> None:
        os.environ["POOL"] = self._path = str(folder / "pool.sock")
        program = "from kvtiers.cli.main import main; main()"
        options = ["--size", f"{gib}GiB", "--socket", self._path, "--engines", str(engines)]
        self.log = folder / "keeper.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen([sys.executable, "-c", program, "pool", "serve", *options], stderr=log)
        self.figures: dict[str, Any] = {}
        while not self.figures.get("populated"):
            time.sleep(0.2)
            if self._process.poll() is not None:
                sys.exit(f"the keeper has ended: {self.log.read_text(encoding='utf-8')}")
            with contextlib.suppress(Exception):  # not there yet
                self.figures = self.ask()
        print(f"keeper: populated in {self.figures['populate_seconds']} s", flush=True)

    def ask(self) -> dict[str, Any]:
        """Return its figures."""
        from kvtiers.pool.loan import pool_figures

        figures: dict[str, Any] = pool_figures(self._path, 30.0)
        return figures

    def after(self, run: Run) -> list[dict[str, Any]]:
        """Return its figures once the engine of this run has ended, and how long that took from now on."""
        begun = time.perf_counter()
        while any(part["engine"] or part["checking"] for part in self.ask()["parts"]):
            time.sleep(0.05)
            if time.perf_counter() > begun + 60:
                break
        figures = self.ask()
        seconds = round(time.perf_counter() - begun, 2)
        place = {"primary_gib": run.primary, "gpu_gib": run.gpu_gib}
        found = {"mode": "pool", "scene": "keeper", **place, "reclaimed_s": seconds, **figures}
        print(" ", json.dumps(found), flush=True)
        return [found]

    def close(self) -> None:
        """End it, and its memory."""
        print(self.log.read_text(encoding="utf-8"), flush=True)
        self._process.terminate()
        self._process.wait()


def link_gb_s() -> float:
    """Return the link's speed to the GPU, in GB/s: 1 GiB from pinned memory, the median of ten."""
    code = (
        "import torch, statistics\n"
        "host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)\n"
        "there = torch.empty_like(host, device='cuda')\n"
        "found = []\n"
        "for _ in range(11):\n"
        "    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "    begin.record(); there.copy_(host, non_blocking=True); end.record(); end.synchronize()\n"
        "    found.append((1 << 30) / begin.elapsed_time(end) / 1e6)\n"
        "print(statistics.median(found[1:]))\n"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def machine() -> dict[str, str]:
    """Return what this ran on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": gpu, "cores": str(os.cpu_count()), "kernel": platform.release(), "python": platform.python_version()}


def place(run: Run, stores: Path) -> Path:
    """Return the folder of this engine's store; on a disk it is in the temporary folder, under the same name."""
    root = Path(tempfile.gettempdir()) / stores.name if run.disk else stores
    return root / (run.store or f"{run.mode}-alone")


def play(run: Run, options: argparse.Namespace, stores: Path, seconds: float) -> list[dict[str, Any]]:
    """Run one engine to its end; return what it printed, and what went wrong as a scene ``error``."""
    model, logs = options.model, options.logs
    folder = place(run, stores)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(FOLDER / "engine_run.py"), model, run.mode, str(folder), run.scenes]
    more = {"GPU_GIB": str(run.gpu_gib), "GRAPHS": "1"} if run.gpu_gib else {}
    more |= {"MTP": str(run.mtp), "KILLED": "1" if run.killed else ""}
    if run.other:
        more["PYTHONPATH"] = os.pathsep.join([options.against, os.environ.get("PYTHONPATH", "")])
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={"TIER": run.tier, "STACK": run.stack, **os.environ, "PRIM": str(run.primary), **more},
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its engine core is in the same session
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    if logs is not None:
        name = f"{len(list(logs.iterdir())):02d}-{run.mode}-{run.scenes.replace(',', '-')}.log"
        (logs / name).write_text("\n".join(line for line in lines if not line.startswith("RESULT ")) + "\n")
    found = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
    for one in found:
        one |= {
            "primary_gib": run.primary,
            "gpu_gib": run.gpu_gib,
            "mtp": run.mtp,
            "other": run.other,
            "wide": run.stack == WIDE,
            "disk": run.disk,
            "slow": run.tier == SLOW,
            "always": run.stack == ALWAYS,
        }
    if process.returncode and not (run.killed and process.returncode == -9):
        said = [line for line in lines if "Error" in line][-3:]
        found.append({
            "mode": run.mode, "scene": "error", "of": run.scenes, "mtp": run.mtp, "status": process.returncode,
            "said": said, "end": lines[-40:],
        })  # fmt: skip
    print(f"{run.mode} {run.scenes}: {time.perf_counter() - begun:.0f} s", *[short(one) for one in found], sep="\n  ")
    sys.stdout.flush()
    return found


def short(found: dict[str, Any]) -> str:
    """Return one scene in one line, without prompts' tokens."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if not key.endswith("tokens")}
        return value

    return json.dumps(clean(found))[:400]


# -- goals


def pick(
    results: list[dict[str, Any]], mode: str, scene: str, primary: int | None = None, *, slow: bool = False
) -> dict[str, Any] | None:
    """Return the first result of this engine and scene, over a store in memory."""
    for one in results:
        if (one["mode"], one["scene"]) != (mode, scene) or primary not in {None, one["primary_gib"]}:
            continue
        if one["slow"] == slow and not (one["disk"] or one["always"] or one.get("mtp")):
            return one
    return None


def restarts(results: list[dict[str, Any]], mode: str) -> list[tuple[float, float]]:
    """Return the seconds of each restart's burst, and the share of its tokens that hit."""
    found = [one for one in results if (one["mode"], one["scene"]) == (mode, "restart") and not one.get("mtp")]
    bursts = [one["burst"] for one in found if not (one["always"] or one["disk"] or one["slow"])]
    return [(burst["s"], burst["cached"] / burst["of"]) for burst in bursts]


def goals(results: list[dict[str, Any]], link: float, limits: Limits) -> list[dict[str, Any]]:
    """Return the goals that this run can decide: ``{name, value, goal, met}``; lower is better but for throughput."""
    found: list[dict[str, Any]] = []

    def goal(name: str, value: float, most: float) -> None:
        found.append({"name": name, "value": round(value, 4), "goal": round(most, 4), "met": value <= most})

    bare, stack = pick(results, "none", "startup"), pick(results, "stack", "startup", 64)
    if bare and stack:
        goal("start until the first three answers, 64 GiB (s)", stack["first_three_s"], 1.1 * bare["first_three_s"])
        goal("worst request after the start, 64 GiB (s)", stack["worst_s"], 1.15 * bare["worst_s"])
    ours = pick(results, "stack_fs", "primary")
    if ours:
        at = ours["16384"]
        goal("16k tokens from the primary (s)", at["primary"]["median_s"],
             at["gpu_hit"]["median_s"] + 1.15 * 2 * 2**30 / link / 1e9)  # fmt: skip
    if (burst := pick(results, "stack_fs", "burst")) is not None:
        goal("burst of 24 x 8k from the primary (s)", statistics.median(burst["primary_s"]), limits.primary)
    if again := restarts(results, "stack_fs"):
        goal(
            "restart + burst from a memory-backed store, median (s)",
            statistics.median(s for s, _ in again),
            limits.restart,
        )
        share = min(share for _, share in again)
        if theirs := restarts(results, "tiering_fs"):
            goal("restart + burst, of vLLM's own way", statistics.median(s for s, _ in again)
                 / statistics.median(s for s, _ in theirs), 1.0)  # fmt: skip
        found.append({"name": "restart + burst: share that hits", "value": round(share, 3), "goal": 0.99,
                      "met": share >= 0.99})  # fmt: skip
    if (store := pick(results, "stack_fs", "store")) is not None:
        goal("16k from a memory-backed store, the first request (s)", store["all"][0], limits.store)
        goal("16k from a memory-backed store, median (s)", store["median_s"], limits.store)
    filled = pick(results, "stack_fs", "fill")
    if filled and (store := pick(results, "stack_fs", "store", slow=True)) is not None:
        goal("16k from a store slower than computing, median (s)", store["median_s"],
             1.05 * statistics.median(filled["s"][:6]))  # fmt: skip
    plain, stored = pick(results, "none", "throughput"), pick(results, "stack_fs", "throughput")
    if plain and stored:
        share = statistics.median(plain["s"]) / statistics.median(stored["s"])
        found.append({"name": "no-hit throughput, storing to fs, of no connector", "value": round(share, 3),
                      "goal": 0.99, "met": share >= 0.99})  # fmt: skip
    plain, stored = pick(results, "none", "beside_stores"), pick(results, "stack_fs", "beside_stores")
    if plain and stored:
        goal("2k tokens beside stores of others, median (s)", stored["cold_median_s"], 1.15 * plain["cold_median_s"])
    plain, mixed = pick(results, "none", "mixed"), pick(results, "stack_fs", "mixed")
    if plain and mixed and plain["itl_p99"] and mixed["itl_p99"]:
        goal("inter-token latency p99 beside loads and stores (s)", mixed["itl_p99"], 1.1 * plain["itl_p99"])
    if (far := pick(results, "stack", "long")) is not None:
        goal("64k tokens from the primary (s)", far["primary"]["median_s"],
             far["gpu_hit"]["median_s"] + 1.15 * 8 * 2**30 / link / 1e9)  # fmt: skip
    return found + pool_goals(results) + same_tokens(results)


def pool_goals(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals of a pool: bursts after restarts, and what it costs beside a primary of the engine's own."""
    found: list[dict[str, Any]] = []
    for kind, captured in (("", True), (", eager mode", False)):
        again = restarts([one for one in results if bool(one.get("gpu_gib")) == captured], "pool")
        if not again:
            continue
        slowest, share = max(s for s, _ in again), min(share for _, share in again)
        found += [
            {"name": f"restart + burst from a pool{kind}, the slowest (s)", "value": slowest, "goal": 0.8,
             "met": slowest <= 0.8},
            {"name": f"restart + burst from a pool{kind}: share that hits", "value": round(share, 3), "goal": 0.99,
             "met": share >= 0.99},
        ]  # fmt: skip
    bare, pooled = (
        [one["s"] for one in results if (one["mode"], one["scene"]) == (mode, "start") and one.get("gpu_gib")]
        for mode in ("none", "pool")
    )
    if bare and pooled:
        more = round(statistics.median(pooled) - statistics.median(bare), 2)
        found.append({"name": "engine's start in a pool, longer than without a connector (s)", "value": more,
                      "goal": 0.1, "met": more <= 0.1})  # fmt: skip
    own, pooled = (
        [s for one in results if (one["mode"], one["scene"]) == (mode, "throughput") for s in one["s"]]
        for mode in ("stack", "pool")
    )
    if own and pooled:
        share = statistics.median(own) / statistics.median(pooled)
        found.append({"name": "no-hit throughput in a pool, of a private primary", "value": round(share, 3),
                      "goal": 0.99, "met": share >= 0.99})  # fmt: skip
    return found


def same_tokens(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the goal that greedy tokens are the same whatever brought the KV, over all engines of the run."""
    answers: dict[str, set[str]] = {}
    for one in results:
        for tokens in ("2048", "8192", "16384"):
            for way in ("cold", "gpu_hit", "primary"):
                if one["scene"] == "primary" and tokens in one:
                    answers.setdefault(tokens, set()).add(json.dumps(one[tokens][way]["tokens"]))
        if one["scene"] == "fill_pool":
            answers.setdefault("burst", set()).add(json.dumps(one["tokens"]))
        mtp = " with MTP" if one.get("mtp") else ""
        if one["scene"] == "burst":
            answers.setdefault("burst" + mtp, set()).add(json.dumps(one["cold"]["tokens"]))
        if one["scene"] == "restart":
            found = {json.dumps(one[key]["tokens"]) for key in ("burst", "again")}
            answers.setdefault("burst" + mtp, set()).update(found)
        if one["scene"] == "tokens":
            found = {json.dumps(one[key]) for key in ("tokens", "again_tokens")}
            answers.setdefault("32 answers" + mtp, set()).update(found)
        if one["scene"] in {"fill", "store"}:
            answers.setdefault("lone 16k" + mtp, set()).add(json.dumps(one["tokens"][:6]))
    if not answers:
        return []
    different = sum(len(kinds) - 1 for kinds in answers.values())
    return [{"name": "sets of greedy tokens that differ", "value": different, "goal": 0, "met": different == 0}]


# -- the page


def bars(rows: list[tuple[str, float]], title: str) -> str:
    """Return a bar chart as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 0.42 * len(rows) + 0.9))
    axes.barh([name for name, _ in rows][::-1], [value for _, value in rows][::-1], color="#3b7a9e")
    for at, (_, value) in enumerate(rows[::-1]):
        axes.text(value, at, f" {value:.3g}", va="center", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg")
    plt.close(figure)
    return out.getvalue().partition("<svg")[1] + out.getvalue().partition("<svg")[2]


def named(one: dict[str, Any]) -> str:
    """Return what a result is called in a chart."""
    special = {"disk": ", disk", "slow": ", 1 GB/s", "always": ", always load"}
    said = "".join(text for key, text in special.items() if one.get(key))
    said += ", MTP" if one.get("mtp") else ""
    said += ", other build" if one.get("other") else ""
    said += ", wide budget" if one.get("wide") else ""
    if one.get("gpu_gib"):
        said += f", GPU {one['gpu_gib']} GiB"
    return f"{LABELS[one['mode']]}, {one.get('primary_gib', '?')} GiB{said}"


def charts(results: list[dict[str, Any]]) -> list[str]:
    """Return a chart for each scene that more than one engine has played."""

    def of(scene: str, value: Any) -> list[tuple[str, float]]:
        rows = []
        for one in results:
            with contextlib.suppress(KeyError, TypeError):  # kept results may be abridged
                if one["scene"] == scene and (number := value(one)) is not None:
                    rows.append((named(one), float(number)))
        return rows

    wanted = [
        ("start until the first three answers, seconds", of("startup", lambda one: one["first_three_s"])),
        ("worst request after the start, seconds", of("startup", lambda one: one["worst_s"])),
        (
            "16k tokens from the primary, seconds (median)",
            of("primary", lambda one: one["16384"]["primary"]["median_s"]),
        ),
        ("burst of 24 x 8k from the primary, seconds", of("burst", lambda one: statistics.median(one["primary_s"]))),
        ("restart + burst of 24 x 8k, seconds", of("restart", lambda one: one["burst"]["s"])),
        ("16k from the store after a restart, seconds (median)", of("store", lambda one: one["median_s"])),
        ("64k tokens from the primary, seconds (median)", of("long", lambda one: one["primary"]["median_s"])),
        ("48 x 2k new prompts + 64 tokens, seconds", of("throughput", lambda one: statistics.median(one["s"]))),
        ("48 conversations of six turns, requests a second", of("chat", lambda one: one["requests_s"])),
        ("48 conversations: time to first token p50, seconds", of("chat", lambda one: one["ttft_p50"])),
        ("48 conversations resumed after a restart, seconds", of("resume", lambda one: one["s"])),
        ("mixed load: time to first token p50, seconds", of("mixed", lambda one: one["ttft_p50"])),
        ("mixed load: inter-token latency p99, seconds", of("mixed", lambda one: one["itl_p99"])),
    ]
    return [bars(rows, title) for title, rows in wanted if len(rows) > 1]


def restarts_figure(results: list[dict[str, Any]]) -> str:
    """Return README's figure as SVG: first tokens of a burst over time, after restarts of two engines."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvtiers"  # the same file each time
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, facecolor="white")
    colours = {"stack_fs": "#1f77b4", "tiering_fs": "#d95f02"}
    said: set[str] = set()
    start: dict[str, float] = {}
    for one in results:
        mode = one["mode"]
        if one["scene"] == "start":
            start[mode] = one["s"]
        elif one["scene"] == "restart":
            times = sorted(one["burst"]["first_s"])
            label = LABELS[mode] if mode not in said else None
            said.add(mode)
            for panel, after in zip(axes, (0.0, start[mode]), strict=True):
                panel.plot([after + at for at in times], range(1, len(times) + 1), color=colours[mode], label=label)
        elif one["scene"] == "burst" and mode == "stack_fs":
            times = sorted(one["cold"]["first_s"])
            axes[0].plot(times, range(1, len(times) + 1), color="0.6", label="computed")
    for panel, title in zip(axes, ("after the first request", "after the engine is started"), strict=True):
        panel.set_xlim(0)
        panel.set_xlabel(f"seconds {title}")
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(0, 25, 8))
    axes[0].set_ylabel("prompts with a first token")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    return out.getvalue().partition("<svg")[1] + out.getvalue().partition("<svg")[2]


def page(runs: list[dict[str, Any]]) -> str:
    """Return the page: of each run the machine, the goals, the charts."""
    return (
        "<!doctype html><meta charset=utf-8><title>kvtiers in vLLM on a GPU</title><style>body{font:15px/1.5 system-ui;"
        "max-width:60rem;margin:2rem auto;padding:0 1rem}td,th{padding:.2rem .8rem;text-align:left;border-bottom:1px "
        "solid #ccc}svg{max-width:100%;height:auto}</style><h1>kvtiers in vLLM on a GPU</h1><p>Random weights; "
        f"Llama-3.1-8B's shape where no other is named. Compare within a run.</p>{''.join(map(section, runs))}"
    )


def runs_in(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file of results: one, or several calls."""
    found = json.loads(path.read_text(encoding="utf-8"))
    calls: list[dict[str, Any]] = found.get("calls", [found])
    return calls


def section(found: dict[str, Any]) -> str:
    """Return a run's part of the page."""
    rows = "".join(
        f"<tr><td>{html.escape(goal['name'])}<td>{goal['value']}<td>{goal['goal']}"
        f"<td>{'met' if goal['met'] else 'missed'}"
        for goal in found.get("goals", ())
    )
    about = html.escape(", ".join([*filter(None, [found.get("what")]), *map(" ".join, found["machine"].items())]))
    link = f"; link {found['link_gb_s']:.1f} GB/s" if "link_gb_s" in found else ""
    return (
        f"<h2>{about}{link}</h2><table><tr><th>goal<th>value<th>at most (throughput, hits: at least)"
        f"<th>{rows}</table>{''.join(charts(found['results']))}"
    )


def draw(options: argparse.Namespace) -> None:
    """Write what the options ask for of earlier runs."""
    if options.figure:
        results, out = map(Path, options.figure)
        out.write_text(restarts_figure(runs_in(results)[0]["results"]), encoding="utf-8")
    else:
        *files, out = map(Path, options.page)
        out.write_text(page([run for path in files for run in runs_in(path)]), encoding="utf-8")


def play_all(runs: list[Run], options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Run one engine after the other, within the budget, and write what is found after each."""
    stores = Path(tempfile.mkdtemp(prefix="kvtiers-bench-", dir=options.stores))
    in_pool = [run.primary for run in runs if run.mode == "pool"]
    keeper = Keeper(in_pool[0], stores) if in_pool else None
    end = time.monotonic() + 60 * options.budget
    limits = HYBRID if options.windows or options.states else DENSE
    try:
        for number, run in enumerate(runs):
            left = end - time.monotonic()
            if left < 0:
                break
            found["results"] += play(run, options, stores, min(60 * options.minutes, left + 30))
            if keeper is not None and run.mode == "pool":
                found["results"] += keeper.after(run)
            if run.store not in {later.store for later in runs[number + 1 :]}:  # two of 60 GiB do not fit into memory
                shutil.rmtree(place(run, stores), ignore_errors=True)
            found["goals"] = goals(found["results"], found["link_gb_s"], limits)
            Path(options.json).write_text(json.dumps(found), encoding="utf-8")
    finally:
        if keeper is not None:
            keeper.close()
        for root in (stores, Path(tempfile.gettempdir()) / stores.name):
            shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    """Run the engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with the model's config.json")
    parser.add_argument("--quick", action="store_true", help="the scenes that have goals")
    parser.add_argument("--restarts", action="store_true", help="restarts of two engines in turns")
    parser.add_argument(
        "--windows", action="store_true", help="a model with sliding windows: burst, restart, lone prompts"
    )
    parser.add_argument("--states", action="store_true", help="a model that keeps states, the same scenes, and MTP")
    parser.add_argument("--against", metavar="FOLDER", help="another build of kvtiers: restarts of both in turns")
    parser.add_argument("--chat", action="store_true", help="conversations in a closed loop, and after a restart")
    parser.add_argument("--throughputs", action="store_true", help="no-hit throughput of four engines in turns")
    parser.add_argument("--pool", action="store_true", help="restarts and throughput in a pool of CPU memory")
    parser.add_argument("--pool-starts", action="store_true", help="starts with a pool of 64 GiB, beside no connector")
    parser.add_argument("--only", default="", help="runs by number, as 0,2,5: a part of the quick or the full list")
    parser.add_argument("--warm", action="store_true", help="this machine has run an engine before: no warm-up")
    parser.add_argument("--stores", default="/dev/shm", help="where stores are made (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", default="vllm_gpu.json", help="results (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=5.0, help="most minutes of one engine (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=math.inf, help="minutes after which no further engine is begun")
    parser.add_argument("--logs", type=Path, help="folder for the log of each engine")
    parser.add_argument(
        "--page", nargs="+", metavar="FILE", help="make a page of earlier runs' results; the last: its name"
    )
    parser.add_argument("--figure", nargs=2, metavar="FILE", help="draw README's figure of an earlier run's restarts")
    options = parser.parse_args()
    if options.figure or options.page:
        draw(options)
        return
    if not options.model:
        parser.error("--model is needed")
    runs = next((listed for name, listed in LISTS.items() if getattr(options, name)), FULL)
    if options.only:
        runs = [runs[int(number)] for number in options.only.split(",")]
    if not options.warm:
        runs = [WARM_UP, *runs]
    found: dict[str, Any] = {"machine": machine(), "link_gb_s": link_gb_s(), "results": [], "goals": []}
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    play_all(runs, options, found)
    for goal in found["goals"]:
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {goal['value']} (goal {goal['goal']})")
    failed = [one for one in found["results"] if one["scene"] == "error"]
    for one in failed:
        print(f"FAILED {one['mode']} {one['of']}: status {one['status']}; its goals are missing above")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
