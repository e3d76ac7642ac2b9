"""A burst of known prompts as the first thing after a restart: real manager, hosts and files, a GPU that is slept.

A store in memory-backed files has the chunks of all requests. Each way is an engine of its own that has just started:
"decide" (``load_wait: auto``), "load" (whatever it takes), "compute" (no tier). Its steps take as long as what they
compute, its loads as long as the hosts take. Computing a request takes ``--ratio`` times as long as loading one alone,
measured at first, so that figures of machines of different speed can be compared.

Regret: all requests' seconds to the first token together, over those of the better of "load" and "compute". What is
computed is stored, as an engine does. `load_or_recompute.py` plays the same scene by the clock, with ideal tiers.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lib.results import at_least, at_most, say

from kvtiers import (
    CacheLayout,
    KVGroup,
    KVTensor,
    ModelIdentity,
    PromptGroup,
    RequestContext,
    open_manager,
    open_worker,
)
from kvtiers.api import OffloadKey, make_offload_key
from kvtiers.layout.seal import seal_value
from kvtiers.layout.storage_name import StorageNames
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore

CHUNK_TOKENS, PAGE = 16, 2 << 20
LAYOUT = CacheLayout(ModelIdentity("burst", weights="w"), (KVGroup("full", CHUNK_TOKENS),), (KVTensor("t", 0, PAGE),))
NAMESPACE = "bench"
WRITERS = 8
IDLE_STEP, STEP_OVERHEAD = 0.002, 0.004
GOAL_REGRET = 1.05
GOAL_HITS = 0.5


class Size(NamedTuple):
    """So many requests of so many chunks each."""

    requests: int
    chunks: int


@dataclass
class Outcome:
    """What came of a burst: each request's seconds to the first token, the share that was loaded, kvtiers' figures."""

    seconds: list[float] = field(default_factory=list)
    loaded: int = 0
    figures: dict[str, float] = field(default_factory=dict)


def keys_of(request: int, chunks: int) -> list[OffloadKey]:
    """Return a request's keys."""
    return [make_offload_key(f"{request:08}-{place:08}".encode(), 0) for place in range(chunks)]


