"""The stall of an engine by its tiers, and of the tiers by the engine: a thread of pure Python beside two busy tiers.

An engine's thread runs Python flat out, ends a step every 10 ms, and so drives two `memory` tiers, each of which stores
1 GiB and then loads it, again and again. In the control the same loop runs in an unrelated process and the engine's
thread only drives the tiers: with few processors the loop takes the same processor time away, in any process. A ticker
in the loop wants to come every millisecond; what it is late is stall. The same with `io: thread`, where each tier has
256 MiB, shows why tiers do not live in the engine's process.

Two processes are never equally fast, with nothing beside them either: where their memory lies and which processor they
are on makes a tenth and more. So each loop is compared with itself: a round has four turns of a fifth of a second, each
loop alone (no step, the tiers at rest) and each loop beside the tiers, in an order that is turned round every time. The
speed that a loop keeps is its speed beside the tiers as a share of its own alone, in the same round; the goal is about
the share that the loop in the engine keeps, as a share of what the other one keeps: the median of the rounds, and of
three runs. Stall is treated alike: what a loop's ticks are later at p99.9 beside the tiers than alone, less the same of
the other loop.

The loop takes the Python of an engine's steps (`rigs/engine_step.py`), one after the other, since what a loop loses
depends on what it is. One that is small and always the same has several speeds, and other Python in its process, a
hundred times a second, puts it into a slow one for all of the time until the next if that Python is broad: 0.3 ms of
one function's did nothing. Probably it is what the processor has learnt of its branches, for C loses nothing. With
loops and hosts on processors of their own, each kept this share of its speed between steps of 0.2 to 0.4 ms::

                                                    30 functions of the        of tiers that
                                                    standard library           move 1.9 GB/s
    walks through a list of 256 numbers             0.81, evenly over 10 ms    0.89 to 0.98, evenly over 10 ms
    three of them, of different lengths, in turn    0.80, evenly over 10 ms    0.90 to 0.98, evenly over 10 ms
    a step of an engine                             0.97 to 0.99, mostly       0.98 to 0.99, mostly
                                                    in the first ms            in the first ms
    sha256 of 8 KiB, in C                           1.00                       1.00

The tiers have held everything once before anything is measured: memory that a virtual machine has never touched took up
to 13 us a page. The heap is frozen then, as vLLM freezes it: else a step in a thousand collects for 20 ms.

Flat out, the tiers take what processor time they find, and do not move the same bytes beside both loops: that compares
the tiers. To compare the loops, the tiers then move the same bytes a second beside both, four fifths of the lower of
the two rates. Both shares have the goal. The loop in the engine pays for the manager's steps, the other one does not.
The share of time in steps is given, and so are the speeds kept by processor time, which do not count when something
else has the processor.

What the loop in the engine loses are the steps, and what they put out of the caches. With requests of 256 tokens, a
quarter of what they have here, a step at 2.7 GB/s takes 0.3 to 0.4 ms, for 0.8 jobs: some 120 calls of 80 functions,
which ten milliseconds of loop and copies have made cold. No part stands out. Of 0.42 ms at 3.5 GB/s, by 4,000 steps of
which every 0.7 ms of processor time was looked at: listening to the hosts and taking their results in 0.17 ms, look-ups
with their loads 0.15, stores 0.12, figures 0.02, and no single function more than 0.02. Of the speed between two steps
up to 4 % goes at 2.8 GB/s, of the standard library's functions 6 to 9 %, of C code nothing. So the share falls with the
rate: 0.97 at 1.4 GB/s, 0.86 to 0.92 at 2.5 to 3 in six runs beside busy neighbours, where the walk through a list had
0.88 and 0.89. With 1 ms of Python more in each step it is 0.85 to 0.88, at 2.1 to 2.4 GB/s.

With requests of 1,024 tokens the same calls move more. Whole runs, flat out and paced, with jobs of 64 MiB and of 128
(one of the two processors is three times as fast as one of the sixteen, whose ticks were 4 ms late with nothing beside
them in the second and third run; the first was with events, which cost 0.3 points of the steps)::

                           GB/s        steps       speed kept      stall, ms
    16 processors, 64      5.8, 3.7    4.4, 3.0 %  0.919, 0.980    1.31, 0.61
    16 processors, 128     5.8, 3.2    3.4, 2.6 %  0.939, 1.042    0.86, 0.30
    16 processors, 128     5.8, 3.3    4.1, 2.8 %  1.001, 0.967    2.35, 1.17
    16 processors, 128     5.7, 3.1    3.6, 2.7 %  0.939, 0.980    1.11, 0.62
    2 processors, 64       7.6, 4.5    3.1, 2.2 %  0.928, 0.946    -0.56, 0.34
    2 processors, 128      7.8, 4.1    2.7, 1.8 %  0.944, 0.965    -0.95, 0.07

Jobs of 128 MiB are a fifth less for the same bytes (1,940 us of processor time per GB, and 2,426; 2,042 with 256 MiB).
On the two processors it comes and goes for minutes with what else the machine does: 1,700 to 2,300, or 2,700 to 3,200.

What a step costs is per job and per key: 125 us a job, and 2 us a chunk of it, in some 45 passes over its keys, most of
them in C. Fewer calls alone do not help: a fifth fewer made no difference that 28 runs by turns would show (4,408 and
4,368 us of processor time per GB), and with primary, jobs, look-ups and verdicts compiled to C by mypyc it was a tenth
less. Nor is it the loop: with a spin of one line in its place a job costs the same, on processors of their own too. Of
values of 64 KiB a job costs 250 us, of 2 MiB 540, for 1.8 times the calls: it takes longer, and is looked for in more
steps. With hosts that write past the caches (glibc's threshold for copies at 512 KiB) a step costs 5 % less and the
loop runs 2.6 % faster, wherever it is; not kept, since what is copied aside to be sealed is read again at once.

A turn of a fifth of a second is no more exact than that: alone, with all else at rest, the loop's speed has a standard
deviation of 20 to 23 % from turn to turn, on two processors as on sixteen (probably what runs on the other half of the
core), so that one run's share is off by 0.05 and more. Hence three runs, and medians.

The stall is made by the steps in which several requests begin, or have all come: about one in a hundred, of 1.4 to 1.6
ms on the sixteen processors. One bound of 128 reserved chunks for all that begin in a step would make those shorter;
not kept, since a request that gets its share in parts loses the rest where an engine's steps are long: its clock has
started. Nor does it help enough to take one job's result a step, and the others in later ones: steps had 1.15 ms at p99
instead of 1.38 there, for 11 % fewer bytes; with two results 1.31 ms, for 4 %.

The rest is a matter of where the kernel runs the hosts. In a trace (Linux 6.18, EEVDF, 250 ticks a second, two
processors) 9 of 10 messages of the engine's thread woke the host on that thread's own processor, and until a tick ends
their turn nothing else runs there. With hosts at a niceness of 5, for which nothing else was done, the loop in the
engine waited for 11 % of the time, the other one for 6 %; hosts that offer the processor after each large value leave
both loops 0.97 to 0.99 of one. At a niceness of 10 a Redis tier beside a busy thread wrote half as much. Hosts that a
timer or a signal wakes, or whose reader stays off the engine's processor, did no better; listened to every 20 ms, they
moved a seventh less.
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
from statistics import median
from typing import Any

from lib.processes import private_mb, processor_seconds, tier_hosts
from lib.results import options_of, say
from rigs.busy_loop import STEP_SECONDS, Loop, OtherLoop
from rigs.tier_traffic import VALUE_BYTES, Traffic, open_engine

RUNS = 3
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
    rate = min(flat_out[f"{where}, busy"]["bytes_per_second"] for where in ("inside", "outside"))
    traffic.pace = max(1.0, PACE * rate)  # 0 is no pace
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
    """Do nothing: the step of an engine without tiers."""


def idle_host(seconds: float) -> dict[str, float]:
    """Return the private memory (MB) of an idle host, and its processor time in percent of one processor."""
    manager, worker = open_engine("process", 64 << 20)
    hosts = tier_hosts()
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
        "throughput_share": share_of(busy["inside"]["bytes_per_second"], busy["outside"]["bytes_per_second"]),
        "kept_inside": middle([inside for inside, _ in kept]),
        "kept_outside": middle([outside for _, outside in kept]),
        "speed_share": middle([inside / outside for inside, outside in kept]),
        "processor_share": middle([inside / outside for inside, outside in of_processor]),
        "added_p999_ms": added["inside"] - added["outside"],
        "share_of_time_in_steps": sum(busy["inside"]["step_us"]) / 1e6 / (len(busy["inside"]["speeds"]) * TURN_SECONDS),
    }


def share_of(part: float, whole: float) -> float:
    """Return the share; of nothing there is none, which reaches no goal."""
    return part / whole if whole else math.nan


def middle(values: Sequence[float]) -> float:
    """Return the median; none of no values, which reaches no goal."""
    return median(values) if values else math.nan


def kept_speeds(sides: dict[str, dict[str, Any]], kind: str) -> list[tuple[float, float]]:
    """Return, by rounds, the shares of their speeds that the loops inside and outside keep beside the tiers."""
    rounds = zip(*(sides[turn][kind] for turn in SIDES), strict=True)
    return [(one[1] / one[0], one[3] / one[2]) for one in rounds if all(one)]  # 0: over before it began


def in_turn(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one side in all runs as if they had been one."""
    rate = sum(figures["bytes_per_second"] for figures in runs) / len(runs)
    lists = runs[0].keys() - {"bytes_per_second"}
    return {name: [*chain(*(figures[name] for figures in runs))] for name in lists} | {"bytes_per_second": rate}


