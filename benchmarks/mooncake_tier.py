"""The rates of the Mooncake tier, beside a plain loop over the same client and beside the Redis tier, in one run.

`tier` is the whole contract with `io: process`: a tier host, which seals what it writes and checks what it reads, in
jobs of 128 MiB. `plain loop` moves the same rows with the same calls of the same client library in a process of its
own, in one thread or in four, and seals and checks nothing: the better of the two is what the tier is a share of.
`control` is that loop once more, in the same turns: what differs between it and the loop is this machine. `redis tier`
is the other tier for a network, with its defaults, on a server of its own; it is there to choose by, without a goal.
`hashes` is the processor's time for the seals of the same values alone, in one thread, as GB/s.

All values lie in the segment of another process, so that each crosses a socket, as between machines; over a network the
link is the limit instead. The lanes take turns, and the figures are the medians.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from baselines import redis_lanes as lanes
from baselines.mooncake_plain import PlainLoop, plain_loop
from lib.results import WAYS, at_least, middle_share, say
from rigs.store_tier_lane import NAMES, TierLane

from kvtiers.api.units import format_size, parse_size
from kvtiers.layout.seal import seal_value
from kvtiers_mooncake.config import MooncakeConfig
from kvtiers_redis.config import RedisConfig

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
sys.path[:0] = [str(PLUGINS / name / "tests") for name in ("redis_tier", "mooncake_tier")]

from pool import Master, SegmentOwner  # noqa: E402 -- the pool of the tier's tests
from servers import Server  # noqa: E402 -- the servers of the tier's tests

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20]
THREADS = (1, 4)
LOOPS = {f"plain loop, {threads} threads": threads for threads in THREADS}
SEGMENT_BYTES = 2 << 30
GOALS = {"write": 0.8, "read": 0.8}
CONTROL = 0.8
LARGE_FROM = 1 << 20


def measure(master: Master, server: Server, nbytes: int, total: int, rounds: int) -> dict[str, Any]:
    """Return the rates of all lanes at this size."""
    with lanes.memory(total) as (fd, rows), ExitStack() as stack:
        loop = stack.enter_context(plain_loop(master.address, fd, total))
        options = {"store_queue": 1 << 20, "deadline": "60s", "nice": 0}
        mooncake = MooncakeConfig(type="mooncake", master=master.address, **options)
        redis = RedisConfig(type="redis", url=server.url, **options)
        tier = TierLane(lambda: loop, fd, rows, nbytes, mooncake, stack)
        beside = TierLane(server.client, fd, rows, nbytes, redis, stack)
        moves = {name: partial(_loop_rate, loop, nbytes, threads) for name, threads in LOOPS.items()}
        moves |= {"tier": tier.rate, "control": partial(_loop_rate, loop, nbytes, THREADS[-1])}
        moves |= {"redis tier": beside.rate}
        samples = lanes.samples_of(moves, rounds)
        hashes = _hash_rate(rows, nbytes)
        tier.forget()
        with server.client() as client:
            client.flushall()
    best = {way: [max(pair) for pair in zip(*(samples[name][way] for name in LOOPS), strict=True)] for way in WAYS}
    last = [*LOOPS][-1]
    return {
        "value_bytes": nbytes,
        "gb_per_s": lanes.medians(samples) | {"hashes": dict.fromkeys(WAYS, hashes)},
        "of_plain": {way: middle_share(samples["tier"][way], best[way]) for way in WAYS},
        "control": {way: middle_share(samples["control"][way], samples[last][way]) for way in WAYS},
        "of_redis": {way: middle_share(samples["tier"][way], samples["redis tier"][way]) for way in WAYS},
    }


def _loop_rate(loop: PlainLoop, nbytes: int, threads: int, way: str) -> float:
    return loop.rate(way, nbytes, threads)


def _hash_rate(rows: memoryview, nbytes: int) -> float:
    """Return the GB/s at which one thread seals the values."""
    begin = time.perf_counter()
    for start in range(0, len(rows), nbytes):
        seal_value(rows[start : start + nbytes], nbytes - 64, "bench/name", NAMES.layout_id)
    return len(rows) / 1e9 / (time.perf_counter() - begin)


def goals_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals, each with the worst size's share, and the control that says how far to trust them."""
    goals = []
    for way in WAYS:
        large = [size["of_plain"][way] for size in found if size["value_bytes"] >= LARGE_FROM]
        goals.append(at_least(f"{way}, values of 1 MiB and more, of the better plain loop", min(large), GOALS[way]))
        control = min(min(size["control"][way], 1 / size["control"][way]) for size in found)
        goals.append(at_least(f"{way}, the plain loop of itself (control)", control, CONTROL))
    return goals


def report(found: dict[str, Any]) -> None:
    """Print the rates as a table."""
    names = [*found["sizes"][0]["gb_per_s"]]
    print(f"GB/s (write / read), {found['processors']} processors, {found['total_bytes'] >> 20} MiB a turn")
    print(" " * 10 + "".join(f"{name:>24}" for name in names) + f"{'of plain':>16}{'of redis':>16}{'control':>16}")
    for size in found["sizes"]:
        cells = ["{write:.2f} / {read:.2f}".format(**size["gb_per_s"][name]) for name in names]
        shares = ["{write:.2f} / {read:.2f}".format(**size[name]) for name in ("of_plain", "of_redis", "control")]
        line = "".join(f"{cell:>24}" for cell in cells) + "".join(f"{share:>16}" for share in shares)
        print(f"{format_size(size['value_bytes']):10}{line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer bytes, sizes and rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", type=parse_size, action="append", help="only this size")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    total, rounds = (64 << 20, 5) if options.quick else (256 << 20, 7)
    sizes = options.size or (SIZES[::2] if options.quick else SIZES)
    found: dict[str, Any] = {"processors": len(os.sched_getaffinity(0)), "total_bytes": total, "sizes": []}
    with tempfile.TemporaryDirectory(prefix="kvtiers-bench-") as top, ExitStack() as stack:
        master = Master(Path(top, "mooncake")).start()
        stack.callback(master.kill)
        owner = SegmentOwner(master.address, SEGMENT_BYTES)
        stack.callback(owner.kill)
        server = Server(Path(top, "redis"), "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru").start()
        stack.callback(server.stop)
        for nbytes in sizes:
            print(f"{format_size(nbytes)} ...", file=sys.stderr)
            found["sizes"].append(measure(master, server, nbytes, total, rounds))
    if options.size:
        print(json.dumps(found))
        return
    found["goals"] = goals_of(found["sizes"])
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
