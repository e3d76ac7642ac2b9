"""Eager stores: the set of GPU blocks whose store is in flight, across steps."""

import pytest

from kvtiers.types import TransferResult

from .harness import TOKENS, Bench, layout_of, stored


@pytest.fixture
def bench() -> Bench:
    return Bench(layout_of())


def hitting(bench: Bench, name: str, other, more: int = 0, text: str = ""):
    """A request that has found all blocks of another one in the engine's prefix cache, and ``more`` new ones."""
    request = bench.request(name, other.num_tokens + more * TOKENS, first_block=100, text=text)
    for group, ids in enumerate(other.block_ids):
        request.block_ids[group][: len(ids)] = ids
    return request


def test_a_request_that_hits_blocks_whose_store_has_not_landed_stores_nothing_twice(bench) -> None:
    first = bench.request("a", 3 * TOKENS)
    transfers = bench.store_step(first)
    assert stored(transfers) == [0, 1, 2]
    assert set(bench.scheduler.blocks_in_flight) == {0, 1, 2}

    second = hitting(bench, "b", first, more=2)
    bench.compute(second, 3 * TOKENS)
    bench.scheduler.on_computed(second, 5 * TOKENS)
    later = bench.scheduler.end_step()
    assert stored(later) == [100 + 3, 100 + 4]
    assert bench.manager.offered[1:] == [bench.keys(second)[3:]]  # not even offered

    bench.done(transfers)
    bench.done(later)
    assert bench.present(second) == [True] * 5
    assert sum(len(job.chunk_ids) for job in [*transfers.stores, *later.stores]) == 5
    assert not bench.scheduler.blocks_in_flight


def test_what_has_landed_is_offered_again_by_a_new_request_and_nothing_is_copied(bench) -> None:
    first = bench.request("a", 3 * TOKENS)
    bench.done(bench.store_step(first))
    second = hitting(bench, "b", first)
    bench.scheduler.on_computed(second, 3 * TOKENS)
    assert bench.manager.offered[-1] == bench.keys(first)
    assert bench.scheduler.end_step().stores == []
    assert not bench.scheduler.blocks_in_flight
    assert bench.blocks.held == {}


def test_what_was_evicted_meanwhile_is_stored_again_from_the_same_blocks() -> None:
    bench = Bench(layout_of(), rows=4)
    first = bench.request("a", 3 * TOKENS)
    bench.serve(first)
    bench.serve(bench.request("other", 4 * TOKENS, first_block=50, text="z" * 4 * TOKENS))
    assert bench.present(first) == [False] * 3
    second = hitting(bench, "b", first)
    bench.scheduler.on_computed(second, 3 * TOKENS)
    transfers = bench.scheduler.end_step()
    assert stored(transfers) == [0, 1, 2]
    bench.done(transfers)
    assert bench.present(first) == [True] * 3
    third = bench.request("c", 4 * TOKENS, first_block=200)
    assert bench.load(third) == 3 * TOKENS
    assert bench.wrong(third, 3 * TOKENS) == []


def test_two_blocks_of_equal_hash_are_both_offered_and_get_one_row(bench) -> None:
    first = bench.request("a", 2 * TOKENS)
    transfers = bench.store_step(first)
    twin = bench.request("b", 2 * TOKENS, first_block=50)  # computed at the same time, so there are two of each block
    bench.compute(twin)
    bench.scheduler.on_computed(twin, 2 * TOKENS)
    assert bench.manager.offered == [bench.keys(first), bench.keys(twin)]
    assert bench.keys(first) == bench.keys(twin)
    assert bench.scheduler.end_step().stores == []
    assert set(bench.scheduler.blocks_in_flight) == {0, 1}
    assert bench.primary.free_rows == bench.rows - 2
    bench.done(transfers)
    assert bench.present(twin) == [True, True]


