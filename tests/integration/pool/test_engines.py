"""Whole engines in a pool: managers, ranks and tiers, one after the other."""

import contextlib
import logging
from functools import partial

import numpy as np
import pytest
from tests.pool_rig import LAYOUT, PAYLOAD, KeeperThread, chain, payload, wait_until

import kvtiers
from kvtiers.api import StartError
from kvtiers.config import load_config
from kvtiers.pool.loan import PoolLoan
from kvtiers.region.early_memory import EarlyMemory
from kvtiers.runtime import EngineFacts, begin_memory
from kvtiers.types import BlockSpec, PromptGroup, RequestContext

KEYS = chain(1, 8)


@pytest.fixture
def keeper(tmp_path):
    return KeeperThread(tmp_path / "pool.sock", 1 << 20)


@pytest.fixture
def shared(tmp_path):
    """A keeper for two engines."""
    return KeeperThread(tmp_path / "pool.sock", 1 << 20, parts=2)


@contextlib.contextmanager
def running(config, layout=LAYOUT, **options):
    """An engine of one rank: its manager, its worker and its only KV tensor."""
    with contextlib.ExitStack() as ends:
        manager = kvtiers.open_manager(config, layout, **options)
        ends.callback(manager.shutdown, 10)
        tensor = np.zeros((16, PAYLOAD), np.uint8)
        worker = kvtiers.open_worker(config, layout, [tensor], engine_id=manager.engine_id)
        ends.callback(worker.shutdown)
        manager.wait_ready(120)  # a busy machine starts hosts slowly
        yield manager, worker, tensor


def config(keeper, *tiers, **more):
    primary = {"capacity": "512KiB", **({} if keeper is None else {"pool": str(keeper.path)})}
    return {
        "version": 1,
        "primary": primary,
        "secondary": list(tiers),
        "lookup_wait": "60s",
        "load_wait": "60s",
        **more,
    }


def copy(worker, submit, *what):
    submit(1, *what)
    worker.wait([1])
    (result,) = worker.get_finished()
    assert result.success, result.error


def bytes_of(keys):
    return np.stack([np.frombuffer(payload(key), np.uint8) for key in keys])


def store(manager, worker, tensor, keys=KEYS, *, ends=True):
    """Store eight chunks, wait until they are in the tiers, too, unless not ``ends``."""
    tensor[:8] = bytes_of(keys)
    context = RequestContext("stores")
    plan = manager.prepare_store(keys, context)
    copy(worker, worker.submit_store, BlockSpec(np.arange(8), (8,), (0,)), plan.chunk_ids)
    manager.complete_store(plan)
    manager.on_request_finished(context)
    if ends:
        step_until(manager, lambda: not manager.has_pending_work())


def step_until(manager, done):
    def stepped():
        manager.on_schedule_end()
        return done()

    wait_until(stepped, "nothing came of it")


def load(manager, worker, tensor, keys=KEYS):
    """Load eight chunks, from wherever they are, and compare each byte."""
    context = RequestContext("loads")
    prompt, tokens = [PromptGroup(keys)], manager.tokens_per_chunk[0]
    step_until(manager, lambda: manager.reach(prompt, context).in_chunks(tokens).ready == 8)
    plan = manager.prepare_load(keys, context)
    copy(worker, worker.submit_load, plan.chunk_ids, BlockSpec(np.arange(8), (8,), (0,)))
    manager.complete_load(plan)
    manager.on_request_finished(context)
    assert (tensor[:8] == bytes_of(keys)).all()


def is_published(keeper):
    wait_until(lambda: keeper.figures()["chunks"] == 8, "it is not published")


