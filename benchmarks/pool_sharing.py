"""What a pool is worth and costs: hits on a trace, the engine's thread, a chunk's first use, and its adoption.

Hits: the requests of Mooncake's conversation trace, in the folder that KVTIERS_TRACES names, are dealt in turn to 2, 4
and 8 engines; there is memory for a fifth of the trace's distinct chunks. One engine with all of it, engines in a pool,
each with its part, and engines with as much memory of their own serve one request after the other. Between requests,
which are seconds apart in reality, each engine sees what the others have published. Chunks are small, but they are
written and compared. Without the trace this part is left out.

The engine's thread: microseconds for a load (look-up, lease, completion) of 64 chunks that are another engine's, that
are its own, and in a primary without a pool, in turns; for a store of 64 chunks in a full part of eight; and the same
while the keeper is stopped. A millisecond lies between two calls, as between an engine's steps. The other engine has
ended, so that its threads take nothing of this process' time. Besides, the processor time of an engine that does
nothing but to follow what others publish, in a pool of 131,072 rows, as 256 GiB may have.

First use: seconds a GiB until chunks of 2 MiB that another engine has stored are readable, each of them hashed, beside
hashing as many of them with as many threads.

Adoption: an engine that has filled a pool of small rows is killed, and the keeper has hashed all of them again: seconds
from the next engine's HELLO until it finds all chunks, and the same in that pool without any. ``--quick``: the trace's
first requests, fewer rounds, less memory.
"""

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lib.processes import processor_seconds
from lib.results import at_least, at_most, middle_share, options_of, say
from rigs.pool_engines import PATIENCE, Engine, keeper, layout_of, wait_until

from kvtiers.api import OffloadKey, make_offload_key
from kvtiers.layout.storage_name import StorageNames
from kvtiers.pool.chunk_hash import ChunkHash
from kvtiers.pool.loan import clear_pool, pool_figures
from kvtiers_replay.plan import PlanTrace
from kvtiers_replay.trace import read_trace

TRACE = "conversation_trace.jsonl.gz"
QUICK_REQUESTS = 3000
SHARE = 0.2  # of the trace's distinct chunks there is memory for
PAGE = layout_of(1, 4000)
LARGE = layout_of(32, 64 << 10)
CHUNKS = 64  # of a load or a store
PARTS = 8
POOL_ROWS = 1 << 17  # as of 256 GiB in rows of 2 MiB
ADOPTED = 1 << 16, 1_000_000  # chunks; the first ones are 128 GiB of 2 MiB each
THREADS, PIECE = 4, 16  # that hash at a first use, and how many rows a thread at a stretch
GOAL_OF_ONE = 0.98  # of the hits with one primary of all the memory
GOAL_OF_PRIVATE = 1.0  # of what a primary without a pool takes
GOAL_P99_US = 100.0
GOAL_FOLLOWING = 0.01
GOAL_OF_HASHING = 1.25
GOAL_ADOPTION_US = 1.0  # a chunk

# Hits.


