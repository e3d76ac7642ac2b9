"""The layout ``slab`` beside fio, beside preadv, and a reader's delay while another process evicts and deletes.

`write_cold` and `read_cold` move past the page cache, as fio does with O_DIRECT at the depth that is its best here; its
file is written once before, and the slab has gone through all of its segments. `read_hot` reads what is in the page
cache, beside `preadv` of the same places into the same memory by as many threads. Batches and threads are those of a
tier host.

Run as a program this is the other process of the delays: it writes, or deletes, so many values of a page, in batches as
a tier host does.
"""

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvtiers.api import ChunkStore, NotKept
from kvtiers_fs.config import FsConfig
from kvtiers_fs.slab.format import Entry, digest_of
from kvtiers_fs.slab.store import SlabStore
from kvtiers_fs.store import FsStore

PAGE = 4096
THREADS = 4
BATCH_VALUES, BATCH_BYTES = 32, 16 << 20
JOBS = (1, 4, 8, 16)
QUEUES = (8, 32)
WARMING = 3  # rounds, by which each segment has been used
READ_BYTES, READ_VALUES = 64 << 10, 32


def open_store(path: Path, layout: str, capacity: int, *, direct: Any = "cold", value_bytes: int = PAGE) -> ChunkStore:
    """Open a store of this layout."""
    options = {"path": path, "capacity": capacity, "min_free": 0, "layout": layout, "direct": direct}
    config = FsConfig(type="fs", **options)
    return SlabStore(config, value_bytes) if layout == "slab" else FsStore(config)


