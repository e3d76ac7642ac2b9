"""Loads that share chunks, fail, or are overtaken."""

import pytest

from kvtiers.scheduler import SchedulerOptions
from kvtiers.types import TransferResult

from .harness import TOKENS, Bench, Shelf, layout_of, stored


@pytest.fixture
def bench() -> Bench:
    bench = Bench(layout_of())
    bench.serve(bench.request("a", 4 * TOKENS))
    return bench


def begin_load(bench: Bench, request, computed: int = 0):
    """Start to load all that a request finds; return the step's transfers."""
    tokens = bench.scheduler.lookup(request, computed)
    assert tokens
    assert bench.scheduler.start_load(request, tokens) == tokens
    return bench.scheduler.end_step()


def test_two_requests_that_need_one_chunk_load_it_once(bench) -> None:
    first = bench.request("b", 5 * TOKENS, first_block=20)
    second = bench.request("c", 5 * TOKENS, first_block=40, text="a" * 4 * TOKENS + "c" * TOKENS)
    transfers = begin_load(bench, first)
    assert len(transfers.loads) == 1
    for _ in range(3):
        assert bench.lookup(second) is None
    bench.done(transfers)
    # The engine has it in its own cache now, and the second request takes it from there.
    second.block_ids[0][:4] = first.block_ids[0][:4]
    assert bench.lookup(second, 4 * TOKENS) == 0
    assert bench.wrong(second, 4 * TOKENS) == []
    assert len(bench.manager.loaded) == 1


def test_a_shared_beginning_is_enough_to_wait_and_other_prefixes_do_not(bench) -> None:
    bench.serve(bench.request("z", 4 * TOKENS, first_block=80, text="z" * 99))
    begin_load(bench, bench.request("b", 5 * TOKENS, first_block=20))
    assert bench.lookup(bench.request("c", 2 * TOKENS + 1, first_block=40)) is None
    assert bench.lookup(bench.request("d", 5 * TOKENS, first_block=60, text="z" * 99)) == 4 * TOKENS


def test_two_requests_that_look_up_in_one_step_go_one_after_the_other(bench) -> None:
    first = bench.request("b", 5 * TOKENS, first_block=20)
    second = bench.request("c", 5 * TOKENS, first_block=40)
    assert bench.scheduler.lookup(first, 0) == 4 * TOKENS
    assert bench.scheduler.lookup(second, 0) is None
    bench.scheduler.start_load(first, 4 * TOKENS)
    transfers = bench.scheduler.end_step()
    assert bench.lookup(second) is None
    bench.done(transfers)
    assert bench.lookup(second, 4 * TOKENS) == 0


def test_a_request_that_has_looked_up_but_gets_no_blocks_holds_no_other_one_up(bench) -> None:
    first = bench.request("b", 5 * TOKENS, first_block=20)
    second = bench.request("c", 5 * TOKENS, first_block=40)
    for expected in (None, 4 * TOKENS):
        assert bench.scheduler.lookup(first, 0) == 4 * TOKENS
        assert bench.scheduler.lookup(second, 0) == expected
        bench.scheduler.end_step()


def test_a_request_that_has_looked_up_in_an_earlier_step_alone_holds_no_other_one_up(bench) -> None:
    assert bench.lookup(bench.request("b", 5 * TOKENS, first_block=20)) == 4 * TOKENS
    assert bench.lookup(bench.request("c", 5 * TOKENS, first_block=40)) == 4 * TOKENS


@pytest.mark.parametrize("how", ["fails", "preempted", "finished"])
def test_after_a_load_that_came_to_nothing_the_next_request_loads_for_itself(bench, how) -> None:
    first = bench.request("b", 5 * TOKENS, first_block=20)
    second = bench.request("c", 5 * TOKENS, first_block=40)
    transfers = begin_load(bench, first)
    assert bench.lookup(second) is None
    if how == "preempted":
        bench.scheduler.preempt_request(first)
    if how == "finished":
        bench.scheduler.finish_request(first)
    bench.done(transfers, success=how != "fails")
    assert bench.load(second) == 4 * TOKENS
    assert bench.wrong(second, 4 * TOKENS) == []


def test_without_a_prefix_cache_in_the_engine_each_request_loads_for_itself() -> None:
    bench = Bench(layout_of(), options=SchedulerOptions(prefix_caching=False))
    bench.serve(bench.request("a", 4 * TOKENS))
    requests = [bench.request(name, 5 * TOKENS, first_block=40 * n) for n, name in enumerate("bc", 1)]
    for request in requests:
        assert bench.scheduler.lookup(request, 0) == 4 * TOKENS
        assert bench.scheduler.start_load(request, 4 * TOKENS) == 4 * TOKENS
    transfers = bench.scheduler.end_step()
    assert len(transfers.loads) == 2
    bench.done(transfers)
    assert [bench.wrong(request, 4 * TOKENS) for request in requests] == [[], []]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_request_that_loads_is_not_looked_up_again(prefix_caching) -> None:
    bench = Bench(layout_of(), options=SchedulerOptions(prefix_caching=prefix_caching))
    bench.serve(bench.request("a", 4 * TOKENS))
    request = bench.request("b", 5 * TOKENS, first_block=20)
    begin_load(bench, request)
    assert bench.lookup(request) is None
    assert bench.scheduler.start_load(request, 4 * TOKENS) == 0


