"""open_manager and open_worker: what they join, what they refuse, and what they leave to a system without memfd."""

import contextlib
import dataclasses
import logging
import math
import threading
import time
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest

import kvtiers
from kvtiers import runtime
from kvtiers._log_queue import LOGGERS
from kvtiers.api import ConfigError, StartError, make_offload_key
from kvtiers.config import load_config
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region.client import RegionJoin
from kvtiers.testing.running import descriptors_left_since, open_descriptors, threads_left_since
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.tier_slot import TierOptions
from kvtiers.types import BlockSpec, PromptGroup, RequestContext
from kvtiers_policies.what_if.what_if_thread import WhatIf

LAYOUT = CacheLayout(ModelIdentity("m", weights="w1"), (KVGroup("g", 16),), (KVTensor("t", 0, 4000),))
MEMORY = {"type": "memory", "capacity": "16MiB", "io": "thread"}
KEYS = [make_offload_key(bytes([i]) * 8, 0) for i in range(8)]


def config(**more):
    return {"version": 1, "primary": {"capacity": "1MiB"}, "lookup_wait": "60s", "load_wait": "60s", **more}


@contextlib.contextmanager
def running(config, layout=LAYOUT, **options):
    """An engine of one rank: its manager, its worker and its only KV tensor."""
    manager = kvtiers.open_manager(config, layout, **options)
    tensor = np.zeros((64, 4000), np.uint8)
    worker = kvtiers.open_worker(config, layout, [tensor], engine_id=manager.engine_id)
    try:
        manager.wait_ready(30)
        yield manager, worker, tensor
    finally:
        worker.shutdown()
        manager.shutdown(10)


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_time_that_no_clock_reaches_is_a_long_one(io):
    manager = kvtiers.open_manager(config(secondary=[{**MEMORY, "io": io}]), LAYOUT)
    worker = kvtiers.open_worker(config(), LAYOUT, [np.zeros((1, 4000), np.uint8)], engine_id=manager.engine_id)
    try:
        manager.wait_ready(math.inf)
    finally:
        worker.shutdown()
        manager.shutdown(math.inf)


def queued_loggers():
    """The loggers whose lines are still kept off the threads that log them."""
    return [name for name in LOGGERS if logging.getLogger(name).filters]


class StartedThreads:
    """Counts the threads that the test's own thread starts, and refuses one of them."""

    def __init__(self, monkeypatch):
        self.by_the_caller, self.refused = 0, 0
        start, caller = threading.Thread.start, threading.current_thread()

        def counted(thread):
            if threading.current_thread() is caller:
                self.by_the_caller += 1
                if self.by_the_caller == self.refused:
                    raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", counted)

    def refuse(self, number):
        """Refuse the thread with this number, counted from now on."""
        self.by_the_caller, self.refused = 0, number


def step_until(manager, done):
    until = time.monotonic() + 30
    while not done():
        assert time.monotonic() < until, "nothing came of it within 30 s"
        manager.on_schedule_end()


def copied(worker, submit, *what):
    submit(1, *what)
    worker.wait([1])
    (result,) = worker.get_finished()
    assert result.success, result.error


def round_trip(manager, worker, tensor):
    """Store 8 chunks, lose the primary, and load them again from the tier."""
    spec = BlockSpec(np.arange(8), (8,), (0,))
    tensor[:8] = np.arange(8, dtype=np.uint8)[:, None] + 1
    step_until(manager, lambda: manager.stats()["tiers"]["memory"]["own"]["open"])
    context = RequestContext("first")
    plan = manager.prepare_store(KEYS, context)
    copied(worker, worker.submit_store, spec, plan.chunk_ids)
    manager.complete_store(plan)
    manager.on_request_finished(context)
    step_until(manager, lambda: not manager.has_pending_work())
    manager.reset_cache()
    tensor[:] = 0
    context = RequestContext("second")
    step_until(
        manager, lambda: manager.reach([PromptGroup(KEYS)], context).in_chunks(manager.tokens_per_chunk[0]).ready == 8
    )
    plan = manager.prepare_load(KEYS, context)
    copied(worker, worker.submit_load, plan.chunk_ids, spec)
    manager.complete_load(plan)
    manager.on_request_finished(context)
    assert (tensor[:8] == np.arange(8, dtype=np.uint8)[:, None] + 1).all()


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_chunk_goes_its_whole_way_and_comes_back(io):
    with running(config(secondary=[{**MEMORY, "io": io}])) as engine:
        round_trip(*engine)


