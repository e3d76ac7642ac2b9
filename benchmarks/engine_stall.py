"""Whether tiers are in the engine's way, and the engine in theirs: a thread of pure Python beside two busy tiers.

An engine's thread runs Python flat out, ends a step every 10 ms, and so drives two `memory` tiers, each of which stores
1 GiB and then loads it, again and again. In the control the same loop runs in an unrelated process and the engine's
thread only drives the tiers: with few processors the loop takes the same processor time away, whoever runs it. The two
take turns, a fifth of a second each, so that what else happens on the machine happens to both. A ticker in the loop
wants to come every millisecond; what it is late is stall. The same with `io: thread` shows why tiers do not live in the
engine's process.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any, Self

import numpy as np

import kvtiers
from kvtiers.base import RequestContext
from kvtiers.rows.layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.tiering.manager import TieringManager

VALUE_BYTES = 2 << 20
REGION_ROWS = 256
BATCH = 16  # chunks a request
MOST_IN_FLIGHT = 48  # chunks a tier, below what it may pin
STEP_SECONDS = 0.01
TICK_SECONDS = 0.001
TURN_SECONDS = 0.2
TIERS = ("one", "two")
LAYOUT = CacheLayout(
    ModelIdentity("benchmark", weights="w"), (KVGroup("g", 16),), (KVTensor("t", 0, VALUE_BYTES - 4096),)
)
GOAL_THROUGHPUT, GOAL_SPEED, GOAL_STALL_MS, GOAL_HOST_MB, GOAL_HOST_CPU = 0.90, 0.95, 1.0, 60.0, 0.5
PATIENCE = 600.0


class Loop:
    """Pure Python, flat out, and what came of it: units of work done, seconds, and how late each tick was."""

    def __init__(self) -> None:
        self.units = 0
        self.seconds = 0.0
        self.late: list[float] = []
        self._number = 1

    def run(self, is_over: Callable[[float], bool], step: Callable[[], None] | None = None) -> None:
        """Run until it is over, with ``step`` every 10 ms."""
        begin = now = time.perf_counter()
        next_tick, next_step = begin + TICK_SECONDS, begin
        number = self._number
        while not is_over(now):
            for _ in range(200):
                number = (number * 31 + 7) & 0xFFFFFF
            self.units += 1
            now = time.perf_counter()
            if now >= next_tick:
                self.late.append(now - next_tick)
                next_tick = now + TICK_SECONDS
            if step is not None and now >= next_step:
                step()
                next_step = now + STEP_SECONDS
        self.seconds += now - begin
        self._number = number

    def figures(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        late = [round(seconds * 1e6) for seconds in self.late]
        return {"units_per_second": self.units / self.seconds, "late_us": late}


class Traffic:
    """What an engine has its tiers do, endlessly: chunks go down to both and come up again, each tier's in an order."""

    def __init__(self, manager: TieringManager, chunks: int) -> None:
        self.manager = manager
        self.chunks = chunks
        self.rounds = 0
        self.step_seconds: list[float] = []
        self._names = (f"request {number}" for number in count())
        self._steps = self._all_steps()

    def step(self) -> None:
        """Do what an engine does in a step."""
        begin = time.perf_counter()
        next(self._steps)
        self.manager.on_schedule_end()
        self.step_seconds.append(time.perf_counter() - begin)

    @property
    def nbytes(self) -> int:
        """Bytes moved so far by both tiers, both ways."""
        return sum(tier["stored_bytes"] + tier["loaded_bytes"] for tier in self.manager.stats()["tiers"].values())

    def _all_steps(self) -> Iterator[None]:
        while True:
            keys = [os.urandom(32) + bytes(4) for _ in range(self.chunks)]
            runs = [keys[at : at + BATCH] for at in range(0, len(keys), BATCH)]
            yield from self._store(runs)
            self.manager.reset_cache()
            yield from self._load(runs)
            self.manager.reset_cache()
            self.rounds += 1

    def _store(self, runs: Sequence[Sequence[bytes]]) -> Iterator[None]:
        manager, waiting = self.manager, list(runs)
        while waiting or manager.has_pending_work():
            pinned = max(tier["pinned_rows"] for tier in manager.stats()["tiers"].values())
            while waiting and pinned + BATCH <= MOST_IN_FLIGHT:
                context = RequestContext(next(self._names))
                plan = manager.prepare_store(waiting[0], context)
                if plan is None:
                    break
                manager.complete_store(plan)
                manager.on_request_finished(context)
                waiting.pop(0)
                pinned += BATCH
            yield
        tiers = manager.stats()["tiers"]
        if any(tiers[name]["stored_chunks"] != (self.rounds + 1) * self.chunks for name in TIERS):
            raise RuntimeError(f"not everything was stored: {tiers}")

    def _load(self, runs: Sequence[Sequence[bytes]]) -> Iterator[None]:
        waiting = {"one": list(reversed(runs)), "two": list(runs)}
        loading: list[tuple[RequestContext, Sequence[bytes]]] = []
        while loading or any(waiting.values()):
            for name, left in waiting.items():
                asked = sum(context.params["kv_load_tiers"] == [name] for context, _ in loading)
                loading += [
                    (RequestContext(next(self._names), {"kv_load_tiers": [name]}), left.pop())
                    for _ in range(min(len(left), 2 - asked))
                ]
            loading = [(context, run) for context, run in loading if not self._has_landed(run, context)]
            yield

    def _has_landed(self, run: Sequence[bytes], context: RequestContext) -> bool:
        hits = self.manager.lookup_prefix(run, context)
        if hits.pending or hits.unresolved:
            return False
        if hits.ready:
            plan = self.manager.prepare_load(run[: hits.ready], context)
            if plan is not None:
                self.manager.complete_load(plan)
        self.manager.on_request_finished(context)
        return True