def fill(store: FsStore, size: Size) -> None:
    """Write all chunks of all requests, sealed."""
    names = StorageNames.of_layout(NAMESPACE, LAYOUT)
    payload = os.urandom(LAYOUT.value_bytes(0))

    def write(requests: Sequence[int]) -> None:
        value = bytearray(payload)
        for request in requests:
            for name in names.names(keys_of(request, size.chunks)):
                with memoryview(value) as view:
                    seal_value(view, LAYOUT.payload_bytes(0), name, names.layout_id)
                    store.write(name, view)

    writers = [threading.Thread(target=write, args=(range(n, size.requests, WRITERS),)) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()


class Engine:
    """An engine that has just started."""

    def __init__(self, folder: Path, size: Size, way: str, compute: float, stack: ExitStack) -> None:
        self.size, self.compute = size, compute
        tier = {"type": "fs", "path": str(folder), "capacity": "256GiB", "min_free": "0B"}
        config: dict[str, Any] = {
            "version": 1, "namespace": NAMESPACE, "start_wait": "60s", "secondary": [] if way == "compute" else [tier],
            "primary": {"capacity": f"{size.requests * size.chunks * LAYOUT.row_stride}B"},
        }  # fmt: skip
        if way == "load":
            budgets = {"one_tier": 0.9, "all_tiers": 0.9, "store_reserve": 0.05, "protected": 0.05}
            config |= {"load_wait": "1h", "lookup_wait": "1h", "budgets": budgets}
        self.manager = open_manager(config, LAYOUT)
        stack.callback(self.manager.shutdown, 5.0)
        blocks = [np.zeros((1, PAGE), np.uint8)]
        worker = open_worker(config, LAYOUT, blocks, engine_id=self.manager.engine_id)
        stack.callback(worker.shutdown)
        self.manager.wait_ready(60)

    def burst(self, requests: Sequence[int]) -> Outcome:
        """Serve these requests, which come at once, as vLLM does: each step computes as much as one of them has."""
        manager, chunks = self.manager, self.size.chunks
        found, begun = Outcome(), time.monotonic()
        waiting = [(RequestContext(f"r{request}"), keys_of(request, chunks)) for request in requests]
        for context, _ in waiting:
            manager.on_new_request(context, chunks * CHUNK_TOKENS)
        tokens, took = 0, 0.0
        while waiting:
            room, step = chunks, []
            for context, keys in list(waiting):
                if room <= 0:
                    break
                hits = manager.reach([PromptGroup(keys)], context).in_chunks(manager.tokens_per_chunk[0])
                if hits.waits:
                    continue
                if hits.ready:
                    plan = manager.prepare_load(keys[: hits.ready], context)
                    assert plan is not None
                    manager.complete_load(plan)
                    found.loaded += hits.ready
                room -= chunks - hits.ready
                step.append((context, keys, hits.ready))
                waiting.remove((context, keys))
            manager.on_schedule_end(tokens, took)
            computed = sum(chunks - ready for _, _, ready in step)
            launched = time.monotonic()
            time.sleep(STEP_OVERHEAD + computed / chunks * self.compute if step else IDLE_STEP)
            tokens, took = computed * CHUNK_TOKENS, time.monotonic() - launched if computed else 0.0
            for context, keys, ready in step:
                found.seconds.append(time.monotonic() - begun)
                if ready < chunks and (stored := manager.prepare_store(keys[ready:], context)) is not None:
                    manager.complete_store(stored)
                manager.on_request_finished(context)
        for figures in manager.stats()["tiers"].values():
            found.figures |= {
                name: value for name, value in figures.items() if isinstance(value, int | float) and value
            }
        return found


def load_alone(folder: Path, size: Size) -> float:
    """Return the seconds that one request takes to load where nothing else is asked for."""
    took = []
    with ExitStack() as stack:
        engine = Engine(folder, size, "load", 0.0, stack)
        for request in range(min(5, size.requests)):
            outcome = engine.burst([request])
            assert outcome.loaded == size.chunks, outcome
            took += outcome.seconds
    return statistics.median(took)


def play(folder: Path, size: Size, ratio: float) -> dict[str, Any]:
    """Play all ways."""
    alone = load_alone(folder, size)
    compute = ratio * alone
    found: dict[str, Any] = {"load_alone_s": alone, "compute_s": compute, "ways": {}}
    for way in ("compute", "load", "decide"):
        with ExitStack() as stack:
            outcome = Engine(folder, size, way, compute, stack).burst(range(size.requests))
        found["ways"][way] = {
            "total_s": sum(outcome.seconds), "end_s": max(outcome.seconds),
            "loaded": outcome.loaded / (size.requests * size.chunks), "figures": outcome.figures,
        }  # fmt: skip
    ways = found["ways"]
    regret = ways["decide"]["total_s"] / min(ways["load"]["total_s"], ways["compute"]["total_s"])
    found["goals"] = [
        at_most("regret of a burst after a restart", regret, GOAL_REGRET),
        at_least("share of it that is loaded", ways["decide"]["loaded"], GOAL_HITS),
    ]
    return found


def report(found: dict[str, Any]) -> None:
    """Print a line for each way."""
    gigabytes = found["bytes"] / found["load_alone_s"] / 1e9
    print(
        f"one request alone: {found['load_alone_s']:.3f} s ({gigabytes:.1f} GB/s); computed: {found['compute_s']:.3f} s"
    )
    for way, figures in found["ways"].items():
        print(
            f"  {way:<8} {figures['total_s']:.2f} s to the first token, all together; the last at "
            f"{figures['end_s']:.2f} s; {figures['loaded']:.0%} loaded"
        )
    print(f"  decide: {found['ways']['decide']['figures']}")


def main() -> None:
    """Fill a store, and play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24, help="at once (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=64, help="of 2 MiB, of each request (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=2.0, help="computing over loading (default: %(default)s)")
    parser.add_argument("--stores", default="/dev/shm", help="where the store is made (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="12 requests of 32 chunks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    size = Size(12, 32) if args.quick else Size(args.requests, args.chunks)
    with tempfile.TemporaryDirectory(prefix="kvtiers-burst-", dir=args.stores) as folder:
        path = Path(folder) / "store"
        store = FsStore(FsConfig(type="fs", path=path, capacity="256GiB", min_free=0))
        fill(store, size)
        store.close()
        found = play(path, size, args.ratio)
    found["bytes"] = size.chunks * PAGE
    say(found, report, as_json=args.json)


if __name__ == "__main__":
    main()
