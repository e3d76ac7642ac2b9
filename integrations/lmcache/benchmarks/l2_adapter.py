"""Stores and loads of LMCache's memory objects, by kvtiers' adapter and by LMCache's own for files, in one run.

Lanes take turns, a round after the other, each on new keys: four tasks of as many objects each are submitted at once,
as for four requests, and waited for by the descriptor. `kvtiers` is the fs tier, with the objects in LMCache's
L1 of shared memory, which tier hosts map; `bounce` the same with an L1 that has no name, so that values pass bounce
rows; `slab` is `kvtiers` with fs's other layout. `fs` and `fs_native` are LMCache's adapters, in Python and in C++,
which check nothing that they load; `control` is `fs` once more: its share of `fs` is what noise makes of one. All on
one folder, from the page cache. Medians; shares are turn by turn. The CPU time of a GB, tier hosts included, says what
a busy machine does not.
"""

import argparse
import logging
import os
import select
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # before LMCache is imported: it reports where it runs
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import numpy as np
import psutil
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager

from kvtiers.api.units import format_size

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from lib.results import WAYS, at_least, middle_share, say

SIZES = [256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20]
TASKS = 4
GOAL = 0.5  # of LMCache's own adapter for files: a copy more, and a hash over every byte
PATIENCE = 120.0


def specs(folder: Path, nbytes: int) -> dict[str, dict[str, Any]]:
    """Return each lane's adapter, as `--l2-adapter` names it."""

    def ours(name: str, **options: Any) -> dict[str, Any]:
        return kvtiers_spec(folder / name, nbytes, options)

    return {
        "kvtiers": ours("kvtiers"),
        "bounce": ours("bounce"),
        "slab": ours("slab", layout="slab", capacity="4GiB"),
        "fs": {"type": "fs", "base_path": str(folder / "fs")},
        "control": {"type": "fs", "base_path": str(folder / "control")},
        "fs_native": {"type": "fs_native", "base_path": str(folder / "fs_native")},
    }


def kvtiers_spec(folder: Path, nbytes: int, options: dict[str, Any]) -> dict[str, Any]:
    tier = {"type": "fs", "path": str(folder), "capacity": "64GiB", "min_free": 0, "store_queue": 1 << 20, **options}
    config = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [tier]}
    params = {"config": config, "weights": "w", "bounce_bytes": max(256 << 20, 32 * nbytes)}
    times = {"lookup_deadline": "60s", "deadline": "60s", "store_deadline": "60s"}
    ours = {"module_path": "kvtiers_lmcache", "class_name": "KvtiersL2Adapter", "adapter_params": {**params, **times}}
    return {"type": "plugin", **ours}


class Lane:
    """An adapter, and what LMCache's controllers do with one."""

    def __init__(
        self, spec: dict[str, Any], l1: Any, objects: Sequence[Any], into: Sequence[Any], stack: ExitStack
    ) -> None:
        """``l1``: LMCache's description of its L1, None for one without a name."""
        config = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
        self._adapter = create_l2_adapter_from_registry(config, l1)
        stack.callback(self._adapter.close)
        self._adapter.set_backend_identity(spec["type"])
        self._objects, self._into = objects, into

    def write(self, keys: Sequence[ObjectKey]) -> None:
        """Store all objects."""
        tasks = [self._adapter.submit_store_task(keys[part], self._objects[part]) for part in _parts(len(keys))]
        done: dict[int, Any] = {}
        while len(done) < len(tasks):
            _wait(self._adapter.get_store_event_fd())
            done |= self._adapter.pop_completed_store_tasks()
        assert all(done[task].is_successful() for task in tasks), self._adapter.report_status()

    def read(self, keys: Sequence[ObjectKey]) -> None:
        """Load all objects."""
        parts = _parts(len(keys))
        tasks = [self._adapter.submit_load_task(keys[part], self._into[part]) for part in parts]
        found: dict[int, Any] = {}
        while len(found) < len(tasks):
            _wait(self._adapter.get_load_event_fd())
            for task in tasks:
                if task not in found and (bitmap := self._adapter.query_load_result(task)) is not None:
                    found[task] = bitmap
        assert sum(bitmap.popcount() for bitmap in found.values()) == len(keys), self._adapter.report_status()

    def check(self, keys: list[ObjectKey]) -> None:
        """Compare what was loaded, and remove it."""
        for got, right in zip(self._into, self._objects, strict=True):
            assert np.array_equal(np.frombuffer(got.byte_array, np.uint8), np.frombuffer(right.byte_array, np.uint8))
            got.tensor.zero_()
        self._adapter.delete(keys)


def _parts(count: int) -> list[slice]:
    each = count // TASKS
    return [slice(start, start + each) for start in range(0, count, each)]


