"""Throughput of the S3 tier, beside the clients that it stands on and their peers, against the same servers in one run.

Servers: Ceph's gateway, which is a real one and mostly measures itself, and a trivial one, which costs next to nothing
and is the ceiling; ``--only trivial`` needs nothing but Python's packages. Lanes take turns, a round after the other,
each on new values, with as many requests in flight as the tier has threads for loads and for stores, in all its hosts:

boto3        as users write it: a default client, put_object and get_object()["Body"].read()
boto3-tuned  the tier's own fallback client, without the tier
obstore      the library that moves the tier's values, alone in this process, which is idle; copied out of its buffer
obstore-hash the same, and a hash over each value, as the tier's seal is: what no tier on obstore can do without
awscrt       AWS's client in C, with its own threads
lmcache      LMCache's S3 connector, which stands on it, in a process of its own
tier         the whole contract with `io: process`: jobs to a tier host, with seal and check
tier-busy    the same, driven by a thread that runs pure Python in between, as an engine's does
tier-beside  the same, driven by a thread that sleeps in between, beside the same loop in an unrelated process
tier-boto3   the tier with `client: boto3`

`lmcache` wants other packages than ours, and is left out where they are not: ``--lmcache`` is a Python that has them.
It does not put the bucket's name in the path (`baselines/lmcache_s3.py`), so it is left out beside the gateway here.

CPU seconds are the client's, without the server's. Medians.

The shares are of two turns that follow one another, the medians over all rounds. obstore, with a hash and without, and
the tier take theirs one way and back in each round; the tier beside the loops one way in one round, and the other way
in the next. The peers, of which no share is taken, have a quarter of the values, and turns in every third round.

A turn of what is compared moves all values so often that it takes obstore alone 0.3 s, and the tier beside the other
process's loop 1 s, as found at the start; with the gateway once. A job of the next pass begins where one of the last
has ended, so that there is no break between passes. Of the values those of the last pass are read back, as often. The
driver asks the tier for events every 5 ms.
"""

import argparse
import contextlib
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TextIO

import numpy as np
from baselines.lmcache_s3 import INSTALL, LeftOutError
from baselines.s3_lanes import (
    STEP_SECONDS,
    THREADS,
    Keyed,
    Lane,
    Rows,
    Seconds,
    awscrt_lane,
    boto3_lane,
    boto3_tuned_lane,
    lmcache_lane,
    obstore_lane,
    servers,
    services,
    tier_lane,
)
from lib.processes import private_mb, processor_seconds, tier_hosts
from lib.results import WAYS, at_least, at_most, middle_share, say
from rigs.busy_loop import busy_driver, busy_process

from kvtiers.api import OffloadKey
from kvtiers.api.units import format_size
from kvtiers.plugins import load_tier
from kvtiers.secondary.placement import host_count
from kvtiers_objectstore.requests import Requests
from kvtiers_s3.config import S3Config
from kvtiers_s3.connection import Connection

SIZES = [64 << 10, 512 << 10, 2 << 20, 8 << 20]
# Bytes and values of a pass, at most, and passes of a turn. The trivial server keeps more: two passes overlap. The
# gateway gives back the memory of large values long after they are deleted, and hangs when it has none left.
AMOUNTS = {"trivial": (512 << 20, 8192, 1 << 10), "radosgw": (128 << 20, 1024, 1)}
DELETED_AT_ONCE = 100  # a gateway takes longer for a thousand than its client waits
PEERS_SHARE, PEERS_MOST = 4, 512  # a peer's turn: so many times fewer values, and no more than so many
PEERS_ROUNDS = 3  # in every third one
FIRST_BYTE, LINK = 0.03, 125e6
FAR_VALUES, FAR_BYTES = 64, 2 << 20
PREFIX_CHUNKS = 200
GOAL_OF_OBSTORE = GOAL_BESIDE_BUSY = 0.9
GOAL_FIRST_BYTES = 4.0
GOAL_LOOKUPS = 9
GOAL_PRIVATE_MB = 60
Sample = dict[str, tuple[float, float]]
"""Of one turn, for each mode: seconds and CPU seconds."""
# Side by side: the machine may do something else a moment later.
ALONE = ("obstore-hash", "obstore", "tier")
BESIDE = ("tier-busy", "tier-beside")
# What each step from obstore to the tier leaves of it.
SHARES = (("obstore-hash", "obstore"), ("tier", "obstore-hash"))
# By which lane's pace they have how many seconds a turn.
TURNS = ((ALONE, "obstore", 0.3), (BESIDE, "tier-beside", 1.0))