class Hits:
    """Serves a trace with engines in turn. ``now``: the clock of all of them, at the request's arrival."""

    def __init__(self, trace: PlanTrace) -> None:
        self._trace = trace
        self._now = 0.0
        self.found = self.wrong = self.refused = self.lost = 0
        """Leading chunks that were there, those with other bytes, refused stores, and chunks not stored at last."""

    def clock(self) -> float:
        """Return the time of the request that is served."""
        return self._now

    def serve(self, engines: Sequence[Engine]) -> None:
        """Serve one request after the other."""
        for number, (arrival, keys, usable) in enumerate(self._trace.requests):
            self._now = max(self._now, arrival)
            engine = engines[number % len(engines)]
            stored = self._serve_one(engine, str(number), keys, usable)
            if engine.loan is not None:
                others = [other for other in engines if other is not engine]
                wait_until(lambda: all(other.sees(stored) for other in others), "it is not published")  # noqa: B023
            for each in engines:
                each.tier.poll()
                each.tier.release_expired(self._now)

    def _serve_one(self, engine: Engine, request: str, keys: Sequence[OffloadKey], usable: int) -> list[int]:
        hits = engine.await_run(keys[:usable])
        rows = engine.tier.prepare_load(keys[:hits], request) if hits else []
        assert rows is not None
        self.wrong += engine.wrong(keys[:hits], rows)
        engine.tier.complete_load(rows)
        self.found += hits
        rest, stored, again = keys[hits:], None, True
        while rest and (stored := engine.store(rest, request)) is None:
            self.refused += 1
            rest, again = rest if again else rest[: len(rest) // 2], False  # the next step offers the same ones
        self.lost += len(keys) - hits - len(rest)
        engine.tier.on_request_finished(request)
        return stored or []


def served(trace: PlanTrace, start: Callable[[Callable[[], float]], Sequence[Engine]]) -> dict[str, Any]:
    """Serve a trace with the engines that are started with a clock; return the share of hits."""
    began, hits = time.perf_counter(), Hits(trace)
    engines = start(hits.clock)
    try:
        hits.serve(engines)
    finally:
        for engine in engines:
            engine.close()
    return {
        "hit_rate": hits.found / trace.references,
        "wrong_bytes": hits.wrong,
        "refused_stores": hits.refused,
        "chunks_not_stored": hits.lost,
        "seconds": time.perf_counter() - began,
    }


def of_their_own(trace: PlanTrace, rows: int, engines: int) -> dict[str, Any]:
    """Serve a trace with so many engines, each with its share of the rows for itself."""
    each = rows // engines
    return served(trace, lambda clock: [Engine(PAGE, rows=each, clock=clock) for _ in range(engines)])


def in_a_pool(trace: PlanTrace, rows: int, engines: int) -> dict[str, Any]:
    """Serve a trace with so many engines in a pool of so many rows."""
    with keeper(rows, PAGE, engines) as pool:
        return served(trace, lambda clock: [Engine(PAGE, pool.path, clock=clock) for _ in range(engines)])


def hits_of(trace: PlanTrace, counts: Sequence[int]) -> dict[str, Any]:
    """Compare the hits of one engine, engines in a pool, and engines with memory of their own."""
    rows = int(trace.unique * SHARE)
    found: dict[str, Any] = {
        "requests": len(trace.requests),
        "references": trace.references,
        "rows": rows,
        "one": of_their_own(trace, rows, 1),
        "by_engines": {},
    }
    one = found["one"]["hit_rate"]
    for count in counts:
        pool, own = in_a_pool(trace, rows, count), of_their_own(trace, rows, count)
        found["by_engines"][str(count)] = {"pool": pool, "own": own, "of_one": pool["hit_rate"] / one}
    return found


# The engine's thread.


def some_keys(count: int = CHUNKS) -> list[OffloadKey]:
    """Return keys of chunks that are nowhere yet."""
    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


def load_us(engine: Engine, keys: Sequence[OffloadKey]) -> float:
    """Load these chunks; return the microseconds that the calls took."""
    tier, began = engine.tier, time.perf_counter()
    hits, pending = tier.resident_run(keys)
    rows = tier.prepare_load(keys, "load")
    if rows is not None:
        tier.complete_load(rows)
    taken = time.perf_counter() - began
    assert (hits, pending) == (len(keys), 0)
    assert rows is not None
    tier.on_request_finished("load")
    return taken * 1e6


def store_us(engine: Engine) -> float:
    """Store new chunks; return the microseconds that the calls took."""
    tier, keys, began = engine.tier, some_keys(), time.perf_counter()
    allocation = tier.prepare_store(keys, "store")
    if allocation is not None:
        tier.complete_store(allocation.rows, success=True)
    taken = time.perf_counter() - began
    assert allocation is not None
    tier.on_request_finished("store")
    return taken * 1e6


def filled(engine: Engine, requests: int) -> list[list[OffloadKey]]:
    """Store so many requests' chunks; return their keys."""
    stored = [some_keys() for _ in range(requests)]
    for keys in stored:
        rows = engine.store(keys, "fill")
        assert rows is not None
        engine.tier.on_request_finished("fill")
    return stored


def in_turns(work: dict[str, Callable[[int], float]], rounds: int, engine: Engine) -> dict[str, list[float]]:
    """Do each work once a round, and what the manager does between two steps."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds):
        for name, one in work.items():
            taken[name].append(one(number))
            time.sleep(0.001)
            engine.tier.poll()
        if not number % 10:
            engine.tier.release_expired(time.monotonic())
    return taken


def of_calls(taken: Sequence[float]) -> dict[str, float]:
    """Return what is said of the microseconds of whole calls."""
    ordered = sorted(taken)
    return {"us_a_chunk": statistics.median(ordered) / CHUNKS, "p99_us": ordered[int(len(ordered) * 0.99)]}


def engine_thread(requests: int, rounds: int) -> dict[str, Any]:
    """Time loads and stores of an engine in a full part of so many requests' chunks, and of one without a pool."""
    part = requests * CHUNKS
    with keeper(PARTS * part, PAGE, PARTS) as pool:
        engine, private = Engine(PAGE, pool.path), Engine(PAGE, rows=part)
        other = Engine(PAGE, pool.path)
        of_other, rows_of_other = filled(other, requests), list(other.loan.own)
        wait_until(lambda: engine.sees(rows_of_other), "it is not published")
        other.close()
        own, alone = filled(engine, requests), filled(private, requests)
        for keys in of_other:
            assert engine.await_run(keys) == CHUNKS
            rows = engine.tier.prepare_load(keys, "check")
            assert rows is not None
            engine.tier.complete_load(rows)
        loads: dict[str, Callable[[int], float]] = {
            "another engine's": lambda number: load_us(engine, of_other[number % requests]),
            "its own": lambda number: load_us(engine, own[number % requests]),
            "without a pool": lambda number: load_us(private, alone[number % requests]),
        }
        stores: dict[str, Callable[[int], float]] = {
            "in a pool": lambda _: store_us(engine),
            "without a pool": lambda _: store_us(private),
        }
        taken = {"load": in_turns(loads, rounds, engine)}
        with pool.stopped():
            taken["load, keeper stopped"] = in_turns(loads, rounds // 4, engine)
        taken["store"] = in_turns(stores, rounds, engine)
        with pool.stopped():
            taken["store, keeper stopped"] = in_turns(stores, rounds // 4, engine)
        engine.close()
        private.close()
    return {
        what: {
            name: of_calls(calls) | {"of_private": middle_share(calls, by_name["without a pool"])}
            for name, calls in by_name.items()
        }
        for what, by_name in taken.items()
    }


def following(rows: int, seconds: float) -> dict[str, float]:
    """Return the share of a processor that an engine takes which does nothing, in a pool of so many rows."""
    with keeper(rows, PAGE, PARTS) as pool:
        engine = Engine(PAGE, pool.path)
        before = processor_seconds(os.getpid())
        time.sleep(seconds)
        taken = processor_seconds(os.getpid()) - before
        engine.close()
    return {"rows": rows, "processors": taken / seconds}


# First use.


def first_use(chunks: int, turns: int) -> dict[str, float]:
    """Return the seconds a GiB of borrowing and checking so many large chunks a turn, and of hashing as many."""
    prefix = StorageNames.of_layout("default", LARGE).prefix
    gib = chunks * LARGE.payload_bytes(0) / (1 << 30)
    checking, hashing = [], []
    with keeper(2 * chunks * turns, LARGE, 2) as pool, ThreadPoolExecutor(THREADS) as threads:
        one, other = Engine(LARGE, pool.path), Engine(LARGE, pool.path)
        hash_chunk = ChunkHash(prefix, LARGE, one.view)
        for _ in range(turns):
            keys = some_keys(chunks)
            rows = one.store(keys, "store")
            assert rows is not None
            wait_until(lambda: other.sees(rows), "it is not published")  # noqa: B023
            began = time.perf_counter()
            assert other.await_run(keys) == chunks
            checking.append((time.perf_counter() - began) / gib)
            pieces = [list(zip(rows, keys, strict=True))[at : at + PIECE] for at in range(0, chunks, PIECE)]
            began = time.perf_counter()
            list(threads.map(lambda piece: [hash_chunk(*chunk) for chunk in piece], pieces))
            hashing.append((time.perf_counter() - began) / gib)
            other.tier.release_expired(float("inf"))
        one.close()
        other.close()
    return {
        "gib_a_turn": gib,
        "check_s_a_gib": statistics.median(checking),
        "hash_s_a_gib": statistics.median(hashing),
        "of_hashing": middle_share(checking, hashing),
    }


# Adoption.


def fill_and_wait(path: Path, requests: int) -> None:
    """Fill a pool as an engine that waits to be killed."""
    engine = Engine(PAGE, path)
    filled(engine, requests)
    while True:
        time.sleep(PATIENCE)


def await_check(path: Path) -> float:
    """Wait until the only part of a pool is to be had; return the seconds that its last check took."""

    def is_free() -> bool:
        (part,) = pool_figures(str(path))["parts"]
        return not part["lent"] and not part["checking"]

    wait_until(is_free, "it is not to be had")
    return float(pool_figures(str(path))["check_seconds"])


def adoption_seconds(path: Path, chunks: int) -> float:
    """Return the seconds of one engine's start in a pool of so many chunks."""
    await_check(path)
    began = time.perf_counter()
    engine = Engine(PAGE, path)
    seconds = time.perf_counter() - began
    assert engine.tier.chunks == chunks
    engine.close()
    return seconds


def adoption(chunks: int, turns: int) -> dict[str, float]:
    """Kill an engine with so many chunks; time the next ones, and as many once the chunks are forgotten."""
    with keeper(chunks, PAGE, 1) as pool:
        killed = multiprocessing.get_context("spawn").Process(target=fill_and_wait, args=(pool.path, chunks // CHUNKS))
        killed.start()
        while killed.is_alive() and pool_figures(str(pool.path))["chunks"] < chunks:
            time.sleep(0.1)
        killed.kill()
        killed.join()
        full = [adoption_seconds(pool.path, chunks) for _ in range(turns)]
        check = await_check(pool.path)
        clear_pool(str(pool.path))
        empty = [adoption_seconds(pool.path, 0) for _ in range(turns)]
    figures = {"full_s": statistics.median(full), "empty_s": statistics.median(empty), "check_s": check}
    return {"chunks": chunks, **figures, "us_a_chunk": statistics.median(full) / chunks * 1e6}


def results(folder: Path | None, *, quick: bool) -> dict[str, Any]:
    """Return the figures and the goals."""
    found: dict[str, Any] = {"hits": None, "goals": []}
    if folder is not None:
        trace = PlanTrace(read_trace(folder / TRACE, QUICK_REQUESTS if quick else None))
        found["hits"] = hits_of(trace, (2, 4) if quick else (2, 4, 8))
    found["engine_thread_us"] = engine_thread(32 if quick else 128, 300 if quick else 2000)
    found["following"] = following(POOL_ROWS, 2.0 if quick else 10.0)
    found["first_use"] = first_use(32, 4 if quick else 8)
    found["adoption"] = [adoption(chunks, 3) for chunks in ADOPTED[: 1 if quick else None]]
    found["goals"] = goals(found)
    return found


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare with what was promised."""
    by_engines = found["hits"]["by_engines"] if found["hits"] is not None else {}
    made = [
        at_least(
            f"hits of {count} engines in a pool, as a share of one engine's with all memory",
            each["of_one"],
            GOAL_OF_ONE,
        )
        for count, each in by_engines.items()
    ]
    for what, by_name in found["engine_thread_us"].items():
        for name, each in by_name.items():
            if name != "without a pool":
                share, p99 = each["of_private"], each["p99_us"]
                made.append(at_most(f"{what}, {name}: share of the time without a pool", share, GOAL_OF_PRIVATE))
                made.append(at_most(f"{what}, {name}: us of a call of {CHUNKS} chunks, p99", p99, GOAL_P99_US))
    idle, use = found["following"], found["first_use"]
    name = f"processors for following what is published, {idle['rows']:,} rows"
    made.append(at_most(name, idle["processors"], GOAL_FOLLOWING))
    made.append(at_most("a first use, as a share of the time of hashing alone", use["of_hashing"], GOAL_OF_HASHING))
    return made + [
        at_most(f"adoption, us a chunk of {each['chunks']:,}", each["us_a_chunk"], GOAL_ADOPTION_US)
        for each in found["adoption"]
    ]


def report(found: dict[str, Any]) -> None:
    """Print the figures as tables."""
    if (hits := found["hits"]) is not None:
        print(f"hits, {hits['requests']:,} requests, memory for {hits['rows']:,} chunks")
        print(f"  one engine with all of it      {hits['one']['hit_rate']:.4f}")
        for count, each in hits["by_engines"].items():
            pool, own = each["pool"], each["own"]
            print(
                f"  {count} engines in a pool          {pool['hit_rate']:.4f}  {each['of_one']:.3f} of one engine's, "
                f"{pool['refused_stores']} refused stores, {pool['wrong_bytes']} chunks with wrong bytes\n"
                f"  {count}, each with its own memory  {own['hit_rate']:.4f}  "
                f"{own['hit_rate'] / hits['one']['hit_rate']:.3f}"
            )
    print(f"\n{f'engine thread, {CHUNKS} chunks':42}{'us a chunk':>12}{'share':>8}{'p99, us a call':>16}")
    for what, by_name in found["engine_thread_us"].items():
        for name, each in by_name.items():
            print(f"  {f'{what}, {name}':40}{each['us_a_chunk']:12.3f}{each['of_private']:8.2f}{each['p99_us']:16.0f}")
    idle, use = found["following"], found["first_use"]
    print(f"\nfollowing what is published, {idle['rows']:,} rows: {idle['processors']:.3f} of a processor")
    print(f"first use: {use['check_s_a_gib']:.3f} s a GiB; hashing alone {use['hash_s_a_gib']:.3f} s a GiB")
    for each in found["adoption"]:
        print(
            f"adoption of {each['chunks']:,} chunks: {each['full_s']:.3f} s; without any in as many rows "
            f"{each['empty_s']:.3f} s; hashing them again {each['check_s']:.3f} s"
        )
    print()


def main() -> None:
    options = options_of(__doc__, f"only the first {QUICK_REQUESTS:,} requests, fewer rounds, less memory").parse_args()
    folder = os.environ.get("KVTIERS_TRACES")
    if not folder:
        print(f"no hits: set KVTIERS_TRACES to the folder that holds {TRACE}", file=sys.stderr)
    found = results(Path(folder) if folder else None, quick=options.quick)
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
