"""What the start of a region costs its engine: the calls' own time, pre-faulting's rate, and how long it stalls.

An engine's thread ticks every millisecond while the region is populated: by the pre-fault program, as kvtiers does
it, and by `mmap.madvise` in a thread of the engine's process, which holds the interpreter for the whole call. Between
them stands a pause of the same length, for what the machine does by itself. The longest gap between two ticks is
the stall. Where there is a GPU: the time until its first row is usable and until all of 16 GiB are pre-faulted and
pinned, against populating and registering everything before the first use.
"""

import argparse
import json
import mmap
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtiers.gpu.settings import CopySettings
from kvtiers.gpu.worker import GpuWorker
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region.client import RegionJoin
from kvtiers.region.populate import MADV_POPULATE_WRITE
from kvtiers.region.region import PrefaultEnded, SharedOffloadRegion
from kvtiers.types import BlockSpec

RANKS = 2
GOAL_START_MS = 50.0  # create() and start() together: they only begin things
GOAL_FIRST_ROW_SHARE = 0.1  # of the time in which all of the memory is populated and registered in one go
GOAL_ALL_PINNED_SHARE = 1.0
GOAL_STALL_SHARE = 0.1  # of the stall of the same work in the engine's process


def layout(ranks: int = RANKS) -> CacheLayout:
    """Return a layout of 2 MiB rows, and a page."""
    tensors = tuple(KVTensor(f"layer{i}", 0, 32 << 10) for i in range(32))
    return CacheLayout(ModelIdentity("bench"), (KVGroup("full", 16),), tensors, world_size=ranks)


def longest_gap_ms(begin: float, finished: Callable[[], bool]) -> float:
    """Tick every millisecond until it is finished; return the longest time between two ticks, or from ``begin``."""
    longest, last = 0.0, begin
    while not finished():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest * 1e3


def start_region(total: int) -> dict[str, float]:
    """Start a region and its ranks, and tick until it is populated."""
    cache, engine_id = layout(), f"bench-{uuid.uuid4().hex}"
    begin = time.perf_counter()
    joins = [RegionJoin.start(engine_id, cache, rank) for rank in range(RANKS)]
    region = SharedOffloadRegion.create(engine_id, cache, total)
    returned = time.perf_counter()
    region.wait_ready()
    joined = time.perf_counter()
    gap = longest_gap_ms(joined, lambda: any(isinstance(event, PrefaultEnded) for event in region.poll()))
    rate = region.view.nbytes / 1e9 / region.timings["prefault"]
    for join in joins:
        join.close()
    region.close()
    return {
        "calls_ms": (returned - begin) * 1e3,
        "joined_ms": (joined - begin) * 1e3,
        "prefault_gb_per_s": rate,
        "stall_ms": gap,
        "prefault_s": total / 1e9 / rate,
    }


def populate_in_process(total: int) -> dict[str, float]:
    """Populate as much memory with `mmap.madvise` in a thread, and tick meanwhile."""
    memory = mmap.mmap(-1, total)
    begin = time.perf_counter()
    worker = threading.Thread(target=lambda: memory.madvise(MADV_POPULATE_WRITE))
    worker.start()
    gap = longest_gap_ms(begin, lambda: not worker.is_alive())
    seconds = time.perf_counter() - begin
    memory.close()
    return {"prefault_gb_per_s": total / 1e9 / seconds, "stall_ms": gap}


def pin_in_background(total: int) -> dict[str, float]:
    """Start a region and a worker with KV in GPU memory; return seconds until a first job and until all is pinned."""
    import torch

    cache, engine_id = layout(ranks=1), f"bench-{uuid.uuid4().hex}"
    kv = [torch.zeros((4, tensor.page_on(0)), dtype=torch.uint8, device="cuda") for tensor in cache.tensors]
    for settings in (CopySettings(pin=False), CopySettings()):  # the first one warms up: kernel, streams, measurement
        begin = time.perf_counter()
        region = SharedOffloadRegion.create(engine_id, cache, total if settings.pin else cache.row_stride)
        worker = GpuWorker(cache, kv, RegionJoin.start(engine_id, cache, 0), copying=settings)
        returned = time.perf_counter()
        worker.submit_store(1, BlockSpec(np.array([0]), (1,), (0,)), np.array([0]))
        worker.wait([1])
        first = time.perf_counter()
        assert all(result.success for result in worker.get_finished())
        copier: Any = worker._copier  # noqa: SLF001 -- to wait for pinning, which jobs need not
        assert not settings.pin or copier.pinned.wait(300)
        pinned = time.perf_counter()
        worker.shutdown()
        region.close()
    return {"calls_ms": (returned - begin) * 1e3, "first_row_s": first - begin, "all_pinned_s": pinned - begin}


