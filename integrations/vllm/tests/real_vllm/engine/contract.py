"""vLLM's own tiering manager over a kvtiers tier, without an engine: for releases that do not run on a CPU.

Usage: contract.py FOLDER. Stores chunks, forgets them, and has them back; every byte is compared. Prints the release.
"""

import ctypes
import inspect
import sys
import time
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvtiers_vllm import compat
from kvtiers_vllm.engine import INITIAL_WEIGHTS
from kvtiers_vllm.plugin import register
from kvtiers_vllm.releases import release_of

ROW, ROWS = 8192, 16
PATIENCE = 30.0
WAITS = {"lookup_wait": "30s", "load_wait": "60s"}
"""Longer than the defaults, by which a chunk that a busy machine brings too late is a miss."""


def make(kind: Any, **arguments: Any) -> Any:
    """Call a constructor with those arguments that this release has."""
    return kind(**{name: value for name, value in arguments.items() if name in inspect.signature(kind).parameters})


def config_of(folder: str) -> Any:
    extra = {"kvtiers": {"weights": "v1"} | WAITS}
    return make(
        OffloadingConfig,
        groups=(make(OffloadingGroupConfig, tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=f"contract-{folder.rpartition('/')[2]}",
        model=OffloadingModelConfig(name="model", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=make(
            OffloadingParallelConfig,
            **dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size", "data_parallel_size"), 1),
            rank=0,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


class Bench:
    """The manager, its rows, and steps as vLLM's scheduler makes them."""

    def __init__(self, folder: str) -> None:
        register()
        register()  # vLLM loads its plugins more than once
        config = config_of(folder)
        sizes = {"num_chunks": ROWS, "num_blocks": ROWS, "kv_bytes_per_chunk": ROW, "kv_bytes_per_block": ROW}
        self.region = make(SharedOffloadRegion, engine_id=config.engine_id, rank=None, cpu_page_size=ROW, **sizes)
        primary = make(CPUPrimaryTierOffloadingManager, mmap_region=self.region, cache_policy="lru", info=None, **sizes)
        self.view = primary.get_kv_memoryview()
        spec = SimpleNamespace(config=config, extra_config=config.extra_config, blocks_per_chunk=1)
        entry = {"type": "kvtiers-fs", "path": folder, "capacity": "1GiB", "required": True}
        self.tier = SecondaryTierFactory.create_secondary_tier(entry, self.view, spec)
        self.manager = make(
            TieringOffloadingManager, primary_tier=primary, secondary_tiers=[self.tier], tier_poll_interval_s=0.0
        )

    def step(self, *new: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=new, preempted_req_ids=()))

    def write(self, row: int, data: bytes) -> None:
        start = (ctypes.c_ubyte * ROW).from_buffer(self.view.cast("B"), row * ROW)
        ctypes.memmove(start, data, ROW)

    def read(self, row: int) -> bytes:
        return bytes(self.view.cast("B")[row * ROW : (row + 1) * ROW])

    def until(self, condition: Any, what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, what
            self.step()
            time.sleep(0.002)


def rows_of(spec: Any) -> list[int]:
    rows: list[int] = (spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids).tolist()
    return rows


def main() -> None:
    # What compat.py wraps is there as it was written for, and how it sees that an engine is idle.
    compat.wrap_core(EngineCore, vllm.__version__)
    compat.wrap_factory(KVConnectorFactory, vllm.__version__)
    compat.wrap_engine_args(EngineArgs, print, print, vllm.__version__)
    if release_of(vllm.__version__).whole_stack:
        compat.check(OffloadingConnector, compat.CONNECTOR, vllm.__version__)
    assert f'_weight_version = "{INITIAL_WEIGHTS}"' in inspect.getsource(EngineCore.__init__)
    assert "self.running.append(request)" in inspect.getsource(Scheduler.schedule)
    bench = Bench(sys.argv[1])
    manager = bench.manager
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(6)]
    content = {key: bytes([number + 1, 7]) * (ROW // 2) for number, key in enumerate(keys)}

    first = ReqContext(req_id="first")
    manager.on_new_request(first)
    plan = manager.prepare_store(keys, first)
    for key, row in zip(plan.keys_to_store, rows_of(plan.store_spec), strict=True):
        bench.write(row, content[key])
    manager.complete_store(plan.keys_to_store, first)
    manager.on_request_finished(first)

    def all_stored() -> bool:
        manager.get_stats()  # as vLLM does in its steps: a tier has work until a report has its state
        return not manager.has_pending_work()

    bench.until(all_stored, "the stores never end")
    manager.reset_cache()
    if hasattr(manager, "on_reset_flushed"):
        manager.on_reset_flushed()
    for row in range(ROWS):
        bench.write(row, bytes(ROW))

    second = ReqContext(req_id="second")
    manager.on_new_request(second)
    answers: list[LookupResult] = []

    def all_ready() -> bool:
        answers[:] = [manager.lookup(key, second) for key in keys]
        assert LookupResult.MISS not in answers, answers
        return all(answer is LookupResult.HIT for answer in answers)

    bench.until(all_ready, f"the chunks never come: {answers}")
    rows = rows_of(manager.prepare_load(keys, second))
    assert [bench.read(row) for row in rows] == list(content.values())
    manager.complete_load(keys, second)
    manager.on_request_finished(second)
    figures: dict[str, Any] = {}

    def loads_reported() -> bool:
        report = manager.get_stats()
        figures.update(report.data["data"] if report is not None else {})
        return "kvtiers_tier_loaded_chunks" in figures

    bench.until(loads_reported, "no report of the loads")
    assert figures["kvtiers_tier_loaded_chunks"] == {("fs",): 6}, figures
    definitions = type(bench.tier).build_metric_definitions({})
    assert {name for name in figures if name.startswith("kvtiers")} <= set(definitions)
    missing = ReqContext(req_id="third")
    manager.on_new_request(missing)
    unknown = make_offload_key(b"?" * 32, 0)
    bench.until(lambda: manager.lookup(unknown, missing) is LookupResult.MISS, "an unknown chunk is never a miss")
    manager.on_request_finished(missing)
    manager.shutdown()
    print(vllm.__version__)  # noqa: T201 -- for the test that reads it


main()
