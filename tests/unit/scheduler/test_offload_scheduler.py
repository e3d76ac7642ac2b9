"""The offload scheduler over a real manager and a real primary; the tests play the engine and its workers."""

import threading

import pytest

from kvtiers.api import JobResult, LookupResult, make_offload_key
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.types import TransferResult

from .harness import TOKENS, Bench, layout_of


@pytest.fixture
def bench() -> Bench:
    return Bench(layout_of())


def test_every_full_chunk_is_stored_as_soon_as_it_is_computed_and_only_once(bench) -> None:
    request = bench.request("a", 5 * TOKENS + 3)
    bench.scheduler.on_computed(request, 2 * TOKENS + 5)
    first = bench.scheduler.end_step()
    assert [job.blocks.block_ids.tolist() for job in first.stores] == [[0, 1]]
    bench.scheduler.on_computed(request, 5 * TOKENS)
    second = bench.scheduler.end_step()
    assert [job.blocks.block_ids.tolist() for job in second.stores] == [[2, 3, 4]]
    assert bench.present(request) == [False] * 5
    bench.done(first)
    bench.done(second)
    assert bench.present(request) == [True] * 5
    bench.scheduler.on_computed(request, 5 * TOKENS + 3)
    assert bench.scheduler.end_step().stores == []


def test_a_job_names_rows_and_blocks_in_the_same_order(bench) -> None:
    request = bench.request("a", 3 * TOKENS, first_block=7)
    bench.scheduler.on_computed(request, 3 * TOKENS)
    (job,) = bench.scheduler.end_step().stores
    assert job.blocks.block_ids.tolist() == [7, 8, 9]
    assert (job.blocks.group_sizes, job.blocks.block_indices) == ((3,), (0,))
    assert sorted(job.chunk_ids.tolist()) == [0, 1, 2]


def test_blocks_in_a_store_are_held_until_all_ranks_have_reported_it() -> None:
    bench = Bench(layout_of(world_size=4))
    request = bench.request("a", 2 * TOKENS)
    bench.scheduler.on_computed(request, 2 * TOKENS)
    (job,) = bench.scheduler.end_step().stores
    bench.scheduler.finish_request(request)
    for rank in (0, 3, 1, 3, 3):
        bench.scheduler.report([TransferResult(job.job_id, success=True)], rank)
        assert bench.blocks.held == {0: 1, 1: 1}
        assert bench.present(request) == [False, False]
        assert bench.scheduler.has_pending_work()
    bench.scheduler.report([TransferResult(job.job_id, success=True)], 2)
    assert bench.blocks.held == {}
    assert bench.present(request) == [True, True]
    assert not bench.scheduler.has_pending_work()


def test_a_store_that_fails_on_one_rank_stores_nothing_and_frees_its_blocks() -> None:
    bench = Bench(layout_of(world_size=2))
    request = bench.request("a", 2 * TOKENS)
    bench.scheduler.on_computed(request, 2 * TOKENS)
    (job,) = bench.scheduler.end_step().stores
    bench.scheduler.report([TransferResult(job.job_id, success=False, error="no")], 0)
    bench.scheduler.report([TransferResult(job.job_id, success=True)], 1)
    assert bench.blocks.held == {}
    assert bench.present(request) == [False, False]
    assert bench.primary.free_rows == bench.rows


def test_a_report_of_an_unknown_job_is_ignored(bench) -> None:
    assert bench.scheduler.report([TransferResult(99, success=True)]) == []


@pytest.mark.parametrize(
    ("tokens", "computed", "loadable"),
    [
        (4 * TOKENS + 1, 0, 4 * TOKENS),
        (4 * TOKENS, 0, 3 * TOKENS),  # an exact multiple loses its last block: one token must be computed
        (4 * TOKENS + 1, TOKENS, 3 * TOKENS),
        (4 * TOKENS + 1, 4 * TOKENS, 0),
        (4 * TOKENS + 1, TOKENS + 1, 0),  # the engine's own cache ends within a block
        (TOKENS, 0, 0),
    ],
)
def test_the_longest_prefix_is_found_and_one_token_is_left_to_compute(bench, tokens, computed, loadable) -> None:
    bench.serve(bench.request("a", 4 * TOKENS))
    assert bench.lookup(bench.request("b", tokens), computed) == loadable


