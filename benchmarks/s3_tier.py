"""What the S3 tier moves, beside the clients that it stands on and their peers, against the same servers in one run.

Servers: Ceph's gateway, which is a real one and mostly measures itself, and a trivial one, which costs next to nothing
and is the ceiling; ``--only trivial`` needs nothing but Python's packages. Lanes take turns, a round after the other,
each on new values, with as many requests under way as the tier has threads for loads and for stores, in all its hosts:

boto3        as users write it: a default client, put_object and get_object()["Body"].read()
boto3-tuned  the tier's own fallback client, without the tier
obstore      the library that moves the tier's values, alone in this process, which is idle; copied out of its buffer
obstore-hash the same, and a hash over each value, as the tier's seal is: what no tier on obstore can do without
awscrt       AWS's client in C, with its own threads
tier         the whole contract with `io: process`: jobs to a tier host, with seal and check
tier-busy    the same, driven by a thread that runs pure Python in between, as an engine's does
tier-beside  the same, driven by a thread that sleeps in between, beside the same loop in an unrelated process
tier-boto3   the tier with `client: boto3`

CPU seconds are the client's, without the server's. Medians.

The shares are of two turns that follow one another, the medians over all rounds. obstore, with a hash and without, and
the tier take theirs one way and back in each round; the tier beside the loops one way in one round, and the other way
in the next. The peers, of which no share is taken, have a quarter of the values, and turns in every third round.

A turn of what is compared moves all values so often that it takes obstore alone 0.3 s, and the tier beside the other
process's loop 1 s, as found at the start; with the gateway once. A job of the next pass begins where one of the last
has ended, so that there is no break between passes. Of the values those of the last pass are read back, as often. The
driver asks the tier for news every 5 ms.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from peers.busy_loop import be_busy, busy_process
from peers.processes import children, private_mb, processor_seconds
from peers.s3_lanes import (
    JOB_BYTES,
    TESTS,
    THREADS,
    Keyed,
    Lane,
    Rows,
    awscrt_lane,
    boto3_lane,
    boto3_tuned_lane,
    obstore_lane,
    servers,
    services,
)

from kvtiers.api import OffloadKey
from kvtiers.api.units import format_size
from kvtiers.secondary.hosts import host_count
from kvtiers_s3.plugin import S3Config

SIZES = [64 << 10, 512 << 10, 2 << 20, 8 << 20]
# Bytes and values of a pass, at most, and passes of a turn. The trivial server keeps more: two passes overlap. The
# gateway gives back the memory of large values long after they are deleted, and hangs when it has none left.
AMOUNTS = {"trivial": (512 << 20, 8192, 1 << 10), "radosgw": (128 << 20, 1024, 1)}
STEP_SECONDS = 0.005
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
MODES = ("write", "read")
Sample = dict[str, tuple[float, float]]
"""Of one turn, for each mode: seconds and CPU seconds."""
# Side by side: the machine may do something else a moment later.
ALONE = ("obstore-hash", "obstore", "tier")
BESIDE = ("tier-busy", "tier-beside")
# What each step from obstore to the tier leaves of it.
SHARES = (("obstore-hash", "obstore"), ("tier", "obstore-hash"))
# By which lane's pace they have how many seconds a turn.
TURNS = ((ALONE, "obstore", 0.3), (BESIDE, "tier-beside", 1.0))
LMCACHE = (
    "LMCache's S3 connector: left out, its package wants torch, cupy for CUDA and an older numpy; it stands on awscrt"
)


def config(endpoint: str, bucket: str, **options: Any) -> S3Config:
    keys = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY, "region": "us-east-1"}
    where = {"endpoint": endpoint, "bucket": bucket, "prefix": "bench"}
    # `nice: 0`: on a machine that others use too, its host is to have what the lanes in this process have.
    found = S3Config(**{"type": "s3", "nice": 0, "store_queue": 1 << 20, **where, **keys, **options})
    writers = math.ceil((THREADS - 1) / host_count(found))
    return found.model_copy(update={"threads": writers + 1})


def tier_lane(tier: Any) -> Lane:
    """Send jobs of 64 MiB to a tier host, for all rows at once, as the manager does."""
    per_job = max(1, JOB_BYTES // tier.rows.shape[1])
    tier.step_seconds = STEP_SECONDS

    def run(keys: Sequence[OffloadKey], *, is_load: bool) -> None:
        rows = len(tier.rows)
        jobs = [(keys[at : at + per_job], at % rows) for at in range(0, len(keys), per_job)]
        results = tier.run_all(jobs, load=is_load)
        failed = sum(not result.success for result in results)
        assert not failed, f"{failed} of {len(results)} jobs failed"

    return (lambda keys: run(keys, is_load=False)), (lambda keys: run(keys, is_load=True))


@contextlib.contextmanager
def busy_driver(service: Any) -> Iterator[None]:
    """Have the thread that drives the tier run pure Python between its questions."""
    rest, service.rest = service.rest, be_busy
    try:
        yield
    finally:
        service.rest = rest


def hosts() -> list[int]:
    """Return the process ids of this process's tier hosts."""
    return [pid for pid in children() if b"kvtiers" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def hosts_cpu() -> float:
    """Return the CPU seconds of this process's tier hosts."""
    return sum(map(processor_seconds, hosts()))


def lanes_of(options: S3Config, nbytes: int, count: int, stack: ExitStack) -> dict[str, tuple[Lane, Callable[[], Any]]]:
    """Return the lanes, each with what runs beside it."""
    rows = Rows(nbytes, count, stack)

    def tier(client: str) -> Any:
        service = stack.enter_context(services.service(options.model_copy(update={"client": client}), nbytes, count))
        service.rows[:] = np.frombuffer(os.urandom(nbytes), np.uint8)
        return service

    service = tier("obstore")
    by_obstore = tier_lane(service)
    alone = contextlib.nullcontext
    return {
        "boto3": (boto3_lane(options, rows), alone),
        "boto3-tuned": (boto3_tuned_lane(options, rows), alone),
        "awscrt": (awscrt_lane(options, rows), alone),
        "obstore-hash": (obstore_lane(options, rows, hashes=True), alone),
        "obstore": (obstore_lane(options, rows), alone),
        "tier": (by_obstore, alone),
        "tier-busy": (by_obstore, lambda: busy_driver(service)),
        "tier-beside": (by_obstore, busy_process),
        "tier-boto3": (tier_lane(tier("boto3")), alone),
    }


def measure(
    options: S3Config,
    nbytes: int,
    count: int,
    most_passes: int,
    rounds: int,
    forget: Callable[[S3Config, Sequence[OffloadKey]], None],
) -> dict[str, Any]:
    """Return the rates of all lanes with values of this size; ``forget`` deletes what was written."""
    samples: dict[str, list[Sample]] = {}
    with ExitStack() as stack:
        lanes = lanes_of(options, nbytes, count, stack)
        peers = [name for name in lanes if name not in (*ALONE, *BESIDE)]
        counts = {name: min(count // PEERS_SHARE, PEERS_MOST) if name in peers else count for name in lanes}
        passes = dict.fromkeys(lanes, 1)

        def turn(name: str) -> Sample:
            (write, read), beside = lanes[name]
            keys = services.new_keys(counts[name] * passes[name])
            works = (write, keys), (read, keys[-counts[name] :] * passes[name])
            with beside():
                # Of a tier its host's alone: what this process does is the engine's, or the loop beside it.
                cpu = hosts_cpu if name.startswith("tier") else time.process_time
                sample = {mode: timed(work, keys, cpu) for mode, (work, keys) in zip(MODES, works, strict=True)}
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
    return {"value_bytes": nbytes, "lanes": {name: rates(samples[name], amounts[name], nbytes) for name in lanes}}


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
    for mode in MODES:
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
        tier.tier.set_names(services.NAMES)  # what it knows of them is forgotten
        before = tier.figures_after(2.5)["head_requests"]
        hits = tier.hits(keys)
        assert hits == FAR_VALUES, hits
        lookups = tier.figures_after(2.5)["head_requests"] - before
        memory = max(map(private_mb, hosts()))
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
        [sys.executable, str(TESTS / "proxy.py"), str(port), str(FIRST_BYTE), str(LINK)],
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
        for mode in MODES:
            name = f"{server}, {mode}: the tier as a share of obstore alone, at every size"
            goals.append(at_every_size(name, shares(sizes, mode, "tier", "obstore"), GOAL_OF_OBSTORE))
            name = f"{server}, {mode}: beside a busy engine thread as a share of beside the same loop elsewhere"
            goals.append(at_every_size(name, shares(sizes, mode, "tier-busy", "tier-beside"), GOAL_BESIDE_BUSY))
    far = found["far"]
    for name, value, goal in (
        (f"{FAR_VALUES} values of 2 MiB from 30 ms away, first-byte times", far["first_byte_times"], GOAL_FIRST_BYTES),
        (f"requests that locate the end of a {PREFIX_CHUNKS}-chunk prefix", far["lookup_requests"], GOAL_LOOKUPS),
        ("private memory of each of its hosts afterwards, at rest, MB", far["private_mb"], GOAL_PRIVATE_MB),
    ):
        goals.append({"name": name, "value": value, "goal": goal, "met": value <= goal})
    return goals


def paired(lanes: dict[str, Any], mode: str, one: str, other: str) -> float:
    """Return how fast one lane is as a share of the other, round by round, in the middle."""
    pairs = zip(lanes[one][mode]["seconds"], lanes[other][mode]["seconds"], strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)


def shares(sizes: Sequence[dict[str, Any]], mode: str, one: str, other: str) -> dict[str, float]:
    return {format_size(size["value_bytes"]): paired(size["lanes"], mode, one, other) for size in sizes}


def at_every_size(name: str, values: dict[str, float], goal: float) -> dict[str, Any]:
    least = min(values.values())
    return {"name": name, "value": least, "by_size": values, "goal": goal, "met": least >= goal}


def report(found: dict[str, Any]) -> None:
    for server, sizes in found["servers"].items():
        report_rates(server, sizes, sys.stdout)
    print("the tier: {hosts} hosts with {threads} threads each".format(**found["tier"]))
    for peer in found["left_out"]:
        print(peer)
    for server, sizes in found["servers"].items():
        report_shares(server, sizes, SHARES, sys.stdout)
    for goal in found["goals"]:
        each = ", ".join(f"{size} {value:.2f}" for size, value in goal.get("by_size", {}).items())
        found_it = f"{goal['value']:.2f}{f' ({each})' if each else ''}"
        print(f"{goal['name']}: {found_it}; goal {goal['goal']:g}: {'met' if goal['met'] else 'MISSED'}")


def report_rates(server: str, sizes: Sequence[dict[str, Any]], to: TextIO) -> None:
    print(f"{server}; GB/s, values/s, client's CPU s per GB", file=to)
    for size in sizes:
        for name, lane in size["lanes"].items():
            cells = [
                f"{mode} {lane[mode]['gb_per_s']:6.3f} {lane[mode]['values_per_s']:7.0f}"
                f" {lane[mode]['cpu_s_per_gb']:6.2f}"
                for mode in MODES
            ]
            print(f"  {format_size(size['value_bytes']):7} {name:12} {'   '.join(cells)}", file=to, flush=True)


def report_shares(server: str, sizes: Sequence[dict[str, Any]], pairs: Sequence[tuple[str, str]], to: TextIO) -> None:
    for mode in MODES:
        for one, other in pairs:
            each = ", ".join(f"{size} {share:.2f}" for size, share in shares(sizes, mode, one, other).items())
            print(f"{server}, {mode}: {one} as a share of {other}: {each}", file=to, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="What is found of a size is on stderr at once; everything is on stdout at the end.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=list(AMOUNTS), help="one of the servers, default: both")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    rounds, sizes = (5, SIZES[::2] + SIZES[-1:]) if options.quick else (11, SIZES)
    left_out = [LMCACHE]
    found: dict[str, Any] = {"servers": {}, "left_out": left_out}
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
            found["tier"] = {"hosts": host_count(where), "threads": where.threads}
            forget = (lambda *_: None) if trivial else delete_all  # the trivial one forgets by itself
            total, most, most_passes = AMOUNTS[name]
            of_sizes = found["servers"][name] = []
            for nbytes in sizes:
                of_sizes.append(measure(where, nbytes, min(total // nbytes, most), most_passes, rounds, forget))
                report_rates(name, of_sizes[-1:], sys.stderr)
                report_shares(name, of_sizes[-1:], (("tier", "obstore"), *SHARES), sys.stderr)
        found["far"] = far_away(trivial_endpoint, "bench-bucket", rounds)
    found["goals"] = goals_of(found)
    if options.json:
        print(json.dumps(found))
    else:
        report(found)


if __name__ == "__main__":
    main()
