"""The processor time of the shadow caches beside an engine: what their thread takes, and the whole process with it.

A made-up workload of coding agents comes in for half a minute, faster than the shadows can serve it. The process does
nothing else, so its processor time, less what handing over the requests takes, is what the shadows cost: their thread's
own count, and what that does not see. The share is of one core; the credit that the thread may catch up on when it
begins is used up before.
"""

import argparse
import time
from typing import Any

from lib.results import at_most, options_of, say

from kvtiers.primary.eviction import BUILT_IN
from kvtiers_policies.what_if.keys_only import Case, CaseTier
from kvtiers_policies.what_if.what_if_thread import CORE_SHARE, WhatIf
from kvtiers_replay.agent_workload import agent_workload

ROWS, REQUESTS, EACH_SECOND = 2_000, 4_000, 50
CREDIT_SECONDS, SECONDS, QUICK_SECONDS = 12.0, 30.0, 8.0


def feed(what_if: WhatIf, requests: list[Any], seconds: float) -> tuple[float, float, float]:
    """Hand over requests; return the seconds, and processor seconds of the process and of the calls."""
    begin, spent, calls, number = time.monotonic(), time.process_time(), 0.0, 0
    while time.monotonic() < begin + seconds:
        request = requests[number % len(requests)]
        before = time.thread_time()
        what_if.request(request.arrival, request.num_tokens, 0, [request.block_hashes], {})
        calls += time.thread_time() - before
        number += 1
        time.sleep(max(0.0, begin + number / EACH_SECOND - time.monotonic()))
    return time.monotonic() - begin, time.process_time() - spent, calls


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both."""
    requests = list(agent_workload(REQUESTS).requests)
    tiers = (CaseTier("disk", 10 * ROWS),)
    what_if = WhatIf(Case(ROWS, "lru", tiers), [*BUILT_IN, "turn-hazard"], ROWS, 512)
    feed(what_if, requests, CREDIT_SECONDS)
    counted = what_if.seconds
    took, process, calls = feed(what_if, requests, QUICK_SECONDS if options.quick else SECONDS)
    thread = (what_if.seconds - counted) / took
    what_if.close(30)
    idle = WhatIf(
        Case(ROWS, "lru", tiers), [*BUILT_IN, "turn-hazard"], ROWS, 512
    )  # a control: the same loop, nothing is served
    idle.close(30)
    control_took, control, _ = feed(idle, requests, QUICK_SECONDS if options.quick else SECONDS)
    found = {"thread": thread, "process": process / took - control / control_took, "calls": calls / took}
    goals = [at_most(f"share of a core, the {what}", found[what], CORE_SHARE) for what in ("thread", "process")]
    return found | {"goals": goals}


def report(found: dict[str, Any]) -> None:
    """Print the shares."""
    print(f"the thread {found['thread']:.2%} of a core, the process {found['process']:.2%} more than without shadows")
    print(f"handing over the requests {found['calls']:.2%}")


def main() -> None:
    options = options_of(__doc__, "eight seconds").parse_args()
    say(run(options), report, as_json=options.json)


if __name__ == "__main__":
    main()