def test_a_chunk_that_shares_blocks_in_flight_but_ends_differently_is_stored() -> None:
    bench = Bench(layout_of(per_chunk=4))
    first = bench.request("a", 4 * TOKENS, text="a" * 64)
    transfers = bench.store_step(first)
    assert stored(transfers) == [0, 1, 2, 3]
    assert set(bench.scheduler.blocks_in_flight) == {3}
    second = bench.request("b", 4 * TOKENS, first_block=100, text="a" * 48 + "b" * 16)
    second.block_ids[0][:3] = [0, 1, 2]
    bench.compute(second, 3 * TOKENS)
    bench.scheduler.on_computed(second, 4 * TOKENS)
    later = bench.scheduler.end_step()
    assert stored(later) == [0, 1, 2, 103]
    bench.done(later)
    assert bench.present(second) == [True]
    assert bench.blocks.held == {0: 1, 1: 1, 2: 1, 3: 1}  # by the first store
    assert set(bench.scheduler.blocks_in_flight) == {3}
    bench.done(transfers)
    assert bench.present(first) == [True]
    assert bench.blocks.held == {}


def test_a_request_that_ends_between_store_and_report_leaves_nothing_in_flight(bench) -> None:
    request = bench.request("a", 3 * TOKENS)
    transfers = bench.store_step(request)
    bench.scheduler.finish_request(request)
    assert bench.blocks.held == {0: 1, 1: 1, 2: 1}  # the copy still reads them
    bench.done(transfers)
    assert not bench.scheduler.blocks_in_flight
    assert bench.blocks.held == {}
    assert bench.present(request) == [True] * 3


def test_a_request_that_is_preempted_between_store_and_report_leaves_nothing_in_flight(bench) -> None:
    request = bench.request("a", 3 * TOKENS)
    transfers = bench.store_step(request)
    bench.scheduler.preempt_request(request)
    assert bench.blocks.held == {0: 1, 1: 1, 2: 1}
    bench.done(transfers)
    assert not bench.scheduler.blocks_in_flight
    assert bench.blocks.held == {}
    # It comes back to other blocks, loads what it had, and goes on storing behind it.
    request.block_ids[0][:] = [30, 31, 32]
    assert bench.load(request) == 2 * TOKENS
    assert bench.wrong(request, 2 * TOKENS) == []
    assert stored(bench.store_step(request)) == []


def test_a_reset_between_store_and_report_leaves_nothing_in_flight_and_nothing_readable(bench) -> None:
    request = bench.request("a", 3 * TOKENS)
    transfers = bench.store_step(request)
    bench.scheduler.reset_cache()
    assert not bench.scheduler.blocks_in_flight
    assert bench.blocks.held == {0: 1, 1: 1, 2: 1}
    bench.done(transfers)
    assert bench.blocks.held == {}
    assert bench.present(request) == [False] * 3
    assert bench.primary.free_rows == bench.rows


def test_a_late_report_from_before_a_reset_does_not_take_the_newer_stores_blocks_out(bench) -> None:
    request = bench.request("a", 2 * TOKENS)
    old = bench.store_step(request)
    bench.scheduler.reset_cache()
    new = bench.store_step(request)  # a running request offers its chunks again
    assert stored(new) == [0, 1]
    bench.done(old)
    assert set(bench.scheduler.blocks_in_flight) == {0, 1}
    assert bench.blocks.held == {0: 1, 1: 1}
    bench.done(new)
    assert not bench.scheduler.blocks_in_flight
    assert bench.present(request) == [True, True]


