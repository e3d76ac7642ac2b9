"""KV blocks to rows and back, through the public `GpuWorker`, beside the link's own limit and beside a model's work.

One run measures, on one GPU: the contiguous pinned peak (each way, both ways at once); then batches of 1 GiB of random
blocks and rows, 32 layers, for pages of 4 KiB to 1 MiB, several batches in flight; then the same beside a loop of bf16
matrix products that fills the GPU; and what the copies cost a thread that runs pure Python. `--explore` adds the
curves of the settings: ring, slots, programs, methods. Without a CUDA device it says so and states no goals.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kvtiers.base import BlockSpec
from kvtiers.gpu.worker import CopySettings, GpuWorker
from kvtiers.rows.join import RegionJoin
from kvtiers.rows.layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.rows.region import AnonymousRegion

LAYERS = 32
BATCH = 1 << 30
KV_BYTES = 2 * BATCH
IN_FLIGHT = 4
PAGES = [4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20]
ALONE_GOALS = {4 << 10: 0.85, 8 << 10: 0.90, 16 << 10: 0.93, 64 << 10: 0.96, 256 << 10: 0.96, 1 << 20: 0.96}
BOTH_GOAL, BESIDE_GOAL, PRODUCT_GOAL, PYTHON_GOAL, SUBMIT_GOAL_MS = 0.85, 0.90, 0.97, 0.01, 1.0
MATRIX = 8192


def timed(call: Callable[[], None], repeats: int) -> float:
    """Return the median seconds of a call, after one that warms up."""
    call()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def peaks(repeats: int) -> dict[str, float]:
    """Return GB/s of contiguous pinned copies: store (to the host), load, both in sum."""
    host = [torch.empty(BATCH, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(BATCH, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def move(ways: list[int]) -> None:
        for _ in range(IN_FLIGHT):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    (device if way else host)[way].copy_((host if way else device)[way], non_blocking=True)
        torch.cuda.synchronize()

    ways = {"store": [0], "load": [1], "both": [0, 1]}
    return {
        name: IN_FLIGHT * BATCH * len(some) / 1e9 / timed(lambda some=some: move(some), repeats)
        for name, some in ways.items()
    }


class Setup:
    """A worker over random KV in GPU memory, and a pinned region of as many rows."""

    def __init__(self, page: int, settings: CopySettings) -> None:
        self.page = page
        self.blocks = KV_BYTES // (page * LAYERS)
        tensors = tuple(KVTensor(f"layer{i}", 0, page) for i in range(LAYERS))
        self.layout = CacheLayout(ModelIdentity("bench"), (KVGroup("full", 16),), tensors)
        self.kv = [torch.randint(0, 256, (self.blocks, page), dtype=torch.uint8, device="cuda") for _ in tensors]
        self.region = AnonymousRegion.create(self.layout, num_rows=self.blocks)
        join = RegionJoin.in_process(self.region, self.layout, 0)
        begin = time.perf_counter()
        self.worker = GpuWorker(self.layout, self.kv, join, copying=settings)
        self.job = 0
        self.rng = np.random.default_rng(1)
        self.finish([self.submit("load", np.arange(1), np.arange(1))])  # it attaches at its first job
        copier: Any = self.worker._copier  # noqa: SLF001 -- to wait for pinning, which jobs need not
        assert not settings.pin or copier.pinned.wait(120), copier.pinned.given_up
        self.start_seconds = time.perf_counter() - begin
        # Two halves, so that both ways at once touch neither each other's blocks nor rows.
        order = [self.rng.permutation(self.blocks) for _ in range(2)]
        half = self.blocks // 2
        self.halves = {"load": [some[:half] for some in order], "store": [some[half:] for some in order]}

    def submit(self, way: str, blocks: Any, rows: Any) -> int:
        """Submit one transfer; return its job id."""
        self.job += 1
        spec = BlockSpec(blocks, (len(blocks),), (0,))
        if way == "store":
            self.worker.submit_store(self.job, spec, rows)
        else:
            self.worker.submit_load(self.job, rows, spec)
        return self.job

    def batch(self, way: str) -> int:
        """Submit 1 GiB of random blocks and rows."""
        return self.submit(way, *self.halves[way])

    def finish(self, jobs: list[int]) -> None:
        """Wait for jobs; whatever failed ends the benchmark."""
        self.worker.wait(jobs)
        for result in self.worker.get_finished():
            assert result.success, result.error

    def rate(self, ways: list[str], repeats: int, in_flight: int = IN_FLIGHT) -> float:
        """Return GB/s of so many batches of each way in flight."""

        def move() -> None:
            self.finish([self.batch(way) for _ in range(in_flight) for way in ways])

        return in_flight * len(ways) * BATCH / 1e9 / timed(move, repeats)

    def submit_ms(self, way: str) -> float:
        """Return the median milliseconds of the call that submits 1 GiB."""
        found = []
        for _ in range(20):
            begin = time.perf_counter()
            job = self.batch(way)
            found.append((time.perf_counter() - begin) * 1e3)
            self.finish([job])
        return statistics.median(found)

    def close(self) -> None:
        """End the worker, then the region."""
        self.worker.shutdown()
        self.region.close()


@contextmanager
def setup(page: int, **settings: Any) -> Iterator[Setup]:
    made = Setup(page, CopySettings(**settings))
    try:
        yield made
    finally:
        made.close()


def alone(page: int, peak: dict[str, float], repeats: int, **settings: Any) -> dict[str, Any]:
    """Return what copies of this page size reach with nothing beside them."""
    with setup(page, **settings) as made:
        found: dict[str, Any] = {"page": page, "start_s": made.start_seconds}
        for way in ("store", "load"):
            found[way] = rate = made.rate([way], repeats)
            found[f"{way}_share"] = rate / peak[way]
            found[f"{way}_single"] = made.rate([way], repeats, in_flight=1)
            found[f"{way}_submit_ms"] = made.submit_ms(way)
            found[f"{way}_thread_ms"] = copy_thread_ms(made, way)
        found["both"] = rate = made.rate(["store", "load"], repeats)
        found["both_share"] = rate / peak["both"]
    return found


class Products:
    """A model's stand-in: matrix products that fill the GPU, at most three of them queued."""

    def __init__(self) -> None:
        self.a, self.b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.out = torch.empty_like(self.a)
        self.events = [torch.cuda.Event(blocking=True) for _ in range(3)]
        self.count = 0

    def step(self) -> None:
        """Launch one, once no more than two are under way."""
        event = self.events[self.count % 3]
        event.synchronize()
        torch.matmul(self.a, self.b, out=self.out)
        event.record()
        self.count += 1

    def rate(self, goes_on: Callable[[], bool]) -> float:
        """Return products a second for as long as it goes on."""
        for _ in range(5):
            self.step()
        torch.cuda.synchronize()
        begin, first = time.perf_counter(), self.count
        while goes_on():
            self.step()
        torch.cuda.synchronize()
        return (self.count - first) / (time.perf_counter() - begin)


