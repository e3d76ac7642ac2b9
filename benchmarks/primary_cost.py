"""The cost of the primary tier on the engine's thread: microseconds a chunk for each operation of a chunk's life.

The tier is full, with 1,000 or 100,000 resident chunks, so that each store evicts. A chunk is looked up and missed,
stored, cascaded to two tiers, touched, hit and loaded by a later request; both requests end. The later request's
chunks are chosen at random among the resident ones, so that the cache misses of a large tier are in the figures.
Median over the rounds; the garbage collector runs as it would in an engine.
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lib.results import options_of, say

from kvtiers.primary.tier import CPUPrimaryTier

OPERATIONS = (
    "resident_run (miss)",
    "prepare_store",
    "complete_store",
    "prepare_read x2",
    "complete_read x2",
    "touch",
    "resident_run (hit)",
    "prepare_load",
    "complete_load",
    "on_request_finished x2",
)
GOAL_LIFE_US = 3.0  # the primary's share of what the whole manager may take
GOAL_GROWTH = 1.5  # 100,000 resident chunks against 1,000: the cache misses of larger tables
GOAL_RUN_MS = 1.0  # of the 3 ms that a prefix look-up of 8,192 chunks may take in all


def new_keys(count: int) -> list[bytes]:
    """Return keys as an engine's: 32 bytes of hash, 4 of group."""
    return [os.urandom(32) + bytes(4) for _ in range(count)]


class Rounds:
    """A full tier, and the microseconds a chunk that each operation took in each round."""

    def __init__(self, resident: int, batch: int, policy: str) -> None:
        self.tier = CPUPrimaryTier(resident, 0, memoryview(b""), policy=policy, record_events=False)
        self.batch = batch
        self.stored: list[list[bytes]] = []
        self.samples: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        while self.tier.free_rows >= batch:
            self.store(new_keys(batch))

    def store(self, keys: list[bytes]) -> None:
        """Store a request's chunks, untimed."""
        allocation = self.tier.prepare_store(keys, "filler")
        assert allocation is not None
        self.tier.complete_store(allocation.rows, success=True)
        self.tier.on_request_finished("filler")
        self.stored.append(keys)

    def timed(self, spent: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
        """Do ``work`` and count its time for this operation of the round."""
        start = time.perf_counter()
        result = work()
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
        return result

    def one_life(self) -> None:
        """Lead one batch of chunks through its life."""
        tier, spent = self.tier, dict[str, float]()
        keys = new_keys(self.batch)
        self.timed(spent, "resident_run (miss)", lambda: tier.resident_run(keys))
        allocation = self.timed(spent, "prepare_store", lambda: tier.prepare_store(keys, "writer"))
        self.timed(spent, "complete_store", lambda: tier.complete_store(allocation.rows, success=True))
        first, second = (self.timed(spent, "prepare_read x2", lambda: tier.prepare_read(keys)) for _ in range(2))
        self.timed(spent, "complete_read x2", lambda: tier.complete_read(first))
        self.timed(spent, "complete_read x2", lambda: tier.complete_read(second))
        self.timed(spent, "touch", lambda: tier.touch(keys))
        self.timed(spent, "on_request_finished x2", lambda: tier.on_request_finished("writer"))
        self.stored.append(keys)
        old = self.any_resident()
        self.timed(spent, "resident_run (hit)", lambda: tier.resident_run(old))
        rows = self.timed(spent, "prepare_load", lambda: tier.prepare_load(old, "reader"))
        self.timed(spent, "complete_load", lambda: tier.complete_load(rows))
        self.timed(spent, "on_request_finished x2", lambda: tier.on_request_finished("reader"))
        for name, seconds in spent.items():
            self.samples[name].append(seconds / self.batch * 1e6)

    def any_resident(self) -> list[bytes]:
        """Return some earlier request's chunks that are all still here."""
        while True:
            index = random.randrange(len(self.stored))
            keys = self.stored[index]
            if self.tier.resident_run(keys)[0] == len(keys):
                return keys
            self.stored[index] = self.stored[-1]
            self.stored.pop()

    def medians(self) -> dict[str, float]:
        """Return the microseconds a chunk by operation, and their sum."""
        by_operation = {name: statistics.median(values) for name, values in self.samples.items()}
        return {**by_operation, "sum": sum(by_operation.values())}


def prefix_lookup_ms(resident: int, chunks: int) -> dict[str, float]:
    """Return the milliseconds that the primary's part of one long prefix look-up takes: all here, half, none."""
    rounds = Rounds(resident, 64, "lru")
    here = [key for keys in rounds.stored for key in keys][:chunks]
    random.shuffle(here)
    away = new_keys(chunks)
    cases = {"hit": here, "mixed": here[: chunks // 2] + away[chunks // 2 :], "miss": away}
    results = {}
    for name, keys in cases.items():
        seconds = []
        for _ in range(20):
            start = time.perf_counter()
            found, _ = rounds.tier.resident_run(keys)
            rounds.tier.find(keys[found:])
            seconds.append(time.perf_counter() - start)
        results[name] = statistics.median(seconds) * 1e3
    return results


def goals(results: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """Return each figure that has a goal; all of them should be small."""
    small, large = (results["us_per_chunk"]["lru"]["64"][str(size)]["sum"] for size in sizes)
    figures = [
        (f"us for a chunk's life, lru, {sizes[1]:,} resident", large, GOAL_LIFE_US),
        (f"{sizes[1]:,} resident, as a multiple of {sizes[0]:,}", large / small, GOAL_GROWTH),
    ]
    for name, milliseconds in results["prefix_lookup_ms"].items():
        figures.append((f"ms for a prefix look-up of 8,192 chunks, {name}", milliseconds, GOAL_RUN_MS))
    return [{"name": name, "value": value, "goal": goal, "met": value <= goal} for name, value, goal in figures]


def report(results: dict[str, Any], sizes: list[int]) -> None:
    """Print the figures as tables."""
    for policy, by_batch in results["us_per_chunk"].items():
        for batch, by_size in by_batch.items():
            print(f"\n{policy}, requests of {batch} chunks; us a chunk, by resident chunks")
            print(f"  {'operation':26}" + "".join(f"{size:>12,}" for size in sizes))
            for name in (*OPERATIONS, "sum"):
                print(f"  {name:26}" + "".join(f"{by_size[str(size)][name]:12.3f}" for size in sizes))


def main() -> None:
    options = options_of(__doc__, "fewer rounds").parse_args()
    lives = 100 if options.quick else 1000
    sizes = [1_000, 100_000]
    figures: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for policy in ("lru", "arc"):
        for batch in (8, 64):
            for size in sizes:
                rounds = Rounds(size, batch, policy)
                for _ in range(lives):
                    rounds.one_life()
                figures.setdefault(policy, {}).setdefault(str(batch), {})[str(size)] = rounds.medians()
    results: dict[str, Any] = {"us_per_chunk": figures, "prefix_lookup_ms": prefix_lookup_ms(100_000, 8192)}
    results["goals"] = goals(results, sizes)
    say(results, partial(report, sizes=sizes), as_json=options.json)


if __name__ == "__main__":
    main()
