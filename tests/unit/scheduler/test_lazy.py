"""Lazy stores, over the reference engine's block pool: what is about to be reused is stored before it is."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers.scheduler import FreeQueue, SchedulerOptions
from kvtiers_replay.engine.block_pool import BlockPool

from .harness import TOKENS, Bench, Blocks, Request, layout_of, stored

LAZY = SchedulerOptions(mode="lazy")


@dataclass(eq=False)
class Engine:
    """Serves one request after the other from a small pool of blocks with a prefix cache."""

    num_blocks: int
    per_chunk: int = 1
    rows: int = 64
    options: SchedulerOptions = LAZY
    served: int = 0
    stored: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, caching=True)
        self.bench = Bench(
            layout_of(self.per_chunk), self.rows, self.options, blocks=self.pool, num_blocks=self.num_blocks
        )
        self.scheduler = self.bench.scheduler

    def begin(self, text: str) -> Request:
        """Give a request its blocks: from the pool's cache as far as possible."""
        self.served += 1
        request = self.bench.request(f"r{self.served}", len(text) + 1, text=text)
        hashes = request.block_hashes[0]
        hit = self.pool.match(hashes)
        self.pool.hold(hit)
        request.block_ids[0][:] = hit + self.pool.allocate(len(hashes) - len(hit))
        self.bench.compute(request, len(hit) * TOKENS)
        self.pool.publish(hashes, request.block_ids[0])
        self.scheduler.on_computed(request, len(hashes) * TOKENS)
        return request

    def end(self, request: Request) -> None:
        self.scheduler.finish_request(request)
        self.pool.release(request.block_ids[0])

    def step(self) -> list[int]:
        """End a step, and let its copies end; return what was stored."""
        transfers = self.scheduler.end_step()
        self.bench.done(transfers)
        self.stored += stored(transfers)
        return stored(transfers)

    def serve(self, text: str) -> Request:
        request = self.begin(text)
        self.step()
        self.end(request)
        self.step()
        return request


def crowded(**options) -> Engine:
    """An engine that has just handed out its last blocks, eight of 32, and whose free ones all hold something."""
    engine = Engine(num_blocks=32, **options)
    requests = [engine.begin(text_of(name, 8)) for name in "abc"]
    assert engine.step() == []  # the free blocks were never used
    for request in requests[:2]:
        engine.end(request)
    engine.begin(text_of("d", 8))
    return engine


def text_of(name: str, blocks: int) -> str:
    return name * TOKENS * blocks


def test_a_pool_that_does_not_show_its_free_blocks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="mode 'lazy' needs to see the engine's free blocks, but Blocks is no FreeQueue"
    ):
        Bench(layout_of(), options=LAZY, blocks=Blocks())
    assert isinstance(BlockPool(1, caching=True), FreeQueue)


def test_nothing_is_stored_while_no_block_is_about_to_be_reused() -> None:
    engine = Engine(num_blocks=100)
    for name in "abcdef":
        engine.serve(text_of(name, 8))
    assert engine.stored == []
    assert engine.pool.free == 100


def test_what_is_about_to_be_reused_is_stored_before_it_is() -> None:
    engine = Engine(num_blocks=40)
    requests = [engine.serve(text_of(name, 8)) for name in "abcdefgh"]
    assert engine.stored
    for request in requests[:3]:
        assert engine.pool.match(request.block_hashes[0]) == []  # gone from the GPU
        assert engine.bench.present(request) == [True] * 8
    again = engine.bench.request("again", 8 * TOKENS + 1, text=text_of("a", 8))
    again.block_ids[0][:] = engine.pool.allocate(8)
    assert engine.bench.load(again) == 8 * TOKENS
    assert engine.bench.wrong(again, 8 * TOKENS) == []


def test_lazy_mode_never_touches_the_set_of_blocks_in_flight() -> None:
    engine = Engine(num_blocks=24)
    touched = 0
    for name in "abcdefgh":
        request = engine.begin(text_of(name, 8))
        transfers = engine.scheduler.end_step()
        touched += len(engine.scheduler.blocks_in_flight)
        engine.bench.done(transfers)
        engine.end(request)
        touched += len(engine.scheduler.blocks_in_flight)
        engine.step()
    assert engine.bench.manager.offered
    assert touched == 0


