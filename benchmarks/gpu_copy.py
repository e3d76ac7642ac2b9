"""KV blocks to rows and back, through the public `GpuWorker`, beside the link's own limit and beside a model's work.

One run measures, on one GPU: the contiguous pinned peak (each way, both ways at once); then batches of 1 GiB of random
blocks and rows, 32 layers, for pages of 4 KiB to 1 MiB, several batches in flight, and into canonical rows for two of
them; then the same beside a loop of bf16 matrix products that fills the GPU; and what the copies cost a thread that
runs pure Python. `--explore` adds the curves of the settings: ring, slots, programs, methods. Without a CUDA device it
says so and states no goals.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from baselines.gpu_link import BATCH, IN_FLIGHT, MATRIX, Products, link_beside, peaks, timed, while_for
from lib.results import options_of
from rigs.gpu_rows import LAYERS, rows_of

from kvtiers.gpu.settings import CopySettings
from kvtiers.gpu.worker import GpuWorker
from kvtiers.region.client import RegionJoin
from kvtiers.region.region import AnonymousRegion
from kvtiers.types import BlockSpec

KV_BYTES = 2 * BATCH
PAGES = [4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20]
CANONICAL_PAGES = [16 << 10, 64 << 10]
ALONE_GOALS = {4 << 10: 0.85, 8 << 10: 0.90, 16 << 10: 0.93, 64 << 10: 0.96, 256 << 10: 0.96, 1 << 20: 0.96}
BOTH_GOAL, BESIDE_GOAL, PRODUCT_GOAL, PYTHON_GOAL, SUBMIT_GOAL_MS = 0.85, 0.90, 0.97, 0.01, 1.0


class Setup:
    """A worker over random KV in GPU memory, and a pinned region of as many rows."""

    def __init__(self, page: int, settings: CopySettings, *, canonical: bool = False) -> None:
        self.page = page
        self.blocks = KV_BYTES // (page * LAYERS)
        self.layout, rank_map = rows_of(page, canonical=canonical)
        self.kv = [
            torch.randint(0, 256, (self.blocks, page), dtype=torch.uint8, device="cuda") for _ in self.layout.tensors
        ]
        self.region = AnonymousRegion.create(self.layout, num_rows=self.blocks)
        join = RegionJoin.in_process(self.region, self.layout, 0)
        begin = time.perf_counter()
        self.worker = GpuWorker(self.layout, self.kv, join, rank_map=rank_map, copying=settings)
        self.job = 0
        self.rng = np.random.default_rng(1)
        self.finish([self.submit("load", np.arange(1), np.arange(1))])  # it is attached then
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
            self.worker.submit_load(self.job, rows, spec, expedited=way == "expedited")
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
def setup(page: int, *, canonical: bool = False, **settings: Any) -> Iterator[Setup]:
    made = Setup(page, CopySettings(**settings), canonical=canonical)
    try:
        yield made
    finally:
        made.close()


def alone(page: int, peak: dict[str, float], repeats: int, *, canonical: bool = False) -> dict[str, Any]:
    """Return what copies of this page size reach with nothing beside them."""
    with setup(page, canonical=canonical) as made:
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


def beside(made: Setup, products: Products, way: str, batches: int) -> dict[str, Any]:
    """Return GB/s of a stream of batches beside the products, and the share of their speed that they keep.

    The rate is that of a stream in full run: the slope of the batches' ends, without the first two.
    """
    seconds = batches * BATCH / 50e9  # about as long as the batches take: a GPU that works for longer gets slower
    products.rate(while_for(0.5))
    before = products.rate(while_for(seconds))
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
    alone_rate = (before + products.rate(while_for(seconds))) / 2
    seconds_per_batch = np.polyfit(np.arange(len(ends) - 2), ends[2:], 1)[0]
    return {
        "page": made.page,
        "way": way,
        "gb_per_s": float(BATCH / 1e9 / seconds_per_batch),
        "product_share": during / alone_rate,
        "tflops_alone": alone_rate * 2 * MATRIX**3 / 1e12,
    }


def copy_thread_ms(made: Setup, way: str) -> float:
    """Return the milliseconds of CPU time that the copy thread takes for 1 GiB."""
    ident = made.worker._thread.ident  # noqa: SLF001 -- its clock shows what no call of the worker does
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    begin = time.clock_gettime(clock)
    made.finish([made.batch(way) for _ in range(8)])
    return (time.clock_gettime(clock) - begin) / 8 * 1e3


def expedited_ms(made: Setup) -> float:
    """Return the median milliseconds of an expedited load of some 2 MiB amid 3 GiB of bulk loads."""
    count = max(1, (2 << 20) // (made.page * LAYERS))
    blocks, rows = (some[:count] for some in made.halves["store"])  # the others are being loaded
    found = []
    for _ in range(5):
        bulk = [made.batch("load") for _ in range(3)]
        time.sleep(0.015)  # it runs by then
        begin = time.perf_counter()
        job = made.submit("expedited", blocks, rows)
        made.worker.wait([job])
        found.append((time.perf_counter() - begin) * 1e3)
        made.finish(bulk)
    return statistics.median(found)


def python_cost(made: Setup, seconds: float, pairs: int) -> dict[str, float]:
    """Return what share of its time a thread of pure Python waits for the copy thread, and GB/s meanwhile.

    The thread never lets the interpreter go by itself, as bad an engine as there can be. What it waits is the time in
    which it does not run: by its own CPU clock, so that a machine of changing speed disturbs nothing.
    """
    eighth = {way: [some[: len(some) // 8] for some in halves] for way, halves in made.halves.items()}
    rates: list[float] = []

    def waits(busy: bool) -> float:
        count = moved = finished = 0
        jobs: list[int] = []
        begin, used = time.perf_counter(), time.thread_time()
        while time.perf_counter() - begin < seconds:
            for _ in range(2000):
                count += 1
            if busy and count % 100_000 == 0:  # as often as an engine steps: every few milliseconds
                results = made.worker.get_finished()
                finished += len(results)
                moved += sum(result.nbytes for result in results)
                while len(jobs) - finished < 16:
                    way = ("store", "load")[len(jobs) % 2]
                    jobs.append(made.submit(way, *eighth[way]))
        used, taken = time.thread_time() - used, time.perf_counter() - begin
        made.finish(jobs)
        if busy:
            rates.append(moved / 1e9 / taken)
        return 1 - used / taken

    costs = [waits(True) - waits(False) for _ in range(pairs)]
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
    goals.append(
        goal("share of its time that a thread of pure Python waits for copies", cost, PYTHON_GOAL, at_most=True)
    )
    return goals


def alone_line(line: dict[str, Any]) -> str:
    return (
        f"{size(line['page']):>8}  store {line['store']:5.1f} ({line['store_share']:.3f}) "
        f"one {line['store_single']:5.1f} [{line['store_submit_ms']:.2f} ms, thread {line['store_thread_ms']:.2f}]  "
        f"load {line['load']:5.1f} ({line['load_share']:.3f}) one {line['load_single']:5.1f} "
        f"[{line['load_submit_ms']:.2f} ms, thread {line['load_thread_ms']:.2f}]  both {line['both']:5.1f} "
        f"({line['both_share']:.3f})"
    )


def results(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures and the goals."""
    repeats = 3 if quick else 7
    batches = 12 if quick else 30
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "settings": asdict(CopySettings())}
    found["peak"] = peaks(repeats)
    say("peak " + ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in found["peak"].items()))
    for kind, pages in (("alone", PAGES), ("canonical", CANONICAL_PAGES)):
        found[kind] = []
        for page in pages:
            found[kind].append(line := alone(page, found["peak"], repeats, canonical=kind == "canonical"))
            say(f"{kind:9} {alone_line(line)}")
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
        found["expedited_ms"] = expedited_ms(made)
    say(f"pure Python waits {found['python']['cost']:.4f} of its time beside {found['python']['gb_per_s']:.1f} GB/s")
    say(f"an expedited load amid bulk loads takes {found['expedited_ms']:.2f} ms")
    found["goals"] = goals_of(found)
    return found


