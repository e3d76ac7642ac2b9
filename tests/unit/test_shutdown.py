"""The end of a whole stack: bounded whatever its tiers do, at the same time for all of them, and said."""

import logging
import time

import numpy as np
import pytest
from tests.unit.test_runtime import KEYS, LAYOUT, config

import kvtiers
from kvtiers.types import RequestContext

SLOW = """
import time
from kvtiers.api import ChunkStore

class Slow(ChunkStore):
    def read_into(self, name, dst):
        return 0

    def exists(self, names):
        return [False for _ in names]

    def write(self, name, src):
        time.sleep(60)

    def delete(self, names):
        pass

return Slow()
"""
TIERS = ("one", "two", "three", "four", "five")


@pytest.mark.parametrize("io", ["thread", "process"])
def test_tiers_whose_stores_hang_end_at_the_same_time_and_each_says_what_it_dropped(distributions, caplog, io):
    distributions.tier("slow", opened=SLOW)
    caplog.set_level(logging.WARNING, logger="kvtiers")
    tiers = [{"type": "slow", "name": name, "io": io, "threads": 1} for name in TIERS]
    manager = kvtiers.open_manager(config(secondary=tiers), LAYOUT)
    worker = kvtiers.open_worker(config(), LAYOUT, [np.zeros((8, 4000), np.uint8)], engine_id=manager.engine_id)
    try:
        manager.wait_ready(30)
        _until_all_are_open(manager)
        plan = manager.prepare_store(KEYS, RequestContext("r"))
        manager.complete_store(plan)
        manager.on_schedule_end()
        figures = manager.stats()["tiers"]
        assert {figures[name]["own"]["storing_chunks"] for name in TIERS} == {8}
    finally:
        worker.shutdown()
        began = time.monotonic()
        manager.shutdown(0.5)
        took = time.monotonic() - began
    # 0.5 s to drain, 3 s for a tier to close, 4 s for hosts; one tier after the other would take 15 s to close.
    assert took < 0.5 + (3.0 if io == "thread" else 4.0) + 7.0
    lines = [record.getMessage() for record in caplog.records]
    dropped = [line for line in lines if "dropped 1 jobs with 8 chunks" in line]
    assert sorted(line.partition(":")[0] for line in dropped) == sorted(TIERS)


def _until_all_are_open(manager):
    until = time.monotonic() + 60
    while not all(tier["own"]["open"] for tier in manager.stats()["tiers"].values()):
        assert time.monotonic() < until, "a tier does not open"
        manager.on_schedule_end()
        time.sleep(0.01)
    manager.on_schedule_end()