def test_an_engine_loads_what_the_one_before_it_stored(keeper):
    with running(config(keeper)) as engine:
        store(*engine)
        is_published(keeper)
    with running(config(keeper)) as engine:
        load(*engine)
        figures = engine[0].stats()["primary"]
        assert (figures["rows"], figures["pool"]) == ((1 << 20) // LAYOUT.row_stride, 1)


@pytest.mark.parametrize("io", ["thread", "process"])
def test_chunks_that_a_tier_brought_are_there_for_the_next_engine(keeper, tmp_path, io):
    tier = {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "16MiB", "min_free": 0, "io": io, "required": True}
    with running(config(None, tier)) as engine:
        store(*engine)
    with running(config(keeper, tier)) as engine:
        load(*engine)
        assert engine[0].stats()["tiers"]["fs"]["loaded_chunks"] == 8
        is_published(keeper)
    with running(config(keeper)) as engine:
        load(*engine)


def test_other_weights_and_unknown_ones_find_nothing(keeper):
    with running(config(keeper)) as engine:
        store(*engine)
        engine[0].set_weights_version("w2")
        store(*engine)
        is_published(keeper)
    with running(config(keeper)) as (manager, _, _):
        assert manager.stats()["primary"]["evictable_rows"] == 0, "these are the weights of before"
    unknown = LAYOUT.from_json(LAYOUT.to_json().replace('"w1"', '""'))
    for _ in range(2):
        with running(config(keeper), unknown) as engine:
            assert engine[0].stats()["primary"]["evictable_rows"] == 0
            store(*engine)


@pytest.mark.parametrize("what", ["absent", "at work"])
def test_where_the_pool_is_not_to_be_had_the_engine_has_memory_of_its_own(keeper, monkeypatch, caplog, what):
    monkeypatch.setattr(PoolLoan, "take", partial(PoolLoan.take, in_use_seconds=0.1))
    path = keeper.path if what == "at work" else keeper.path.with_name("nobody.sock")
    settings = config(keeper)
    settings["primary"]["pool"] = str(path)
    with contextlib.ExitStack() as stack:
        if what == "at work":
            stack.enter_context(running(config(keeper)))
        engine = stack.enter_context(running(settings))
        store(*engine)
        load(*engine)
        figures = engine[0].stats()["primary"]
        assert (figures["rows"], figures["pool"]) == ((512 << 10) // LAYOUT.row_stride, 3)
    (line,) = [record for record in caplog.records if "this engine's primary is its own, of 512KiB" in record.message]
    assert line.levelno == logging.WARNING


def test_memory_is_prepared_ahead_only_where_there_is_no_keeper(keeper):
    assert begin_memory(load_config(config(keeper)), "x") is None
    settings = config(keeper)
    settings["primary"]["pool"] += "-not"
    with contextlib.closing(begin_memory(load_config(settings), "x")) as memory:
        assert isinstance(memory, EarlyMemory)
        with running(config(keeper), engine=EngineFacts(memory=memory)) as engine:  # it came meanwhile
            assert engine[0].stats()["primary"]["rows"] == (1 << 20) // LAYOUT.row_stride
        with pytest.raises(StartError, match="released or used"):
            memory.take()


@pytest.mark.parametrize("admission", ["all", "second_access"])
def test_of_engines_at_work_one_loads_what_the_other_stored_and_its_tier_is_not_asked(shared, tmp_path, admission):
    where = {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "16MiB", "min_free": 0, "required": True}
    settings = config(shared, {**where, "admission": admission})
    with running(settings) as one, running(settings) as other:
        store(*one)
        is_published(shared)
        wait_until(lambda: len(other[0]._primary._neighbours.places) == 8, "it is not followed")
        for _ in range(2):
            other[2][:] = 0
            load(*other)
        step_until(other[0], lambda: not other[0].has_pending_work())
        tiers = [manager.stats()["tiers"]["fs"] for manager, *_ in (one, other)]
        assert [tier["loaded_chunks"] for tier in tiers] == [0, 0]
        assert [tier["stored_chunks"] for tier in tiers] == ([8, 0] if admission == "all" else [0, 8])
        assert other[0].stats()["primary"]["free_rows"] == other[0].stats()["primary"]["rows"]
        for manager, *_ in (one, other):
            assert manager.stats()["engine"]["misuse"] == manager.stats()["primary"]["misuse"] == 0


def test_an_engine_goes_on_without_the_one_that_it_shares_with(shared):
    with running(config(shared)) as other:
        with running(config(shared)) as one:
            store(*one)
            is_published(shared)
            load(*other)
        other[2][:] = 0
        load(*other)
        with running(config(shared)) as third:
            load(*third)
