"""Throughput of the tiers over object stores, S3, Google's and Azure's, beside obstore alone at the same server.

The server is the trivial one of the S3 tier's tests: it keeps objects in memory and looks at nothing, so that it takes
the requests of all three, and is the ceiling. Emulators would measure themselves. For each service four lanes take
turns, one way and back in each round, each on new values, with as many requests in flight as the tier has threads:

obstore      the library that moves the tier's values, alone in this process, which is idle; copied out of its buffer
again        the same once more, a control: how far two turns of one thing are apart here
obstore-hash the same, and a hash over each value, as the tier's seal is: what no tier on obstore can do without
tier         the whole contract with `io: process`: jobs to a tier host, with seal and check

The shares are of two turns that follow one another, the medians over all rounds. Of each turn the processor time is
taken, too, of this process and of the tier's hosts: where other work takes the processors, it differs less than the
rate, but no goal is about it. On two processors that were busy with other work obstore with the hash came to 0.82 to
0.93 of obstore alone by its processor time, from 2 MiB on, so the goal of the rate is for a machine with some to spare.
`s3_tier.py` has the S3 tier beside its peers, on a real gateway, and beside a busy engine.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from baselines.s3_lanes import THREADS, Lane, Rows, obstore_lane, servers, services, tier_lane
from lib.processes import processor_seconds, tier_hosts
from lib.results import WAYS, at_least, middle_share, say

from kvtiers.api import TierConfig
from kvtiers.api.units import format_size
from kvtiers.plugins import load_tier
from kvtiers.secondary.placement import host_count

SIZES = [64 << 10, 512 << 10, 2 << 20, 8 << 20]
QUICK_SIZES = [64 << 10, 2 << 20, 8 << 20]
PASS_BYTES, PASS_VALUES = 256 << 20, 2048
TURN_SECONDS = 0.3
MOST_PASSES = 1 << 8
GOAL = 0.9
ORDER = ("again", "obstore", "obstore-hash", "tier")
Seconds = dict[str, dict[str, list[float]]]
"""Of each lane and way, one number a turn."""


def with_threads(config_class: type[TierConfig], options: dict[str, Any]) -> Any:
    """Return the tier's options with as many threads for stores as obstore's lane has, in all its hosts."""
    # `nice: 0`: on a machine that others use too, its host is to have what the lanes in this process have.
    found = config_class(**{"nice": 0, "store_queue": 1 << 20, "prefix": "bench", **options})
    return found.model_copy(update={"threads": math.ceil((THREADS - 1) / host_count(found, load_tier(found.type))) + 1})


def s3(endpoint: str) -> tuple[Any, Any]:
    from kvtiers_objectstore.requests import Requests
    from kvtiers_s3.config import S3Config
    from kvtiers_s3.connection import Connection

    keys = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY, "region": "us-east-1"}
    config = with_threads(S3Config, {"type": "s3", "endpoint": endpoint, "bucket": "bench-s3", **keys})
    return config, Connection(config, Requests(0, 0)).obstore()


def gcs(endpoint: str) -> tuple[Any, Any]:
    from kvtiers_gcs.config import GcsConfig
    from kvtiers_gcs.credentials import Tokens
    from kvtiers_gcs.store import open_obstore
    from kvtiers_objectstore.route import find_route

    config = with_threads(GcsConfig, {"type": "gcs", "endpoint": endpoint, "bucket": "bench-gcs", "anonymous": True})
    route = find_route(config.endpoint, ("ca_file", config.ca_file))
    return config, open_obstore(config, route, Tokens(config))


def azure(endpoint: str) -> tuple[Any, Any]:
    from kvtiers_azure.access import open_obstore, route_of
    from kvtiers_azure.config import AzureConfig

    where = {"endpoint": f"{endpoint}/devstoreaccount1", "container": "bench-azure", "emulator": True}
    config = with_threads(AzureConfig, {"type": "azure", **where})
    return config, open_obstore(config, route_of(config))


SERVICES: dict[str, Callable[[str], tuple[Any, Any]]] = {"s3": s3, "gcs": gcs, "azure": azure}


def measure(config: Any, store: Any, nbytes: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of all lanes with values of this size, and the rates that they make."""
    count = min(PASS_BYTES // nbytes, PASS_VALUES)
    with ExitStack() as stack:
        rows = Rows(nbytes, count, stack)
        others = {*tier_hosts()}
        service = stack.enter_context(services.service(config, nbytes, count, is_awaited=True))
        hosts = [pid for pid in tier_hosts() if pid not in others]
        service.rows[:] = np.frombuffer(os.urandom(nbytes), np.uint8)
        alone = obstore_lane(store, rows)
        lanes: dict[str, Lane] = {
            "obstore": alone,
            "again": alone,
            "obstore-hash": obstore_lane(store, rows, hashes=True),
            "tier": tier_lane(service),
        }
        for lane in lanes.values():
            turn(lane, count, 1, hosts)  # warms up
        shortest = min(seconds for seconds, _ in turn(alone, count, 1, hosts).values())
        passes = min(MOST_PASSES, math.ceil(TURN_SECONDS / shortest))
        seconds: Seconds = {name: {way: [] for way in WAYS} for name in lanes}
        processor: Seconds = {name: {way: [] for way in WAYS} for name in lanes}
        for _ in range(rounds):
            for name in (*ORDER, *reversed(ORDER)):
                for way, (taken, spent) in turn(lanes[name], count, passes, hosts).items():
                    seconds[name][way].append(taken)
                    processor[name][way].append(spent)
    gigabytes = count * passes * nbytes / 1e9
    rates = {name: {way: gigabytes / float(np.median(ways[way])) for way in WAYS} for name, ways in seconds.items()}
    costs = {name: {way: float(np.median(ways[way])) / gigabytes for way in WAYS} for name, ways in processor.items()}
    found = {"seconds": seconds, "processor_seconds": processor, "gb_per_s": rates, "processor_seconds_per_gb": costs}
    return {"value_bytes": nbytes, **found}


def turn(lane: Lane, count: int, passes: int, hosts: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Write new values and read them back; of several passes those of the last one are read, as often.

    Return the seconds, and the processor seconds of this process and of the tier's hosts.
    """
    keys = services.new_keys(count * passes)
    taken = {}

    def spent() -> float:
        return time.process_time() + sum(map(processor_seconds, hosts))

    for way, move, moved in zip(WAYS, lane, (keys, keys[-count:] * passes), strict=True):
        before, begin = spent(), time.perf_counter()
        move(moved)
        taken[way] = time.perf_counter() - begin, spent() - before
    return taken


def shares(sizes: Sequence[dict[str, Any]], way: str, one: str, other: str, what: str = "seconds") -> dict[str, float]:
    """Return how fast one lane is as a share of the other, by size; ``processor_seconds``: for the same of those."""
    return {
        format_size(size["value_bytes"]): middle_share(size[what][other][way], size[what][one][way]) for size in sizes
    }


def goals_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    goals = []
    for name, sizes in found["services"].items():
        for way in WAYS:
            by_size = shares(sizes, way, "tier", "obstore")
            text = f"{name}, {way}: the tier as a share of obstore alone, at every size"
            goals.append(at_least(text, min(by_size.values()), GOAL) | {"by_size": by_size})
    return goals


def report(found: dict[str, Any]) -> None:
    for name, sizes in found["services"].items():
        report_one(name, sizes)


def report_one(name: str, sizes: Sequence[dict[str, Any]], to: Any = None) -> None:
    for size in sizes:
        for lane, rates in size["gb_per_s"].items():
            cost = size["processor_seconds_per_gb"][lane]
            cells = "   ".join(f"{way} {rates[way]:6.3f} GB/s, {cost[way]:.3f} processor s/GB" for way in WAYS)
            print(f"{name:6} {format_size(size['value_bytes']):7} {lane:12} {cells}", file=to or sys.stdout)
    for way in WAYS:
        for one, other in (("again", "obstore"), ("obstore-hash", "obstore"), ("tier", "obstore-hash")):
            for what, text in (("seconds", "rate"), ("processor_seconds", "GB a processor second")):
                each = ", ".join(f"{size} {share:.2f}" for size, share in shares(sizes, way, one, other, what).items())
                print(f"{name}, {way}: {one} as a share of {other}, {text}: {each}", file=to or sys.stdout, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="What is found of a service is on stderr at once; everything is on stdout at the end.",
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 7, and not all sizes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=list(SERVICES), help="one of the services, default: all")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    rounds, sizes = (3, QUICK_SIZES) if options.quick else (7, SIZES)
    found: dict[str, Any] = {"services": {}, "rounds": rounds}
    with servers.trivial_server() as endpoint:
        for name, open_service in SERVICES.items():
            if options.only in {None, name}:
                of_service = [measure(*open_service(endpoint), nbytes, rounds) for nbytes in sizes]
                found["services"][name] = of_service
                report_one(name, of_service, sys.stderr)
    found["goals"] = goals_of(found)
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
