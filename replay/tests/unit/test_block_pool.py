"""The reference engine's blocks."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers_replay.engine.block_pool import BlockPool

A, B, C, D = (bytes([number]) for number in range(4))


def test_a_freed_block_is_found_again_until_it_is_reused() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.allocate(2)
    pool.publish([A, B], blocks)
    assert pool.match([A, B, C]) == blocks
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.allocate(4) is None
    pool.release(blocks)
    assert pool.match([A, B, C]) == blocks
    assert pool.allocate(4) is not None
    assert pool.match([A, B]) == []


def test_the_tail_of_a_prefix_is_reused_before_its_head() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.allocate(4)
    pool.publish([A, B, C, D], blocks)
    pool.release(blocks)
    assert pool.allocate(2) == [blocks[3], blocks[2]]
    assert pool.match([A, B, C]) == blocks[:2]


def test_a_held_block_is_never_handed_out() -> None:
    pool = BlockPool(3, caching=True)
    blocks = pool.allocate(2)
    pool.hold(blocks[:1])
    pool.release(blocks)
    assert pool.allocate(3) is None
    assert pool.allocate(2) is not None
    pool.release(blocks[:1])
    assert pool.allocate(1) == blocks[:1]


def test_without_a_cache_a_block_is_forgotten_when_it_is_free() -> None:
    pool = BlockPool(4, caching=False)
    blocks = pool.allocate(2)
    pool.publish([A, B], blocks)
    assert pool.match([A, B]) == []


def test_two_blocks_of_one_hash_are_two_blocks_of_which_one_is_found() -> None:
    pool = BlockPool(4, caching=True)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish([A], first)
    pool.publish([A], second)
    assert pool.match([A]) == first
    pool.release(second)
    pool.allocate(2)
    assert pool.match([A]) == first


def test_releasing_too_often_is_found() -> None:
    pool = BlockPool(1, caching=True)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 0 was released too often"):
        pool.release(blocks)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=25), st.integers(6, 9))
def test_the_cache_never_names_a_block_that_holds_something_else(prompts, num_blocks) -> None:
    pool = BlockPool(num_blocks, caching=True)
    content: dict[int, bytes] = {}
    held: Counter[int] = Counter()
    running: list[list[int]] = []
    for prompt in prompts:
        hashes = [bytes(prompt[: end + 1]) for end in range(len(prompt))]
        blocks = pool.match(hashes)
        assert [content[block] for block in blocks] == hashes[: len(blocks)]
        pool.hold(blocks)
        held.update(blocks)
        while (more := pool.allocate(len(hashes) - len(blocks))) is None:
            done = running.pop(0)
            held.subtract(done)
            pool.release(done)
        assert not any(held[block] for block in more)
        held.update(more)
        content.update(zip(more, hashes[len(blocks) :], strict=True))
        pool.publish(hashes, blocks + more)
        running.append(blocks + more)
        assert pool.free == num_blocks - len(+held)
