"""Throughput of the directory tier, beside a plain Python loop, dd and fio on the same disk in the same run.

Lanes take turns, a round after the other, each on new values, which it removes again: `tier` calls the store in one
thread; `host` is the whole contract with `io: process`: 4 threads in a tier host, with seal, check and jobs of 128 MiB;
`plain` writes each value to a temporary file and renames it; `dd` (and `fio`, where it is installed) copies as much
into one file with one block a value, which is a ceiling: no file is made, no name looked up. These go through the page
cache, both ways; `tier-direct` and `dd-direct` do not, and show the disk. Medians.

Then what it takes to open a directory of a million values (``--quick``: 100,000) beside an empty one, and to count
it.

Last the layout `slab` (``rigs/slab_lanes.py``; alone with ``--slab``): beside fio with O_DIRECT at its best depth,
beside `preadv`, and how long a reader waits while another process evicts and deletes a million values, in one round
(alone with ``--delays``; ``--quick``: 20,000 in three), and with `files` beside 100,000. The goals are for values of
1 MiB and more; smaller ones show what finding each of them costs.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lib.results import at_least, at_most, options_of, say
from rigs.slab_lanes import measure_delays, measure_slab

from kvtiers.api import JobResult, OffloadKey, TransferJob, make_offload_key
from kvtiers.api.units import format_size
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier
from kvtiers.region.memfd import create_memfd, map_memory
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.types import RequestContext
from kvtiers_fs.config import FsConfig
from kvtiers_fs.paths import SHARDS, place_of
from kvtiers_fs.store import FsStore

SIZES = [64 << 10, 1 << 20, 4 << 20]
JOB_BYTES = TieringOptions().job_bytes
FILLERS = 2000
NAMES = StorageNames("bench/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
# One thread in a store does what the plain loop does, and looks after capacity, free space and links besides.
GOAL_SHARE_OF_PLAIN = 0.8
GOAL_FROM_BYTES = 1 << 20
GOAL_OPEN_MS = 100.0
OPENINGS = 7
SLAB_SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
MANY, FEW, FILES = 1_000_000, 20_000, 100_000
FEW_ROUNDS = 3
GOAL_SHARE_OF_DRIVE = 0.95
GOAL_SHARE_OF_PREADV = 0.9
# Of the same reader beside a process that writes as much and evicts nothing: what that costs is the machine's.
GOAL_DELAY = 1.5
DD_SECONDS = re.compile(r"copied, ([0-9.e-]+) s")

Keyed = Callable[[Sequence[OffloadKey]], None]
Lane = tuple[Keyed, Keyed, Keyed]
"""How a lane writes values under these keys, reads them back, and removes them."""


def tier_lane(path: Path, rows: memoryview, nbytes: int, stack: ExitStack, *, direct: bool = False) -> Lane:
    """Call the store as one of core's threads does."""
    store = open_filled(path, stack, direct=direct)
    value = rows[:nbytes]

    def write(keys: Sequence[OffloadKey]) -> None:
        for name in NAMES.names(keys):
            store.write(name, value)

    def read(keys: Sequence[OffloadKey]) -> None:
        for name in NAMES.names(keys):
            assert store.read_into(name, value)

    return write, read, lambda keys: store.delete(NAMES.names(keys))


def open_filled(path: Path, stack: ExitStack, *, direct: bool = False) -> FsStore:
    """Open a store in which other values are, so that its folders are there as in one that is in use."""
    store = stack.enter_context(closing(FsStore(config(path, direct=direct))))
    for number in range(FILLERS):
        store.write(NAMES.prefix + f"{number:064x}", memoryview(bytes(4096)))
    return store


