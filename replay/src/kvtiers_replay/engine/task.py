"""One engine of a replay, from its opening to its end: the stack, the reference engine over it, and its measures."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kvtiers
from kvtiers.config import OffloadConfig
from kvtiers.control_actions import EngineActions
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.scheduler import OffloadScheduler, SchedulerOptions
from kvtiers.status import Troubles, answer_status
from kvtiers.tiering.manager import TieringManager
from kvtiers_replay.engine.block_pool import BlockPool
from kvtiers_replay.engine.engine import EngineOptions, Interrupted, ReplayEngine
from kvtiers_replay.engine.measures import Measures, Progress
from kvtiers_replay.engine.ranks import Ranks, open_ranks
from kvtiers_replay.options import ReplayOptions
from kvtiers_replay.workload import Arrivals, ReplayRequest, Workload, infinite_hits

__all__ = ["EngineTask", "deal_out", "run_engine"]

_START_SECONDS = 60.0
_REPORT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class EngineTask:
    """The task of one engine. ``requests``: each with its ``infinite_hits``; ``first``: see ``Arrivals``."""

    config: OffloadConfig
    layout: CacheLayout
    options: ReplayOptions
    pool_blocks: int
    requests: Sequence[tuple[ReplayRequest, int]]
    first: float


def deal_out(
    config: OffloadConfig, layout: CacheLayout, workload: Workload, options: ReplayOptions
) -> list[EngineTask]:
    """Return the engines' tasks: they get the requests in turns, as from a round-robin load balancer."""
    requests = list(zip(workload.requests, infinite_hits(workload), strict=True))
    first = min(request.arrival for request in workload.requests)
    pool_blocks = options.gpu_blocks or workload.longest * options.concurrency
    return [
        EngineTask(config, layout, options, pool_blocks, requests[number :: options.engines], first)
        for number in range(options.engines)
    ]


def run_engine(
    task: EngineTask,
    stop: threading.Event,
    progress: Callable[[Progress], None],
    begin: Callable[[], None] = lambda: None,
) -> Measures:
    """Run one engine in this process. ``begin``: called when all is open, before the first request.

    ``progress``: called after every request, and each second, so that the parent sees that it is alive.
    """
    options = task.options
    measures = Measures(has_prefix_cache=options.gpu_blocks > 0)
    pool = BlockPool(task.pool_blocks, caching=options.gpu_blocks > 0)
    engine_options = EngineOptions(
        task.layout.groups[0].tokens_per_block, options.concurrency, options.step_tokens, options.prefill_speed
    )
    with (
        _troubles(task.config) as troubles,
        _stack(task) as (manager, ranks),
        _answered_status(task, troubles, manager),
    ):
        scheduler = OffloadScheduler(
            manager, task.layout, pool, SchedulerOptions(options.store, prefix_caching=options.gpu_blocks > 0)
        )
        engine = ReplayEngine(scheduler, ranks, pool, engine_options, measures, stop)
        started, reported, due = time.perf_counter(), 0, _REPORT_SECONDS

        def stepped() -> None:
            nonlocal reported, due
            measures.seconds = time.perf_counter() - started
            if measures.curve.is_due(measures.seconds):
                measures.note(measures.seconds, manager.stats(), engine.waiting)
            if measures.requests != reported or measures.seconds >= due:
                reported, due = measures.requests, measures.seconds + _REPORT_SECONDS
                progress(measures.progress(len(task.requests)))

        try:
            engine.step_until(lambda: not _opening(manager.stats()), _START_SECONDS)
            begin()
            started = time.perf_counter()
            engine.run(Arrivals(task.requests, options.speed, task.first), stepped)
            if task.config.secondary:
                engine.step_until(lambda: False, options.settle_seconds)
        except Interrupted:
            measures.interrupted = True
        measures.note(measures.seconds, manager.stats(), engine.waiting)
        names = [tier.tier_name for tier in task.config.secondary]
        measures.last_troubles = {name: trouble for name in names if (trouble := troubles.of(name).text)}
    return measures


def _opening(stats: Mapping[str, Any]) -> bool:
    """Return whether a tier is still on its way; one that cannot be opened is not: its breaker is open."""
    return any(
        not tier["own"].get("open", 1) and not tier["own"].get("breaker_state") for tier in stats["tiers"].values()
    )


@contextlib.contextmanager
def _troubles(config: OffloadConfig) -> Iterator[Troubles]:
    """Keep the last warning of each tier, for the report and for ``kvtiers status``."""
    logger = logging.getLogger("kvtiers")
    # Python writes warnings to stderr only while nothing else handles them; they must stay visible.
    last_resort = logging.lastResort if not logger.hasHandlers() else None
    if last_resort is not None:
        logger.addHandler(last_resort)
    troubles = Troubles([tier.tier_name for tier in config.secondary])
    try:
        yield troubles
    finally:
        troubles.close()
        if last_resort is not None:
            logger.removeHandler(last_resort)


@contextlib.contextmanager
def _answered_status(task: EngineTask, troubles: Troubles, manager: TieringManager) -> Iterator[None]:
    """Answer ``kvtiers status`` while the engine runs. Elsewhere than on Linux there are no sockets for that."""
    if sys.platform != "linux":
        yield
        return

    answering = answer_status(
        f"kvtiers replay {kvtiers.__version__}",
        task.layout.model.name,
        troubles,
        manager.stats,
        partial(_about_tier, task),
        namespace=task.config.namespace,
        fingerprint=manager.fingerprint,
        actions=EngineActions(manager, task.layout.model.name).actions(),
        tend=manager.tend,
    )
    try:
        yield
    finally:
        answering.close()


def _about_tier(task: EngineTask, _: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``kvtiers status`` adds to a tier's figures: its keys are the same in every replay."""
    tokens = figures["prefix_hits"] * task.layout.tokens_per_chunk(task.layout.prefix_group)
    saved = tokens / task.options.prefill_speed - figures["load_seconds"]
    return {"tokens": tokens, "saved_seconds": saved, "off": "", "shared": True}


@contextlib.contextmanager
def _stack(task: EngineTask) -> Iterator[tuple[TieringManager, Ranks]]:
    manager = kvtiers.open_manager(task.config, task.layout)
    with contextlib.ExitStack() as closing:
        closing.callback(manager.shutdown)
        ranks = closing.enter_context(
            open_ranks(
                task.config,
                task.layout,
                manager.engine_id,
                task.pool_blocks,
                processes=task.options.workers > 0,
                device=task.options.device,
                answer_seconds=task.options.answer_seconds,
            )
        )
        manager.wait_ready(_START_SECONDS)
        yield manager, ranks