def explore(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the curves of the settings: alone at several pages, and beside the products."""
    mib = 1 << 20
    ways = {"store": "staged", "load": "staged"}
    variants: dict[str, dict[str, Any]] = {
        f"staged {ring} MiB x{slots}": {**ways, "ring_bytes": ring * mib, "slots": slots}
        for ring, slots in [(64, 3), (128, 3), (192, 3), (256, 2), (256, 3), (256, 4), (256, 6), (512, 3)]
    }
    for programs in (2, 8, 32):
        variants[f"direct, {programs} programs"] = {"store": "direct", "load": "direct", "direct_programs": programs}
    variants["pages"] = {"store": "pages", "load": "pages"}
    products, lines = Products(), []
    for name, settings in variants.items():
        for page in (16 << 10, 64 << 10):
            if name == "pages" and page < 64 << 10:
                continue
            with setup(page, **settings) as made:
                line: dict[str, Any] = {"variant": name, "page": page, "python": python_cost(made, 0.5, 1)}
                for way in ("store", "load"):
                    line[way] = made.rate([way], 3)
                    line[f"{way}_beside"] = beside(made, products, way, 6)
                lines.append(line)
            text = "  ".join(
                f"{way} {line[way]:5.1f}, beside {line[f'{way}_beside']['gb_per_s']:5.1f} "
                f"keeps {line[f'{way}_beside']['product_share']:.3f}"
                for way in ("store", "load")
            )
            waits = f"pure Python waits {line['python']['cost']:.3f} beside {line['python']['gb_per_s']:.1f} GB/s"
            say(f"{name:24} {size(page):>8}  {text}  {waits}")
    return lines


def main() -> None:
    parser = options_of(__doc__, "fewer repeats")
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