def test_after_a_failed_load_the_request_computes_and_is_offered_no_other_load(bench) -> None:
    request = bench.request("b", 5 * TOKENS, first_block=20)
    (outcome,) = bench.done(begin_load(bench, request), success=False)
    assert outcome == ("b", False, 0, 4 * TOKENS)
    assert bench.lookup(request) == 0
    bench.compute(request)
    bench.scheduler.on_computed(request, 5 * TOKENS)
    assert stored(bench.scheduler.end_step()) == [24]  # the others are in the primary still
    bench.scheduler.preempt_request(request)
    assert bench.lookup(request) == 4 * TOKENS, "it is decided anew"
    bench.scheduler.preempt_request(request)
    assert bench.load(bench.request("c", 5 * TOKENS, first_block=60)) == 4 * TOKENS


def test_a_load_that_fails_on_one_rank_has_failed() -> None:
    bench = Bench(layout_of(world_size=2))
    bench.serve(bench.request("a", 2 * TOKENS))
    request = bench.request("b", 3 * TOKENS, first_block=20)
    (job,) = begin_load(bench, request).loads
    assert bench.scheduler.report([TransferResult(job.job_id, success=False, error="no")], 1) == []
    assert bench.scheduler.report([TransferResult(job.job_id, success=True)], 0) == [("b", False, 0, 2 * TOKENS)]
    assert bench.blocks.held == {}
    assert bench.primary.evictable == 2


def test_a_load_of_a_rank_that_is_lost_has_failed_and_the_next_report_says_so() -> None:
    bench = Bench(layout_of(world_size=2))
    bench.serve(bench.request("a", 2 * TOKENS))
    request = bench.request("b", 3 * TOKENS, first_block=20)
    (job,) = begin_load(bench, request).loads
    assert bench.scheduler.report([TransferResult(job.job_id, success=True)], 0) == []
    bench.engine.lost_ranks = [1]
    bench.scheduler.end_step()
    assert bench.scheduler.report([], 0) == [("b", False, 0, 2 * TOKENS)]
    assert bench.blocks.held == {}
    assert bench.primary.evictable == 2


def with_four_chunks_in_a_tier() -> tuple[Bench, Shelf]:
    """A bench with a tier that has four chunks, of which the primary has none any more."""
    layout = layout_of()
    shelf = Shelf(layout.row_stride)
    bench = Bench(layout, tier=shelf)
    bench.serve(bench.request("a", 4 * TOKENS))
    bench.scheduler.end_step()
    bench.scheduler.reset_cache()
    return bench, shelf


def test_a_load_whose_tier_fails_is_computed_and_not_tried_for_ever() -> None:
    bench, shelf = with_four_chunks_in_a_tier()
    shelf.fails = True
    request = bench.request("b", 5 * TOKENS, first_block=20)
    assert bench.lookup(request) is None
    shelf.land()
    answers = [bench.lookup(request) for _ in range(5)]
    assert answers[-1] == 0
    assert None not in answers[1:]
    assert set(shelf.loaded.values()) == {1}
    transfers = bench.store_step(request)
    assert stored(transfers) == [20, 21, 22, 23, 24]
    bench.done(transfers)
    assert bench.present(request) == [True] * 5


def test_a_chunk_that_two_requests_wait_for_is_brought_by_the_tier_once() -> None:
    bench, shelf = with_four_chunks_in_a_tier()
    requests = [bench.request(name, 5 * TOKENS, first_block=40 * n) for n, name in enumerate("bcd", 1)]
    for _ in range(3):
        assert [bench.scheduler.lookup(request, 0) for request in requests] == [None] * 3
        bench.scheduler.end_step()
    shelf.land()
    assert bench.load(requests[0]) == 4 * TOKENS
    assert bench.wrong(requests[0], 4 * TOKENS) == []
    assert set(shelf.loaded.values()) == {1}


def test_while_a_tier_loads_for_a_request_its_prompt_is_not_gone_through_again(monkeypatch) -> None:
    bench, shelf = with_four_chunks_in_a_tier()
    request = bench.request("b", 5 * TOKENS, first_block=40)
    assert bench.lookup(request) is None
    asked = []
    reach = bench.manager.reach
    monkeypatch.setattr(bench.manager, "reach", lambda *args: asked.append(args) or reach(*args))
    assert [bench.lookup(request) for _ in range(3)] == [None] * 3
    assert not asked
    shelf.land()
    assert bench.load(request) == 4 * TOKENS
    assert len(asked) == 1