def config(endpoint: str, bucket: str, **options: Any) -> S3Config:
    keys = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY, "region": "us-east-1"}
    where = {"endpoint": endpoint, "bucket": bucket, "prefix": "bench"}
    # `nice: 0`: on a machine that others use too, its host is to have what the lanes in this process have.
    found = S3Config(**{"type": "s3", "nice": 0, "store_queue": 1 << 20, **where, **keys, **options})
    writers = math.ceil((THREADS - 1) / host_count(found, load_tier(found.type)))
    return found.model_copy(update={"threads": writers + 1})


def hosts_cpu() -> float:
    """Return the CPU seconds of this process's tier hosts."""
    return sum(map(processor_seconds, tier_hosts()))


class Way(NamedTuple):
    """A lane, what runs beside it, and what counts its CPU seconds."""

    lane: Lane
    beside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    cpu_seconds: Seconds = time.process_time


def lanes_of(options: S3Config, nbytes: int, count: int, stack: ExitStack) -> dict[str, Way]:
    """Return the lanes, but for LMCache's."""
    rows = Rows(nbytes, count, stack)
    alone = Connection(options, Requests(0, 0)).obstore()

    def tier(client: str) -> Any:
        service = stack.enter_context(services.service(options.model_copy(update={"client": client}), nbytes, count))
        service.rows[:] = np.frombuffer(os.urandom(nbytes), np.uint8)
        return service

    service = tier("obstore")
    by_obstore = tier_lane(service)
    # Of a tier its host's alone: what this process does is the engine's, or the loop beside it.
    return {
        "boto3": Way(boto3_lane(options, rows)),
        "boto3-tuned": Way(boto3_tuned_lane(options, rows)),
        "awscrt": Way(awscrt_lane(options, rows)),
        "obstore-hash": Way(obstore_lane(alone, rows, hashes=True)),
        "obstore": Way(obstore_lane(alone, rows)),
        "tier": Way(by_obstore, cpu_seconds=hosts_cpu),
        "tier-busy": Way(by_obstore, lambda: busy_driver(service, STEP_SECONDS), hosts_cpu),
        "tier-beside": Way(by_obstore, busy_process, hosts_cpu),
        "tier-boto3": Way(tier_lane(tier("boto3")), cpu_seconds=hosts_cpu),
    }


