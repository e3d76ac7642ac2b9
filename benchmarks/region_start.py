"""The cost of a region's start for its engine: the calls' own time, pre-faulting's rate, and how long it stalls.

An engine's thread ticks every millisecond while the region is populated: by the pre-fault program, as kvtiers does
it, and by `mmap.madvise` in a thread of the engine's process, which holds the interpreter for the whole call. Between
them stands a pause of the same length, for what the machine does by itself. The longest gap between two ticks is
the stall. Where there is a GPU: the time until its first row is usable and until all of 16 GiB are pre-faulted and
pinned, against populating and registering everything before the first use; and how long a launch takes beside pinning
at several paces, against no pinning and against pinning as fast as it goes.

Memory is populated ahead of use, so a large primary must start like a small one: both are started in turns, to the
first stored row, and what they take of the machine's memory is read. The large one is address space only, so it may be
larger than the machine. What huge pages save is the time to populate as much memory with and without them: of a memfd
where the machine gives them to shared memory (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`), else of anonymous
memory, which says what there is to gain.
"""

import contextlib
import mmap
import os
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lib.results import options_of, say

import kvtiers
from kvtiers.gpu.pin_pace import PinPace
from kvtiers.gpu.settings import CopySettings
from kvtiers.gpu.worker import GpuWorker
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region import region as region_module
from kvtiers.region.client import RegionJoin
from kvtiers.region.populate import MADV_POPULATE_WRITE
from kvtiers.region.region import PrefaultEnded, SharedOffloadRegion
from kvtiers.types import BlockSpec, RequestContext

RANKS = 2
GOAL_START_MS = 50.0  # create() and start() together: they only begin things
GOAL_FIRST_ROW_SHARE = 0.1  # of the time in which all of the memory is populated and registered in one go
GOAL_ALL_PINNED_SHARE = 1.0
GOAL_LARGE_MS = 20.0  # by which the large primary stores its first row later: it has 64 times as many rows
GOAL_RESIDENT_SHARE = 1.25  # of the window, what the large primary takes of memory then
GOAL_LAUNCH_SHARE = 1.15  # of the time without pinning, what launches take beside pinning at its default pace
SMALL, LARGE = 8 << 30, 512 << 30
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
    region = SharedOffloadRegion.create(engine_id, cache, total, prefault_window=total)
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
    for settings in (
        CopySettings(pin=False),
        CopySettings(pin_share=1.0, pin_seconds=0.05),
    ):  # the first one warms up: kernel, streams, measurement
        begin = time.perf_counter()
        capacity = total if settings.pin else cache.row_stride
        region = SharedOffloadRegion.create(engine_id, cache, capacity, prefault_window=capacity)
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


PACES = ((0.0, 0.0), (0.05, 0.002), (0.1, 0.001), (0.1, 0.002), (0.1, 0.004), (0.4, 0.002), (1.0, 0.05))
DEFAULT_PACE = (0.1, 0.002)
"""Share of the time and seconds a piece, as ``primary.pin_share`` and ``primary.pin_piece``; (0, 0): no pinning."""


def pin_at(pace: PinPace, driver: Any, memory: tuple[int, int], stop: threading.Event, pinned: list[int]) -> None:
    """Pin memory (address, bytes) at this pace until the caller asks it to stop."""
    driver.enter()
    address, total = memory
    at = 0
    while not stop.is_set() and at < total:
        size, begin = min(pace.piece_bytes, total - at), time.perf_counter()
        driver.pin(address + at, size)
        pinned.append(address + at)
        at += size
        stop.wait(pace.rest_after(time.perf_counter() - begin, busy=True))