def test_a_preempted_requests_hit_is_released(bench) -> None:
    request = bench.request("b", 5 * TOKENS, first_block=20)
    assert bench.lookup(request) == 4 * TOKENS
    assert bench.primary.evictable == 0
    bench.scheduler.preempt_request(request)
    assert bench.primary.evictable == 4
    assert bench.scheduler.start_load(request, 4 * TOKENS) == 0
    bench.scheduler.end_step()
    assert bench.load(request) == 4 * TOKENS


def test_a_preempted_request_loads_from_a_tier_what_it_has_failed_to_bring_before() -> None:
    shelf = Shelf(layout_of().row_stride)
    bench = Bench(layout_of(), tier=shelf)
    bench.serve(bench.request("a", 4 * TOKENS))
    bench.scheduler.reset_cache()
    request = bench.request("b", 5 * TOKENS, first_block=20)
    shelf.fails = True
    assert bench.lookup(request) is None
    shelf.land()
    assert bench.lookup(request) == 0
    shelf.fails = False
    bench.scheduler.preempt_request(request)
    assert bench.lookup(request) is None
    shelf.land()
    assert bench.load(request) == 4 * TOKENS
    assert bench.wrong(request, 4 * TOKENS) == []


def test_the_load_of_a_preempted_request_is_not_reported_and_its_blocks_stay_held(bench) -> None:
    request = bench.request("b", 5 * TOKENS, first_block=20)
    transfers = begin_load(bench, request)
    bench.scheduler.preempt_request(request)
    assert bench.blocks.held == {20: 1, 21: 1, 22: 1, 23: 1}
    request.block_ids[0][:] = range(60, 65)
    assert bench.done(transfers) == []
    assert bench.blocks.held == {}
    # Whatever it had loaded is not in its new blocks: they are offered when they are computed.
    bench.compute(request)
    bench.scheduler.on_computed(request, 5 * TOKENS)
    bench.scheduler.end_step()
    assert bench.manager.offered[-1] == bench.keys(request)


def test_a_name_that_is_used_again_does_not_get_the_old_requests_load(bench) -> None:
    request = bench.request("b", 5 * TOKENS, first_block=20)
    transfers = begin_load(bench, request)
    bench.scheduler.finish_request(request)
    bench.request("b", 5 * TOKENS, first_block=60)
    assert bench.done(transfers) == []


def test_a_reset_lets_hits_go_and_makes_running_loads_failed_ones(bench) -> None:
    loading = bench.request("b", 5 * TOKENS, first_block=20)
    transfers = begin_load(bench, loading)
    bench.serve(bench.request("z", 4 * TOKENS, first_block=80, text="z" * 99))
    pinned = bench.request("c", 5 * TOKENS, first_block=40, text="z" * 99)
    assert bench.lookup(pinned) == 4 * TOKENS
    bench.scheduler.reset_cache()
    assert bench.scheduler.start_load(pinned, 4 * TOKENS) == 0
    assert bench.done(transfers) == [("b", False, 0, 4 * TOKENS)]
    bench.scheduler.end_step()
    assert bench.primary.free_rows == bench.rows
    assert bench.manager.stats()["primary"]["misuse"] == 0


# -- new weights


def test_what_was_computed_with_old_weights_is_never_stored(bench) -> None:
    request = bench.request("b", 6 * TOKENS, first_block=20, text="b" * 999)
    bench.done(bench.store_step(request, 2 * TOKENS))
    bench.scheduler.set_weights_version("2")
    assert stored(bench.store_step(request, 4 * TOKENS)) == []
    bench.scheduler.finish_request(request, 6 * TOKENS)
    assert bench.scheduler.end_step().stores == []


def test_a_preempted_request_stores_what_the_new_weights_compute(bench) -> None:
    request = bench.request("b", 3 * TOKENS, first_block=20, text="b" * 999)
    bench.store_step(request)
    bench.scheduler.set_weights_version("2")
    bench.scheduler.preempt_request(request)
    assert bench.lookup(request) == 0
    assert stored(bench.store_step(request)) == [20, 21, 22]


def test_a_request_that_had_not_begun_when_the_weights_changed_is_stored(bench) -> None:
    request = bench.request("b", 3 * TOKENS, first_block=20, text="b" * 999)
    bench.scheduler.set_weights_version("2")
    assert bench.lookup(request) == 0
    assert stored(bench.store_step(request)) == [20, 21, 22]


def test_calls_between_steps_take_and_give_back_the_lock(bench) -> None:
    request = bench.request("b", 3 * TOKENS, first_block=20)
    for call in (
        lambda: bench.scheduler.preempt_request(request),
        bench.scheduler.reset_cache,
        lambda: bench.scheduler.set_weights_version("2"),
        lambda: bench.scheduler.finish_request(request),
    ):
        call()
        assert not bench.manager.lock.locked()
