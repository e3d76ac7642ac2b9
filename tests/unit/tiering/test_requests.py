"""What a tier hears of a request: its beginning once, its end once, and nothing of it after that."""

import pytest

from kvtiers.tiering.jobs import TieringOptions
from kvtiers.types import OffloadPolicy, RequestContext

from .harness import Bench, chain

WIDE = TieringOptions(lookup_wait=0.02, load_wait=0.1, one_tier=1.0, all_tiers=1.0)
KEYS = chain("k", 4)


def test_any_tier_can_ask_for_whole_requests():
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    assert bench.manager.on_new_request(RequestContext("1")) is OffloadPolicy.CHUNK_LEVEL
    bench.tier["b"].wants_whole = True
    assert bench.manager.on_new_request(RequestContext("2")) is OffloadPolicy.REQUEST_LEVEL


def test_a_tier_that_may_not_write_asks_for_whole_requests_in_vain():
    bench = Bench(tiers={"a": {"read_only": True}}, options=WIDE)
    bench.tier["a"].wants_whole = True
    assert bench.manager.on_new_request(RequestContext("1")) is OffloadPolicy.CHUNK_LEVEL


@pytest.mark.parametrize("success", [True, False])
def test_the_end_is_reported_once_and_after_the_last_store(success):
    bench = Bench(tiers={"a": {}, "b": {}}, options=WIDE)
    ctx = bench.request()
    first, second = bench.begin_store(KEYS[:2], ctx), bench.begin_store(KEYS[2:], ctx)
    bench.manager.on_request_finished(ctx)
    bench.step()
    bench.manager.complete_store(first, success)
    bench.step()
    assert [tier.notified[ctx] for tier in bench.tier.values()] == [0, 0]
    bench.manager.complete_store(second, success)  # a tier fails the test if it gets a job of a request that is over
    bench.settle()
    assert [tier.notified[ctx] for tier in bench.tier.values()] == [1, 1]


def test_transfers_may_outlive_the_request():
    bench = Bench(options=WIDE, hold=True)
    ctx = bench.request()
    bench.manager.complete_store(bench.begin_store(KEYS, ctx))
    bench.manager.on_request_finished(ctx)
    assert bench.tier["a"].notified[ctx] == 1
    bench.tier["a"].end_all()
    bench.settle()
    assert bench.figures("a")["stored_chunks"] == 4


def test_a_reset_does_not_lose_the_end_of_a_request():
    bench = Bench(options=WIDE)
    ctx = bench.request()
    plan = bench.begin_store(KEYS, ctx)
    bench.manager.on_request_finished(ctx)
    bench.manager.reset_cache()
    assert not bench.tier["a"].notified[ctx]
    bench.manager.complete_store(plan)
    assert bench.tier["a"].notified[ctx] == 1


def test_a_call_for_a_request_that_is_over_is_a_misuse_and_does_nothing():
    bench = Bench(options=WIDE)
    ctx = bench.request()
    bench.store(KEYS, ctx)
    bench.manager.on_request_finished(ctx)
    assert bench.lookup(KEYS, ctx) == (0, 0, False)
    assert bench.lookup(KEYS[:1], ctx) == (0, 0, False)
    assert bench.manager.prepare_store(chain("x", 1), ctx) is None
    assert bench.manager.prepare_load(KEYS, ctx) is None
    bench.manager.on_request_finished(ctx)
    assert bench.figures()["misuse"] == 5
    assert bench.tier["a"].notified[ctx] == 1


def test_an_id_can_be_used_again():
    bench = Bench(options=WIDE)
    for _ in range(3):
        ctx = bench.request("same")
        bench.store(KEYS, ctx)
        assert bench.load(KEYS, ctx)
        bench.manager.on_request_finished(ctx)
        assert bench.tier["a"].notified[ctx] == 1
    assert bench.figures()["misuse"] == 0


def test_an_id_that_is_used_again_while_the_old_requests_stores_run_is_a_request_of_its_own():
    bench = Bench(tiers={"a": {}, "w": {}}, options=WIDE)
    bench.tier["w"].wants_whole = True
    old = bench.request("same")
    plan = bench.begin_store(KEYS, old)
    empty = bench.begin_store(KEYS, old)  # parks them for w
    bench.manager.complete_store(empty)
    bench.manager.on_request_finished(old)
    new = bench.request("same")
    assert [tier.notified[old] for tier in bench.tier.values()] == [1, 1]
    bench.manager.complete_store(plan)
    assert {job.context.request_id for job in bench.tier["a"].stores} == {""}
    bench.settle()
    assert bench.load(KEYS, new)
    bench.manager.on_request_finished(new)
    bench.settle()
    for tier in bench.tier.values():
        assert tier.has(KEYS) == [True] * 4
        assert (tier.notified[old], tier.notified[new]) == (1, 1)


def test_a_request_that_is_begun_twice_is_one_request():
    bench = Bench(options=WIDE)
    ctx = bench.request()
    bench.manager.on_new_request(ctx)
    bench.manager.on_request_finished(ctx)
    assert bench.tier["a"].notified[ctx] == 1
    assert bench.figures()["misuse"] == 1


def test_many_requests_leave_nothing_behind():
    bench = Bench(options=WIDE)
    for _ in range(10_000):
        bench.manager.on_request_finished(bench.request())
    table = bench.manager._requests
    assert not table._open
    assert not table._closing
    assert len(table._over) <= 4096
