"""Writes to a secondary tier and hits, by admission: what is saved, and what it costs.

Four kinds of traffic: conversation and synthetic, Mooncake's traces of chats, from the folder that KVTIERS_TRACES
names; coding agents and retrieval, as ``kvtiers replay`` makes them up. The primary holds 5 % of a trace's unique full
blocks, one secondary tier 50 %. The real manager serves one request after the other, as ``kvtiers plan`` does. All is
relative to ``admission: all`` with the same eviction policy. ``expected-reuse`` is given several ``may_lose``: the
trade-off.

The cost is what the manager takes of processor time with ``expected-reuse`` more than with ``all``, with LRU: in turns,
in this process. ``--quick``: fewer requests, LRU alone, and no goal, since a model that learns has seen less. All takes
about ten minutes of two processors; ``--trace``: that one alone, a part of it.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from lib.results import at_least, at_most, options_of, say

from kvtiers_replay.agent_workload import agent_workload
from kvtiers_replay.plan import PlanCase, PlanTier, PlanTrace, simulate, sweep
from kvtiers_replay.rag_workload import rag_workload
from kvtiers_replay.trace import read_trace

TRACES = ("conversation", "synthetic", "agent", "rag")
REQUESTS, QUICK_REQUESTS = 12_000, 2_000
PRIMARY, SECONDARY = 0.05, 0.50
DEFAULT = 0.01
MAY_LOSE = (DEFAULT, 0.005, 0.02)
OTHERS = ("on_eviction", "second_access")
POLICIES = ("lru", "turn-hazard")
COST_REQUESTS, COST_TURNS = 2_000, 3
GOAL_SAVED, GOAL_LOST = 0.30, 0.01
GOAL_CHUNK_US, GOAL_REQUEST_US = 5.0, 150.0


def trace_of(name: str, requests: int) -> PlanTrace:
    """Return a trace as keys."""
    if name in {"agent", "rag"}:
        return PlanTrace({"agent": agent_workload, "rag": rag_workload}[name](requests))
    path = Path(os.environ["KVTIERS_TRACES"]) / f"{name}_trace.jsonl.gz"
    return PlanTrace(read_trace(path, requests if requests < REQUESTS else None))


def tier(trace: PlanTrace, admission: str) -> PlanTier:
    """Return the secondary tier with an admission, such as ``expected-reuse 0.01``."""
    name, _, may_lose = admission.partition(" ")
    chunks = int(trace.unique * SECONDARY)
    return PlanTier("secondary", chunks, name, may_lose=float(may_lose or DEFAULT))  # type: ignore[arg-type]


def rows_of(trace: PlanTrace, policy: str, admissions: list[str], processes: int) -> dict[str, dict[str, float]]:
    """Return hits and writes by admission, each relative to the first one's."""
    primary = int(trace.unique * PRIMARY)
    cases = [PlanCase(primary, policy, (tier(trace, admission),)) for admission in admissions]
    points = [point for _, point in sorted(sweep(trace, cases, processes=processes), key=lambda found: found[0])]
    hits, writes = sum(points[0].hits.values()), points[0].written["secondary"]
    return {
        admission: {
            "hit_rate": point.rate,
            "hits": sum(point.hits.values()) / hits - 1,
            "writes": point.written["secondary"] / writes - 1,
            "writes_per_hit": point.written["secondary"] / max(1, point.hits["secondary"]),
        }
        for admission, point in zip(admissions, points, strict=True)
    }


def cost(name: str) -> dict[str, float]:
    """Return what ``expected-reuse`` takes more than ``all``, in the middle of some turns."""
    trace = trace_of(name, COST_REQUESTS)
    primary = int(trace.unique * PRIMARY)
    more = []
    for _ in range(COST_TURNS):
        spent = []
        for admission in ("all", f"expected-reuse {DEFAULT}"):
            begin = time.process_time()
            simulate(trace, PlanCase(primary, "lru", (tier(trace, admission),)))
            spent.append(time.process_time() - begin)
        more.append(spent[1] - spent[0])
    seconds = statistics.median(more)
    return {"us_a_chunk": seconds / trace.references * 1e6, "us_a_request": seconds / len(trace.requests) * 1e6}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    admissions = ["all", *OTHERS, *(f"expected-reuse {each}" for each in MAY_LOSE)]
    found: dict[str, Any] = {"quick": options.quick, "traces": {}, "cost": {}}
    for name in options.trace or TRACES:
        trace = trace_of(name, QUICK_REQUESTS if options.quick else REQUESTS)
        policies = POLICIES[: 1 if options.quick else None]
        found["traces"][name] = {each: rows_of(trace, each, admissions, options.processes) for each in policies}
        found["cost"][name] = cost(name)
    found["goals"] = [] if options.quick else goals(found)
    return found


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised."""
    results = []
    default = f"expected-reuse {DEFAULT}"
    for policy in POLICIES:
        rows = {name: by_policy[policy][default] for name, by_policy in found["traces"].items()}
        if len(rows) == len(TRACES):
            saved = -statistics.mean(row["writes"] for row in rows.values())
            results.append(at_least(f"writes saved, mean, {policy}", saved, GOAL_SAVED))
        results += [at_most(f"hits lost, {name}, {policy}", -row["hits"], GOAL_LOST) for name, row in rows.items()]
    for name, each in found["cost"].items():
        results.append(at_most(f"us a chunk more than all, {name}", each["us_a_chunk"], GOAL_CHUNK_US))
        results.append(at_most(f"us a request more than all, {name}", each["us_a_request"], GOAL_REQUEST_US))
    return results


def report(found: dict[str, Any]) -> None:
    """Print the figures as tables."""
    names = list(found["traces"])
    for policy in found["traces"][names[0]]:
        print(f"{policy:22}" + "".join(f"{name:>28}" for name in names) + f"{'mean':>10}")
        print(f"{'':22}" + f"{'hits':>10}{'writes':>9}{'a hit':>9}" * len(names) + f"{'writes':>10}")
        rows = [found["traces"][name][policy] for name in names]
        for admission in rows[0]:
            cells = [row[admission] for row in rows]
            print(
                f"{admission:22}"
                + "".join(f"{c['hits']:10.2%}{c['writes']:9.1%}{c['writes_per_hit']:9.1f}" for c in cells)
                + f"{statistics.mean(cell['writes'] for cell in cells):10.1%}"
            )
        print()
    for name, each in found["cost"].items():
        print(f"{name}: {each['us_a_chunk']:.1f} us a chunk, {each['us_a_request']:.0f} us a request more than 'all'")


def main() -> None:
    parser = options_of(__doc__, "fewer requests, LRU alone")
    parser.add_argument("--trace", action="append", choices=TRACES, help="this traffic alone")
    parser.add_argument("--processes", type=int, default=2, help="simulations at the same time")
    options = parser.parse_args()
    if "KVTIERS_TRACES" not in os.environ:
        parser.error("KVTIERS_TRACES names no folder; it has to have Mooncake's traces, gzipped")
    say(run(options), report, as_json=options.json)


if __name__ == "__main__":
    main()
