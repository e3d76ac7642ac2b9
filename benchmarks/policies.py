"""Prefix hits by eviction policy and size, as shares of the optimum, and what each policy costs on the engine's thread.

The optimum is Belady's with admission: of the chunks used so far those whose next use is soonest are resident. A use of
a chunk is one of all before it in its prefix, so no chunk is kept without its head, and no policy can hit more.

Traces: conversation and synthetic, in Mooncake's format, from the folder that KVTIERS_TRACES names, and the workload of
conversations about source code that ``kvtiers replay`` makes. Sizes: 1, 2, 5, 10 and 20 % of a trace's unique full
blocks. The real primary serves one request after the other, as ``kvtiers plan`` does without secondary tiers. The time
is that of all calls of a policy, at sizes where about 100,000 chunks are known. ``--quick``: fewer requests and sizes,
with other goals, since a policy that learns has seen less; about 20 s. ``--batch``: how many examples and ranks
turn-hazard computes together, for the trade-off between its time and its hits. ``--vllm``: instead of all that, the
prefix hits of vLLM's own manager on conversation, with its LRU and with turn-hazard as its policy; a minute or two.
"""

import argparse
import functools
import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from baselines import vllm_tiering
from lib.results import at_least, at_most, options_of, say

from kvtiers.primary.eviction import BUILT_IN, EvictionPolicy, make_policy
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.types import RequestHints
from kvtiers_policies.turn_hazard import ages
from kvtiers_replay.code_workload import code_workload
from kvtiers_replay.plan import PlanTrace
from kvtiers_replay.trace import read_trace

TRACES = ("conversation", "synthetic", "code")
SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)
LEARNS = "turn-hazard"
HINTED = "conversation"
CODE_REQUESTS, QUICK_CODE_REQUESTS, QUICK_REQUESTS = 12_000, 2_000, 3_000
KNOWN = 100_000
GOAL_WHOLE, GOAL_HALVES, GOAL_HINTED, GOAL_POINTS = 0.675, 0.70, 0.69, -0.25
GOAL_CHUNK_US, GOAL_REQUEST_US = 5.0, 150.0


def trace_of(name: str, *, quick: bool) -> PlanTrace:
    """Return a trace as keys."""
    if name == "code":
        return PlanTrace(code_workload(QUICK_CODE_REQUESTS if quick else CODE_REQUESTS))
    path = Path(os.environ["KVTIERS_TRACES"]) / f"{name}_trace.jsonl.gz"
    return PlanTrace(read_trace(path, QUICK_REQUESTS if quick else None))


def optimum(trace: PlanTrace, capacity: int) -> list[int]:
    """Return the hits of each request with the optimal policy."""
    never = len(trace.requests)
    coming: dict[bytes, list[int]] = {}
    for number, (_, keys, _) in enumerate(trace.requests):
        for key in keys:
            coming.setdefault(key, []).append(number)
    for uses in coming.values():
        uses.reverse()
    next_use: dict[bytes, int] = {}  # of what is resident
    queue: list[tuple[int, int, bytes]] = []
    hits = []
    for _, keys, usable in trace.requests:
        hits.append(next((i for i in range(usable) if keys[i] not in next_use), usable))
        for place, key in enumerate(keys):
            coming[key].pop()
            soonest = coming[key][-1] if coming[key] else never
            if soonest < never:
                next_use[key] = soonest
                heapq.heappush(queue, (-soonest, -place, key))
            else:
                next_use.pop(key, None)
        while len(next_use) > capacity:
            when, _, key = heapq.heappop(queue)
            if next_use.get(key) == -when:
                del next_use[key]
    return hits


class Timed:
    """A policy whose calls are timed."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        """Return the policy's method, timed."""
        method = getattr(self._policy, name)
        if not callable(method):
            return method

        @functools.wraps(method)
        def timed(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*args)
            finally:
                self.seconds += time.thread_time() - begin

        setattr(self, name, timed)
        return timed


