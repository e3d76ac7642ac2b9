"""Whether tiers are in the engine's way, and the engine in theirs: a thread of pure Python beside two busy tiers.

An engine's thread runs Python flat out, ends a step every 10 ms, and so drives two `memory` tiers, each of which stores
1 GiB and then loads it, again and again. In the control the same loop runs in an unrelated process and the engine's
thread only drives the tiers: with few processors the loop takes the same processor time away, whoever runs it. The two
take turns, a fifth of a second each, so that what else happens on the machine happens to both. A ticker in the loop
wants to come every millisecond; what it is late is stall. The same with `io: thread` shows why tiers do not live in the
engine's process.

Flat out, the tiers take what processor time they find, and do not move the same bytes beside both loops: that compares
the tiers. To compare the loops, the tiers then move the same bytes a second beside both, four fifths of the lower of
the two rates. The loop in the engine pays for the manager's steps, the other one does not: its speed is bounded by the
share of time in steps, which is given too. A step costs several times what `scheduler_cost.py` says, since ten
milliseconds of loop and copies have emptied the caches: an idle one 75 us instead of 17 (two processors, others busy).
On a machine that others use, the speeds' ratio alone varies by a tenth and more, with no tier at work at all.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from peers.busy_loop import STEP_SECONDS, Loop, OtherLoop
from peers.processes import children, private_mb, processor_seconds

import kvtiers
from kvtiers.base import RequestContext
from kvtiers.rows.layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.tiering.manager import TieringManager

VALUE_BYTES = 2 << 20
REGION_ROWS = 256
BATCH = 16  # chunks a request
MOST_IN_FLIGHT = 48  # chunks a tier, below what it may pin
TURN_SECONDS = 0.2
PACE = 0.8  # of the lower of the two rates that were reached flat out
TIERS = ("one", "two")
LAYOUT = CacheLayout(
    ModelIdentity("benchmark", weights="w"), (KVGroup("g", 16),), (KVTensor("t", 0, VALUE_BYTES - 4096),)
)
GOAL_THROUGHPUT, GOAL_SPEED, GOAL_STALL_MS, GOAL_HOST_MB, GOAL_HOST_CPU = 0.90, 0.95, 1.0, 60.0, 0.5
PATIENCE = 600.0


class Traffic:
    """What an engine has its tiers do, endlessly: chunks go down to both and come up again, each tier's in an order.

    ``pace``: bytes a second, 0 for as many as they can.
    """

    def __init__(self, manager: TieringManager, chunks: int) -> None:
        self.manager = manager
        self.chunks = chunks
        self.rounds = 0
        self.pace = 0.0
        self.step_seconds: list[float] = []
        self._owed = self._stepped = 0.0
        self._names = (f"request {number}" for number in count())
        self._steps = self._all_steps()

    def step(self) -> None:
        """Do what an engine does in a step."""
        begin = time.perf_counter()
        self._owed = min(self._owed + self.pace * (begin - self._stepped), self.pace * TURN_SECONDS)
        self._stepped = begin
        next(self._steps)
        self.manager.on_schedule_end()
        self.step_seconds.append(time.perf_counter() - begin)

    @property
    def nbytes(self) -> int:
        """Bytes moved so far by both tiers, both ways."""
        return sum(tier["stored_bytes"] + tier["loaded_bytes"] for tier in self.manager.stats()["tiers"].values())

    def _is_due(self, nbytes: int) -> bool:
        """Say whether so many bytes more may be moved now, and count them."""
        if self._owed < 0:
            return False
        if self.pace:
            self._owed -= nbytes
        return True

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
            pinned = max(tier["pinned_rows"] for tier in manager.stats()["tiers"].values()) if waiting else 0
            while waiting and pinned + BATCH <= MOST_IN_FLIGHT and self._is_due(len(TIERS) * BATCH * VALUE_BYTES):
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
                while left and asked < 2 and self._is_due(BATCH * VALUE_BYTES):
                    loading.append((RequestContext(next(self._names), {"kv_load_tiers": [name]}), left.pop()))
                    asked += 1
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
    """Keep the tiers busy, flat out and then at one pace beside both loops; return the figures of each."""
    manager, worker = open_engine(io, bytes_per_tier)
    traffic = Traffic(manager, bytes_per_tier // VALUE_BYTES)
    flat_out = beside_both(traffic, seconds / 2)
    traffic.pace = PACE * min(figures["bytes_per_second"] for figures in flat_out.values())
    figures = {"flat out": flat_out, "paced": beside_both(traffic, seconds / 2)}
    worker.shutdown()
    manager.shutdown(5.0)
    return figures


def beside_both(traffic: Traffic, seconds: float) -> dict[str, Any]:
    """Run the loop in the engine's own thread (inside) and in an unrelated process (outside) by turns."""
    loop, moved, taken = Loop(), {"inside": 0, "outside": 0}, {"inside": 0.0, "outside": 0.0}
    inside_steps: list[float] = []
    with OtherLoop() as other:
        other.run_for(TURN_SECONDS, traffic.step)  # it is there, and warm
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for turn in moved:
                before, begin = traffic.nbytes, time.perf_counter()
                traffic.step_seconds.clear()
                if turn == "inside":
                    loop.run((begin + TURN_SECONDS).__le__, traffic.step)
                    inside_steps += traffic.step_seconds
                else:
                    other.run_for(TURN_SECONDS, traffic.step)
                moved[turn] += traffic.nbytes - before
                taken[turn] += time.perf_counter() - begin
        figures = {"inside": loop.figures(), "outside": other.end()}
    figures["outside"]["speeds"].pop(0)
    for turn, those in figures.items():
        those["bytes_per_second"] = moved[turn] / taken[turn]
    figures["inside"]["step_us"] = [round(step * 1e6) for step in inside_steps]
    return figures


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
    late, steps = figures["late_us"], figures.get("step_us")
    short = {
        "gb_per_second": figures["bytes_per_second"] / 1e9,
        "units_per_second": median(figures["speeds"]),
        "late_p50_ms": quantile(late, 0.5) / 1e3,
        "late_p99_ms": quantile(late, 0.99) / 1e3,
        "late_p999_ms": quantile(late, 0.999) / 1e3,
        "ticks": len(late),
    }
    if steps:
        short |= {"step_p50_ms": quantile(steps, 0.5) / 1e3, "step_p999_ms": quantile(steps, 0.999) / 1e3}
    return short