def plain_lane(path: Path, rows: memoryview, nbytes: int) -> Lane:
    """Do by hand the least that keeps values whole: one folder, a temporary name, a rename."""
    path.mkdir()
    value = rows[:nbytes]

    def write(keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            with open(f"{path}/tmp", "wb", buffering=0) as file:  # noqa: PTH123 -- as people write it
                file.write(value)
            os.rename(f"{path}/tmp", f"{path}/{key.hex()}")  # noqa: PTH104

    def read(keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            with open(f"{path}/{key.hex()}", "rb", buffering=0) as file:  # noqa: PTH123
                assert file.readinto(value) == nbytes

    def remove(keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            os.unlink(f"{path}/{key.hex()}")  # noqa: PTH108

    return write, read, remove


def host_lane(path: Path, fd: int, rows: memoryview, nbytes: int, stack: ExitStack) -> Lane:
    """Send jobs to a tier host that maps the same rows."""
    options, other = config(path), open_filled(path, stack)
    region = HostedRegion(fd, len(rows), len(rows), nbytes, [(nbytes - 64, nbytes)])
    hosts = TierHosts(region, "bench", lambda: NAMES)
    stack.callback(hosts.close, 10.0)
    tier = ChunkStoreTier(options, hosts.pool(options, load_tier(options.type)))
    stack.callback(tier.close)
    assert not (problem := tier.wait_open(30.0)), problem
    numbers = iter(range(1, 1 << 30))
    request = RequestContext("bench")

    def run(keys: Sequence[OffloadKey], *, load: bool) -> None:
        per_job = JOB_BYTES // nbytes
        for start in range(0, len(keys), per_job):
            part = keys[start : start + per_job]
            row_ids = memoryview(array("i", range(len(part))))
            job = TransferJob(next(numbers), part, row_ids, is_promotion=load, context=request)
            (tier.submit_load if load else tier.submit_store)(job)
            tier.on_schedule_end()
            results: Sequence[JobResult] = ()
            while not results:
                time.sleep(0.0002)
                results = tier.get_finished_jobs()
            assert results[0].success, results

    return partial(run, load=False), partial(run, load=True), lambda keys: other.delete(NAMES.names(keys))


def config(path: Path, *, direct: bool = False) -> FsConfig:
    """Return the tier's options: nothing is evicted here."""
    return FsConfig(type="fs", path=path, capacity="64GiB", min_free=0, direct=direct, store_queue=1 << 20)


def seconds_of(work: Keyed, keys: Sequence[OffloadKey]) -> float:
    start = time.perf_counter()
    work(keys)
    return time.perf_counter() - start


def dd_seconds(file: Path, nbytes: int, count: int, flags: Sequence[str] = ("", "")) -> tuple[float, float]:
    """Return how long dd says that it wrote, and read, this many blocks."""
    taken = []
    for source, target, flag in (("/dev/zero", file, flags[0]), (file, "/dev/null", flags[1])):
        command = ["dd", f"if={source}", f"of={target}", f"bs={nbytes}", f"count={count}", *([flag] if flag else [])]
        said = subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stderr
        found = DD_SECONDS.search(said)
        assert found, said
        taken.append(float(found[1]))
    return taken[0], taken[1]


def fio_seconds(file: Path, nbytes: int, count: int) -> tuple[float, float]:
    """Return the same by fio, which is not in every installation."""
    taken = []
    for mode in ("write", "read"):
        command = ["fio", "--name=x", f"--filename={file}", f"--rw={mode}", f"--bs={nbytes}", "--output-format=json"]
        command += [f"--size={nbytes * count}", "--ioengine=psync", "--invalidate=0", "--fallocate=none"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        taken.append(json.loads(said[said.index("{") :])["jobs"][0][mode]["runtime"] / 1e3)
    return taken[0], taken[1]


@contextmanager
def memory() -> Iterator[tuple[int, memoryview]]:
    """Give a memfd and its bytes, which are random: rows for one job of the largest size."""
    fd = create_memfd("kvtiers-bench", JOB_BYTES)
    mapping = map_memory(fd, JOB_BYTES, JOB_BYTES)
    np.frombuffer(mapping.view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, JOB_BYTES, np.uint8)
    try:
        yield fd, mapping.view
    finally:
        os.close(fd)


def measure(folder: Path, nbytes: int, total: int, rounds: int) -> dict[str, Any]:
    """Return the rates of all lanes with values of this size."""
    count = total // nbytes
    direct = partial(dd_seconds, flags=("oflag=direct", "iflag=direct"))
    ceilings = {"dd": dd_seconds, "dd-direct": direct} | ({"fio": fio_seconds} if shutil.which("fio") else {})
    with memory() as (fd, rows), ExitStack() as stack:
        lanes = {
            "tier": tier_lane(folder / "tier", rows, nbytes, stack),
            "host": host_lane(folder / "host", fd, rows, nbytes, stack),
            "plain": plain_lane(folder / "plain", rows, nbytes),
            "tier-direct": tier_lane(folder / "tier-direct", rows, nbytes, stack, direct=True),
        }
        order = [*lanes, *ceilings]
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
        for turn in range(rounds + 1):
            keys = [make_offload_key(os.urandom(32), 0) for _ in range(count)]
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                if name in lanes:
                    write, read, remove = lanes[name]
                    pair = seconds_of(write, keys), seconds_of(read, keys)
                    remove(keys)
                else:
                    pair = ceilings[name](folder / name, nbytes, count)
                    (folder / name).unlink()
                if turn:  # the first one warms up
                    samples[name].append(pair)
    shutil.rmtree(folder)
    folder.mkdir()
    rates = {
        name: {
            way: count * nbytes / 1e9 / statistics.median(pair[i] for pair in pairs)
            for i, way in enumerate(("write", "read"))
        }
        for name, pairs in samples.items()
    }
    return {"value_bytes": nbytes, "gb_per_s": rates}


def start_cost(folder: Path, values: int) -> dict[str, float]:
    """Return how long it takes to open a directory of so many values and one of none, and to count the first."""
    with closing(FsStore(config(folder / "full"))):
        pass
    for number in range(values):
        place = place_of(f"{NAMES.prefix}{number:064x}")
        path = folder / "full" / place.folder
        if number < 8 * SHARDS:  # by then each of them has had one
            path.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path / place.leaf, os.O_CREAT | os.O_WRONLY))
    (folder / "full/.usage").unlink()
    start = time.perf_counter()
    with closing(FsStore(config(folder / "full"))) as store:
        while store.stats()["values"] != values:
            time.sleep(0.01)
        counted = time.perf_counter() - start
    return {
        "values": values,
        "count_s": counted,
        "open_s": open_seconds(folder / "full"),
        "open_empty_s": open_seconds(folder / "empty"),
    }


def open_seconds(path: Path) -> float:
    """Return the median of some openings, the first of which makes the directory if it is not there."""
    taken = []
    for _ in range(OPENINGS + 1):
        start = time.perf_counter()
        store = FsStore(config(path))
        taken.append(time.perf_counter() - start)
        store.close()
    return statistics.median(taken[1:])


def goals_of(sizes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    goals = []
    for way in ("write", "read"):
        shares = [
            size["gb_per_s"]["tier"][way] / size["gb_per_s"]["plain"][way]
            for size in sizes
            if size["value_bytes"] >= GOAL_FROM_BYTES
        ]
        name = f"{way}, the store as a share of a plain loop, values of {format_size(GOAL_FROM_BYTES)} and more"
        goals.append(
            {"name": name, "value": min(shares), "goal": GOAL_SHARE_OF_PLAIN, "met": min(shares) >= GOAL_SHARE_OF_PLAIN}
        )
    return goals


def slab_goals(sizes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    goals = []
    for what, goal, peer in (
        ("write_cold", GOAL_SHARE_OF_DRIVE, "the drive, by fio"),
        ("read_cold", GOAL_SHARE_OF_DRIVE, "the drive, by fio"),
        ("read_hot", GOAL_SHARE_OF_PREADV, "preadv"),
    ):
        worst = min(size["shares"][what] for size in sizes if size["value_bytes"] >= GOAL_FROM_BYTES)
        name = (
            f"slab, {what.replace('_', ', ')}, as a share of {peer}, values of {format_size(GOAL_FROM_BYTES)} and more"
        )
        by_size = {format_size(size["value_bytes"]): size["shares"][what] for size in sizes}
        goals.append(at_least(name, worst, goal) | {"by_size": by_size})
    return goals


def delay_goals(delays: dict[str, Any]) -> list[dict[str, Any]]:
    goals = []
    for what in ("evicts", "deletes"):
        times = delays[what]["p99_us"] / delays["writes"]["p99_us"]
        name = f"slab, a reader's p99 while another {what}, times that while it writes and evicts nothing"
        goals.append(at_most(name, times, GOAL_DELAY))
    return goals


def report_slab(slab: dict[str, Any]) -> None:
    if slab["sizes"]:
        print("layout slab; GB/s past the page cache (cold) and in it (hot), beside the drive and preadv")
    for size in slab["sizes"]:
        rates = ", ".join(f"{name} {rate:.2f}" for name, rate in size["gb_per_s"].items())
        print(f"  {format_size(size['value_bytes'])}: {rates}; {size['peers']}")
    for layout, delays in slab["delays"].items():
        parts = [
            f"{what} {part['p50_us']:.0f}/{part['p99_us']:.0f} ({part['misses']} of {part['reads']} missed"
            + (f"; {part['gone']:,.0f} went)" if part.get("gone", 0) > 0 else ")")
            for what, part in delays["readers"].items()
        ]
        print(
            f"  {layout}, {delays['values']:,} values: a reader's p50/p99 in us, alone and beside: {'; '.join(parts)}"
        )


def report(found: dict[str, Any]) -> None:
    """Print the rates as a table, each with its share of the plain loop's."""
    print(f"{found['file_system']} at {found['path']}; GB/s (share of the plain loop's)")
    names = list(found["sizes"][0]["gb_per_s"])
    print(f"  {'value':8}{'':6}" + "".join(f"{name:>14}" for name in names))
    for size in found["sizes"]:
        rates = size["gb_per_s"]
        for way in ("write", "read"):
            cells = [f"{rates[name][way]:.2f} ({rates[name][way] / rates['plain'][way]:.2f})" for name in names]
            print(f"  {format_size(size['value_bytes']):8}{way:6}" + "".join(f"{cell:>14}" for cell in cells))
    start = found["start"]
    print(
        f"  {start['values']:,} values: opened in {start['open_s'] * 1e3:.1f} ms (an empty directory in "
        f"{start['open_empty_s'] * 1e3:.1f} ms), counted in {start['count_s']:.1f} s"
    )
    report_slab(found["slab"])


def main() -> None:
    parser = options_of(__doc__, "fewer bytes and rounds")
    parser.add_argument("--path", type=Path, help="a folder on the disk to measure (the one for temporary files)")
    parser.add_argument("--slab", action="store_true", help="only the layout slab")
    parser.add_argument("--delays", action="store_true", help="only a reader's delays, with the layout slab")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    total, rounds = (64 << 20, 3) if options.quick else (128 << 20, 5)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="kvtiers-bench-") as top:
        kind = subprocess.run(["stat", "-f", "-c", "%T", top], capture_output=True, text=True, check=True).stdout
        folder = Path(top, "disk")
        folder.mkdir()
        found: dict[str, Any] = {"path": str(Path(top).parent), "file_system": kind.strip(), "goals": []}
        is_whole = not (options.slab or options.delays)
        if is_whole:
            found["sizes"] = [measure(folder, nbytes, total, rounds) for nbytes in SIZES]
            start = found["start"] = start_cost(folder, 100_000 if options.quick else MANY)
            found["goals"] = goals_of(found["sizes"])
            name = f"ms to open a directory of {start['values']:,} values"
            found["goals"].append(at_most(name, 1e3 * start["open_s"], GOAL_OPEN_MS))
        sizes = [] if options.delays else [measure_slab(folder, n, 2 * total, 2 * rounds) for n in SLAB_SIZES]
        delays = measure_layouts(folder, is_quick=options.quick, with_files=not options.delays)
        found["slab"] = {"sizes": sizes, "delays": delays}
        found["goals"] += (slab_goals(sizes) if sizes else []) + delay_goals(delays["slab"]["readers"])
    say(found, report if is_whole else report_slab_alone, as_json=options.json)


def measure_layouts(folder: Path, *, is_quick: bool, with_files: bool) -> dict[str, dict[str, Any]]:
    """Return a reader's delays with each layout, and beside how many values."""
    if is_quick:
        return {"slab": {"values": FEW, "readers": measure_delays(folder, "slab", FEW, FEW_ROUNDS)}}
    counts = {"slab": MANY} | ({"files": FILES} if with_files else {})
    return {
        name: {"values": count, "readers": measure_delays(folder, name, count, 1)} for name, count in counts.items()
    }


def report_slab_alone(found: dict[str, Any]) -> None:
    print(f"{found['file_system']} at {found['path']}")
    report_slab(found["slab"])


if __name__ == "__main__":
    main()
