"""Whether tiers are in the engine's way, and the engine in theirs: a thread of pure Python beside two busy tiers.

An engine's thread runs Python flat out, ends a step every 10 ms, and so drives two `memory` tiers, each of which stores
1 GiB and then loads it, again and again. In the control the same loop runs in an unrelated process and the engine's
thread only drives the tiers: with few processors the loop takes the same processor time away, whoever runs it. A ticker
in the loop wants to come every millisecond; what it is late is stall. The same with `io: thread` shows why tiers do not
live in the engine's process.

Two processes are never equally fast, with nothing beside them either: where their memory lies and which processor they
are on makes a tenth and more. So each loop is compared with itself: a round has four turns of a fifth of a second, each
loop alone (no step, the tiers at rest) and each loop beside the tiers, in an order that is turned round every time. The
speed that a loop keeps is its speed beside the tiers as a share of its own alone, in the same round; the goal is about
the share that the loop in the engine keeps, as a share of what the other one keeps: the median of the rounds. Stall is
treated alike: what a loop's ticks are later at p99.9 beside the tiers than alone, less the same of the other loop.

Both loops end steps of an engine's own (`peers/engine_step.py`), since an engine's thread does. The tiers have held
everything once before anything is measured: memory that a virtual machine has never touched took up to 13 us a page,
and flat out the tiers moved 2.8 GB/s with it and 4.2 to 4.8 without. The heap is frozen then, as vLLM freezes it: else
a step in a thousand collects for 20 ms.

Flat out, the tiers take what processor time they find, and do not move the same bytes beside both loops: that compares
the tiers. To compare the loops, the tiers then move the same bytes a second beside both, four fifths of the lower of
the two rates. The loop in the engine pays for the manager's steps, the other one does not: its speed is bounded by the
share of time in steps. That share and the speeds kept by processor time are given too: neither counts when something
else has the loop's processor, and the second has in it what steps do to the caches. A step costs several times what
`scheduler_cost.py` says, since ten milliseconds of loop and copies have emptied the caches: one in which nothing
happens takes 7 us a thousand times in a row, and 20 to 135 us every 10 ms. What costs is code met for the first time,
some 2 us a function, and not how often it runs: with all caches emptied before each, steps with 1.4 jobs took no longer
than steps with 0.6. Of 275 us, with 0.5 jobs a step, on a quiet machine, before the last 5 % were saved::

    listening: the slots, the links, `poll` and `recv`        44     rows for stores and loads, ends of requests    44
    messages to results: decoding 22, the tier 17, rows 18    57     jobs out 21, sockets 19                        40
    look-ups, which open the requests                         31     figures of the step                            14
    what the traffic itself decides, and the clocks        to 22     the step's own round                           23

What else the loop in the engine loses goes to the hosts, and is a matter of where the kernel runs them. Seen in a trace
of its scheduler (Linux 6.18, EEVDF, 250 ticks a second, two processors with others at work): 9 of 10 messages of the
engine's thread wake the host on that thread's own processor (probably since a sender on a socket is taken for one that
sleeps at once), and the host's threads stay there; until a tick ends their turn nobody else runs. With hosts at a
niceness of 5, for which nothing else was done, the loop in the engine waited for them for 11 % of the time and the
other one for 6 %, a tenth of the turns longer than 4 to 6 ms. Where hosts offer the processor after each large value, a
tenth are longer than 1.5 to 2 ms, and with nobody else at work both loops have 0.99 of a processor: what the loop in
the engine then loses are the steps, 3 % of its time, and 2 to 9 % of its speed between them. At a niceness of 10 it
waits for 6 % of the time, but a Redis tier beside a busy thread writes half as much. A host that is woken by a timer of
its own instead of the engine's message does not do better: the timer, too, goes off on the processor that is not idle.
With one that is woken by a signal, which is not taken for a sender's last act, the other loop kept 0.91 instead of 0.99
of its speed, and this one no more than before: the share is better since the control is worse. With one whose reader
stays off the processor of an engine that is at work, the engine waited for 0.7 % of the time in one trace and for 9 %
in the next. Listened to every 20 ms as long as they owe only stores, hosts cost fewer steps, but moved a seventh less
flat out, where rows that are pinned longer hold up the next ones. Runs of 14 s on a machine whose neighbours are at
work scatter by more than a tenth, in each of these.

Nor is the kernel's choice all of it. With the loop bound to one processor and the hosts to the other, the loop in the
engine kept 0.86 to 0.91 of its speed where steps took 2.5 to 4 % of its time (2.6 to 4.7 GB/s), and lost the rest
evenly over all of the time between two steps; the other one kept 0.97 and more. There were no page faults, interrupts
or switches in it. Not bound, at 0.6 GB/s, it kept 0.90 to 0.92 where steps took 2.2 % and it had 0.98 to 0.99 of a
processor; with steps every 25 ms, 2 % of its time, 0.82 to 0.87. Waking a process on the other processor, which copies,
cost a loop 0 to 2 %, system calls 1 to 4 %, 0.4 ms of other Python a hundred times a second 1 to 3 %. What the rest is
was not found: that machine has no counters to ask. On one with 16 processors the share was 0.90 to 0.99 in six figures
of three runs.
"""