def launches_beside_pinning(total: int) -> dict[tuple[float, float], dict[str, float]]:
    """Return microseconds a launch, mean and longest, by the pace of the pinning beside it."""
    import torch

    from kvtiers.gpu.cuda.driver import CudaDriver

    memory = mmap.mmap(-1, total)
    memory.madvise(MADV_POPULATE_WRITE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    driver, counter = CudaDriver(0), torch.zeros(1, device="cuda")
    found = {}
    for share, seconds in PACES:
        stop, pinned, took = threading.Event(), list[int](), list[float]()
        pace = PinPace(share or 1.0, seconds, 64 << 20)
        thread = threading.Thread(target=pin_at, args=(pace, driver, (address, total if share else 0), stop, pinned))
        thread.start()
        started = time.perf_counter()
        while time.perf_counter() - started < 2.0 and (thread.is_alive() or not share):
            begin = time.perf_counter()
            counter.add_(1)
            took.append(time.perf_counter() - begin)
            if not len(took) % 500:
                torch.cuda.synchronize()
        stop.set()
        thread.join()
        torch.cuda.synchronize()
        with driver.current():
            for piece in pinned:
                driver.unpin(piece)
        found[share, seconds] = {"us_a_launch": statistics.fmean(took) * 1e6, "longest_us": max(took) * 1e6}
    driver.close()
    return found


def cuda_start(total: int) -> dict[str, Any]:
    """Return both ways of starting with a GPU, and their goals; nothing where there is none."""
    try:
        import torch
    except ImportError:
        return {"goals": []}
    if not torch.cuda.is_available():
        return {"goals": []}
    ours, theirs = pin_in_background(total), allocate_then_wait(total)
    launches = launches_beside_pinning(min(total, 4 << 30))
    launch_share = launches[DEFAULT_PACE]["us_a_launch"] / launches[0.0, 0.0]["us_a_launch"]
    goals = [
        ("first row usable on the GPU, as a share of allocate-then-wait", "first_row_s", GOAL_FIRST_ROW_SHARE),
        ("all rows pre-faulted and pinned, as a share of allocate-then-wait", "all_pinned_s", GOAL_ALL_PINNED_SHARE),
    ]
    return {
        "bytes": total,
        "kvtiers": ours,
        "allocate_then_wait": theirs,
        "launches": [{"share": share, "piece_s": seconds, **taken} for (share, seconds), taken in launches.items()],
        "goals": [
            *(goal_line(name, ours[key] / theirs[key], goal) for name, key, goal in goals),
            goal_line("a launch beside pinning, as a share of one without", launch_share, GOAL_LAUNCH_SHARE),
        ],
    }


def goal_line(name: str, value: float, goal: float) -> dict[str, Any]:
    """Return one goal, which every value up to it satisfies."""
    return {"name": name, "value": value, "goal": goal, "met": value <= goal}


@contextlib.contextmanager
def unchecked_memory() -> Iterator[None]:
    """Let a region be larger than the machine's memory: it is never touched."""
    check, region_module.memory_problem = region_module.memory_problem, lambda _nbytes: None
    try:
        yield
    finally:
        region_module.memory_problem = check


def first_stored_row(capacity: int, window: int) -> dict[str, float]:
    """Start a manager and a worker, store a row; return the seconds it took, and the memory that is taken then."""
    cache = layout(ranks=1)
    config = {"version": 1, "primary": {"capacity": f"{capacity}B", "prefault_window": f"{window}B"}}
    kv = [np.zeros((4, tensor.page_on(0)), np.uint8) for tensor in cache.tensors]
    begin = time.perf_counter()
    with unchecked_memory():
        manager = kvtiers.open_manager(config, cache)
    worker = kvtiers.open_worker(config, cache, kv, engine_id=manager.engine_id)
    manager.wait_ready()
    context = RequestContext("r")
    manager.on_new_request(context)
    plan = manager.prepare_store([b"k" * 32 + bytes(4)], context)
    assert plan is not None
    worker.submit_store(1, BlockSpec(np.array([0]), (1,), (0,)), plan.chunk_ids)
    worker.wait([1])
    taken = time.perf_counter() - begin
    manager.complete_store(plan, success=all(result.success for result in worker.get_finished()))
    region: Any = manager._engine._region  # type: ignore[attr-defined]  # noqa: SLF001 -- to see the memory it takes
    while region.populated_rows * region.row_stride < min(window, capacity) - region.row_stride:
        time.sleep(0.01)
    resident = os.fstat(region.fd).st_blocks * 512
    worker.shutdown()
    manager.shutdown(1)
    return {"first_row_s": taken, "resident_bytes": resident}


def small_and_large(window: int, rounds: int) -> dict[str, Any]:
    """Start a small and a large primary in turns; return the least of each: what a busy machine adds is not theirs."""
    runs = [(first_stored_row(SMALL, window), first_stored_row(LARGE, window)) for _ in range(rounds)]
    names = ("first_row_s", "resident_bytes")
    small, large = ({name: min(run[i][name] for run in runs) for name in names} for i in range(2))
    return {"window": window, "small": small, "large": large}


def populate_seconds(total: int, advice: int, *, shared: bool) -> float:
    """Return the seconds that it takes to populate so much memory, of a memfd or anonymous, after this advice."""
    fd = os.memfd_create("bench") if shared else -1
    try:
        if shared:
            os.ftruncate(fd, total)
        with mmap.mmap(fd, total) if shared else mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE) as memory:
            memory.madvise(advice)
            begin = time.perf_counter()
            memory.madvise(MADV_POPULATE_WRITE)
            return time.perf_counter() - begin
    finally:
        if shared:
            os.close(fd)