def comparison(inside: dict[str, Any], outside: dict[str, Any]) -> dict[str, float]:
    """Return what the loop inside costs, and is cost. Speeds are compared turn by turn: the machine's own change."""
    return {
        "throughput_share": inside["bytes_per_second"] / outside["bytes_per_second"],
        "speed_share": median(a / b for a, b in zip(inside["speeds"], outside["speeds"], strict=False)),
        "added_p999_ms": (quantile(inside["late_us"], 0.999) - quantile(outside["late_us"], 0.999)) / 1e3,
        "share_of_time_in_steps": sum(inside["step_us"]) / 1e6 / (len(inside["speeds"]) * TURN_SECONDS),
    }


def measure(*, quick: bool) -> dict[str, Any]:
    """Return all figures."""
    results: dict[str, Any] = {}
    for io, nbytes, seconds in (("process", 1 << 30, 60.0), ("thread", 256 << 20, 20.0)):
        arguments = [str(nbytes >> 2), str(seconds / 5)] if quick else [str(nbytes), str(seconds)]
        for phase, sides in in_process("--turns", io, *arguments).items():
            for side, figures in sides.items():
                results[f"{io}, {phase}, loop {side}"] = summary(figures)
            results[f"{io}, {phase}"] = comparison(**sides)
    results["idle_host"] = in_process("--idle", "3" if quick else "15")
    return results


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each figure that has a goal."""
    flat_out, paced, host = results["process, flat out"], results["process, paced"], results["idle_host"]
    at_least = [
        ("tiers' throughput, as a share of the control's (at least)", flat_out["throughput_share"], GOAL_THROUGHPUT),
        ("engine thread's speed, as a share of the control's, paced (at least)", paced["speed_share"], GOAL_SPEED),
    ]
    at_most = [
        (
            "ms that a 1 ms ticker is later at p99.9 than in the control, flat out",
            flat_out["added_p999_ms"],
            GOAL_STALL_MS,
        ),
        ("the same, paced", paced["added_p999_ms"], GOAL_STALL_MS),
        ("MB of private memory of an idle host", host["private_mb"], GOAL_HOST_MB),
        ("% of a processor that an idle host takes", host["cpu_percent"], GOAL_HOST_CPU),
    ]
    found = [{"name": name, "value": value, "goal": goal, "met": value >= goal} for name, value, goal in at_least]
    return found + [{"name": name, "value": value, "goal": goal, "met": value <= goal} for name, value, goal in at_most]


def report(results: dict[str, Any]) -> None:
    """Print the figures."""
    columns = ("tiers GB/s", "loop 1/s", "late ms p50", "p99", "p99.9", "step ms p50", "p99.9")
    print(f"{'':32}" + "".join(f"{column:>12}" for column in columns))
    for kind, found in results.items():
        if "ticks" in found:
            numbers = [found["gb_per_second"], found["units_per_second"], found["late_p50_ms"], found["late_p99_ms"]]
            numbers += [found["late_p999_ms"], *(found[key] for key in ("step_p50_ms", "step_p999_ms") if key in found)]
            print(f"{kind:32}" + "".join(f"{number:12.6g}" for number in numbers))
    print()
    for kind, found in results.items():
        if "speed_share" in found:
            print(
                f"{kind}: the loop inside has {found['speed_share']:.3f} of the other's speed, "
                f"{found['share_of_time_in_steps']:.1%} of its time are the manager's steps; "
                f"the tiers move {found['throughput_share']:.3f} of the bytes"
            )
    print()
    for goal in results["goals"]:
        print(f"{goal['name']}: {goal['value']:.3f}; goal {goal['goal']:g}: {'met' if goal['met'] else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the time, and a quarter of the bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for part, values in (("--turns", 3), ("--idle", 1)):
        parser.add_argument(part, nargs=values, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turns:
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