def measure(
    options: S3Config,
    nbytes: int,
    count: int,
    most_passes: int,
    rounds: int,
    forget: Callable[[S3Config, Sequence[OffloadKey]], None],
    lmcache_python: str,
) -> dict[str, Any]:
    """Return the rates of all lanes with values of this size; ``forget`` deletes what was written."""
    left_out = {}
    samples: dict[str, list[Sample]] = {}
    with ExitStack() as stack:
        lanes = lanes_of(options, nbytes, count, stack)
        of_a_peer = min(count // PEERS_SHARE, PEERS_MOST)
        try:
            lane, cpu_seconds = lmcache_lane(options, lmcache_python, nbytes, of_a_peer, stack)
            lanes["lmcache"] = Way(lane, cpu_seconds=cpu_seconds)
        except LeftOutError as error:
            left_out["lmcache"] = str(error)
        peers = [name for name in lanes if name not in (*ALONE, *BESIDE)]
        counts = {name: of_a_peer if name in peers else count for name in lanes}
        passes = dict.fromkeys(lanes, 1)

        def turn(name: str) -> Sample:
            (write, read), beside, cpu = lanes[name]
            keys = services.new_keys(counts[name] * passes[name])
            works = (write, keys), (read, keys[-counts[name] :] * passes[name])
            with beside():
                sample = {mode: timed(work, keys, cpu) for mode, (work, keys) in zip(WAYS, works, strict=True)}
            forget(options, keys)
            return sample

        for name in lanes:
            turn(name)  # warms up
        for names, pace, seconds in TURNS:
            a_pass = min(taken for taken, _ in turn(pace).values())
            passes |= dict.fromkeys(names, min(most_passes, math.ceil(seconds / a_pass)))
        for number in range(rounds):
            of_peers = peers if number % PEERS_ROUNDS == 0 else []
            for name in (*of_peers, *ALONE, *reversed(ALONE), *BESIDE[:: -1 if number % 2 else 1]):
                samples.setdefault(name, []).append(turn(name))
    amounts = {name: counts[name] * passes[name] for name in lanes}
    found = {name: rates(samples[name], amounts[name], nbytes) for name in lanes}
    return {"value_bytes": nbytes, "lanes": found, "left_out": left_out}


def delete_all(options: S3Config, keys: Sequence[OffloadKey]) -> None:
    """Delete these values, under whichever prefix a lane has put them."""
    client = servers.client_of(options.endpoint)
    for start in range(0, len(keys), DELETED_AT_ONCE):
        some = keys[start : start + DELETED_AT_ONCE]
        names = [{"Key": f"{options.prefix}/{name}"} for name in services.NAMES.names(some)]
        client.delete_objects(Bucket=options.bucket, Delete={"Objects": names, "Quiet": True})
    client.close()


def timed(work: Keyed, keys: Sequence[OffloadKey], cpu_seconds: Callable[[], float]) -> tuple[float, float]:
    """Return seconds and CPU seconds."""
    cpu, begin = cpu_seconds(), time.perf_counter()
    work(keys)
    return time.perf_counter() - begin, cpu_seconds() - cpu


def rates(samples: Sequence[Sample], count: int, nbytes: int) -> dict[str, Any]:
    gigabytes = count * nbytes / 1e9
    found: dict[str, Any] = {}
    for mode in WAYS:
        seconds = statistics.median(sample[mode][0] for sample in samples)
        cpu = statistics.median(sample[mode][1] for sample in samples)
        found[mode] = {
            "gb_per_s": gigabytes / seconds,
            "values_per_s": count / seconds,
            "cpu_s_per_gb": cpu / gigabytes,
            "seconds": [sample[mode][0] for sample in samples],
        }
    return found


def far_away(endpoint: str, bucket: str, rounds: int) -> dict[str, Any]:
    """Measure the tier as it is configured by default, behind 30 ms to the first byte and a link of 1 Gbit/s."""
    port = int(endpoint.rpartition(":")[2])
    with ExitStack() as stack:
        proxy = stack.enter_context(far_proxy(port))
        options = config(proxy, bucket).model_copy(update={"threads": S3Config.model_fields["threads"].default})
        tier = stack.enter_context(services.service(options, FAR_BYTES, FAR_VALUES))
        tier.rows[:] = np.frombuffer(os.urandom(FAR_BYTES), np.uint8)
        keys = services.new_keys(PREFIX_CHUNKS)
        write, read = tier_lane(tier)
        write(keys[:FAR_VALUES])
        seconds = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            read(keys[:FAR_VALUES])
            seconds.append(time.perf_counter() - begin)
        transfer = FAR_VALUES * FAR_BYTES / LINK
        tier.tier.set_names(services.NAMES)  # what it has of them is forgotten
        before = tier.figures_after(2.5)["head_requests"]
        hits = tier.hits(keys)
        assert hits == FAR_VALUES, hits
        lookups = tier.figures_after(2.5)["head_requests"] - before
        memory = max(map(private_mb, tier_hosts()))
    taken = statistics.median(seconds[1:])
    return {
        "seconds": taken,
        "transfer_seconds": transfer,
        "first_byte_times": (taken - transfer) / FIRST_BYTE,
        "lookup_requests": lookups,
        "private_mb": memory,
    }


@contextlib.contextmanager
def far_proxy(port: int) -> Iterator[str]:
    """Run the tests' proxy in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvtiers_objectstore.testing.proxy", str(port), str(FIRST_BYTE), str(LINK)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def goals_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    goals = []
    for server, sizes in found["servers"].items():
        for mode in WAYS:
            name = f"{server}, {mode}: the tier as a share of obstore alone, at every size"
            goals.append(at_every_size(name, shares(sizes, mode, "tier", "obstore"), GOAL_OF_OBSTORE))
            name = f"{server}, {mode}: beside a busy engine thread as a share of beside the same loop elsewhere"
            goals.append(at_every_size(name, shares(sizes, mode, "tier-busy", "tier-beside"), GOAL_BESIDE_BUSY))
    far = found["far"]
    times = f"{FAR_VALUES} values of 2 MiB from 30 ms away, first-byte times"
    lookups = f"requests that locate the end of a {PREFIX_CHUNKS}-chunk prefix"
    memory = "private memory of each of its hosts afterwards, at rest, MB"
    goals.append(at_most(times, far["first_byte_times"], GOAL_FIRST_BYTES))
    goals.append(at_most(lookups, far["lookup_requests"], GOAL_LOOKUPS))
    goals.append(at_most(memory, far["private_mb"], GOAL_PRIVATE_MB))
    return goals


def at_every_size(name: str, values: dict[str, float], goal: float) -> dict[str, Any]:
    return at_least(name, min(values.values()), goal) | {"by_size": values}


def paired(lanes: dict[str, Any], mode: str, one: str, other: str) -> float:
    """Return how fast one lane is as a share of the other, round by round, in the middle."""
    return middle_share(lanes[other][mode]["seconds"], lanes[one][mode]["seconds"])


def shares(sizes: Sequence[dict[str, Any]], mode: str, one: str, other: str) -> dict[str, float]:
    return {format_size(size["value_bytes"]): paired(size["lanes"], mode, one, other) for size in sizes}


def lmcache_left_out(server: str, sizes: Sequence[dict[str, Any]]) -> list[str]:
    """Return why LMCache's connector was not measured, a line each, and how it can be had."""
    problems = dict.fromkeys(size["left_out"]["lmcache"] for size in sizes if size["left_out"])
    how = "; it takes a Python (--lmcache) with: "
    return [
        f"{server}: LMCache's S3 connector: left out, {problem}{how + INSTALL if 'No module' in problem else ''}"
        for problem in problems
    ]


def report(found: dict[str, Any]) -> None:
    for server, sizes in found["servers"].items():
        report_rates(server, sizes, sys.stdout)
    print("the tier: {hosts} hosts with {threads} threads each".format(**found["tier"]))
    for peer in found["left_out"]:
        print(peer)
    for server, sizes in found["servers"].items():
        report_shares(server, sizes, SHARES, sys.stdout)


def report_rates(server: str, sizes: Sequence[dict[str, Any]], to: TextIO) -> None:
    print(f"{server}; GB/s, values/s, client's CPU s per GB", file=to)
    for size in sizes:
        for name, lane in size["lanes"].items():
            cells = [
                f"{mode} {lane[mode]['gb_per_s']:6.3f} {lane[mode]['values_per_s']:7.0f}"
                f" {lane[mode]['cpu_s_per_gb']:6.2f}"
                for mode in WAYS
            ]
            print(f"  {format_size(size['value_bytes']):7} {name:12} {'   '.join(cells)}", file=to, flush=True)


def report_shares(server: str, sizes: Sequence[dict[str, Any]], pairs: Sequence[tuple[str, str]], to: TextIO) -> None:
    for mode in WAYS:
        for one, other in pairs:
            each = ", ".join(f"{size} {share:.2f}" for size, share in shares(sizes, mode, one, other).items())
            print(f"{server}, {mode}: {one} as a share of {other}: {each}", file=to, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="What is found of a size is on stderr at once; everything is on stdout at the end.",
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 11, and not all sizes")
    parser.add_argument("--rounds", type=int, help="so many rounds instead, at all sizes unless --quick")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=list(AMOUNTS), help="one of the servers, default: both")
    parser.add_argument("--lmcache", metavar="PYTHON", default=sys.executable, help="one that has LMCache's packages")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    rounds, sizes = (5, SIZES[::2] + SIZES[-1:]) if options.quick else (11, SIZES)
    rounds = options.rounds or rounds
    left_out: list[str] = []
    found: dict[str, Any] = {"servers": {}, "left_out": left_out, "rounds": rounds}
    with ExitStack() as stack:
        trivial_endpoint = stack.enter_context(servers.trivial_server())
        endpoints = {} if options.only == "radosgw" else {"trivial": trivial_endpoint}
        if options.only == "trivial":
            left_out.append("Ceph's gateway: left out, as was asked for")
        elif shutil.which("radosgw"):
            endpoints["radosgw"] = stack.enter_context(servers.Radosgw(memory_bytes=8 << 30)).endpoint
        else:
            left_out.append("Ceph's gateway: left out, radosgw is not installed here")
        for name, endpoint in endpoints.items():
            trivial = name == "trivial"
            where = config(endpoint, "bench-bucket" if trivial else servers.new_bucket(endpoint))
            found["tier"] = {"hosts": host_count(where, load_tier(where.type)), "threads": where.threads}
            forget = (lambda *_: None) if trivial else delete_all  # the trivial one forgets by itself
            total, most, most_passes = AMOUNTS[name]
            of_sizes = found["servers"][name] = []
            for nbytes in sizes:
                count = min(total // nbytes, most)
                of_sizes.append(measure(where, nbytes, count, most_passes, rounds, forget, options.lmcache))
                report_rates(name, of_sizes[-1:], sys.stderr)
                report_shares(name, of_sizes[-1:], (("tier", "obstore"), *SHARES), sys.stderr)
            left_out += lmcache_left_out(name, of_sizes)
        found["far"] = far_away(trivial_endpoint, "bench-bucket", rounds)
    found["goals"] = goals_of(found)
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