def serve_vllm(trace: PlanTrace, policy: str, capacity: int) -> int:
    """Return the prefix hits of vLLM's own manager, which one request after the other comes to."""
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    now = [0.0]
    manager = CPUOffloadingManager(num_chunks=capacity, cache_policy=policy)
    here = manager._policy  # noqa: SLF001 -- it does not say otherwise what is here
    if policy != "lru":
        here._policy.clock = lambda: now[0]  # noqa: SLF001
    found = 0
    for number, (arrival, keys, usable) in enumerate(trace.requests):
        now[0] = max(now[0], arrival)
        context = ReqContext(req_id=str(number))
        for place, key in enumerate(keys, 1):
            context.set_offload_key_position(key, place)
        manager.on_new_request(context)
        hits = next((place for place in range(usable) if here.get(keys[place]) is None), usable)
        found += hits
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
        rest = keys[hits:]
        while rest:
            if manager.prepare_store(rest, context) is not None:
                manager.complete_store(rest, context)
                break
            rest = rest[: len(rest) // 2]
        manager.on_request_finished(context)
    if policy != "lru" and here.bugs._bugs:  # noqa: SLF001
        raise SystemExit(f"{policy} has failed: its figures mean nothing")
    return found


def run_vllm(options: argparse.Namespace) -> dict[str, Any]:
    """Measure vLLM's own manager with its LRU and with ours that learns."""
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    from kvtiers_vllm.own_tiering.tier_names import policy_name

    ours = policy_name(LEARNS)
    CachePolicyFactory.register_cache_policy(ours, "kvtiers_vllm.own_tiering.cache_policy", LEARNS)
    trace = trace_of(HINTED, quick=options.quick)
    shares = SHARES[::2] if options.quick else SHARES
    sizes = {share: int(trace.unique * share) for share in shares}
    hits = {
        policy: {f"{share:.0%}": serve_vllm(trace, policy, size) / trace.references for share, size in sizes.items()}
        for policy in ("lru", ours)
    }
    return {"quick": options.quick, "vllm": hits, "goals": []}


def report_vllm(found: dict[str, Any]) -> None:
    """Print the hits as a table."""
    for policy, by_size in found["vllm"].items():
        print(f"{policy:22}" + "".join(f"{size:>5}{rate:7.1%}" for size, rate in by_size.items()))


def last_turns(trace: PlanTrace) -> list[bool]:
    """Return of each request whether no later one goes on where it ends, as its client would say."""
    used_later: set[bytes] = set()
    found = []
    for _, keys, _ in reversed(trace.requests):
        found.append(not keys or keys[-1] not in used_later)
        used_later.update(keys)
    return found[::-1]


def hits_by_request(
    trace: PlanTrace, primary: CPUPrimaryTier, clock: Callable[[float], None], hints: Sequence[RequestHints]
) -> Iterator[int]:
    """Serve one request after the other; yield the prefix hits of each."""
    for number, (arrival, keys, usable) in enumerate(trace.requests):
        clock(arrival)
        request = str(number)
        if hints:
            primary.hint(request, hints[number])
        hits, _ = primary.resident_run(keys[:usable])
        if hits:
            rows = primary.prepare_load(keys[:hits], request)
            assert rows is not None
            primary.complete_load(rows)
        rest = keys[hits:]
        while rest:
            stored = primary.prepare_store(rest, request)
            if stored is not None:
                primary.complete_store(stored.rows, success=True)
                break
            rest = rest[: len(rest) // 2]
        primary.on_request_finished(request)
        yield hits


def serve(
    trace: PlanTrace, name: str, capacity: int, *, timed: bool = False, hints: Sequence[RequestHints] = ()
) -> tuple[list[int], float]:
    """Return the hits of each request with a policy, and the seconds in its calls, if ``timed``."""
    now = [0.0]
    policy: Any = make_policy(name, capacity, lambda: now[0])
    if timed:
        policy = Timed(policy)
    primary = CPUPrimaryTier(capacity, 0, memoryview(b""), policy=policy, record_events=False, clock=lambda: now[0])
    hits = list(hits_by_request(trace, primary, lambda arrival: now.__setitem__(0, max(now[0], arrival)), hints))
    return hits, policy.seconds if timed else 0.0


def halves(hits: Sequence[int]) -> tuple[int, int]:
    """Return all hits, and those of the second half of the requests."""
    return sum(hits), sum(hits[len(hits) // 2 :])


def cost(trace: PlanTrace, name: str) -> dict[str, float]:
    """Return what a policy's calls take, at a size at which the learning one's known chunks are 100,000 or all."""
    _, seconds = serve(trace, name, max(1, min(KNOWN, trace.unique) // 16 + 1), timed=True)
    return {"us_a_chunk": seconds / trace.references * 1e6, "us_a_request": seconds / len(trace.requests) * 1e6}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    policies = [*BUILT_IN, LEARNS, *(options.policy or ())]
    ages._BATCH = options.batch  # noqa: SLF001 -- not an option: it is worth little
    cells, costs = [], {}
    for name in TRACES:
        trace = trace_of(name, quick=options.quick)
        for share in SHARES[::2] if options.quick else SHARES:
            capacity = int(trace.unique * share)
            best = halves(optimum(trace, capacity))
            cell: dict[str, Any] = {"trace": name, "share": share, "optimum": best[0] / trace.references, "hits": {}}
            for policy in policies:
                found = halves(serve(trace, policy, capacity)[0])
                cell["hits"][policy] = {
                    "rate": found[0] / trace.references,
                    "of_optimum": found[0] / best[0],
                    "second_half": found[1] / best[1],
                }
            if name == HINTED:
                cell["hinted"] = halves(serve(trace, LEARNS, capacity, hints=hints_of(trace))[0])[0] / best[0]
            cells.append(cell)
        costs[name] = {policy: cost(trace, policy) for policy in policies}
    found = {"quick": options.quick, "cells": cells, "cost": costs, "means": means(cells, policies)}
    found["goals"] = goals(found)
    return found


def means(cells: Sequence[dict[str, Any]], policies: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the mean shares of the optimum over all cells."""
    return {
        policy: {
            what: sum(cell["hits"][policy][what] for cell in cells) / len(cells)
            for what in ("of_optimum", "second_half")
        }
        for policy in policies
    }


def hints_of(trace: PlanTrace) -> list[RequestHints]:
    """Return what the clients of a chat would say: which turn is the last, and how long the answer was."""
    outputs = [output for _, output in trace.hints]
    return [
        RequestHints(session_ends=ends, output_tokens=output)
        for ends, output in zip(last_turns(trace), outputs, strict=True)
    ]


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised."""
    mean, cells = found["means"][LEARNS], found["cells"]
    above = min(100 * (cell["hits"][LEARNS]["rate"] - cell["hits"]["lru"]["rate"]) for cell in cells)
    results = [at_least("points above LRU in the worst cell", above, GOAL_POINTS)]
    if found["quick"]:
        results.append(
            at_least("mean above LRU's, of the optimum", mean["of_optimum"] - found["means"]["lru"]["of_optimum"], 0.02)
        )
    else:
        results.append(at_least("mean of the optimum, whole traces", mean["of_optimum"], GOAL_WHOLE))
        results.append(at_least("mean of the optimum, second halves", mean["second_half"], GOAL_HALVES))
        hinted = [cell["hinted"] for cell in cells if "hinted" in cell]
        results.append(at_least(f"mean of the optimum, {HINTED} with hints", sum(hinted) / len(hinted), GOAL_HINTED))
    for trace, by_policy in found["cost"].items():
        results.append(at_most(f"us a chunk, {trace}", by_policy[LEARNS]["us_a_chunk"], GOAL_CHUNK_US))
        results.append(at_most(f"us a request, {trace}", by_policy[LEARNS]["us_a_request"], GOAL_REQUEST_US))
    return results


def report(found: dict[str, Any]) -> None:
    """Print the figures as tables."""
    policies = list(found["means"])
    print(
        f"{'hits / optimum':14}{'size':>6}{'optimum':>9}"
        + "".join(f"{policy:>14}{'(2nd half)':>11}" for policy in policies)
    )
    for cell in found["cells"]:
        row = "".join(f"{one['of_optimum']:14.3f}{one['second_half']:11.3f}" for one in cell["hits"].values())
        print(f"{cell['trace']:14}{cell['share']:6.0%}{cell['optimum']:9.1%}{row}")
    print(
        f"{'mean':29}"
        + "".join(f"{one['of_optimum']:14.3f}{one['second_half']:11.3f}" for one in found["means"].values())
    )
    print(f"\n{'us of processor time':29}" + "".join(f"{policy:>14}" for policy in policies))
    for trace, by_policy in found["cost"].items():
        for what in ("us_a_chunk", "us_a_request"):
            print(
                f"{trace + ', ' + what.replace('us_', ''):29}"
                + "".join(f"{one[what]:14.1f}" for one in by_policy.values())
            )
    print()


def as_svg(found: dict[str, Any]) -> str:
    """Return the hits of each policy by size, a chart a trace."""
    from matplotlib.axes import Axes  # slow, and only wanted here
    from matplotlib.ticker import NullLocator

    from kvtiers_replay.report.drawing import COLOURS, GREY, WIDE, Marks, draw, shares, style

    def chart(trace: str) -> Any:
        cells = [cell for cell in found["cells"] if cell["trace"] == trace]
        sizes = [cell["share"] for cell in cells]
        lines = {"optimum": [cell["optimum"] for cell in cells]}
        lines |= {policy: [cell["hits"][policy]["rate"] for cell in cells] for policy in found["means"]}

        def paint(axes: Axes, marks: Marks) -> None:
            axes.set_xscale("log")
            for (name, rates), colour in zip(lines.items(), (GREY, *COLOURS), strict=False):
                places = [
                    (size, rate, f"{name}, {size:.0%}: {rate:.1%}") for size, rate in zip(sizes, rates, strict=True)
                ]
                marks.line(axes, places, name, color=colour)
            axes.set_xticks(sizes, [f"{size:.0%}" for size in sizes])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("primary, share of the trace's chunks")
            axes.set_ylim(shares(axes.yaxis, max(map(max, lines.values()))))
            axes.set_ylabel("prefix hits")

        return draw(f"hits by size, {trace}", paint, height=270, title=trace)

    parts, top = [], 0
    for trace in dict.fromkeys(cell["trace"] for cell in found["cells"]):
        drawing = chart(trace)
        parts.append(drawing.svg.replace("<svg ", f'<svg y="{top}" ', 1))
        top += drawing.height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {top}" width="{WIDE}" height="{top}">'
        f"<style>{style()}</style>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = options_of(__doc__, "fewer requests and sizes")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the hits as .svg")
    parser.add_argument("--policy", action="append", metavar="NAME", help="an installed policy besides ours")
    parser.add_argument("--batch", type=int, default=ages._BATCH, help="of turn-hazard")  # noqa: SLF001 -- see run
    parser.add_argument(
        "--vllm", metavar="FOLDER", nargs="?", const="", help="hits in vLLM: installed, or its wheel's Python files"
    )
    options = parser.parse_args()
    if "KVTIERS_TRACES" not in os.environ:
        parser.error("KVTIERS_TRACES names no folder; it has to have Mooncake's traces, gzipped")
    if options.vllm is not None:
        if missing := vllm_tiering.prepare(options.vllm or None):
            parser.error(f"vLLM: {missing}")
        say(run_vllm(options), report_vllm, as_json=options.json)
        return
    found = run(options)
    if options.plot:
        options.plot.write_text(as_svg(found), encoding="utf-8")
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