class Lane:
    """Threads that move one job's values in batches, each from or into its own place in memory."""

    def __init__(self, pool: ThreadPoolExecutor, memory: memoryview, nbytes: int) -> None:
        self._pool = pool
        self._rows = [memory[at : at + nbytes] for at in range(0, len(memory), nbytes)]
        size = max(1, min(BATCH_VALUES, BATCH_BYTES // nbytes, len(self._rows) // THREADS))
        self._parts = [range(len(self._rows))[at : at + size] for at in range(0, len(self._rows), size)]
        self.count, self._nbytes = len(self._rows), len(memory)

    def rate(
        self, move: Callable[[Sequence[Any], Sequence[Sequence[memoryview]]], Sequence[object]], what: Sequence[Any]
    ) -> float:
        """Return GB/s. ``move`` takes a list of views a value, here of one, and answers something true for each."""
        start = time.perf_counter()
        done = self._pool.map(lambda part: move([what[i] for i in part], [[self._rows[i]] for i in part]), self._parts)
        assert all(map(all, done))
        return self._nbytes / (time.perf_counter() - start) / 1e9


def fio_rate(file: Path, way: str, nbytes: int, total: int, jobs: int, queue: int = 1) -> float:
    """Return fio's GB/s with O_DIRECT: so many threads of one request each, or one thread with so many at a time."""
    share = total // jobs
    command = ["fio", "--name=x", f"--filename={file}", f"--rw={way}", f"--bs={nbytes}", "--direct=1", "--thread"]
    command += [f"--numjobs={jobs}", f"--offset_increment={share}", f"--size={share}", "--group_reporting"]
    command += ["--output-format=json", *(["--ioengine=libaio", f"--iodepth={queue}"] if queue > 1 else [])]
    command += [] if queue > 1 else ["--ioengine=psync"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(said[said.index("{") :])["jobs"][0][way]["bw_bytes"] / 1e9)


def plain_rate(pool: ThreadPoolExecutor, file: Path, way: str, memory: memoryview, nbytes: int) -> float:
    """Return the same by threads of this program, where fio is not installed."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    call = os.pwritev if way == "write" else os.preadv
    try:
        start = time.perf_counter()
        list(pool.map(lambda at: call(fd, [memory[at : at + nbytes]], at), range(0, len(memory), nbytes)))
        return len(memory) / (time.perf_counter() - start) / 1e9
    finally:
        os.close(fd)


def best_peer(
    pool: ThreadPoolExecutor, file: Path, way: str, memory: memoryview, nbytes: int
) -> tuple[str, Callable[[], float]]:
    """Return the fastest way to use the drive here, and what measures it."""
    if shutil.which("fio") is None:
        return f"{THREADS} threads, O_DIRECT, without fio", partial(plain_rate, pool, file, way, memory, nbytes)
    shapes = [(jobs, 1) for jobs in JOBS] + [(1, queue) for queue in QUEUES]
    measure = partial(fio_rate, file, way, nbytes, len(memory))
    _, (jobs, queue) = max((measure(*shape), shape) for shape in shapes)
    return f"fio, {jobs} x {queue}", partial(measure, jobs, queue)


def places_of(store: SlabStore, names: Sequence[str]) -> list[tuple[int, Entry]]:
    """Return for each value the descriptor and the entry by which it is found."""
    slab, index, found = store.slab, store.slab.opened_index, []
    for name in names:
        entry = index.find(digest_of(name))
        assert entry is not None
        found.append((slab.segments.file(entry.segment, index.row(entry.segment).birth).fd, entry))
    return found


def preadv_runs(places: Sequence[tuple[int, Entry]], dsts: Sequence[Sequence[memoryview]]) -> Sequence[bool]:
    """Read each value by a call of its own, where it lies."""
    return [os.preadv(fd, dst, entry.at) == entry.nbytes for (fd, entry), dst in zip(places, dsts, strict=True)]


def are_kept(store: SlabStore, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> Sequence[bool]:
    """Write the values, and return of each whether it was kept."""
    return [answer is None for answer in store.write_many(names, srcs)]


def measure_slab(folder: Path, nbytes: int, total: int, rounds: int) -> dict[str, Any]:
    """Return GB/s of each lane, and ours as a share of its peer's, in the middle of the rounds."""
    capacity = 5 * total // 2
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max(THREADS, 1)))
        memory = memoryview(mmap.mmap(-1, total))
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, total, np.uint8)
        lane = Lane(pool, memory, nbytes)
        opened = partial(open_store, layout="slab", capacity=capacity, value_bytes=nbytes)
        cold = stack.enter_context(closing(opened(folder / "cold", direct=True)))
        hot = stack.enter_context(closing(opened(folder / "hot")))
        assert isinstance(cold, SlabStore)
        assert isinstance(hot, SlabStore)
        file = folder / "peer"
        (fio_rate if shutil.which("fio") else lambda *_: plain_rate(pool, file, "write", memory, nbytes))(
            file, "write", nbytes, total, 4
        )
        peers = {way: best_peer(pool, file, way, memory, nbytes) for way in ("write", "read")}
        samples: dict[str, list[float]] = {}
        for turn in range(WARMING + rounds):
            names = [f"bench/slab/{turn:032x}{number:032x}" for number in range(lane.count)]
            found = {"write_cold": lane.rate(partial(are_kept, cold), names), "peer_write": peers["write"][1]()}
            found |= {"read_cold": lane.rate(cold.read_many_into, names), "peer_read": peers["read"][1]()}
            found["write_hot"] = lane.rate(partial(are_kept, hot), names)
            places = places_of(hot, names)
            lane.rate(preadv_runs, places)
            found |= {"read_hot": lane.rate(hot.read_many_into, names), "preadv": lane.rate(preadv_runs, places)}
            for store in (cold, hot):
                store.delete(names)
            if turn >= WARMING:
                for name, rate in found.items():
                    samples.setdefault(name, []).append(rate)
    shutil.rmtree(folder)
    folder.mkdir()
    shares = {
        mine: statistics.median(a / b for a, b in zip(samples[mine], samples[other], strict=True))
        for mine, other in (("write_cold", "peer_write"), ("read_cold", "peer_read"), ("read_hot", "preadv"))
    }
    rates = {name: statistics.median(found) for name, found in samples.items()}
    return {"value_bytes": nbytes, "peers": {w: p for w, (p, _) in peers.items()}, "gb_per_s": rates, "shares": shares}