def test_a_store_that_failed_is_offered_again_by_the_next_request_that_hits_its_blocks(bench) -> None:
    first = bench.request("a", 2 * TOKENS)
    bench.done(bench.store_step(first), success=False)
    assert not bench.scheduler.blocks_in_flight
    second = hitting(bench, "b", first)
    bench.scheduler.on_computed(second, 2 * TOKENS)
    assert stored(bench.scheduler.end_step()) == [0, 1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_store_lands_when_the_last_rank_has_reported_however_late(ranks) -> None:
    bench = Bench(layout_of(world_size=ranks))
    request = bench.request("a", 2 * TOKENS)
    transfers = bench.store_step(request)
    for rank in range(ranks - 1):
        bench.done(transfers, ranks=[rank])
    for _ in range(10):
        bench.scheduler.end_step()
    assert set(bench.scheduler.blocks_in_flight) == {0, 1}
    assert bench.blocks.held == {0: 1, 1: 1}
    assert bench.present(request) == [False, False]
    bench.done(transfers, ranks=[ranks - 1])
    assert not bench.scheduler.blocks_in_flight
    assert bench.blocks.held == {}
    assert bench.present(request) == [True, True]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_reports_twice_counts_once(ranks) -> None:
    bench = Bench(layout_of(world_size=ranks))
    request = bench.request("a", 2 * TOKENS)
    transfers = bench.store_step(request)
    for rank in [0, 0, *range(ranks - 1)]:
        bench.done(transfers, ranks=[rank])
    assert set(bench.scheduler.blocks_in_flight) == {0, 1}
    assert bench.present(request) == [False, False]
    (job,) = transfers.stores
    bench.scheduler.report([TransferResult(job.job_id, success=False, error="a second opinion")], 0)
    bench.done(transfers, ranks=[ranks - 1])
    assert bench.present(request) == [True, True]
    bench.done(transfers)  # and all of them once more
    assert bench.blocks.held == {}
    assert not bench.scheduler.blocks_in_flight


@pytest.mark.parametrize("ranks", [2, 4])
def test_while_one_rank_never_reports_nothing_is_readable_and_a_reset_frees_the_set(ranks) -> None:
    bench = Bench(layout_of(world_size=ranks))
    request = bench.request("a", 2 * TOKENS)
    transfers = bench.store_step(request)
    bench.done(transfers, ranks=range(1, ranks))
    bench.scheduler.finish_request(request)
    for _ in range(10):
        bench.scheduler.end_step()
    assert set(bench.scheduler.blocks_in_flight) == {0, 1}
    assert bench.blocks.held == {0: 1, 1: 1}  # it may still read them
    assert bench.present(request) == [False, False]
    assert bench.scheduler.has_pending_work()
    bench.scheduler.reset_cache()
    assert not bench.scheduler.blocks_in_flight
    assert bench.blocks.held == {0: 1, 1: 1}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_store_that_fails_on_one_rank_frees_its_blocks_and_stores_nothing(ranks) -> None:
    bench = Bench(layout_of(world_size=ranks))
    request = bench.request("a", 2 * TOKENS)
    transfers = bench.store_step(request)
    bench.done(transfers, ranks=[0], success=False)
    assert set(bench.scheduler.blocks_in_flight) == {0, 1}  # the others still copy
    bench.done(transfers, ranks=range(1, ranks))
    assert not bench.scheduler.blocks_in_flight
    assert bench.blocks.held == {}
    assert bench.present(request) == [False, False]
    assert bench.primary.free_rows == bench.rows


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_that_is_lost_has_failed_its_stores_once_the_others_have_ended(ranks, caplog) -> None:
    bench = Bench(layout_of(world_size=ranks))
    request = bench.request("a", 2 * TOKENS)
    transfers = bench.store_step(request)
    bench.engine.lost_ranks = [ranks - 1]
    bench.scheduler.end_step()
    if ranks > 1:
        assert set(bench.scheduler.blocks_in_flight) == {0, 1}  # the others still copy
    bench.done(transfers, ranks=range(ranks - 1))
    bench.scheduler.finish_request(request)
    bench.scheduler.end_step()
    assert not bench.scheduler.has_pending_work()
    assert not bench.scheduler.blocks_in_flight
    assert bench.blocks.held == {}
    assert bench.present(request) == [False, False]
    assert bench.primary.free_rows == bench.rows
    bench.done(transfers, ranks=[ranks - 1])  # what it says after all changes nothing
    assert bench.present(request) == [False, False]
    (record,) = [record for record in caplog.records if "is lost" in record.message]
    assert record.message == f"rank {ranks - 1} is lost; 1 transfers have failed"


def test_a_report_of_a_rank_that_does_not_exist_changes_nothing(bench) -> None:
    request = bench.request("a", TOKENS)
    (job,) = (transfers := bench.store_step(request)).stores
    bench.scheduler.report([TransferResult(job.job_id, success=False, error="who?")], rank=7)
    bench.done(transfers)
    assert bench.present(request) == [True]