def test_a_loaded_prefix_is_copied_into_the_requests_own_blocks_and_not_stored_again(bench) -> None:
    bench.serve(bench.request("a", 3 * TOKENS))
    request = bench.request("b", 5 * TOKENS, first_block=20)
    assert bench.scheduler.lookup(request, 0) == 3 * TOKENS
    assert bench.scheduler.start_load(request, 3 * TOKENS) == 3 * TOKENS
    (load,) = (transfers := bench.scheduler.end_step()).loads
    assert load.blocks.block_ids.tolist() == [20, 21, 22]
    assert load.blocks.block_indices == (0,)
    assert bench.blocks.held == {20: 1, 21: 1, 22: 1}
    (outcome,) = bench.done(transfers)
    assert outcome == ("b", True, 0, 3 * TOKENS)
    assert bench.blocks.held == {}
    bench.scheduler.on_computed(request, 5 * TOKENS)
    (store,) = bench.scheduler.end_step().stores
    assert store.blocks.block_ids.tolist() == [23, 24]
    assert store.blocks.block_indices == (3,)
    assert bench.manager.offered[-1] == bench.keys(request)[3:]


def test_a_load_behind_the_engines_own_hit_starts_at_the_right_block(bench) -> None:
    bench.serve(bench.request("a", 4 * TOKENS))
    request = bench.request("b", 5 * TOKENS, first_block=20)
    assert bench.scheduler.lookup(request, 2 * TOKENS) == 2 * TOKENS
    bench.scheduler.start_load(request, 2 * TOKENS)
    (load,) = bench.scheduler.end_step().loads
    assert load.blocks.block_ids.tolist() == [22, 23]
    assert load.blocks.block_indices == (2,)


def test_a_pinned_hit_is_released_if_the_engine_takes_fewer_tokens_or_none(bench) -> None:
    bench.serve(bench.request("a", 4 * TOKENS))
    request = bench.request("b", 5 * TOKENS, first_block=20)
    bench.scheduler.lookup(request, 0)
    assert bench.primary.evictable == 0
    assert bench.scheduler.start_load(request, TOKENS + 5) == TOKENS
    assert bench.primary.evictable == 3
    bench.done(bench.scheduler.end_step())
    assert bench.primary.evictable == 4
    bench.scheduler.lookup(request, TOKENS)
    assert bench.primary.evictable == 1
    assert bench.scheduler.start_load(request, 0) == 0
    assert bench.primary.evictable == 4


def test_a_hit_that_is_never_loaded_is_released_at_the_requests_end(bench) -> None:
    bench.serve(bench.request("a", 4 * TOKENS))
    request = bench.request("b", 5 * TOKENS)
    assert bench.lookup(request) == 4 * TOKENS
    assert bench.primary.evictable == 0
    bench.scheduler.finish_request(request)
    assert bench.primary.evictable == 4


def test_asking_again_keeps_one_pin_and_asking_from_elsewhere_moves_it(bench) -> None:
    bench.serve(bench.request("a", 4 * TOKENS))
    request = bench.request("b", 5 * TOKENS)
    for _ in range(3):
        assert bench.lookup(request) == 4 * TOKENS
    assert bench.lookup(request, 3 * TOKENS) == TOKENS
    assert bench.primary.evictable == 3
    bench.scheduler.finish_request(request)
    assert bench.primary.evictable == 4


def test_a_chunk_whose_store_is_in_flight_is_waited_for_and_then_hit(bench) -> None:
    first = bench.request("a", 2 * TOKENS)
    bench.scheduler.on_computed(first, 2 * TOKENS)
    transfers = bench.scheduler.end_step()
    second = bench.request("b", 3 * TOKENS)
    assert bench.lookup(second) is None
    bench.done(transfers)
    assert bench.lookup(second) == 2 * TOKENS


def test_a_failed_load_is_reported_as_failed_and_its_chunks_stay(bench) -> None:
    bench.serve(bench.request("a", 3 * TOKENS))
    request = bench.request("b", 4 * TOKENS, first_block=20)
    bench.scheduler.lookup(request, 0)
    bench.scheduler.start_load(request, 3 * TOKENS)
    (outcome,) = bench.done(bench.scheduler.end_step(), success=False)
    assert not outcome.success
    assert bench.blocks.held == {}
    assert bench.primary.evictable == 3


def test_a_request_may_end_while_its_load_runs_and_its_blocks_stay_held(bench) -> None:
    bench.serve(bench.request("a", 3 * TOKENS))
    request = bench.request("b", 4 * TOKENS, first_block=20)
    bench.scheduler.lookup(request, 0)
    bench.scheduler.start_load(request, 3 * TOKENS)
    transfers = bench.scheduler.end_step()
    bench.scheduler.finish_request(request)
    assert bench.blocks.held == {20: 1, 21: 1, 22: 1}
    bench.done(transfers)
    assert bench.blocks.held == {}
    assert bench.primary.evictable == 3


def test_what_another_request_has_stored_meanwhile_is_recognised_by_its_key(bench) -> None:
    bench.serve(bench.request("a", 3 * TOKENS))
    request = bench.request("b", 4 * TOKENS, first_block=20)
    bench.scheduler.on_computed(request, 4 * TOKENS)  # computed without a lookup
    (store,) = bench.scheduler.end_step().stores
    assert store.blocks.block_ids.tolist() == [23]