def test_admission_by_expected_reuse_reaches_the_tier_in_chunks():
    tier = {**MEMORY, "admission": "expected-reuse", "may_lose": "2%", "writes_per_hour": "1MiB"}
    with running(config(secondary=[tier])) as (manager, _, _):
        (slot,) = manager._slots
        value_bytes = LAYOUT.value_bytes(0)
        assert (slot.options.admission, slot.options.may_lose) == ("expected-reuse", 0.02)
        assert slot.options.writes_per_hour == 2**20 / value_bytes
        assert slot.options.chunks == 2**24 // value_bytes


def learnt(manager):
    """The examples that the policy's model, or the one beside the policy, has learnt from, and its weights."""
    policy = manager._primary._policy
    ages = getattr(policy, "_model", policy)._ages
    ages.settle()
    return ages.model.examples, ages.model._weights.tolist()


@pytest.mark.parametrize("eviction", ["lru", "turn-hazard"])
def test_what_an_engine_learns_of_its_workload_ends_with_it_and_reaches_no_other(eviction, tmp_path):
    """Engines of one configuration over one store, which outlives them: beside each other, and one after the other."""
    tier = {"type": "fs", "path": str(tmp_path / "fs"), "io": "thread", "capacity": "16MiB", "min_free": 0}
    primary = {"capacity": "1MiB", "eviction": eviction}
    settings = config(primary=primary, secondary=[{**tier, "admission": "expected-reuse"}])
    with running(settings) as (first, _, _), running(settings) as (beside, _, _):
        fresh = learnt(first)
        for number in range(3):
            context = RequestContext(str(number))
            first.complete_store(first.prepare_store(KEYS, context))
            first.on_request_finished(context)
        examples, weights = learnt(first)
        assert examples > fresh[0] == 0
        assert weights != fresh[1]
        assert learnt(beside) == fresh
    with running(settings) as (again, _, _):
        assert learnt(again) == fresh


@pytest.mark.parametrize("option", [{"may_lose": "2%"}, {"writes_per_hour": "1MiB"}])
def test_options_of_expected_reuse_are_refused_with_another_admission(option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"'{name}' is obeyed with 'admission: expected-reuse' only; leave it out"):
        load_config(config(secondary=[MEMORY | option]))


def test_what_the_config_says_of_tiering_reaches_the_parts_that_obey_it():
    budgets = {"store_reserve": "11%", "all_tiers": "41%", "one_tier": "21%", "protected": "12%", "protect_for": "7s"}
    tier = {**MEMORY, "read_only": True, "admission": "second_access", "deadline": "9s"}
    asked = config(secondary=[tier], budgets=budgets, clean_reserve="6%") | {"lookup_wait": "50ms", "load_wait": "2s"}
    assert runtime._tiering_options(load_config(asked)) == TieringOptions(0.05, 2.0, 0.11, 0.41, 0.21, 0.06)
    assert runtime._tiering_options(load_config(asked | {"load_wait": "auto"})).load_wait is None
    with running(asked) as (manager, _, _):
        (slot,) = manager._slots
        assert slot.options == TierOptions("memory", True, "second_access", 9.0, chunks=slot.options.chunks)
        unread = manager._primary._unread
        assert (unread.limit, unread.seconds) == (int(0.12 * manager._primary.num_rows), 7.0)


@pytest.mark.parametrize("tier", [MEMORY, {"type": "redis", "url": "redis://127.0.0.1:1"}])
def test_a_tier_that_others_share_over_a_network_is_known_as_remote(tier):
    with running(config(secondary=[tier])) as (manager, _, _):
        assert [slot.options.is_remote for slot in manager._slots] == [tier["type"] == "redis"]


def test_where_no_memory_can_be_shared_threads_of_one_process_do_the_same(monkeypatch, caplog):
    monkeypatch.setattr(runtime.sys, "platform", "darwin")
    with running(config(secondary=[{**MEMORY, "io": "process"}])) as engine:
        round_trip(*engine)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("darwin" in line for line in lines) == 1
    assert sum("its io is 'thread'" in line for line in lines) == 1


def test_each_engine_gets_an_id_of_its_own():
    with running(config()) as (one, _, _), running(config()) as (other, _, _):
        assert one.engine_id != other.engine_id


def test_a_start_that_fails_late_releases_the_rows_memory(monkeypatch, caplog):
    def fail(*_):
        raise StartError("late")

    monkeypatch.setattr("kvtiers.tier_set.load_tier", fail)
    with pytest.raises(StartError, match="late") as error:
        kvtiers.open_manager(config(secondary=[MEMORY]), LAYOUT, engine_id="fails-late")
    assert "memfd:kvtiers-fails-late" not in Path("/proc/self/maps").read_text()
    assert "still in use" not in caplog.text
    del error


