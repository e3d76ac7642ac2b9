"""Throughput of the Redis tier, beside redis-benchmark with 1, 4 and 16 connections to the same server in the same run.

`tier` is the whole contract with `io: process`: tier hosts, as many as the tier has by itself or `--processes` says,
which seal what they write and check what they read, in jobs of 128 MiB. `bare sockets` move the same rows in three
Python threads and look at nothing: what the tier takes beyond them is its own. `redis-py` sets and gets a value at a
time, a quarter of them. `lmcache` is LMCache's native connector, where it can be had. All others move as many values
under as many keys, in turns, a round after the other; medians, and of redis-benchmark the best of the three. It sends
one buffer again and again, which stays in a cache, and seals and checks nothing: where clients and server have to share
processors, that is a part of its rate; all others move a region that no cache holds.

Server and tier are set up as the plugin's README says: on 8 processors and more with io-threads, and with more threads
and a smaller window than by default, on fewer with neither. All lanes, redis-benchmark too, use the same server, and
all goals are of it. The ceiling is redis-benchmark as it is, with nothing but its connections. Where the server has
io-threads, redis-benchmark is also run with as many threads of its own, and what the tier is of the best of those
stands beside the goals, without one: such a client alone takes four processors. `plain, one thread` is what a server
without io-threads gives on such a machine, with the tier's defaults, with no goal either. `--io-threads` forces a
number. TLS and the network have the tier's defaults on any machine, and TLS a server without io-threads: beside many
TLS connections Redis 7.0 with io-threads that read ends in a write; its configuration file says that these do not work
with TLS. (That redis-benchmark writes values of 64 KiB at 0.01 GB/s with TLS is its own: it does so with io-threads and
without.)

`tls` is beside redis-benchmark and a bare Python TLS socket. `delayed` is over a network with 1 ms of round trip and a
link of 10 Gbit/s (`--link`), beside raw streams over the same, which show that the link gives what it says. Its goal is
about the round trip: whether windows and connections hide it. `delayed, no link` has the same round trip and no
limit, and no goal: raw streams move more over it than one Redis serves without any delay (redis-benchmark is beside
them), so that a share of theirs would measure the server. `busy` is with an engine's thread that runs pure Python flat
out, beside the same loop in an unrelated process: the median of the rounds' ratios, since turns that follow each other
differ less than rounds do, and each turn takes a second or more.

The servers keep the memory of what is deleted, as a full cache uses that of what it evicts: redis-benchmark overwrites
its keys, core writes each key once, and neither is to pay for new pages that the other has not. All lanes have the same
priority, except beside the busy thread, where the host gives way to the engine as it does by default.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from baselines import redis_lanes as lanes
from baselines import redis_sockets as sockets
from lib.processes import processor_seconds
from lib.results import WAYS, at_least, middle_share, options_of, say
from rigs import slow_network as network
from rigs.busy_loop import busy_driver, busy_process
from rigs.store_tier_lane import TierLane

from kvtiers.api.units import format_size, parse_size
from kvtiers.plugins import load_tier
from kvtiers.secondary.placement import host_count
from kvtiers_redis.config import RedisConfig

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "plugins" / "redis_tier" / "tests")]

from servers import Server, Tls  # noqa: E402 -- the servers of the tier's tests

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20]
CONNECTIONS = (1, 4, 16)
PEERS = {connections: f"redis-benchmark -c {connections}" for connections in CONNECTIONS}
THREADED = " --threads "
SOCKETS = 3  # as many as the tier writes through at a time
REDIS_PY_SHARE = 4  # it is slow, and no goal is about it: so many times fewer values
DELAY_SECONDS = 0.0005  # each way
RAW = {n: f"raw, {n} streams" for n in (1, 4)}
LINK_GBITS = 10.0
FROM_PROCESSORS = 8  # from so many on the server has io-threads, and the tier the options that suit them
LARGE_BYTES = 512 << 20  # for a turn on so many: 128 MiB take 30 ms there
IO_THREADS = 4
TIER_OPTIONS = {"threads": 8, "window": 128 << 10}
WITH_IO_THREADS = ("plain", "busy")
BUSY_SECONDS, BUSY_STEP_SECONDS = 1.0, 0.001
GOALS = {"plain": 0.9, "tls": 0.9, "delayed": 0.8, "busy": 0.9}
KINDS = {"plain": "plain", "single": "plain, one thread", "tls": "tls", "delayed": "delayed"}
KINDS |= {"unlimited": "delayed, no link", "busy": "busy"}
DELAYED_FROM = 256 << 10
REMOTE_WINDOW = 4 << 20  # what a server on another machine gets by default; the proxy is on this one
COST_ROUNDS = 5
BROKEN = 10  # so many times slower than the other peer
DEFAULT_NICE = RedisConfig.model_fields["nice"].default
KEPT_MEMORY = "dirty_decay_ms:-1,oversize_threshold:0,lg_extent_max_active_fit:30"  # for jemalloc


def config(url: str, **options: Any) -> RedisConfig:
    return RedisConfig(type="redis", url=url, store_queue=1 << 20, deadline="60s", **{"nice": 0, **options})


def start(stack: ExitStack, folder: Path, io_threads: int, **options: Any) -> Server:
    """Start a server with the README's settings that keeps what is freed."""
    variables = ("MALLOC_CONF", "JE_MALLOC_CONF")  # of the system's jemalloc, and of the one that Redis brings along
    os.environ |= dict.fromkeys(variables, KEPT_MEMORY)
    settings = ["--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "no"]
    if io_threads > 1:
        settings += ["--io-threads", str(io_threads), "--io-threads-do-reads", "yes"]
    server = Server(folder, *settings, **options).start()
    for variable in variables:
        del os.environ[variable]
    stack.callback(server.stop)
    return server


def measure_plain(
    server: Server, nbytes: int, total: int, rounds: int, *, io_threads: int, **tier_options: Any
) -> dict[str, Any]:
    """Return the rates of all lanes at this size, and what the tier costs. ``io_threads``: of the server."""
    count = total // nbytes
    with lanes.memory(total) as (fd, rows), ExitStack() as stack:
        tier = TierLane(server.client, fd, rows, nbytes, config(server.url, **tier_options), stack)
        with server.client() as client:
            client.flushall()
            lanes.fill(client, nbytes, count)

        def benchmark(way: str, connections: int, threads: int) -> float:
            values = lanes.redis_benchmark(server.port, connections, nbytes, count, way, threads=threads)
            return values * nbytes / 1e9

        moves = {name: partial(benchmark, connections=c, threads=1) for c, name in PEERS.items()}
        moves |= {
            f"{PEERS[c]}{THREADED}{io_threads}": partial(benchmark, connections=c, threads=io_threads)
            for c in CONNECTIONS
            if 1 < io_threads <= c
        }
        moves["tier"] = tier.rate
        bare = sockets.plain_sockets(lanes.connections(server.port, SOCKETS), rows, nbytes, count)
        moves[f"bare sockets, {SOCKETS}"] = lanes.timed(bare, total)
        few = -(-count // REDIS_PY_SHARE)
        moves["redis-py"] = lanes.timed(lanes.redis_py(server.port, rows, nbytes, few), few * nbytes)
        missing = ""
        try:
            moves["lmcache"] = lanes.timed(lanes.lmcache(server.port, rows, nbytes, count), total)
        except (ImportError, OSError) as error:
            missing = str(error).splitlines()[0]
        rates = lanes.medians(lanes.samples_of(moves, rounds))
        cost = cpu_of(tier, server, total)
        with server.client() as client:
            client.flushall()
    found = {"value_bytes": nbytes, "gb_per_s": rates, "cpu_seconds_per_gb": cost}
    return found | ({"lmcache_missing": missing} if missing else {})


def cpu_of(tier: TierLane, server: Server, total: int) -> dict[str, dict[str, float]]:
    """Return the processor seconds per GB of the hosts and of the server."""
    who = {"client": tier.pids, "server": [server.pid]}
    cost: dict[str, dict[str, float]] = {name: {} for name in who}
    for way in WAYS:
        spent = dict.fromkeys(who, 0.0)
        for _ in range(COST_ROUNDS):
            if way == "write":
                tier.forget()
            before = {name: sum(map(processor_seconds, pids)) for name, pids in who.items()}
            tier.move(way)
            for name, pids in who.items():
                spent[name] += sum(map(processor_seconds, pids)) - before[name]
        for name, seconds in spent.items():
            cost[name][way] = seconds * 1e9 / (COST_ROUNDS * total)
    return cost


def measure_busy(server: Server, nbytes: int, total: int, rounds: int, **tier_options: Any) -> dict[str, Any]:
    """Return the tier's rate beside an engine's thread that runs Python, and beside a process that does."""
    with lanes.memory(total) as (fd, rows), ExitStack() as stack:
        options = config(server.url, nice=DEFAULT_NICE, **tier_options)
        tier = TierLane(server.client, fd, rows, nbytes, options, stack)

        def beside(other: AbstractContextManager[None], way: str) -> float:
            with other:
                return tier.rate(way, BUSY_SECONDS)

        moves = {
            "idle": tier.rate,
            "busy thread": lambda way: beside(busy_driver(tier, BUSY_STEP_SECONDS), way),
            "busy process": lambda way: beside(busy_process(), way),
        }
        samples = lanes.samples_of(moves, rounds)
        with busy_driver(tier, BUSY_STEP_SECONDS):
            cost = cpu_of(tier, server, total)
        with server.client() as client:
            client.flushall()
    ratios = {way: middle_share(samples["busy thread"][way], samples["busy process"][way]) for way in WAYS}
    rates = lanes.medians(samples)
    return {"value_bytes": nbytes, "gb_per_s": rates, "thread_to_process": ratios, "cpu_seconds_per_gb": cost}


def measure_tls(server: Server, nbytes: int, total: int, rounds: int, **tier_options: Any) -> dict[str, Any]:
    """Return the rates with TLS."""
    tls, count = server.tls, total // nbytes
    assert tls is not None
    options = {"username": "admin", "password": "secret", "tls_ca": tls.ca, "tls_cert": tls.cert, "tls_key": tls.key}
    with lanes.memory(total) as (fd, rows), ExitStack() as stack:
        tier = TierLane(server.client, fd, rows, nbytes, config(server.url, **options, **tier_options), stack)
        with server.client() as client:
            client.flushall()
            lanes.fill(client, nbytes, count)

        def benchmark(way: str) -> float:
            return lanes.redis_benchmark(server.port, 4, nbytes, count, way, tls=tls) * nbytes / 1e9

        python = lanes.timed(sockets.tls_socket(server.port, tls, rows, nbytes, count), total)
        moves = {"redis-benchmark --tls -c 4": benchmark, "tier": tier.rate, "Python TLS socket": python}
        rates = lanes.medians(lanes.samples_of(moves, rounds))
        with server.client() as client:
            client.flushall()
    return {"value_bytes": nbytes, "gb_per_s": rates}


def measure_delayed(
    server: Server, nbytes: int, total: int, rounds: int, *, rate: float, **tier_options: Any
) -> dict[str, Any]:
    """Return the tier's rates over a network with 1 ms of round trip, and those of raw streams over the same.

    ``rate``: what the network moves in bytes a second, each way; infinite for no limit.
    """
    count = total // nbytes
    with lanes.memory(total) as (fd, rows), ExitStack() as stack:

        def through(port: int) -> int:
            return stack.enter_context(lanes.in_process(network.slow_network, port, DELAY_SECONDS, rate))

        raw, to_server = through(stack.enter_context(lanes.in_process(network.raw_server))), through(server.port)
        options = config(f"redis://127.0.0.1:{to_server}", window=REMOTE_WINDOW, **tier_options)
        tier = TierLane(server.client, fd, rows, nbytes, options, stack)
        moves = {name: lanes.timed(network.raw_stream(raw, rows, n), total) for n, name in RAW.items()}
        bare = sockets.plain_sockets(lanes.connections(to_server, SOCKETS), rows, nbytes, count, window=REMOTE_WINDOW)
        moves[f"bare sockets, {SOCKETS}"] = lanes.timed(bare, total)
        moves["tier"] = tier.rate
        if rate == float("inf"):
            with server.client() as client:
                lanes.fill(client, nbytes, count)
            moves["redis-benchmark, no delay"] = lambda way: (
                lanes.redis_benchmark(server.port, 4, nbytes, count, way) * nbytes / 1e9
            )
        rates = lanes.medians(lanes.samples_of(moves, rounds))
        with server.client() as client:
            client.flushall()
    return {"value_bytes": nbytes, "gb_per_s": rates}


def shares(found: Sequence[dict[str, Any]], of: str, beside: Sequence[str], way: str) -> list[float]:
    """Return, for each size, the lane's rate as a share of the best of the others."""
    return [size["gb_per_s"][of][way] / max(size["gb_per_s"][name][way] for name in beside) for size in found]


def goals_of(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the goals, each with the worst size's share."""
    best = [PEERS[connections] for connections in CONNECTIONS]
    goals = []
    for way in WAYS:
        for kind, of, beside, text in (
            ("plain", "tier", best, "of redis-benchmark's best of 1, 4 and 16 connections, at every size"),
            ("delayed", "tier", [*RAW.values()], "of the raw rate with 1 ms of round trip"),
        ):
            goals.append(at_least(f"{way}, {text}", min(shares(found[kind], of, beside, way)), GOALS[kind]))
        busy = min(size["thread_to_process"][way] for size in found["busy"])
        goals.append(at_least(f"{way}, beside a busy engine thread, of beside a busy process", busy, GOALS["busy"]))
        tls = min(share_with_tls(size, way) for size in found["tls"])
        goals.append(at_least(f"{way}, TLS, of redis-benchmark or of a Python TLS socket", tls, GOALS["tls"]))
    return goals


def share_with_tls(size: dict[str, Any], way: str) -> float:
    """Return the tier's share of the slower peer: either will do, but redis-benchmark where it hardly writes."""
    each = [shares([size], "tier", [name], way)[0] for name in size["gb_per_s"] if name != "tier"]
    return max(share for share in each if share < BROKEN * min(each))


def report(found: dict[str, Any]) -> None:
    """Print the rates as tables."""
    for kind, tier in found["tier"].items():
        print(f"the tier, {KINDS[kind]}: " + "{hosts} hosts with {threads} threads each".format(**tier))
    print("the server: {io_threads} io-threads; the link: {link_gb_per_s:g} GB/s".format(**found["set-up"]))
    for kind in [kind for kind in KINDS if kind in found]:
        print(f"{KINDS[kind]}, GB/s (write / read)")
        names = list(found[kind][0]["gb_per_s"])
        print("  " + " " * 10 + "".join(f"{name:>28}" for name in names))
        for size in found[kind]:
            cells = ["{write:.2f} / {read:.2f}".format(**size["gb_per_s"][name]) for name in names]
            print(f"  {format_size(size['value_bytes']):10}" + "".join(f"{cell:>28}" for cell in cells))
    if threaded := [name for name in found["plain"][0]["gb_per_s"] if THREADED in name]:
        for way in WAYS:
            each = zip(found["plain"], shares(found["plain"], "tier", threaded, way), strict=True)
            of_sizes = ", ".join(f"{format_size(size['value_bytes'])} {share:.2f}" for size, share in each)
            print(f"{way}, of redis-benchmark's best with threads of its own, without a goal: {of_sizes}")
    for kind, engine in (("plain", "an idle"), ("busy", "a busy")):
        print(f"processor seconds per GB of the tier (write / read) beside {engine} engine thread: hosts, server")
        for size in found[kind]:
            cost = size["cpu_seconds_per_gb"]
            cells = ["{write:.2f} / {read:.2f}".format(**cost[name]) for name in ("client", "server")]
            print(f"  {format_size(size['value_bytes']):10}" + "".join(f"{cell:>20}" for cell in cells))
    if missing := found["plain"][0].get("lmcache_missing"):
        print(f"LMCache's connector was not measured: {missing}")


def main() -> None:
    parser = options_of(__doc__, "fewer bytes, sizes and rounds")
    parser.add_argument(
        "--only", choices=[*KINDS], action="append", help="only these parts; states no goals without all that have some"
    )
    parser.add_argument("--processes", type=int, help="the tier's hosts (default: as many as it has by itself)")
    parser.add_argument("--threads", type=int, help="threads of each host (default: the tier's own)")
    parser.add_argument("--io-threads", type=int, help="of the servers (default: as the plugin's README says)")
    parser.add_argument("--link", type=float, default=LINK_GBITS, help="Gbit/s of the slow network (default: 10)")
    parser.add_argument("--size", type=parse_size, action="append", help="only this size (states no goals)")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    total, rounds = (128 << 20, 5) if options.quick else (256 << 20, 7)
    is_large = len(os.sched_getaffinity(0)) >= FROM_PROCESSORS
    forced = {name: number for name in ("processes", "threads") if (number := getattr(options, name))}
    io_threads = options.io_threads or (IO_THREADS if is_large else 1)
    link = options.link * 1e9 / 8
    found: dict[str, Any] = {"tier": {}, "set-up": {"io_threads": io_threads, "link_gb_per_s": link / 1e9}}
    with tempfile.TemporaryDirectory(prefix="kvtiers-bench-") as top, ExitStack() as stack:
        plain = start(stack, Path(top, "plain"), io_threads)
        single = start(stack, Path(top, "single"), 1) if io_threads > 1 else None
        secure = start(stack, Path(top, "tls"), 1, tls=Tls(Path(top, "ca")))
        every = options.size or SIZES
        some = SIZES[::2] if options.quick and not options.size else every
        far = [size for size in every if size >= DELAYED_FROM]
        for kind, measure, server, sizes in (
            ("plain", partial(measure_plain, io_threads=io_threads), plain, every),
            ("single", partial(measure_plain, io_threads=1), single, some),
            ("tls", measure_tls, secure, some),
            ("delayed", partial(measure_delayed, rate=link), plain, far),
            ("unlimited", partial(measure_delayed, rate=float("inf")), plain, far[::3]),
            ("busy", measure_busy, plain, some),
        ):
            if server is None or (options.only and kind not in options.only):
                continue
            suits = is_large and kind in WITH_IO_THREADS
            tier_options, moved = (TIER_OPTIONS if suits else {}) | forced, LARGE_BYTES if suits else total
            tier = config("redis://localhost", **tier_options)
            found["tier"][kind] = {"hosts": host_count(tier, load_tier(tier.type)), "threads": tier.threads}
            found[kind] = []
            for nbytes in sizes:
                print(f"{KINDS[kind]}, {format_size(nbytes)} ...", file=sys.stderr)
                found[kind].append(measure(server, nbytes, moved, rounds, **tier_options))
    if options.size or GOALS.keys() - found:
        print(json.dumps(found))
        return
    found["goals"] = goals_of(found)
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
