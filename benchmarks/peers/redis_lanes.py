"""What the Redis tier is measured beside: redis-benchmark, redis-py, LMCache's connector, a slow network."""

import contextlib
import csv
import importlib.util
import multiprocessing
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis

from kvtiers.rows.mapping import create_memfd, map_memory

WAYS = ("write", "read")
PIECE = 1 << 18
LEAST_REQUESTS = 64  # below that its start-up shows
Lane = Callable[[str], None]
"""Moves all values one way: "write" or "read"."""


def rates_of(moves: dict[str, Callable[[str], float]], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median GB/s of each lane and way; the lanes take turns, and the first round warms up."""
    samples: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in moves}
    order = [*moves]
    for turn in range(rounds + 1):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            for way in WAYS:
                rate = moves[name](way)
                if turn:
                    samples[name][way].append(rate)
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


def redis_benchmark(port: int, connections: int, nbytes: int, count: int, way: str, *, tls: Any = None) -> float:
    """Return the values a second that redis-benchmark moves, over as many keys as the other lanes have."""
    number = max(count, LEAST_REQUESTS)
    command = ["redis-benchmark", "-p", str(port), "-c", str(connections), "-d", str(nbytes), "-n", str(number)]
    command += ["-r", str(count), "-t", {"write": "set", "read": "get"}[way], "--csv"]
    if tls is not None:
        command += ["--tls", "--cacert", str(tls.ca), "--cert", str(tls.cert), "--key", str(tls.key)]
        command += ["--user", "admin", "-a", "secret"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [row for row in csv.DictReader(line for line in said.splitlines() if line.startswith('"')) if row.get("rps")]
    return float(rows[-1]["rps"])


def fill(client: redis.Redis, nbytes: int, count: int) -> None:
    """Write the keys that redis-benchmark reads: it does not know a missing one from another."""
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
        raise ImportError("lmcache is not installed")
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


@contextlib.contextmanager
def in_process(work: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """Run ``work(listener, *arguments)`` in a process of its own; give the port that it listens on."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        process = multiprocessing.get_context("fork").Process(target=work, args=(listener, *arguments), daemon=True)
        process.start()
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.join()


@contextlib.contextmanager
def spinning() -> Iterator[subprocess.Popen[str]]:
    """Give a process that runs Python flat out while it is not stopped; it begins stopped."""
    command = [sys.executable, "-c", "print('ready', flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def delaying_proxy(listener: socket.socket, port: int, seconds: float) -> None:
    """Forward every connection to the port, each byte so much later than it came."""
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_forward, args=(source, target, seconds), daemon=True).start()


def _forward(source: socket.socket, target: socket.socket, seconds: float) -> None:
    """Forward until the source ends; what is due goes out together, so that small replies cost little."""
    pieces: deque[tuple[float, bytes]] = deque()
    going = True
    with contextlib.suppress(OSError, ValueError):  # the other direction has closed them
        while going or pieces:
            wait = max(0.0, pieces[0][0] - time.monotonic()) if pieces else None
            if select.select([source] if going else [], [], [], wait)[0]:
                piece = source.recv(PIECE)
                going = bool(piece)
                pieces.append((time.monotonic() + seconds, piece))
            now, due = time.monotonic(), []
            while pieces and pieces[0][0] <= now:
                due.append(pieces.popleft()[1])
            if due:
                target.sendall(due[0] if len(due) == 1 else b"".join(due))
    target.close()


def raw_server(listener: socket.socket) -> None:
    """Take as many bytes as the first 8 bytes of a request say (negative: send them), then answer with one byte."""

    def serve(connected: socket.socket) -> None:
        buffer = memoryview(bytearray(PIECE))
        while head := connected.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "big", signed=True)
            while left < 0:
                connected.sendall(buffer[: min(PIECE, -left)])
                left += min(PIECE, -left)
            while left > 0:
                left -= connected.recv_into(buffer, min(PIECE, left))
            if int.from_bytes(head, "big", signed=True) > 0:
                connected.sendall(b".")

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def raw_stream(port: int, rows: memoryview, connections: int) -> Lane:
    """Move the rows through a socket to or from ``raw_server``, each connection its share."""
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    share = len(rows) // connections

    def move_one(link: socket.socket, part: memoryview, way: str) -> None:
        link.sendall((len(part) if way == "write" else -len(part)).to_bytes(8, "big", signed=True))
        if way == "write":
            link.sendall(part)
            assert link.recv(1) == b"."
        else:
            assert link.recv_into(part, len(part), socket.MSG_WAITALL) == len(part)

    def move(way: str) -> None:
        threads = [
            threading.Thread(target=move_one, args=(link, rows[i * share : (i + 1) * share], way))
            for i, link in enumerate(links)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return move