def measure(*, quick: bool) -> dict[str, Any]:
    """Return all figures."""
    results: dict[str, Any] = {}
    for io, runs, mebibytes, seconds in (
        ("process", 1, 256, 12.0) if quick else ("process", RUNS, 1024, 60.0),
        ("thread", 1, 128, 4.0) if quick else ("thread", 1, 256, 20.0),
    ):
        taken = [in_process("--turns", io, str(mebibytes << 20), str(seconds)) for _ in range(runs)]
        for phase in taken[0]:
            for side in SIDES:
                results[f"{io}, {phase}, loop {side}"] = summary(in_turn([figures[phase][side] for figures in taken]))
            compared = [comparison(figures[phase]) for figures in taken]
            results[f"{io}, {phase}"] = {name: median(one[name] for one in compared) for name in compared[0]}
            if runs > 1:
                results[f"{io}, {phase}, by run"] = {name: [one[name] for one in compared] for name in compared[0]}
    results["idle_host"] = in_process("--idle", "3" if quick else "15")
    return results


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each figure that has a goal."""
    flat_out, paced, host = results["process, flat out"], results["process, paced"], results["idle_host"]
    at_least = [
        ("tiers' throughput, as a share of the control's (at least)", flat_out["throughput_share"], GOAL_THROUGHPUT),
        *(
            (
                f"speed that the engine's thread keeps, as a share of the control's, {phase} (at least)",
                figures["speed_share"],
                GOAL_SPEED,
            )
            for phase, figures in (("flat out", flat_out), ("paced", paced))
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
        if kind.endswith("by run"):
            shares, added = ([f"{value:.3f}" for value in found[name]] for name in ("speed_share", "added_p999_ms"))
            print(f"{kind}: speed kept, as a share of the other's {', '.join(shares)}; ms added {', '.join(added)}")
        elif "speed_share" in found:
            print(
                f"{kind}: the loop inside keeps {found['kept_inside']:.3f} of its speed, the other "
                f"{found['kept_outside']:.3f}: {found['speed_share']:.3f} of it by rounds, "
                f"{found['processor_share']:.3f} by processor time; steps take {found['share_of_time_in_steps']:.1%}; "
                f"the tiers move {found['throughput_share']:.3f} of the bytes"
            )


def main() -> None:
    parser = options_of(__doc__, "a fifth of the time, and a quarter of the bytes")
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
        say(results, report, as_json=options.json)


if __name__ == "__main__":
    main()