def test_an_engine_id_in_use_is_refused_in_one_line():
    with running(config(), engine_id="twice"), pytest.raises(StartError, match="twice") as refused:
        kvtiers.open_manager(config(), LAYOUT, engine_id="twice")
    assert "\n" not in str(refused.value)


def test_a_model_that_config_and_engine_name_differently_is_refused_with_both_values():
    with pytest.raises(ConfigError, match=r"model\.weights.*'w2'.*'w1'"):
        kvtiers.open_manager(config(model={"name": "m", "revision": "w2"}), LAYOUT)


def test_the_config_fills_in_what_the_engine_does_not_name():
    bare = dataclasses.replace(LAYOUT, model=ModelIdentity("m"))
    with running(config(model={"name": "m", "revision": "w1"}), bare) as (manager, _, _):
        assert manager.engine_id


def test_without_a_weights_identity_one_line_says_that_nothing_is_shared(caplog):
    with running(config(), dataclasses.replace(LAYOUT, model=ModelIdentity("m"))):
        pass
    assert sum("nothing is shared" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_required_tier_that_cannot_be_opened_fails_the_start_by_name(io):
    tier = {**MEMORY, "capacity": "1KiB", "io": io, "required": True, "name": "must"}
    manager = kvtiers.open_manager(config(secondary=[tier]), LAYOUT)
    worker = kvtiers.open_worker(config(), LAYOUT, [np.zeros((1, 4000), np.uint8)], engine_id=manager.engine_id)
    try:
        with pytest.raises(StartError, match=r"must: required, but cannot be opened: .*capacity"):
            manager.wait_ready(30)
    finally:
        worker.shutdown()
        manager.shutdown(5)


def test_a_tier_that_cannot_be_opened_does_not_stop_an_engine_that_does_not_require_it():
    with running(config(secondary=[{**MEMORY, "capacity": "1KiB"}])) as (manager, _, _):
        context = RequestContext("r")
        assert manager.prepare_store(KEYS, context) is not None
        assert (
            manager.reach([PromptGroup(KEYS[:1])], RequestContext("s")).in_chunks(manager.tokens_per_chunk[0]).tokens
            == 1
        )


def test_an_engine_says_what_other_sizes_would_hit(monkeypatch):
    monkeypatch.setattr(WhatIf, "__init__", partialmethod(WhatIf.__init__, report_seconds=0.01))
    with running(config(secondary=[MEMORY], what_if=True)) as (manager, _, _):
        assert manager.takes_requests
        assert manager.stats()["what_if"] == {}
        hashes = [bytes([number]) * 32 for number in range(64)]
        for _ in range(4):
            manager.record_request(0.0, 64 * 16 + 1, 64 * 16 + 9, [hashes])
        step_until(manager, lambda: manager.stats()["what_if"].get("chunks") == 256)
        report = manager.stats()["what_if"]
    assert report["hit_rates"]["lru"]["1"] == pytest.approx(0.75, abs=0.02)
    assert set(report["hit_rates"]) == {"lru", "arc", "turn-hazard"}
    assert (report["rows"], report["capacity"]) == (256, 2**20)
    assert set(report["adds"]) == {"memory"}
    with running(config()) as (manager, _, _):
        assert not manager.takes_requests
        assert "what_if" not in manager.stats()


def test_after_shutdown_no_thread_is_left():
    before = set(threading.enumerate())
    with running(config(secondary=[MEMORY, {**MEMORY, "io": "process", "name": "helped"}], what_if=True)):
        pass
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not left, left


EVERYTHING = config(
    secondary=[MEMORY, {**MEMORY, "io": "process", "name": "helped"}, {"type": "memory-async", "max_blocks": 4}]
)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_start_that_fails_for_want_of_a_thread_leaves_nothing_behind(platform, tmp_path, monkeypatch):
    """Once for each thread that the caller's starts: it is refused, those before it are not."""
    monkeypatch.setattr(runtime.sys, "platform", platform)
    settings = {**EVERYTHING, "record": {"path": str(tmp_path / "trace.jsonl")}, "what_if": True}
    started = StartedThreads(monkeypatch)
    manager = kvtiers.open_manager(settings, LAYOUT)
    needed = started.by_the_caller
    manager.shutdown(10)
    assert needed >= 5
    threads, descriptors, regions = set(threading.enumerate()), open_descriptors(), dict(runtime._anonymous_regions)
    refused = 0
    for number in range(1, needed + 1):
        started.refuse(number)
        try:
            manager = kvtiers.open_manager(settings, LAYOUT)
        except StartError as error:
            refused += 1
            assert str(error).startswith("can't start new thread: raise the limit of processes and threads")  # noqa: PT017 -- it may start
        else:  # a thread that it can do without
            manager.shutdown(10)
        assert not threads_left_since(threads), number
        assert not descriptors_left_since(descriptors), number
        assert runtime._anonymous_regions == regions, number
        assert not queued_loggers(), number
    assert refused >= needed - 2


def test_a_worker_that_fails_for_want_of_a_thread_leaves_nothing_behind(monkeypatch):
    def open_worker():
        return kvtiers.open_worker(config(), LAYOUT, [np.zeros((1, 4000), np.uint8)], engine_id=manager.engine_id)

    manager = kvtiers.open_manager(config(), LAYOUT)
    try:
        started = StartedThreads(monkeypatch)
        worker = open_worker()
        needed = started.by_the_caller
        worker.shutdown()
        assert needed == 2
        threads, descriptors = set(threading.enumerate()), open_descriptors()
        for number in range(1, needed + 1):
            started.refuse(number)
            with pytest.raises(StartError, match="can't start new thread: raise the limit of processes and threads"):
                open_worker()
            assert not threads_left_since(threads), number
            assert not descriptors_left_since(descriptors), number
    finally:
        manager.shutdown(10)
    assert not queued_loggers()


def test_where_all_memory_is_pinned_at_the_start_nothing_is_ready_before_that():
    settings = config(primary={"capacity": "1MiB", "prefault": "all"})
    manager = kvtiers.open_manager(settings, LAYOUT)
    join = RegionJoin.start(manager.engine_id, LAYOUT, 0)
    try:
        join.wait(30)
        ctx = RequestContext("r")
        manager.on_new_request(ctx)
        with pytest.raises(StartError, match=r"its memory is not (populated|pinned by all ranks) after"):
            manager.wait_ready(0.2)  # this rank has pinned nothing yet
        assert manager.prepare_store(KEYS, ctx) is None
        join.settle()
        manager.wait_ready(30)
        manager.on_schedule_end()
        assert len(manager.prepare_store(KEYS, ctx).chunk_ids) == 8
    finally:
        join.close()
        manager.shutdown(1)


def test_a_worker_in_host_memory_has_nothing_to_pin_and_the_start_does_not_wait_for_it():
    with running(config(primary={"capacity": "1MiB", "prefault": "all"})) as (manager, _, _):
        stats = manager.stats()["primary"]
        assert stats["free_rows"] == stats["rows"] > 0


@pytest.mark.parametrize(
    ("primary", "share", "seconds"),
    [({}, 0.1, 0.002), ({"pin_share": "5%", "pin_piece": "1ms"}, 0.05, 0.001), ({"prefault": "all"}, 1.0, 0.05)],
)
def test_a_worker_pins_at_the_pace_that_its_config_says(primary, share, seconds):
    loaded = load_config(config(primary={"capacity": "1MiB", **primary}))
    settings = runtime._copying(loaded, None)
    assert (settings.pin_share, settings.pin_seconds) == (share, seconds)


def test_a_tenants_share_of_the_config_is_kept_for_it_in_the_engine():
    rows = {"primary": {"capacity": f"{20 * LAYOUT.row_stride}"}}
    with running(config(**rows, tenants={"named": {"blue": {"share": "25%"}}})) as (manager, _, _):
        total = manager.stats()["primary"]["rows"]

        def store(tenant, count, name):
            keys = [make_offload_key(b"%d" % number, 0, tenant) for number in range(count)]
            context = RequestContext(name, {"kvtiers_tenant": tenant} if tenant else {})
            assert manager.tenant_of(context) == tenant
            plan = manager.prepare_store(keys, context)
            manager.complete_store(plan)
            manager.on_request_finished(context)
            manager.on_schedule_end()
            return keys, plan.evicted

        blue, _ = store("blue", total // 4, "a")
        _, evicted = store("", total - total // 4, "b")
        assert not evicted
        more = [make_offload_key(b"more %d" % number, 0) for number in range(total // 2)]
        plan = manager.prepare_store(more, RequestContext("c"))
        assert len(plan.evicted) == total // 2
        assert not set(blue) & set(plan.evicted), "the coldest are blue's, and stay"


def test_an_integrations_estimate_of_computing_is_used_and_outlasts_a_reload():
    with running(config(), engine=runtime.EngineFacts(prefill_seconds=4e-12)) as (manager, _, _):
        cost = manager._waits.cost
        assert (cost.estimate, cost.is_measured) == (4e-12, False)
        assert cost.seconds_per_token > cost.estimate, "the prior, which takes computing to be dear"
        assert manager.live is not None
        assert manager.live._options(manager.live._config).estimated_seconds_per_token == 4e-12
