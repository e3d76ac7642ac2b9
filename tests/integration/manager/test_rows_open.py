"""A primary whose rows a GPU's rank pins bit by bit: none is leased before it is pinned."""

import os
import threading
import time
from functools import partial

import numpy as np
import pytest

import kvtiers
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region.client import RegionJoin
from kvtiers.region.region import SharedOffloadRegion
from kvtiers.region.state import SETTLED
from kvtiers.types import RequestContext

LAYOUT = CacheLayout(ModelIdentity("m", weights="w"), (KVGroup("full", 16),), (KVTensor("t", 0, 4000),))


def keys(first, count):
    return [b"%032d\0\0\0\0" % number for number in range(first, first + count)]


@pytest.fixture(params=[64])
def engine(request, monkeypatch):
    """An engine whose rank says only what the test says: the owner looks no more once a rank has settled."""
    joined = []
    monkeypatch.setattr(RegionJoin, "settle", lambda join: joined.insert(0, join))
    capacity, window = 64 * LAYOUT.row_stride, request.param * LAYOUT.row_stride
    primary = {"capacity": f"{capacity}B", "prefault_window": f"{window}B"}
    config = {"version": 1, "start_wait": "1ms", "primary": primary}
    manager = kvtiers.open_manager(config, LAYOUT)
    tensors = [np.zeros((64, 4000), np.uint8)]
    worker = kvtiers.open_worker(config, LAYOUT, tensors, engine_id=manager.engine_id)
    manager.wait_ready(60)
    wait_until(lambda: joined)
    yield manager, joined[0]
    worker.shutdown()
    manager.shutdown(1)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def steps_until(manager, closed):
    end = time.monotonic() + 60
    while manager.stats()["primary"]["closed_rows"] != closed:
        assert time.monotonic() < end
        manager.on_schedule_end()


def test_what_is_stored_gets_rows_that_are_pinned_and_older_chunks_make_room_until_there_are_more(engine):
    manager, rank = engine
    context = RequestContext("r")
    manager.on_new_request(context)
    steps_until(manager, closed=0)  # a rank without a GPU closes nothing
    rank.pinned(8)  # as the rank of a GPU says it, which has pinned so many
    steps_until(manager, closed=56)
    first = manager.prepare_store(keys(0, 8), context)
    assert max(first.chunk_ids) < 8
    manager.complete_store(first)
    again = manager.prepare_store(keys(100, 3), context)
    assert max(again.chunk_ids) < 8, "the oldest made room"
    manager.complete_store(again)
    assert manager.prepare_store(keys(200, 9), context) is None, "no engine waits for what is not pinned"
    rank.pinned(20)
    steps_until(manager, closed=44)
    more = manager.prepare_store(keys(300, 12), context)
    assert sorted(more.chunk_ids) == list(range(8, 20)), "nothing had to leave"
    manager.complete_store(more)
    rank.pinned(SETTLED)
    steps_until(manager, closed=0)
    manager.on_request_finished(context)


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_a_store_of_more_rows_than_the_window_has_memory_made_ready_for_it(engine):
    manager, rank = engine
    context = RequestContext("r")
    manager.on_new_request(context)
    rank.pinned(0)
    steps_until(manager, closed=64)
    end, plan = time.monotonic() + 60, None
    while plan is None:
        assert time.monotonic() < end, "it waits for rows for ever"
        plan = manager.prepare_store(keys(0, 20), context)
        manager.on_schedule_end()
        rank.pinned(rank.populated_rows)  # what pins follows the memory that is ready
    assert max(plan.chunk_ids) < 64
    manager.complete_store(plan)
    manager.on_request_finished(context)


def waits_until_pinned(wait, pin, rows):
    """Whether a call returns once the rank has pinned so many rows, and not before."""
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    pin(rows - 1)
    waiting.join(0.1)
    was_waiting = waiting.is_alive()
    pin(rows)
    waiting.join(60)
    return was_waiting and not waiting.is_alive()


def test_the_start_waits_a_moment_for_the_first_pinned_memory(monkeypatch):
    config = {"version": 1, "start_wait": "1h", "primary": {"capacity": f"{64 * LAYOUT.row_stride}B"}}
    joined = []
    monkeypatch.setattr(RegionJoin, "settle", lambda join: joined.insert(0, join))  # as a GPU's rank: it has yet to pin
    manager = kvtiers.open_manager(config, LAYOUT)
    worker = kvtiers.open_worker(config, LAYOUT, [np.zeros((64, 4000), np.uint8)], engine_id=manager.engine_id)
    wait_until(lambda: joined)
    assert waits_until_pinned(lambda: manager.wait_ready(3600), joined[0].pinned, 60)
    worker.shutdown()
    manager.shutdown(1)


def test_of_much_memory_the_start_waits_for_what_the_first_requests_use():
    engine_id = f"first-{os.getpid()}"
    region = SharedOffloadRegion.create(engine_id, LAYOUT, 64 * LAYOUT.row_stride, prefault="off")
    rank = RegionJoin(engine_id, LAYOUT, 0)
    rank.begin(60.0)
    rank.wait(60.0)
    rank.pinned(0)
    try:
        wait = partial(region.wait_window, 3600.0, 8 * LAYOUT.row_stride)
        assert waits_until_pinned(wait, rank.pinned, 8), "of 64 rows it waits for 8"
    finally:
        rank.close()
        region.close()


@pytest.mark.parametrize(("prefault", "wait"), [("ahead", "50ms"), ("off", "1h")])
def test_memory_that_is_not_pinned_in_time_does_not_keep_the_start(prefault, wait, monkeypatch):
    primary = {"capacity": f"{64 * LAYOUT.row_stride}B", "prefault": prefault}
    config = {"version": 1, "start_wait": wait, "primary": primary}
    monkeypatch.setattr(RegionJoin, "settle", lambda join: join.pinned(0))
    manager = kvtiers.open_manager(config, LAYOUT)
    worker = kvtiers.open_worker(config, LAYOUT, [np.zeros((64, 4000), np.uint8)], engine_id=manager.engine_id)
    manager.wait_ready(60)
    worker.shutdown()
    manager.shutdown(1)