def _wait(fd: int) -> None:
    assert select.select([fd], [], [], PATIENCE)[0], "no signal"
    os.eventfd_read(fd)


def measure(nbytes: int, total: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the rates of all lanes with objects of this size."""
    count = total // nbytes // TASKS * TASKS
    shape = torch.Size((2, 1, nbytes // 512, 128))
    name = f"kvtiers_bench_{os.getpid()}"
    l1 = L1MemoryManager(L1MemoryManagerConfig(2 * total + (64 << 20), use_lazy=False, shm_name=name))
    desc = MemoryLayoutDesc([shape], [torch.bfloat16])
    (_, objects), (_, into) = (l1.allocate(desc, count) for _ in range(2))
    rng = np.random.default_rng(0)
    for it in objects:
        it.byte_array.cast("B")[:] = rng.integers(0, 256, it.get_size(), np.uint8).tobytes()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in specs(folder, nbytes)}
    cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in samples}
    with ExitStack() as stack:
        folder.mkdir()
        lanes = {
            name: Lane(spec, None if name == "bounce" else l1.get_l1_memory_desc(), objects, into, stack)
            for name, spec in specs(folder, nbytes).items()
        }
        order = [*lanes]
        for turn in range(rounds + 1):
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                keys = [ObjectKey(os.urandom(32), "bench/model", 0) for _ in range(count)]
                (wrote, cpu_wrote), (read, cpu_read) = (_seconds(getattr(lanes[name], way), keys) for way in WAYS)
                lanes[name].check(keys)
                if turn:  # the first one warms up
                    samples[name].append((wrote, read))
                    cpu[name].append((cpu_wrote, cpu_read))
    for it in [*objects, *into]:
        it.ref_count_down()
    l1.close()
    shutil.rmtree(folder)
    moved = count * nbytes / 1e9
    rates = {
        name: {way: moved / statistics.median(pair[i] for pair in pairs) for i, way in enumerate(WAYS)}
        for name, pairs in samples.items()
    }
    shares = {
        name: {
            way: middle_share([pair[i] for pair in samples["fs"]], [pair[i] for pair in pairs])
            for i, way in enumerate(WAYS)
        }
        for name, pairs in samples.items()
        if name != "fs"
    }
    costs = {
        name: {way: statistics.median(pair[i] for pair in pairs) / moved for i, way in enumerate(WAYS)}
        for name, pairs in cpu.items()
    }
    return {"value_bytes": nbytes, "objects": count, "gb_per_s": rates, "cpu_s_per_gb": costs, "of_fs": shares}


def _seconds(work: Callable[[list[ObjectKey]], None], keys: list[ObjectKey]) -> tuple[float, float]:
    """Return the time that it takes, and the CPU time of this process and of all below it."""
    begin, cpu = time.perf_counter(), _cpu_seconds()
    work(keys)
    return time.perf_counter() - begin, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (this, *this.children(recursive=True)))


def goals_of(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals: the smallest share of all sizes, each way."""
    goals = []
    for way in WAYS:
        by_size = {format_size(one["value_bytes"]): one["of_fs"]["kvtiers"][way] for one in found}
        name = f"{way}: kvtiers as a share of LMCache's own adapter for files"
        goals.append(at_least(name, min(by_size.values()), GOAL) | {"by_size": by_size})
    return goals


def report(found: dict[str, Any]) -> None:
    """Print the rates as a table, and the shares of LMCache's adapter."""
    names = list(found["sizes"][0]["gb_per_s"])
    print(
        f"{'GB/s, CPU s a GB':21}"
        + "".join(f"{name:>14}" for name in names)
        + "   of fs: kvtiers, bounce, control, fs_native"
    )
    for one in found["sizes"]:
        for way in WAYS:
            rates = "".join(
                f"{one['gb_per_s'][name][way]:8.2f},{one['cpu_s_per_gb'][name][way]:5.2f}" for name in names
            )
            shares = ", ".join(f"{share[way]:.2f}" for share in one["of_fs"].values())
            print(f"{format_size(one['value_bytes']):>6} {way:14}{rates}   {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="a folder on the disk (the one for temporary files)")
    parser.add_argument("--quick", action="store_true", help="fewer bytes, sizes and rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    sizes, total, rounds = ([SIZES[0], SIZES[2], SIZES[-1]], 64 << 20, 3) if options.quick else (SIZES, 256 << 20, 7)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="kvtiers-bench-") as top:
        found = [measure(nbytes, total, rounds, Path(top) / str(nbytes)) for nbytes in sizes]
    say({"sizes": found, "goals": goals_of(found)}, report, as_json=options.json)


if __name__ == "__main__":
    main()
