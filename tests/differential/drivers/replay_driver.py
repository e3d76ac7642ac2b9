"""The driver of ``kvtiers replay``'s reference engine: the whole stack, and a check of each byte."""

import contextlib
import dataclasses
import threading

from common import MODEL, PATIENCE, Here, result

import kvtiers
from kvtiers import BlockHashChain
from kvtiers.config import load_config
from kvtiers.scheduler import OffloadScheduler, SchedulerOptions
from kvtiers_replay.engine.block_pool import BlockPool
from kvtiers_replay.engine.engine import EngineOptions, ReplayEngine
from kvtiers_replay.engine.measures import Measures
from kvtiers_replay.engine.ranks import open_ranks
from kvtiers_replay.options import ReplayOptions, replay_layout
from kvtiers_replay.workload import Arrivals, ReplayRequest

BLOCK, BLOCKS = 16, 5


def release():
    return f"kvtiers {kvtiers.__version__}"


class Engine(Here):
    def __init__(self, config, weights):
        config = load_config(config)
        layout = replay_layout(config, BLOCK, ReplayOptions())
        layout = dataclasses.replace(layout, model=dataclasses.replace(layout.model, name=MODEL, weights=weights))
        self._stack = contextlib.ExitStack()
        self._manager = kvtiers.open_manager(config, layout)
        self._stack.callback(self._manager.shutdown)
        self._ranks = self._stack.enter_context(
            open_ranks(config, layout, self._manager.engine_id, 2 * BLOCKS, processes=False)
        )
        self._manager.wait_ready(PATIENCE)
        self._layout, self._requests = layout, 0

    def _run(self, seed):
        """Serve a prompt; return the figures."""
        self._manager.reset_cache()
        measures, pool = Measures(False), BlockPool(2 * BLOCKS, caching=False)
        scheduler = OffloadScheduler(self._manager, self._layout, pool, SchedulerOptions("eager", prefix_caching=False))
        engine = ReplayEngine(
            scheduler, self._ranks, pool, EngineOptions(BLOCK, 1, 8192, 1e-3), measures, threading.Event()
        )
        chain = BlockHashChain(BLOCK)
        chain.extend([seed * 1000 + token for token in range(BLOCK * BLOCKS)])
        request = ReplayRequest(BLOCK * BLOCKS + 1, chain.hashes)
        engine.run(Arrivals([(request, 0)]))
        engine.step_until(lambda: not self._manager.has_pending_work(), PATIENCE)
        return measures

    def put(self, seed):
        self._run(seed)
        return BLOCKS

    def get(self, seed):
        measures = self._run(seed)
        return result(measures.loaded, BLOCKS, measures.wrong_bytes)

    def close(self):
        self._stack.close()


open = Engine  # noqa: A001 -- the interface of drivers