import argparse
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from peers.busy_loop import STEP_SECONDS, Loop, OtherLoop
from peers.processes import children, private_mb, processor_seconds
from peers.tier_traffic import VALUE_BYTES, Traffic, open_engine

TURN_SECONDS = 0.2
PACE = 0.8  # of the lower of the two rates that were reached flat out
SIDES = ("inside, alone", "inside, busy", "outside, alone", "outside, busy")
GOAL_THROUGHPUT, GOAL_SPEED, GOAL_STALL_MS, GOAL_HOST_MB, GOAL_HOST_CPU = 0.90, 0.95, 1.0, 60.0, 0.5
PATIENCE = 600.0


def take_turns(io: str, bytes_per_tier: int, seconds: float) -> dict[str, Any]:
    """Keep the tiers busy, flat out and then at one pace beside both loops; return the figures of each."""
    manager, worker = open_engine(io, bytes_per_tier)
    traffic = Traffic(manager, bytes_per_tier // VALUE_BYTES)
    traffic.fill()
    gc.freeze()  # as vLLM's engine does when it has started
    flat_out = beside_both(traffic, seconds / 2)
    traffic.pace = PACE * min(flat_out[f"{where}, busy"]["bytes_per_second"] for where in ("inside", "outside"))
    figures = {"flat out": flat_out, "paced": beside_both(traffic, seconds / 2)}
    worker.shutdown()
    manager.shutdown(5.0)
    return figures


def beside_both(traffic: Traffic, seconds: float) -> dict[str, Any]:
    """Run the loop in the engine's own thread (inside) and in an unrelated process (outside), alone and not, by turns.

    Return the figures of each loop by turn; ``speeds`` and ``late_us`` hold an entry a round.
    """
    turns = [(where, busy) for busy in (False, True) for where in ("inside", "outside")]
    ran: dict[tuple[str, bool], list[int]] = {turn: [] for turn in turns}  # which run of its loop each one was
    moved, taken, steps = dict.fromkeys(ran, 0), dict.fromkeys(ran, 0.0), list[float]()
    loop, outside_runs = Loop(), 0
    with OtherLoop() as other:
        other.run_for(TURN_SECONDS, traffic.step)  # it is there, and warm
        for _ in range(math.ceil(seconds / TURN_SECONDS / len(turns))):
            for where, busy in turns:
                if busy:
                    traffic.go_on()
                else:
                    traffic.settle()
                before, begin = traffic.nbytes, time.perf_counter()
                traffic.step_seconds.clear()
                if where == "inside":
                    ran[where, busy].append(len(loop.speeds))
                    loop.run((begin + TURN_SECONDS).__le__, traffic.step if busy else _nothing)
                    steps += traffic.step_seconds
                else:
                    ran[where, busy].append(outside_runs := outside_runs + 1)
                    other.run_for(TURN_SECONDS, traffic.step if busy else _nothing)
                moved[where, busy] += traffic.nbytes - before
                taken[where, busy] += time.perf_counter() - begin
            turns.reverse()
        loops = {"inside": loop.figures(), "outside": other.end()}
    figures: dict[str, Any] = {}
    for (where, busy), those in ran.items():
        figures[f"{where}, busy" if busy else f"{where}, alone"] = {
            "bytes_per_second": moved[where, busy] / taken[where, busy],
            **{name: [runs[run] for run in those] for name, runs in loops[where].items()},
        }
    figures["inside, busy"]["step_us"] = [round(step * 1e6) for step in steps]
    return figures


def _nothing() -> None:
    """A step of an engine without tiers."""


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
    late, steps = list(chain(*figures["late_us"])), figures.get("step_us")
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


def comparison(sides: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return what the loop inside costs, and is cost; both loops by what they are alone, in the same round."""
    busy = {where: sides[f"{where}, busy"] for where in ("inside", "outside")}
    kept, of_processor = kept_speeds(sides, "speeds"), kept_speeds(sides, "processor_speeds")
    added = {
        where: summary(sides[f"{where}, busy"])["late_p999_ms"] - summary(sides[f"{where}, alone"])["late_p999_ms"]
        for where in busy
    }
    return {
        "throughput_share": busy["inside"]["bytes_per_second"] / busy["outside"]["bytes_per_second"],
        "kept_inside": median(inside for inside, _ in kept),
        "kept_outside": median(outside for _, outside in kept),
        "speed_share": median(inside / outside for inside, outside in kept),
        "processor_share": median(inside / outside for inside, outside in of_processor),
        "added_p999_ms": added["inside"] - added["outside"],
        "share_of_time_in_steps": sum(busy["inside"]["step_us"]) / 1e6 / (len(busy["inside"]["speeds"]) * TURN_SECONDS),
    }


def kept_speeds(sides: dict[str, dict[str, Any]], kind: str) -> list[tuple[float, float]]:
    """Return, by rounds, the shares of their speeds that the loops inside and outside keep beside the tiers."""
    rounds = zip(*(sides[turn][kind] for turn in SIDES), strict=True)
    return [(one[1] / one[0], one[3] / one[2]) for one in rounds if all(one)]  # 0: over before it began


def measure(*, quick: bool) -> dict[str, Any]:
    """Return all figures."""
    results: dict[str, Any] = {}
    for io, nbytes, seconds in (("process", 1 << 30, 60.0), ("thread", 256 << 20, 20.0)):
        arguments = [str(nbytes >> 2), str(seconds / 5)] if quick else [str(nbytes), str(seconds)]
        for phase, sides in in_process("--turns", io, *arguments).items():
            for side, figures in sides.items():
                results[f"{io}, {phase}, loop {side}"] = summary(figures)
            results[f"{io}, {phase}"] = comparison(sides)
    results["idle_host"] = in_process("--idle", "3" if quick else "15")
    return results


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each figure that has a goal."""
    flat_out, paced, host = results["process, flat out"], results["process, paced"], results["idle_host"]
    at_least = [
        ("tiers' throughput, as a share of the control's (at least)", flat_out["throughput_share"], GOAL_THROUGHPUT),
        (
            "speed that the engine's thread keeps, as a share of the control's, paced (at least)",
            paced["speed_share"],
            GOAL_SPEED,
        ),
    ]
    at_most = [
        (
            "ms that tiers add to a 1 ms ticker at p99.9, over the control, flat out",
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
                f"{kind}: the loop inside keeps {found['kept_inside']:.3f} of its speed, the other "
                f"{found['kept_outside']:.3f}: {found['speed_share']:.3f} of it by rounds, "
                f"{found['processor_share']:.3f} by processor time; steps take {found['share_of_time_in_steps']:.1%}; "
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