def open_engine(io: str, bytes_per_tier: int) -> tuple[TieringManager, Any]:
    """Return a manager whose rank has joined and whose tiers are open, and its worker."""
    config = {
        "version": 1,
        "primary": {"capacity": f"{REGION_ROWS * VALUE_BYTES >> 20}MiB"},
        "secondary": [
            {"type": "memory", "name": name, "io": io, "capacity": f"{bytes_per_tier + (64 << 20) >> 20}MiB"}
            for name in TIERS
        ],
        "lookup_wait": "600s",
        "load_wait": "600s",
    }
    manager = kvtiers.open_manager(config, LAYOUT)
    tensors = [np.zeros((1, VALUE_BYTES - 4096), np.uint8)]
    worker = kvtiers.open_worker(config, LAYOUT, tensors, engine_id=manager.engine_id)
    manager.wait_ready(60)
    until = time.monotonic() + 60
    while not all(tier["own"].get("open") for tier in manager.stats()["tiers"].values()):
        manager.on_schedule_end()
        time.sleep(0.005)
        if time.monotonic() > until:
            raise RuntimeError("the tiers do not open")
    time.sleep(0.5)  # the region is touched in the background meanwhile
    return manager, worker


def take_turns(io: str, bytes_per_tier: int, seconds: float) -> dict[str, Any]:
    """Keep the tiers busy, with the loop in the engine's own thread and in an unrelated process by turns."""
    manager, worker = open_engine(io, bytes_per_tier)
    traffic = Traffic(manager, bytes_per_tier // VALUE_BYTES)
    loop, moved, taken = Loop(), {"own": 0, "other": 0}, {"own": 0.0, "other": 0.0}
    with OtherLoop() as other:
        until = time.monotonic() + seconds
        turns = cycle(("own", "other"))
        while time.monotonic() < until or not traffic.rounds:
            turn, before, begin = next(turns), traffic.nbytes, time.perf_counter()
            if turn == "own":
                loop.run((begin + TURN_SECONDS).__le__, traffic.step)
            else:
                other.run_for(TURN_SECONDS, traffic.step)
            moved[turn] += traffic.nbytes - before
            taken[turn] += time.perf_counter() - begin
        control = other.end()
    figures = {"own": loop.figures(), "other": control}
    for turn, those in figures.items():
        those["bytes_per_second"] = moved[turn] / taken[turn]
    figures["own"]["step_us"] = [round(step * 1e6) for step in traffic.step_seconds]
    worker.shutdown()
    manager.shutdown(5.0)
    return figures


class OtherLoop:
    """The loop in an unrelated process, which runs, waits and ends as a byte of shared memory says."""

    WAITS, RUNS, ENDS = 1, 2, 3

    def __enter__(self) -> Self:
        memory = os.memfd_create("turn")
        os.ftruncate(memory, mmap.PAGESIZE)
        self._turn = mmap.mmap(memory, mmap.PAGESIZE)
        command = [sys.executable, __file__, "--loop", str(memory)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[memory])
        os.close(memory)
        while self._turn[0] != self.WAITS:
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self._turn[0] = self.ENDS
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run_for(self, seconds: float, step: Callable[[], None]) -> None:
        """Let it run for so long, while ``step`` is called every 10 ms here."""
        until = time.perf_counter() + seconds
        self._turn[0] = self.RUNS
        while time.perf_counter() < until:
            step()
            time.sleep(STEP_SECONDS)
        self._turn[0] = self.WAITS

    def end(self) -> dict[str, Any]:
        """End it; return its figures."""
        self._turn[0] = self.ENDS
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.read())  # type: ignore[no-any-return]


