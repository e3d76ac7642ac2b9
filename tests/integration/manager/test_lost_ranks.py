"""A worker that is killed in the middle of a copy: its rows come back when its process is gone, and not before."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.types import PromptGroup

from .conftest import PATIENCE, EngineOfOne, make_layout

RANK = Path(__file__).with_name("rank.py")


class Ranks:
    def __init__(self, engine, layout):
        self.engine, self.layout = engine, layout
        self.processes = []

    def start(self, number):
        command = [sys.executable, str(RANK), self.engine.manager.engine_id, str(number), self.layout.to_json()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout.readline() == "joined\n"

    def end_all(self):
        for process in self.processes:
            process.kill()
            process.wait(PATIENCE)
            process.stdin.close()
            process.stdout.close()


@pytest.fixture
def two_ranks():
    layout = make_layout(world_size=2)
    config = {"version": 1, "primary": {"capacity": 16 * layout.row_stride}, "lookup_wait": "20s", "load_wait": "20s"}
    engine = EngineOfOne(config, layout)
    ranks = Ranks(engine, layout)
    try:
        for number in range(2):
            ranks.start(number)
        engine.manager.wait_ready(PATIENCE)
        engine.manager.on_schedule_end()
        yield engine, ranks
    finally:
        ranks.end_all()
        engine.manager.shutdown(5)


def test_rows_of_a_killed_workers_copies_come_back_when_it_is_gone(two_ranks, keys):
    engine, ranks = two_ranks
    engine.store(keys(4, "here"))
    reader = engine.request()
    load = engine.manager.prepare_load(keys(4, "here"), reader)
    store = engine.manager.prepare_store(keys(12, "new"), engine.request())
    victim = ranks.processes[0]
    victim.kill()
    victim.wait(PATIENCE)

    def lost():
        return (
            engine.manager.reach([PromptGroup(keys(4, "here"))], reader)
            .in_chunks(engine.manager.tokens_per_chunk[0])
            .ready
            == 0
        )

    engine.step_until(lost)
    engine.manager.complete_store(store, success=False)
    engine.manager.complete_load(load, success=False)
    assert engine.manager.prepare_store(keys(1, "more"), reader) is None, "until all ranks are there nothing is stored"
    engine.step_until(lambda: engine.manager.stats()["primary"]["free_rows"] == 12)
    ranks.start(0)
    engine.step_until(
        lambda: (
            engine.manager.reach([PromptGroup(keys(4, "here"))], reader)
            .in_chunks(engine.manager.tokens_per_chunk[0])
            .ready
            == 4
        )
    )
    assert engine.load(keys(4, "here")) == 4
    engine.store(keys(12, "new"))
    assert engine.load(keys(12, "new")) == 12


def test_a_manager_whose_ranks_have_all_gone_answers_and_ends(two_ranks, keys):
    engine, ranks = two_ranks
    engine.store(keys(4, "here"))
    store = engine.manager.prepare_store(keys(8), ctx := engine.request())
    ranks.end_all()
    engine.step_until(
        lambda: (
            engine.manager.reach([PromptGroup(keys(4, "here"))], ctx)
            .in_chunks(engine.manager.tokens_per_chunk[0])
            .ready
            == 0
        )
    )
    assert engine.manager.prepare_store(keys(1, "x"), ctx) is None
    engine.manager.complete_store(store, success=False)
    engine.manager.on_request_finished(ctx)
    engine.step_until(lambda: engine.manager.stats()["primary"]["free_rows"] == 12)
    assert not engine.manager.has_pending_work()