def allocate_then_wait(total: int) -> dict[str, float]:
    """Populate and register as much memory in one go, with one thread: then the first row is usable."""
    import torch

    memory = mmap.mmap(-1, total)
    begin = time.perf_counter()
    memory.madvise(MADV_POPULATE_WRITE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    status = torch.cuda.cudart().cudaHostRegister(address, total, 0)
    seconds = time.perf_counter() - begin
    assert int(status) == 0, status
    torch.cuda.cudart().cudaHostUnregister(address)
    return {"first_row_s": seconds, "all_pinned_s": seconds}


def cuda_start(total: int) -> dict[str, Any]:
    """Return both ways of starting with a GPU, and their goals; nothing where there is none."""
    try:
        import torch
    except ImportError:
        return {"goals": []}
    if not torch.cuda.is_available():
        return {"goals": []}
    ours, theirs = pin_in_background(total), allocate_then_wait(total)
    goals = [
        ("first row usable on the GPU, as a share of allocate-then-wait", "first_row_s", GOAL_FIRST_ROW_SHARE),
        ("all rows pre-faulted and pinned, as a share of allocate-then-wait", "all_pinned_s", GOAL_ALL_PINNED_SHARE),
    ]
    return {
        "bytes": total,
        "kvtiers": ours,
        "allocate_then_wait": theirs,
        "goals": [
            {"name": name, "value": (share := ours[key] / theirs[key]), "goal": goal, "met": share <= goal}
            for name, key, goal in goals
        ],
    }


def results(*, quick: bool) -> dict[str, Any]:
    """Return the figures and the goals."""
    total = (256 << 20) if quick else (2 << 30)
    ours = start_region(total)
    begin = time.perf_counter()
    until = begin + ours["prefault_s"]
    pause = {"stall_ms": longest_gap_ms(begin, lambda: time.perf_counter() > until)}
    in_process = populate_in_process(total)
    share = ours["stall_ms"] / in_process["stall_ms"]
    goals = [
        {
            "name": f"ms until open_manager's and {RANKS} open_worker's region calls have returned",
            "value": ours["calls_ms"],
            "goal": GOAL_START_MS,
            "met": ours["calls_ms"] <= GOAL_START_MS,
        },
        {
            "name": "longest stall of the engine's thread, as a share of populating in its process",
            "value": share,
            "goal": GOAL_STALL_SHARE,
            "met": share <= GOAL_STALL_SHARE,
        },
    ]
    cuda = cuda_start((2 << 30) if quick else (16 << 30))
    goals += cuda.pop("goals")
    return {"bytes": total, "kvtiers": ours, "pause": pause, "in_process": in_process, "cuda": cuda, "goals": goals}


def report(found: dict[str, Any]) -> None:
    """Print the figures."""
    ours = found["kvtiers"]
    print(f"  calls {ours['calls_ms']:.1f} ms, all ranks joined after {ours['joined_ms']:.1f} ms")
    for name in ("kvtiers", "in_process"):
        figures = found[name]
        print(f"  {name:12} {figures['prefault_gb_per_s']:6.2f} GB/s, longest stall {figures['stall_ms']:8.1f} ms")
    print(f"  {'pause':12} {'':11}  longest stall {found['pause']['stall_ms']:8.1f} ms")
    if found["cuda"]:
        for name in ("kvtiers", "allocate_then_wait"):
            cuda = found["cuda"][name]
            print(
                f"  {found['cuda']['bytes'] >> 30} GiB for a GPU, {name:18} first row {cuda['first_row_s']:.3f} s, "
                f"all pinned {cuda['all_pinned_s']:.2f} s"
            )
    for goal in found["goals"]:
        print(f"{goal['name']}: {goal['value']:.3g}; goal {goal['goal']:g}: {'met' if goal['met'] else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller region")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = results(quick=options.quick)
    if options.json:
        print(json.dumps(found))
    else:
        report(found)


if __name__ == "__main__":
    main()