def test_a_request_larger_than_the_primary_stores_its_head() -> None:
    bench = Bench(layout_of(), rows=10)
    request = bench.request("a", 16 * TOKENS)
    bench.scheduler.on_computed(request, 16 * TOKENS)
    (job,) = (transfers := bench.scheduler.end_step()).stores
    assert job.blocks.block_ids.tolist() == list(range(8))
    bench.done(transfers)
    assert bench.present(request)[:8] == [True] * 8


def test_chunks_of_several_blocks_are_stored_whole_and_loaded_in_part() -> None:
    bench = Bench(layout_of(per_chunk=4))
    first = bench.request("a", 11 * TOKENS)
    bench.scheduler.on_computed(first, 11 * TOKENS)
    (job,) = (transfers := bench.scheduler.end_step()).stores
    assert job.blocks.block_ids.tolist() == list(range(8))  # two full chunks; the third is not full
    assert len(job.chunk_ids) == 2
    bench.done(transfers)
    second = bench.request("b", 8 * TOKENS, first_block=20)
    assert bench.scheduler.lookup(second, TOKENS) == 6 * TOKENS
    bench.scheduler.start_load(second, 6 * TOKENS)
    (load,) = bench.scheduler.end_step().loads
    assert load.blocks.block_ids.tolist() == list(range(21, 27))
    assert load.blocks.block_indices == (1,)
    assert len(load.chunk_ids) == 2


def test_groups_are_hit_as_far_as_the_shortest_of_them_reaches() -> None:
    bench = Bench(layout_of(groups=(TOKENS, 4 * TOKENS)))
    first = bench.request("a", 8 * TOKENS)
    bench.serve(first)
    assert (bench.present(first, 0), bench.present(first, 1)) == ([True] * 8, [True] * 2)
    second = bench.request("b", 8 * TOKENS, first_block=40)
    assert bench.scheduler.lookup(second, 0) == 4 * TOKENS  # one token is left, and group 1 has blocks of four
    bench.scheduler.start_load(second, 4 * TOKENS)
    (load,) = bench.scheduler.end_step().loads
    assert load.blocks.group_sizes == (4, 1)
    assert load.blocks.block_ids.tolist() == [40, 41, 42, 43, 48]
    assert len(load.chunk_ids) == 5


def test_the_managers_lock_is_held_within_a_step_and_free_between_steps(bench) -> None:
    request = bench.request("a", 2 * TOKENS)
    assert not bench.manager.lock.locked()
    bench.scheduler.lookup(request, 0)
    assert bench.manager.lock.locked()
    bench.scheduler.on_computed(request, 2 * TOKENS)
    transfers = bench.scheduler.end_step()
    assert not bench.manager.lock.locked()
    bench.done(transfers)
    bench.scheduler.finish_request(request)
    assert not bench.manager.lock.locked()


def test_a_call_between_steps_waits_for_another_holder_of_the_lock(bench) -> None:
    bench.manager.lock.acquire()
    other = threading.Thread(target=bench.scheduler.has_pending_work)
    other.start()
    other.join(0.05)
    assert other.is_alive()
    bench.manager.lock.release()
    other.join(30)
    assert not other.is_alive()


class WholeRequests(EventTier):
    """A tier that is offered all chunks of every request; it notes the keys and keeps nothing."""

    def __init__(self) -> None:
        self.stored: list[list[bytes]] = []
        self.finished: list[JobResult] = []

    def on_new_request(self, context) -> bool:
        return True

    def lookup(self, key, context) -> LookupResult:
        return LookupResult.MISS

    def submit_store(self, job) -> None:
        self.stored.append(list(job.keys))
        self.finished.append(JobResult(job.job_id, success=True))

    def submit_load(self, job) -> None:
        raise AssertionError("nothing is here to be loaded")

    def get_finished_jobs(self):
        finished, self.finished = self.finished, []
        return finished

    def drain(self, timeout) -> bool:
        return True


def test_a_tier_that_wants_whole_requests_is_offered_loaded_chunks_too() -> None:
    tier = WholeRequests()
    bench = Bench(layout_of(), tier=tier)
    bench.serve(bench.request("a", 3 * TOKENS))
    tier.stored.clear()
    request = bench.request("b", 4 * TOKENS, first_block=20)
    bench.scheduler.lookup(request, 0)
    bench.scheduler.start_load(request, 3 * TOKENS)
    bench.done(bench.scheduler.end_step())
    bench.scheduler.on_computed(request, 4 * TOKENS)
    transfers = bench.scheduler.end_step()
    assert [job.blocks.block_ids.tolist() for job in transfers.stores] == [[23]]
    bench.done(transfers)
    keys = [make_offload_key(block_hash, 0) for block_hash in request.block_hashes[0]]
    assert sorted(key for job in tier.stored for key in job) == sorted(keys)