def be_other_loop(memory: int) -> dict[str, Any]:
    """Be the unrelated process."""
    turn, loop = mmap.mmap(memory, mmap.PAGESIZE), Loop()
    turn[0] = OtherLoop.WAITS
    while turn[0] != OtherLoop.ENDS:
        if turn[0] == OtherLoop.RUNS:
            loop.run(lambda _: turn[0] != OtherLoop.RUNS)
        time.sleep(0.0002)
    return loop.figures()


def idle_host(seconds: float) -> dict[str, float]:
    """Return the private memory (MB) of an idle host, and its processor time in percent of one processor."""
    manager, worker = open_engine("process", 64 << 20)
    hosts = [pid for pid in children() if b"host_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        manager.on_schedule_end()
        time.sleep(STEP_SECONDS)
    before, begin = [processor_seconds(pid) for pid in hosts], time.monotonic()
    while time.monotonic() < begin + seconds:
        manager.on_schedule_end()
        time.sleep(STEP_SECONDS)
    taken = time.monotonic() - begin
    used = [processor_seconds(pid) - earlier for pid, earlier in zip(hosts, before, strict=True)]
    figures = {"private_mb": max(map(private_mb, hosts)), "cpu_percent": max(used) / taken * 100}
    worker.shutdown()
    manager.shutdown(5.0)
    return figures


def children() -> list[int]:
    """Return the process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, to the nanosecond."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def private_mb(pid: int) -> float:
    """Return the memory (10^6 bytes) that a process has for itself, without its part of the shared region."""
    kibibytes, in_region = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            in_region = "memfd:kvtiers" in line
        elif words[0] in {"Private_Clean:", "Private_Dirty:"} and not in_region:
            kibibytes += int(words[1])
    return kibibytes * 1024 / 1e6


def in_process(*arguments: str) -> dict[str, Any]:
    """Run one part in a process of its own; return its figures."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True, text=True, timeout=PATIENCE
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(figures: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one kind in short."""
    late = figures["late_us"]
    return {
        "gb_per_second": figures["bytes_per_second"] / 1e9,
        "units_per_second": figures["units_per_second"],
        "late_p50_ms": quantile(late, 0.5) / 1e3,
        "late_p99_ms": quantile(late, 0.99) / 1e3,
        "late_p999_ms": quantile(late, 0.999) / 1e3,
        "ticks": len(late),
    }


def measure(*, quick: bool) -> dict[str, Any]:
    """Return all figures."""
    results: dict[str, Any] = {}
    for io, nbytes, seconds in (("process", 1 << 30, 40.0), ("thread", 256 << 20, 15.0)):
        arguments = [str(nbytes >> 2), str(seconds / 5)] if quick else [str(nbytes), str(seconds)]
        figures = in_process("--turns", io, *arguments)
        results[f"{io}, loop outside"] = summary(figures["other"])
        results[f"{io}, loop inside"] = summary(figures["own"])
        results[f"{io}, step"] = {
            "p50_ms": quantile(figures["own"]["step_us"], 0.5) / 1e3,
            "p999_ms": quantile(figures["own"]["step_us"], 0.999) / 1e3,
        }
    results["idle_host"] = in_process("--idle", "3" if quick else "15")
    return results


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each figure that has a goal."""
    control, engine = results["process, loop outside"], results["process, loop inside"]
    throughput = engine["gb_per_second"] / control["gb_per_second"]
    speed = engine["units_per_second"] / control["units_per_second"]
    stall = engine["late_p999_ms"] - control["late_p999_ms"]
    host = results["idle_host"]
    at_least = [
        ("tiers' throughput, as a share of the control's (at least)", throughput, GOAL_THROUGHPUT),
        ("engine thread's speed, as a share of the control's (at least)", speed, GOAL_SPEED),
    ]
    at_most = [
        ("ms that a 1 ms ticker is later at p99.9 than in the control", stall, GOAL_STALL_MS),
        ("MB of private memory of an idle host", host["private_mb"], GOAL_HOST_MB),
        ("% of a processor that an idle host takes", host["cpu_percent"], GOAL_HOST_CPU),
    ]
    found = [{"name": name, "value": value, "goal": goal, "met": value >= goal} for name, value, goal in at_least]
    return found + [{"name": name, "value": value, "goal": goal, "met": value <= goal} for name, value, goal in at_most]


def report(results: dict[str, Any]) -> None:
    """Print the figures."""
    print(f"{'':24}{'tiers GB/s':>12}{'loop 1/s':>10}{'late ms p50':>13}{'p99':>8}{'p99.9':>8}{'ticks':>8}")
    for kind, figures in results.items():
        if "ticks" in figures:
            print(
                f"{kind:24}{figures['gb_per_second']:12.2f}{figures['units_per_second']:10.0f}"
                f"{figures['late_p50_ms']:13.3f}{figures['late_p99_ms']:8.2f}{figures['late_p999_ms']:8.2f}"
                f"{figures['ticks']:8.0f}"
            )
    for io in ("process", "thread"):
        step = results[f"{io}, step"]
        print(f"{io}: a step of the manager takes {step['p50_ms']:.3f} ms, p99.9 {step['p999_ms']:.2f} ms")
    print()
    for goal in results["goals"]:
        print(f"{goal['name']}: {goal['value']:.3f}; goal {goal['goal']:g}: {'met' if goal['met'] else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the time, and a quarter of the bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for part, values in (("--loop", 1), ("--turns", 3), ("--idle", 1)):
        parser.add_argument(part, nargs=values, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        print(json.dumps(be_other_loop(int(options.loop[0]))))
    elif options.turns:
        io, nbytes, seconds = options.turns
        print(json.dumps(take_turns(io, int(nbytes), float(seconds))))
    elif options.idle:
        print(json.dumps(idle_host(float(options.idle[0]))))
    else:
        results = measure(quick=options.quick)
        results["goals"] = goals(results)
        if options.json:
            print(json.dumps(results))
        else:
            report(results)


if __name__ == "__main__":
    main()