def huge_pages(total: int) -> dict[str, Any]:
    """Return how fast memory is populated with and without huge pages, where the machine gives them."""
    allowed = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    words = allowed.read_text().split() if allowed.exists() else ["[never]"]
    setting = next(word for word in words if word.startswith("[")).strip("[]")
    shared = setting in {"always", "within_size", "advise", "force"}
    seconds = {
        name: statistics.median(populate_seconds(total, advice, shared=shared) for _ in range(3))
        for name, advice in (("small", mmap.MADV_NOHUGEPAGE), ("huge", mmap.MADV_HUGEPAGE))
    }
    return {"shmem_enabled": setting, "memory": "memfd" if shared else "anonymous"} | {
        f"{name}_gb_per_s": total / 1e9 / taken for name, taken in seconds.items()
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
    window = (64 << 20) if quick else (1 << 30)
    sizes = small_and_large(window, rounds=5 if quick else 9)
    small, large = sizes["small"], sizes["large"]
    goals += [
        goal_line(
            f"ms by which the first row is stored later with {LARGE >> 30} GiB than with {SMALL >> 30} GiB",
            (large["first_row_s"] - small["first_row_s"]) * 1e3,
            GOAL_LARGE_MS,
        ),
        goal_line(
            f"memory that {LARGE >> 30} GiB take at the start, as a share of the window",
            large["resident_bytes"] / window,
            GOAL_RESIDENT_SHARE if window > (1 << 29) else 1 + (5 * (64 << 20)) / window,  # whole pieces
        ),
    ]
    huge = huge_pages(total)
    cuda = cuda_start((2 << 30) if quick else (16 << 30))
    goals += cuda.pop("goals")
    found = {"bytes": total, "kvtiers": ours, "pause": pause, "in_process": in_process, "sizes": sizes}
    return found | {"huge_pages": huge, "cuda": cuda, "goals": goals}


def report(found: dict[str, Any]) -> None:
    """Print the figures."""
    ours = found["kvtiers"]
    print(f"  calls {ours['calls_ms']:.1f} ms, all ranks joined after {ours['joined_ms']:.1f} ms")
    for name in ("kvtiers", "in_process"):
        figures = found[name]
        print(f"  {name:12} {figures['prefault_gb_per_s']:6.2f} GB/s, longest stall {figures['stall_ms']:8.1f} ms")
    print(f"  {'pause':12} {'':11}  longest stall {found['pause']['stall_ms']:8.1f} ms")
    for name, capacity in (("small", SMALL), ("large", LARGE)):
        figures = found["sizes"][name]
        print(
            f"  primary of {capacity >> 30:3} GiB: first row stored after {figures['first_row_s'] * 1e3:6.1f} ms, "
            f"{figures['resident_bytes'] >> 20} MiB of memory taken, window {found['sizes']['window'] >> 20} MiB"
        )
    huge = found["huge_pages"]
    print(
        f"  huge pages ({huge['memory']}, shmem_enabled is {huge['shmem_enabled']}): populated at "
        f"{huge['huge_gb_per_s']:.2f} GB/s, without {huge['small_gb_per_s']:.2f} GB/s"
    )
    if found["cuda"]:
        for beside in found["cuda"]["launches"]:
            print(
                f"  beside pinning {beside['share']:4.0%} of the time, {beside['piece_s'] * 1e3:4.1f} ms a piece: "
                f"{beside['us_a_launch']:6.2f} us a launch, the longest {beside['longest_us']:8.0f} us"
            )
        for name in ("kvtiers", "allocate_then_wait"):
            cuda = found["cuda"][name]
            print(
                f"  {found['cuda']['bytes'] >> 30} GiB for a GPU, {name:18} first row {cuda['first_row_s']:.3f} s, "
                f"all pinned {cuda['all_pinned_s']:.2f} s"
            )


def main() -> None:
    options = options_of(__doc__, "a smaller region").parse_args()
    found = results(quick=options.quick)
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
