"""A scheduler's process and worker processes (spawn) on one region: what ranks store they load again, bit by bit."""

import os
import signal
import threading

import pytest

import kvtiers
from kvtiers.api import ConfigError, StartError
from kvtiers.region.client import RegionJoin

from .conftest import PATIENCE, Request, layout_of

SHAPES = {
    "tensor parallel 2": layout_of(tp=2),
    "pipeline parallel 2, uneven": layout_of(stages=((0, 1), (2,))),
    "2 x 2": layout_of(tp=2, stages=((0,), (1, 2))),
    "replicated, 2 ranks": layout_of(tp=2, row_layout="replicated"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_all_processes_store_each_of_them_loads_again(start, shape):
    tp = 1 if "pipeline" in shape else 2
    engine = start(SHAPES[shape], tp)
    engine.serve(Request("a", 0, 6))
    engine.on_all("clear")
    tokens, wrong = engine.load(Request("a", 20, 6))
    assert tokens == 6 * 4
    assert wrong == [0] * SHAPES[shape].world_size


def test_a_store_is_done_only_when_all_workers_have_reported(start):
    engine = start(layout_of(tp=2), 2)
    request = Request("a", 0, 4)
    engine.scheduler.add_request(request)
    engine.on_all("compute", request.ids, request.hashes)
    engine.scheduler.on_computed(request, 16)
    transfers = engine.scheduler.end_step()
    engine.scheduler.report(engine.ranks[0].transfer([], list(transfers.stores)), 0)
    probe = Request("a", 20, 4)
    engine.scheduler.add_request(probe)
    assert engine.scheduler.lookup(probe, 0) is None  # on its way, and not there yet
    engine.scheduler.report(engine.ranks[1].transfer([], list(transfers.stores)), 1)
    engine.scheduler.end_step()
    assert engine.scheduler.lookup(probe, 0) == 16


def test_a_killed_worker_fails_its_jobs_and_nothing_hangs(start):
    engine = start(layout_of(tp=2), 2)
    request = Request("a", 0, 4)
    engine.scheduler.add_request(request)
    engine.on_all("compute", request.ids, request.hashes)
    engine.scheduler.on_computed(request, 16)
    (store,) = engine.scheduler.end_step().stores
    victim = engine.ranks[1]
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.join(PATIENCE)
    victim.pipe.close()
    # Without a message from it: the end of its process is seen.
    engine.scheduler.report(engine.ranks[0].transfer([], [store]), 0)
    engine.scheduler.finish_request(request)
    engine.ranks = engine.ranks[:1]
    engine.settle()
    probe = Request("a", 20, 4)
    engine.scheduler.add_request(probe)
    assert engine.scheduler.lookup(probe, 0) == 0
    engine.scheduler.finish_request(probe)
    engine.step()
    engine.add_rank(1)  # in its place
    engine.serve(request)
    engine.on_all("clear")
    assert engine.load(Request("a", 20, 4)) == (16, [0, 0])


def test_a_load_that_a_killed_worker_had_is_computed(start):
    engine = start(layout_of(tp=2), 2)
    engine.serve(Request("a", 0, 4))
    request = Request("a", 20, 4)
    engine.scheduler.add_request(request)
    engine.step_until(lambda: engine.scheduler.lookup(request, 0) == 16)
    assert engine.scheduler.start_load(request, 16) == 16
    (load,) = engine.scheduler.end_step().loads
    victim = engine.ranks.pop()
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.close()
    outcomes = engine.scheduler.report(engine.ranks[0].transfer([load], []), 0)

    def has_reported():
        outcomes.extend(engine.scheduler.report([], 0))
        return outcomes

    engine.step_until(has_reported)
    assert outcomes == [(request.context.request_id, False, 0, 16)]
    engine.scheduler.finish_request(request)
    engine.settle()


def test_a_worker_that_is_refused_for_its_tensors_has_not_joined():
    layout = layout_of(tp=1)
    config = {"version": 1, "primary": {"capacity": 4 * layout.row_stride}}
    manager = kvtiers.open_manager(config, layout)
    before = set(threading.enumerate())
    try:
        with pytest.raises(ConfigError, match="0 KV tensors, but the layout names 3"):
            kvtiers.open_worker(config, layout, [], engine_id=manager.engine_id)
        new = {each.name for each in threading.enumerate() if each not in before}
        assert not new & {"kvtiers-join", "kvtiers-copy-0"}
        with pytest.raises(StartError, match=r"these did not join within 0\.2 s: 0"):
            manager.wait_ready(0.2)
    finally:
        manager.shutdown(10)


def test_a_worker_of_another_layout_is_refused_with_the_difference(start):
    layout = layout_of(tp=1)
    engine = start(layout, 1)
    other = layout_of(tp=1, blocks_per_chunk=4)
    join = RegionJoin.start(engine.manager.engine_id, other, 0)
    with pytest.raises(StartError, match="blocks_per_chunk: 2 here, 4 there"):
        join.wait(PATIENCE)
    join.close()
