"""Transfer plans between the GPU and rows, and rows that a lost rank may still touch."""

import pytest

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.types import PromptGroup

from .harness import HIT, MISS, PENDING, Bench, chain

WIDE = TieringOptions(lookup_wait=0.02, load_wait=0.1, one_tier=1.0, all_tiers=1.0)
KEYS = chain("k", 4)


def test_a_chunk_that_is_there_in_whatever_state_gets_no_second_row():
    bench = Bench(options=WIDE)
    first = bench.begin_store(KEYS[:2])
    second = bench.begin_store(KEYS)
    assert list(second.keys) == KEYS[2:]
    assert not set(first.chunk_ids.tolist()) & set(second.chunk_ids.tolist())
    assert bench.primary.find(KEYS) == [PENDING] * 4
    bench.manager.complete_store(first)
    assert bench.primary.find(KEYS) == [HIT] * 2 + [PENDING] * 2


def test_a_plan_is_completed_once():
    bench = Bench(options=WIDE)
    store = bench.begin_store(KEYS)
    bench.manager.complete_store(store)
    bench.manager.complete_store(store, success=False)
    assert bench.primary.find(KEYS) == [HIT] * 4
    load = bench.manager.prepare_load(KEYS, bench.request())
    bench.manager.complete_load(load)
    bench.manager.complete_load(load)
    bench.settle()
    assert bench.primary.evictable == 4
    assert bench.figures()["misuse"] == 2


def test_no_room_is_no_plan_and_no_change():
    bench = Bench(rows=4, options=WIDE)
    plan = bench.begin_store(KEYS[:3])
    assert bench.manager.prepare_store(chain("x", 2), bench.request()) is None
    assert bench.figures()["refused_stores"] == 2
    assert bench.primary.free_rows == 1
    bench.manager.complete_store(plan)


def test_what_is_not_readable_cannot_be_loaded_and_nothing_stays_pinned():
    bench = Bench(options=WIDE)
    bench.store(KEYS[:2])
    pending = bench.begin_store(KEYS[2:3])
    ctx = bench.request()
    assert bench.manager.prepare_load(KEYS[:3], ctx) is None
    assert bench.manager.prepare_load([*KEYS[:2], KEYS[3]], ctx) is None
    assert bench.primary.evictable == 2
    bench.manager.complete_store(pending)
    assert bench.load(KEYS[:3], ctx)


def test_loaded_chunks_stay_while_they_are_being_copied():
    bench = Bench(rows=4, options=WIDE)
    bench.store(KEYS)
    plan = bench.manager.prepare_load(KEYS[:3], bench.request())
    assert bench.manager.prepare_store(chain("x", 2), bench.request()) is None
    bench.manager.complete_load(plan, success=False)
    assert bench.begin_store(chain("x", 2)) is not None
    assert bench.figures()["failed_gpu_loads"] == 3


def test_the_rows_of_a_lost_ranks_store_are_not_used_until_it_is_gone():
    bench = Bench(rows=4, options=WIDE, tiers={})
    plan = bench.begin_store(KEYS)
    bench.engine.dma = True
    bench.manager.complete_store(plan, success=False)
    assert bench.primary.find(KEYS) == [MISS] * 4
    bench.step()
    assert bench.manager.prepare_store(KEYS[:1], bench.request()) is None
    bench.engine.dma = False
    bench.step()
    assert bench.primary.free_rows == 4


