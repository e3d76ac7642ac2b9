"""Replay a workload: one engine in this process or several in their own, and the figures of all of them together."""

import threading
from collections.abc import Callable

from kvtiers.config import OffloadConfig
from kvtiers_replay.engine.engines import run_engines
from kvtiers_replay.engine.measures import Progress
from kvtiers_replay.engine.task import deal_out, run_engine
from kvtiers_replay.options import ReplayOptions, check_options, replay_layout
from kvtiers_replay.report.summary import summarize
from kvtiers_replay.results import ReplayResults
from kvtiers_replay.workload import Workload

__all__ = ["ReplayOptions", "replay"]


def replay(
    config: OffloadConfig,
    workload: Workload,
    options: ReplayOptions,
    *,
    stop: threading.Event | None = None,
    progress: Callable[[Progress], None] = lambda _progress: None,
) -> ReplayResults:
    """Replay a workload over the real manager, region and tiers; return the figures, also if ``stop`` ended it.

    ``progress`` is called after every request and each second, or, with several engines, a few times a second.
    ConfigError and StartError if it cannot begin; ReplayError if a process of it ends, or hangs.
    """
    stop = stop or threading.Event()
    check_options(workload, options)
    layout = replay_layout(config, workload.tokens_per_block, options)
    if options.primary_chunks is not None:
        primary = config.primary.model_copy(update={"capacity": options.primary_chunks * layout.row_stride})
        config = config.model_copy(update={"primary": primary})
    tasks = deal_out(config, layout, workload, options)
    alone = options.engines == 1
    measures = (
        [run_engine(tasks[0], stop, progress)]
        if alone
        else run_engines(tasks, stop, progress, 2 * options.answer_seconds)
    )
    return summarize(workload, config, options, measures)