def while_for(seconds: float) -> Callable[[], bool]:
    """Return a question that is answered by True for so long."""
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until


def beside(made: Setup, products: Products, way: str, batches: int) -> dict[str, Any]:
    """Return GB/s of a stream of batches beside the products, and the share of their speed that they keep.

    The rate is that of a stream that is under way: from the end of the first batch to that of the last one.
    """
    before = products.rate(while_for(0.4))
    submitted = 0
    ends: list[float] = []

    def goes_on() -> bool:
        nonlocal submitted
        for result in made.worker.get_finished():
            assert result.success, result.error
            ends.append(time.perf_counter())
        while submitted < batches and submitted - len(ends) < 3:
            made.batch(way)
            submitted += 1
        return len(ends) < batches

    during = products.rate(goes_on)
    alone_rate = (before + products.rate(while_for(0.4))) / 2
    return {
        "page": made.page,
        "way": way,
        "gb_per_s": (batches - 1) * BATCH / 1e9 / (ends[-1] - ends[0]),
        "product_share": during / alone_rate,
        "tflops_alone": alone_rate * 2 * MATRIX**3 / 1e12,
    }


def link_beside(products: Products, copies: int) -> dict[str, float]:
    """Return GB/s of contiguous pinned copies beside the products: what the link gives then, to whoever asks."""
    host = torch.empty(BATCH, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(BATCH, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    found = {}
    for way, to, source in (("store", host, device), ("load", device, host)):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(copies)]
        with torch.cuda.stream(stream):
            for event in events:
                to.copy_(source, non_blocking=True)
                event.record()
        products.rate(lambda last=events[-1]: not last.query())
        found[way] = (copies - 1) * BATCH / 1e6 / events[0].elapsed_time(events[-1])
    return found


def copy_thread_ms(made: Setup, way: str) -> float:
    """Return the milliseconds of CPU time that the copy thread takes for 1 GiB."""
    ident = made.worker._thread.ident  # noqa: SLF001 -- its clock tells what no call of the worker does
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    begin = time.clock_gettime(clock)
    made.finish([made.batch(way) for _ in range(8)])
    return (time.clock_gettime(clock) - begin) / 8 * 1e3


def python_cost(made: Setup, seconds: float, pairs: int) -> dict[str, float]:
    """Return what share of pure Python's speed copies cost the thread that submits them, and their GB/s meanwhile."""
    rates: list[float] = []

    def loops(busy: bool) -> float:
        count = moved = 0
        jobs: list[int] = []
        begin = time.perf_counter()
        until = begin + seconds
        while time.perf_counter() < until:
            for _ in range(2000):
                count += 1
            if busy and count % 100_000 == 0:  # as often as an engine steps: every few milliseconds
                moved += sum(result.nbytes for result in made.worker.get_finished())
                while len(jobs) * BATCH - moved < 4 * BATCH:
                    jobs.append(made.batch(("store", "load")[len(jobs) % 2]))
        taken = time.perf_counter() - begin
        made.finish(jobs)
        if busy:
            rates.append(moved / 1e9 / taken)
        return count / taken

    loops(False)
    costs = []
    for _ in range(pairs):
        idle, busy, again = loops(False), loops(True), loops(False)
        costs.append(1 - busy / ((idle + again) / 2))
    return {"cost": statistics.median(costs), "gb_per_s": statistics.median(rates)}


def goal(name: str, value: float, wanted: float, *, at_most: bool = False) -> dict[str, Any]:
    return {"name": name, "value": value, "goal": wanted, "met": value <= wanted if at_most else value >= wanted}


def size(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def goals_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    goals = []
    for line in found["alone"]:
        page = size(line["page"])
        for way in ("store", "load"):
            wanted = ALONE_GOALS[line["page"]]
            goals.append(goal(f"{way}, pages of {page}: share of the link's peak", line[f"{way}_share"], wanted))
            if line["page"] >= 16 << 10:
                goals.append(
                    goal(f"{way}, pages of {page}: ms to submit 1 GiB", line[f"{way}_submit_ms"], SUBMIT_GOAL_MS,
                         at_most=True)
                )  # fmt: skip
        goals.append(goal(f"both ways, pages of {page}: share of the peak", line["both_share"], BOTH_GOAL))
    for line in found["beside"]:
        what = f"{line['way']}, pages of {size(line['page'])}, beside products"
        goals.append(goal(f"{what}: share of the peak", line["gb_per_s"] / found["peak"][line["way"]], BESIDE_GOAL))
        goals.append(goal(f"{what}: share of their speed that they keep", line["product_share"], PRODUCT_GOAL))
    cost = found["python"]["cost"]
    goals.append(goal("share of a Python thread's speed that the copies cost it", cost, PYTHON_GOAL, at_most=True))
    return goals


def results(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures and the goals."""
    repeats = 3 if quick else 7
    batches = 12 if quick else 30
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "settings": asdict(CopySettings())}
    found["peak"] = peaks(repeats)
    say("peak " + ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in found["peak"].items()))
    found["alone"] = []
    for page in PAGES:
        found["alone"].append(line := alone(page, found["peak"], repeats))
        say(
            f"{size(page):>8}  store {line['store']:5.1f} ({line['store_share']:.3f}) one {line['store_single']:5.1f} "
            f"[{line['store_submit_ms']:.2f} ms, thread {line['store_thread_ms']:.2f}]  "
            f"load {line['load']:5.1f} ({line['load_share']:.3f}) one {line['load_single']:5.1f} "
            f"[{line['load_submit_ms']:.2f} ms, thread {line['load_thread_ms']:.2f}]  both {line['both']:5.1f} "
            f"({line['both_share']:.3f})"
        )
    products = Products()
    found["link_beside"] = link_beside(products, 12)
    say("contiguous copies beside products " + ", ".join(f"{w} {r:.1f} GB/s" for w, r in found["link_beside"].items()))
    found["beside"] = []
    for page in (16 << 10, 64 << 10, 1 << 20):
        with setup(page) as made:
            for way in ("store", "load"):
                found["beside"].append(line := beside(made, products, way, batches))
                say(
                    f"{size(page):>8}  {way} beside products: {line['gb_per_s']:.1f} GB/s "
                    f"({line['gb_per_s'] / found['peak'][way]:.3f}), they keep {line['product_share']:.3f} "
                    f"of {line['tflops_alone']:.0f} TFLOP/s"
                )
    with setup(64 << 10) as made:
        found["python"] = python_cost(made, 1.0, 3 if quick else 7)
    say(f"pure Python loses {found['python']['cost']:.4f} beside {found['python']['gb_per_s']:.1f} GB/s")
    found["goals"] = goals_of(found)
    return found


@dataclass(frozen=True)
class Variant:
    """Settings to try, each with a short name."""

    name: str
    settings: dict[str, Any]


def explore(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the curves of the settings: alone at several pages, and beside the products."""
    mib = 1 << 20
    ways = {"store": "staged", "load": "staged"}
    variants = [
        Variant(f"staged {ring} MiB x{slots}", {**ways, "ring_bytes": ring * mib, "slots": slots, "ahead": 2 * slots})
        for ring, slots in [(64, 3), (128, 3), (192, 3), (256, 2), (256, 3), (256, 4), (256, 6), (384, 3), (512, 3)]
    ]
    variants += [
        Variant(f"direct, {programs} programs", {"store": "direct", "load": "direct", "direct_programs": programs})
        for programs in (2, 8, 32)
    ]
    variants.append(Variant("pages", {"store": "pages", "load": "pages"}))
    products, lines = Products(), []
    for variant in variants:
        for page in (16 << 10, 64 << 10):
            if variant.name == "pages" and page < 64 << 10:
                continue
            with setup(page, **variant.settings) as made:
                line: dict[str, Any] = {"variant": variant.name, "page": page}
                for way in ("store", "load"):
                    line[way] = made.rate([way], 3)
                    line[f"{way}_beside"] = beside(made, products, way, 6)
                lines.append(line)
            text = "  ".join(
                f"{way} {line[way]:5.1f}, beside {line[f'{way}_beside']['gb_per_s']:5.1f} "
                f"keeps {line[f'{way}_beside']['product_share']:.3f}"
                for way in ("store", "load")
            )
            say(f"{variant.name:24} {size(page):>8}  {text}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--explore", action="store_true", help="the curves of the settings instead")
    options = parser.parse_args()
    say: Callable[[str], None] = (lambda _line: None) if options.json else (lambda line: print(line, flush=True))
    if not torch.cuda.is_available():
        say("no CUDA device: nothing to measure here")
        found: dict[str, Any] = {"skipped": "no CUDA device", "goals": []}
    elif options.explore:
        found = {"curves": explore(say), "goals": []}
    else:
        found = results(quick=options.quick, say=say)
    if options.json:
        print(json.dumps(found))
    for met in found["goals"] if not options.json else []:
        print(f"{'met   ' if met['met'] else 'MISSED'} {met['name']}: {met['value']:.3g} (goal {met['goal']:g})")


if __name__ == "__main__":
    main()