def test_the_rows_of_a_lost_ranks_load_stay_as_they_are_until_it_is_gone():
    bench = Bench(rows=4, options=WIDE, tiers={})
    bench.store(KEYS)
    plan = bench.manager.prepare_load(KEYS, bench.request())
    bench.engine.dma = True
    bench.manager.complete_load(plan, success=False)
    assert bench.primary.find(KEYS) == [HIT] * 4
    assert bench.manager.prepare_store(chain("x", 1), bench.request()) is None
    bench.engine.dma = False
    bench.step()
    assert bench.begin_store(chain("x", 4)) is not None


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_reset_between_does_not_free_what_a_lost_rank_touches(kind):
    bench = Bench(rows=4, options=WIDE, tiers={})
    if kind == "load":
        bench.store(KEYS)
        plan = bench.manager.prepare_load(KEYS, bench.request())
    else:
        plan = bench.begin_store(KEYS)
    bench.engine.dma = True
    if kind == "load":
        bench.manager.complete_load(plan, success=False)
    else:
        bench.manager.complete_store(plan, success=False)
    bench.manager.reset_cache()
    bench.step()
    assert bench.primary.free_rows == 0
    bench.engine.dma = False
    bench.step()
    assert bench.primary.free_rows == 4


# -- who served


def test_hits_are_counted_for_the_tier_that_brought_the_chunk_and_once_a_request():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    bench.tier["b"].put(KEYS[:3])
    first, second = bench.request(), bench.request()
    bench.lookup(KEYS, first)
    bench.settle()
    for _ in range(3):
        assert bench.load(KEYS[:3], first)
    assert bench.load(KEYS[:3], second)
    assert (bench.figures("a")["hits"], bench.figures("b")["hits"]) == (0, 3)
    assert bench.figures()["primary_hits"] == 3


@pytest.mark.parametrize(("prefix_group", "prefix_hits"), [(0, 1), (1, 3)])
def test_hits_of_a_prompts_prefix_are_those_of_one_group(prefix_group, prefix_hits):
    bench = Bench(tokens_per_chunk=(48, 16), options=WIDE, prefix_group=prefix_group)
    groups = chain("k", 1, group=0), chain("k", 3, group=1)
    request = bench.request()
    for keys in groups:
        bench.tier["a"].put(keys)
        bench.lookup(keys, request)
    bench.settle()
    for _ in range(2):
        for keys in groups:
            assert bench.load(keys, request)
    assert (bench.figures("a")["hits"], bench.figures("a")["prefix_hits"]) == (4, prefix_hits)


def test_a_chunk_that_left_and_was_computed_again_is_the_primarys():
    bench = Bench(rows=8, tiers={"a": {"read_only": True}}, options=WIDE)
    bench.tier["a"].put(KEYS)
    bench.lookup(KEYS, bench.request())
    bench.settle()
    bench.step(20.0)
    bench.store(chain("x", 8))
    assert bench.primary.find(KEYS) == [MISS] * 4
    bench.tier["a"].values.clear()
    bench.store(KEYS)
    assert bench.load(KEYS, bench.request())
    assert bench.figures("a")["hits"] == 0
    assert bench.figures()["primary_hits"] == 4
    assert len(bench.manager._provenance._tier_of) == 0


def test_a_chunk_that_left_for_a_promotion_is_not_the_tiers_any_more():
    bench = Bench(rows=8, tiers={"a": {"read_only": True}}, options=WIDE)
    bench.tier["a"].put(KEYS)
    bench.lookup(KEYS, bench.request())
    bench.settle()
    bench.step(20.0)
    bench.tier["a"].put(chain("other", 7))
    assert bench.lookup(chain("other", 7), bench.request()) == (0, 7, False)
    assert len(bench.manager._provenance._tier_of) == 7 + bench.primary.find(KEYS).count(HIT)


@pytest.mark.parametrize("end", ["failed", "overdue", "reset"])
def test_a_chunk_that_a_tier_did_not_bring_and_that_was_computed_is_the_primarys(end):
    bench = Bench(options=WIDE, hold=True)
    bench.tier["a"].put(KEYS)
    bench.lookup(KEYS, bench.request())
    bench.step()
    if end == "failed":
        bench.tier["a"].end(1, landed=[])
    elif end == "reset":
        bench.manager.reset_cache()
    bench.step(31.0 if end == "overdue" else 0.0)
    bench.manager.complete_store(bench.begin_store(KEYS))
    assert bench.load(KEYS, bench.request())
    assert bench.figures("a")["hits"] == 0
    assert bench.figures()["primary_hits"] == 4


