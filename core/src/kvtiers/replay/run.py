"""Open the whole stack for a workload, run the reference engine over it, and close everything again."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import kvtiers
from kvtiers.api import ConfigError
from kvtiers.config import OffloadConfig
from kvtiers.gpu.worker import GpuWorker
from kvtiers.replay.block_pool import BlockPool
from kvtiers.replay.content import CONTENT_VERSION, BlockContent
from kvtiers.replay.engine import LOAD_LINK, STORE_LINK, Interrupted, ReplayEngine
from kvtiers.replay.report import Link, ReplayReport
from kvtiers.replay.workload import Workload
from kvtiers.rows.layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.scheduler import OffloadScheduler
from kvtiers.tiering.manager import TieringManager

__all__ = ["ReplayOptions", "replay", "replay_layout"]

_START_SECONDS = 60.0
_KV_TENSORS = 2


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """``bytes_per_chunk``: KV of one block. ``gpu_blocks``: the engine's pool; 0: no prefix cache of its own.

    ``primary_chunks``: rows of the primary, instead of the config's ``primary.capacity``.
    """

    bytes_per_chunk: int = 4032
    gpu_blocks: int = 0
    primary_chunks: int | None = None


def replay_layout(config: OffloadConfig, tokens_per_block: int, bytes_per_chunk: int) -> CacheLayout:
    """Return the reference engine's KV layout: one group, one block a chunk, two tensors (one, for a few bytes)."""
    tensors = _KV_TENSORS if bytes_per_chunk >= _KV_TENSORS else 1
    sizes = [bytes_per_chunk // tensors] * tensors
    sizes[0] += bytes_per_chunk - sum(sizes)
    identity = ModelIdentity("replay", weights=CONTENT_VERSION)
    if config.model is not None:
        identity = replace(identity, **config.model.identity())
    return CacheLayout(
        identity,
        (KVGroup("replay", tokens_per_block),),
        tuple(KVTensor(f"replay.{index}", 0, size) for index, size in enumerate(sizes)),
    )


def replay(
    config: OffloadConfig,
    workload: Workload,
    options: ReplayOptions,
    *,
    stop: threading.Event | None = None,
    progress: Callable[[ReplayReport], None] = lambda _report: None,
) -> ReplayReport:
    """Replay a workload over the real manager, region and tiers; return the figures, also if ``stop`` ended it.

    ``progress`` is called after every request. ConfigError and StartError if it cannot begin.
    """
    layout = replay_layout(config, workload.tokens_per_block, options.bytes_per_chunk)
    if options.primary_chunks is not None:
        primary = config.primary.model_copy(update={"capacity": options.primary_chunks * layout.row_stride})
        config = config.model_copy(update={"primary": primary})
    pool = _pool(workload, options)
    tensors = [np.zeros((options.gpu_blocks or workload.longest, t.page_on(0)), np.uint8) for t in layout.tensors]
    report = ReplayReport(workload.name, len(workload.requests), links={STORE_LINK: Link(), LOAD_LINK: Link()})
    report.gpu_hits = 0 if options.gpu_blocks else None
    with _stack(config, layout, tensors) as (manager, worker):
        scheduler = OffloadScheduler(manager, layout, pool)
        engine = ReplayEngine(
            scheduler, worker, pool, BlockContent(tensors), workload.tokens_per_block, report, stop or threading.Event()
        )
        begin = time.perf_counter()
        try:
            engine.step_until(lambda: not _opening(manager.stats()), _START_SECONDS)
            begin = time.perf_counter()
            for request in workload.requests:
                engine.run(request)
                report.take_tiers(manager.stats()["tiers"])
                progress(report)
            engine.settle()
        except Interrupted:
            report.interrupted = True
        report.seconds = time.perf_counter() - begin
        report.take_tiers(manager.stats()["tiers"])
    return report


def _opening(stats: Mapping[str, Any]) -> bool:
    """Say whether a tier is still on its way; one that cannot be opened is not: its breaker is open."""
    return any(
        not tier["own"].get("open", 1) and not tier["own"].get("breaker_state") for tier in stats["tiers"].values()
    )


def _pool(workload: Workload, options: ReplayOptions) -> BlockPool:
    if options.gpu_blocks and options.gpu_blocks < workload.longest:
        raise ConfigError(
            f"--gpu-blocks {options.gpu_blocks}: the longest request has {workload.longest} full blocks; give that "
            "many at least, or 0 for blocks without a prefix cache"
        )
    return BlockPool(options.gpu_blocks or workload.longest, caching=options.gpu_blocks > 0)


@contextlib.contextmanager
def _stack(
    config: OffloadConfig, layout: CacheLayout, tensors: list[Any]
) -> Iterator[tuple[TieringManager, GpuWorker]]:
    manager = kvtiers.open_manager(config, layout)
    with contextlib.ExitStack() as closing:
        closing.callback(manager.shutdown)
        worker = kvtiers.open_worker(config, layout, tensors, engine_id=manager.engine_id, rank=0)
        closing.callback(worker.shutdown)
        manager.wait_ready(_START_SECONDS)
        yield manager, worker