def test_as_much_is_covered_as_two_steps_hand_out() -> None:
    engine = Engine(num_blocks=64)
    for name in "abcdef":
        engine.serve(text_of(name, 8))
    assert engine.pool.next_free(1)[0] not in engine.stored
    engine.serve(text_of("g", 8))  # the free queue: eight blocks that were never used, then those of a, b, c ...
    assert len(engine.stored) == 8  # of the next sixteen, half held something
    engine.serve(text_of("h", 8))
    assert len(engine.stored) == 16


def test_blocks_are_held_while_they_are_copied_and_are_the_first_to_be_reused_then() -> None:
    engine = crowded()
    before = engine.pool.next_free(16)
    transfers = engine.scheduler.end_step()
    assert stored(transfers) == before[::-1]  # the manager gets them head first
    assert engine.pool.free == 0
    engine.bench.done(transfers)
    assert engine.pool.next_free(16) == before


def test_a_chunk_is_offered_once_while_its_blocks_wait_to_be_reused() -> None:
    engine = crowded()
    steps = [len(engine.step()) for _ in range(10)]
    assert steps == [16] + [0] * 9
    assert sum(len(keys) for keys in engine.bench.manager.offered) == 16


def test_a_chunk_is_offered_once_however_long_its_copy_takes() -> None:
    engine = crowded()
    transfers = engine.scheduler.end_step()
    for _ in range(3):
        assert engine.step() == []
    engine.bench.done(transfers)
    assert engine.step() == []
    assert sum(len(keys) for keys in engine.bench.manager.offered) == 16


def test_a_pause_does_not_make_the_next_step_smaller() -> None:
    engine = Engine(num_blocks=32)
    requests = [engine.begin(text_of(name, 8)) for name in "abcd"]
    for _ in range(100):
        assert engine.step() == []
    engine.end(requests[0])
    assert len(engine.step()) == 8


def test_a_block_that_is_hit_again_is_offered_again_when_it_is_about_to_be_reused_again() -> None:
    engine = crowded()
    (key, *_) = keys = engine.bench.keys(engine.bench.request("look", 8 * TOKENS, text=text_of("a", 8)))
    engine.step()
    offers = engine.bench.manager.offered
    assert sum(key in keys for keys in offers) == 1
    engine.serve(text_of("a", 8))  # in the engine's own cache: its blocks go to the end of the queue
    for name in "efgh":
        engine.serve(text_of(name, 8))
    assert sum(key in keys for keys in offers) == 2
    assert len(keys) == 8


def test_a_block_that_holds_something_else_by_now_is_not_stored_as_what_it_was() -> None:
    engine = Engine(num_blocks=32, per_chunk=4)
    first = engine.serve(text_of("a", 4))
    stolen = first.block_ids[0][1]
    engine.pool._hash_of.pop(stolen)  # the engine has dropped one of the chunk's blocks
    del engine.pool._block_of[first.block_hashes[0][1]]
    for name in "bcdefgh":
        engine.serve(text_of(name, 8))
    assert all(engine.bench.keys(first)[0] not in keys for keys in engine.bench.manager.offered)


def test_chunks_of_several_blocks_are_stored_whole() -> None:
    engine = Engine(num_blocks=40, per_chunk=4)
    requests = [engine.serve(text_of(name, 10)) for name in "abcdefgh"]
    assert engine.bench.present(requests[0]) == [True, True]
    again = engine.bench.request("again", 10 * TOKENS, text=text_of("a", 10))
    again.block_ids[0][:] = engine.pool.allocate(10)
    assert engine.bench.load(again) == 8 * TOKENS
    assert engine.bench.wrong(again, 8 * TOKENS) == []


def test_without_room_for_all_the_most_endangered_are_stored() -> None:
    engine = crowded(rows=9)
    queue = engine.pool.next_free(16)
    assert engine.step() == queue[:8][::-1]  # sixteen do not fit into nine rows


def test_a_failed_store_frees_its_blocks_and_is_not_tried_again_at_once() -> None:
    engine = crowded()
    engine.bench.done(engine.scheduler.end_step(), success=False)
    assert engine.pool.free == 16
    assert engine.bench.primary.free_rows == engine.bench.rows
    assert [engine.step() for _ in range(3)] == [[]] * 3