def test_a_store_that_a_reset_overtook_takes_nothing_of_the_budgets():
    bench = Bench(options=WIDE)
    plan = bench.begin_store(KEYS)
    bench.manager.reset_cache()
    bench.manager.complete_store(plan)
    assert bench.figures("a")["pinned_rows"] == 0
    assert not bench.tier["a"].submitted


def test_the_request_that_ends_last_has_the_hottest_chunks():
    bench = Bench(rows=8, tiers={}, options=WIDE)
    first, second = bench.request(), bench.request()
    for ctx, name in ((first, "first"), (second, "second")):
        bench.manager.complete_store(bench.begin_store(chain(name, 4), ctx))
    bench.manager.on_request_finished(second)
    bench.manager.on_request_finished(first)
    bench.store(chain("new", 4))
    assert bench.primary.find(chain("first", 4)) == [HIT] * 4


def test_bytes_that_were_written_and_not_read_since_are_known():
    bench = Bench(options=WIDE)
    bench.store(KEYS)
    bench.forget()
    bench.store(KEYS)
    assert bench.figures("a")["unread_bytes"] == 4 * 16
    bench.forget()
    bench.lookup(KEYS[:3], bench.request())
    bench.settle()
    assert bench.figures("a")["unread_bytes"] == 16
    bench.forget()
    bench.tier["a"].values.clear()
    bench.store(KEYS[:2])
    assert bench.figures("a")["unread_bytes"] == 3 * 16


def test_what_is_unread_of_old_weights_stays_unread():
    bench = Bench(options=WIDE)
    bench.store(KEYS)
    bench.manager.set_weights_version("new")
    bench.tier["a"].put(KEYS)
    bench.lookup(KEYS, bench.request())
    bench.settle()
    assert bench.figures("a")["loaded_chunks"] == 4
    assert bench.figures("a")["unread_bytes"] == 4 * 16


def test_hits_are_counted_again_under_other_weights():
    bench = Bench()
    ctx = bench.request()
    for version, hits in (("new", 3), ("newer", 6)):
        bench.manager.set_weights_version(version)
        keys = chain("k", 3)
        bench.store(keys)
        assert bench.load(keys, ctx)
        assert bench.load(keys, ctx), "once a request"
        assert bench.figures()["primary_hits"] == hits


def test_of_a_load_that_goes_on_each_part_has_the_head_of_each_run_that_is_readable():
    bench = Bench()
    ctx, windows = bench.request(), chain("windows", 3)
    bench.store([KEYS[0], KEYS[2], *windows[:2]])
    assert bench.manager.prepare_part([KEYS[1:], windows[2:]], ctx) is None
    assert not bench.primary.figures()["pinned_rows"]
    plan, chunks = bench.manager.prepare_part([KEYS, (), windows], ctx)
    assert (list(plan.keys), list(chunks)) == ([KEYS[0], *windows[:2]], [1, 0, 2])
    assert bench.primary.figures()["pinned_rows"] == 3
    bench.manager.complete_load(plan)
    assert not bench.primary.figures()["pinned_rows"]


def test_a_load_may_begin_once_its_first_chunk_is_readable_and_not_once_another_is():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE, hold=True)
    bench.tier["a"].put(KEYS[:2])
    bench.tier["b"].put(KEYS[2:])
    ctx, prompt = bench.request(), [PromptGroup(KEYS)]
    assert bench.manager.reach(prompt, ctx) == (0, 4 * 16, False, False)
    bench.step()
    for name, begins in (("b", False), ("a", True)):
        bench.tier[name].end(next(iter(bench.tier[name].held)))
        bench.step()
        reach = bench.manager.reach(prompt, ctx)
        assert reach.begins is reach.in_chunks(16).begins is begins