# -- a reader's delay


def measure_delays(folder: Path, layout: str, values: int, rounds: int) -> dict[str, Any]:
    """Return a reader's percentiles, in us: alone, and while another process writes, evicts, deletes so many.

    Each is the least of some rounds: other programs of the machine make it longer, and nothing makes it shorter.
    """
    turns = [_one_round(folder / layout, layout, values) for _ in range(rounds)]
    return {what: min((turn[what] for turn in turns), key=lambda found: found["p99_us"]) for what in turns[0]}


def _one_round(path: Path, layout: str, values: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    # Room for as many again as the slab's granularity and its spare segments may cost.
    capacity = int(values * PAGE * 1.25) + (64 << 20)
    names = [f"bench/read/{number:064x}" for number in range(READ_VALUES)]
    with closing(open_store(path, layout, capacity)) as store:
        memory = memoryview(mmap.mmap(-1, READ_BYTES))
        for name in names:
            store.write(name, memory)
        found["alone"] = _delays(store, names, memory, lambda: False, seconds=1.0)
        # Fill what is left, and evict as many as there are; the first of these passes evicts nothing.
        for what, first in (("writes", 0), ("evicts", values), ("evicts", 2 * values), ("deletes", 2 * values)):
            mode = "delete" if what == "deletes" else "write"
            command = [sys.executable, __file__, str(path), layout, str(capacity), mode, str(first), str(values)]
            other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            before = _living(store)
            with other:
                assert other.stdin is not None
                assert other.stdout is not None
                other.stdout.readline()  # it is ready
                other.stdin.close()
                found[what] = _delays(store, names, memory, lambda other=other: other.poll() is None)
            assert other.returncode == 0
            found[what]["gone"] = before + (values if mode == "write" else 0) - _living(store)
    shutil.rmtree(path)
    return found


def _living(store: ChunkStore) -> int:
    """Return how many values a slab has; of files it is a hint, and 0 stands for it."""
    return store.slab.segments.totals().values if isinstance(store, SlabStore) else 0


def _delays(
    store: ChunkStore, names: Sequence[str], memory: memoryview, is_busy: Callable[[], bool], seconds: float = 0.0
) -> dict[str, float]:
    taken: list[float] = []
    missed, begun = 0, time.perf_counter()
    while not taken or is_busy() or time.perf_counter() - begun < seconds:
        for name in names:
            start = time.perf_counter()
            is_there = store.read_into(name, memory)
            taken.append(time.perf_counter() - start)
            if not is_there:  # evicted; an engine would store it again
                missed += 1
                with suppress(NotKept):
                    store.write(name, memory)
    taken.sort()
    lasted = time.perf_counter() - begun
    p99 = 1e6 * taken[int(0.99 * len(taken))]
    return {"p50_us": 1e6 * taken[len(taken) // 2], "p99_us": p99, "reads": len(taken), "misses": missed, "s": lasted}


def main(path: str, layout: str, capacity: str, mode: str, first: str, count: str) -> None:
    with closing(open_store(Path(path), layout, int(capacity))) as store:
        memory = memoryview(mmap.mmap(-1, PAGE))
        names = [f"bench/other/{number:064x}" for number in range(int(first), int(first) + int(count))]
        print("ready", flush=True)
        sys.stdin.read()
        for start in range(0, len(names), BATCH_VALUES):
            batch = names[start : start + BATCH_VALUES]
            if mode == "delete":
                store.delete(batch)
            else:
                _write(store, batch, memory)


def _write(store: ChunkStore, names: Sequence[str], memory: memoryview) -> None:
    """Write all of them, waiting for room."""
    if isinstance(store, SlabStore):
        while names:
            refusals = store.write_many(names, [[memory]] * len(names))
            names = [name for name, refusal in zip(names, refusals, strict=True) if refusal is not None]
            if names:
                time.sleep(0.001)
        return
    for name in names:
        while True:
            try:
                store.write(name, memory)
                break
            except NotKept:
                time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