def test_after_a_reset_what_is_about_to_be_reused_is_stored_again() -> None:
    engine = crowded()
    first = engine.step()
    engine.scheduler.reset_cache()
    assert sorted(engine.step()) == sorted(first) != []


def test_a_reset_while_copies_run_leaves_no_block_held() -> None:
    engine = crowded()
    transfers = engine.scheduler.end_step()
    engine.scheduler.reset_cache()
    engine.bench.done(transfers)
    assert engine.pool.free == 16
    assert len(engine.step()) == 16
    assert engine.bench.primary.free_rows == engine.bench.rows - 16


def test_blocks_of_old_weights_are_never_stored() -> None:
    engine = crowded()
    engine.scheduler.set_weights_version("2")
    assert engine.step() == []


def test_a_long_prefix_alone_is_worth_storing_with_a_minimum() -> None:
    engine = Engine(num_blocks=40, options=SchedulerOptions(mode="lazy", min_offload_tokens=6 * TOKENS))
    short, long = engine.serve(text_of("s", 4)), engine.serve(text_of("l", 8))
    for name in "abcdefgh":
        engine.serve(text_of(name, 8))
    assert engine.bench.present(short) == [False] * 4
    assert engine.bench.present(long) == [True] * 8


def test_no_request_of_its_own_making_is_left_open() -> None:
    engine = Engine(num_blocks=32)
    for name in "abcdef":
        engine.serve(text_of(name, 8))
    engine.step()
    requests = engine.bench.manager._requests
    assert not requests._open
    assert not requests._closing
    assert engine.bench.manager.stats()["engine"]["misuse"] == 0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=40),
    st.integers(14, 40),
    st.integers(1, 3),
)
def test_whatever_comes_back_is_right_and_no_block_stays_held(prompts, num_blocks, per_chunk) -> None:
    engine = Engine(num_blocks, per_chunk, rows=30)
    for name, blocks in prompts:
        text = text_of("abcdef"[name], blocks)
        hashes = engine.bench.request(f"look-{engine.served}", len(text) + 1, text=text)
        hit = engine.pool.match(hashes.block_hashes[0])
        hashes.block_ids[0][: len(hit)] = hit
        assert engine.bench.wrong(hashes, len(hit) * TOKENS) == []  # nothing was ever copied over a block in use
        engine.scheduler.finish_request(hashes)
        request = engine.serve(text)
        loader = engine.bench.request(f"load-{engine.served}", len(text) + 1, text=text)
        loader.block_ids[0][:] = engine.pool.allocate(min(blocks, engine.pool.free)) or []
        if len(loader.block_ids[0]) == blocks:
            found = engine.bench.load(loader)
            assert engine.bench.wrong(loader, found) == []
        engine.end(loader)
        assert request.block_ids
    engine.step()
    engine.step()
    assert engine.pool.free == num_blocks


# -- the reference engine's pool as a free queue


def test_the_pool_counts_what_it_hands_out_and_shows_what_goes_next() -> None:
    pool = BlockPool(5, caching=True)
    assert (pool.allocated, pool.next_free(9)) == (0, [0, 1, 2, 3, 4])
    blocks = pool.allocate(2)
    pool.publish([b"a", b"b"], blocks)
    assert (pool.allocated, pool.next_free(2)) == (2, [2, 3])
    pool.release(blocks)
    assert pool.next_free(9) == [2, 3, 4, 1, 0]
    assert [pool.hash_of(block) for block in (0, 1, 2)] == [b"a", b"b", None]
    pool.allocate(9 - 5)
    assert pool.hash_of(1) is None
    assert pool.allocate(9) is None
    assert pool.allocated == 6


def test_blocks_that_are_put_back_go_first_unless_another_request_holds_them() -> None:
    pool = BlockPool(5, caching=True)
    blocks = pool.allocate(3)
    pool.hold(blocks[1:])
    pool.put_back(blocks)
    assert pool.next_free(9) == [0, 3, 4]
    pool.put_back(blocks[1:])
    assert pool.next_free(9) == [1, 2, 0, 3, 4]
