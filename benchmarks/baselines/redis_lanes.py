"""The baselines of the Redis tier: redis-benchmark, redis-py, LMCache's connector."""

import contextlib
import csv
import importlib.util
import multiprocessing
import os
import select
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis
from lib.results import WAYS

from kvtiers.region.memfd import create_memfd, map_memory

LEAST_REQUESTS = 64  # below that its start-up shows
COUNTED_BYTES = 1 << 30  # so many take a third of a second
COUNT_SECONDS = 0.005
Lane = Callable[[str], None]
"""Moves all values one way: "write" or "read"."""
Samples = dict[str, dict[str, list[float]]]
"""GB/s of each lane, each way, in each round."""


def samples_of(moves: dict[str, Callable[[str], float]], rounds: int) -> Samples:
    """Return each lane's rates one way, a round each: the lanes take turns, and the first round warms up."""
    samples: Samples = {name: {way: [] for way in WAYS} for name in moves}
    order = [*moves]
    for turn in range(rounds + 1):
        for way in WAYS:
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                rate = moves[name](way)
                if turn:
                    samples[name][way].append(rate)
    return samples


def medians(samples: Samples) -> dict[str, dict[str, float]]:
    """Return the median of each lane's rates."""
    return {name: {way: statistics.median(rates) for way, rates in by_way.items()} for name, by_way in samples.items()}


def timed(move: Callable[[str], None], nbytes: int) -> Callable[[str], float]:
    """Return a function that says at how many GB/s ``move`` moves its ``nbytes``."""

    def rate(way: str) -> float:
        begin = time.perf_counter()
        move(way)
        return nbytes / 1e9 / (time.perf_counter() - begin)

    return rate


@contextlib.contextmanager
def memory(nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Give a memfd and its bytes, which are random."""
    fd = create_memfd("kvtiers-bench", nbytes)
    view = map_memory(fd, nbytes, nbytes).view
    np.frombuffer(view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    try:
        yield fd, view
    finally:
        os.close(fd)


def redis_benchmark(
    address: int | str, connections: int, nbytes: int, count: int, way: str, *, threads: int = 1, tls: Any = None
) -> float:
    """Return the values a second that redis-benchmark moves, over as many keys as the other lanes have.

    ``address``: a port of this machine, or the path of a UNIX socket.
    """
    word = {"write": "set", "read": "get"}[way]
    number = max(count, COUNTED_BYTES // nbytes if threads > 1 else LEAST_REQUESTS)
    where = ["-s", address] if isinstance(address, str) else ["-p", str(address)]
    command = ["redis-benchmark", *where, "-c", str(connections), "-d", str(nbytes), "-n", str(number)]
    command += ["-r", str(count), "-t", word, "--csv"]
    if threads > 1:
        assert isinstance(address, int)
        return counted_rate([*command, "--threads", str(threads)], address, word, number)
    if tls is not None:
        command += ["--tls", "--cacert", str(tls.ca), "--cert", str(tls.cert), "--key", str(tls.key)]
        command += ["--user", "admin", "-a", "secret"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [row for row in csv.DictReader(line for line in said.splitlines() if line.startswith('"')) if row.get("rps")]
    return float(rows[-1]["rps"])


def counted_rate(command: Sequence[str], port: int, word: str, number: int) -> float:
    """Return the calls a second that the server counts while the command has it do so many.

    With threads, redis-benchmark looks four times a second whether it is done, and takes that for the end.
    """
    with redis.Redis("127.0.0.1", port) as client, subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:

        def calls() -> int:
            return int(client.info("commandstats").get(f"cmdstat_{word}", {"calls": 0})["calls"])

        before, counts = calls(), []
        while process.poll() is None:
            counts.append((time.perf_counter(), calls() - before))
            time.sleep(COUNT_SECONDS)
    in_flight = [(now, done) for now, done in counts if 0 < done < number]
    (begin, at_first), (end, at_last) = in_flight[0], in_flight[-1]
    return (at_last - at_first) / (end - begin)


def fill(client: redis.Redis, nbytes: int, count: int) -> None:
    """Write the keys that redis-benchmark reads: it does not distinguish a missing one from another."""
    value = os.urandom(nbytes)
    for number in range(count):
        client.set(f"key:{number:012d}", value)


def redis_py(port: int, rows: memoryview, nbytes: int, count: int) -> Lane:
    """Call redis-py as people do, a value at a time, on one connection."""
    client = redis.Redis("127.0.0.1", port, protocol=2)

    def move(way: str) -> None:
        for number in range(count):
            row = rows[number * nbytes : (number + 1) * nbytes]
            if way == "write":
                client.set(f"plain:{number}", row)
            else:
                row[:] = client.get(f"plain:{number}")

    return move


def lmcache(port: int, rows: memoryview, nbytes: int, count: int) -> Lane:
    """Drive LMCache's native RESP connector, 8 workers as it has by default. ImportError with why it cannot be had."""
    found = importlib.util.find_spec("lmcache")
    if found is None or not found.submodule_search_locations:
        raise ImportError("lmcache is not installed (pip install --no-deps lmcache)")
    [library] = [path for folder in found.submodule_search_locations for path in Path(folder).glob("lmcache_redis*.so")]
    spec = importlib.util.spec_from_file_location("lmcache_redis", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = module.LMCacheRedisClient("127.0.0.1", port, 8, "", "")
    done = select.poll()
    done.register(client.event_fd(), select.POLLIN)
    keys = [f"lmcache:{number}" for number in range(count)]
    views = [rows[number * nbytes : (number + 1) * nbytes] for number in range(count)]

    def move(way: str) -> None:
        submit = client.submit_batch_set if way == "write" else client.submit_batch_get
        waiting = {submit(keys[at : at + 32], views[at : at + 32]) for at in range(0, count, 32)}
        while waiting:
            done.poll()
            for number, ok, error, _ in client.drain_completions():
                assert ok, error
                waiting.discard(number)

    return move


def connect(address: int | str, buffer_bytes: int = 0) -> socket.socket:
    """Connect to a port of this machine, or to a UNIX socket by its path. ``buffer_bytes``: of both of its buffers."""
    connected = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    if buffer_bytes:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    if isinstance(address, int):
        send_at_once(connected)
    connected.connect(address if isinstance(address, str) else ("127.0.0.1", address))
    return connected


def connections(address: int | str, count: int, buffer_bytes: int = 0) -> list[socket.socket]:
    """Connect so many times."""
    return [connect(address, buffer_bytes) for _ in range(count)]


def send_at_once(new: socket.socket) -> None:
    """Have a socket, or those that a listener accepts, wait neither for an answer nor for a timer, as with BBR."""
    new.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    new.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


@contextlib.contextmanager
def in_process(work: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """Run ``work(listener, *arguments)`` in a process of its own; give the port that it listens on."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        send_at_once(listener)
        process = multiprocessing.get_context("fork").Process(target=work, args=(listener, *arguments), daemon=True)
        process.start()
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.join()
