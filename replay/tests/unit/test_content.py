"""The bytes of blocks: made from hashes, and compared so that no mix-up goes unseen."""

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers_replay.content import BlockContent

GOLDEN = "284b44069bc58240ffb6e526e9bd70324c0e49cc173974b31e9485ee3fa328bc62aaacb78f98c1e6"

HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(6)]


def tensors(*pages: int) -> list[np.ndarray]:
    return [np.zeros((8, page), np.uint8) for page in pages]


def test_the_bytes_are_the_same_for_ever() -> None:
    # What one run stored in a lasting tier another one, perhaps of another version, compares.
    (block,) = BlockContent(tensors(40)).bytes_of([b"kvtiers"])
    assert block.tobytes().hex() == GOLDEN


def test_written_blocks_are_right_and_others_are_not_touched() -> None:
    kv = tensors(24, 17)
    content = BlockContent(kv)
    content.write(HASHES[:3], [5, 0, 2])
    assert content.count_wrong(HASHES[:3], [5, 0, 2]) == 0
    assert not any(tensor[[1, 3, 4, 6, 7]].any() for tensor in kv)


@settings(deadline=None, max_examples=60)
@given(pages=st.lists(st.integers(1, 50), min_size=1, max_size=3), data=st.data())
def test_every_single_wrong_byte_is_counted(pages, data) -> None:
    kv = tensors(*pages)
    content = BlockContent(kv)
    content.write(HASHES, range(6))
    tensor = data.draw(st.integers(0, len(pages) - 1))
    at = data.draw(st.integers(0, pages[tensor] - 1))
    kv[tensor][data.draw(st.integers(0, 5)), at] ^= data.draw(st.integers(1, 255))
    assert content.count_wrong(HASHES, range(6)) == 1


def test_a_swapped_a_shifted_and_a_stale_block_are_found() -> None:
    kv = tensors(4096)
    content = BlockContent(kv)
    content.write(HASHES, range(6))
    nearly_all = 4000
    assert content.count_wrong(HASHES[:2], [1, 0]) > 2 * nearly_all
    kv[0][3] = np.roll(kv[0][3], 8)
    assert content.count_wrong(HASHES[3:4], [3]) > nearly_all
    kv[0][4] = 0
    assert content.count_wrong(HASHES[4:5], [4]) > nearly_all


def test_many_large_blocks_are_made_in_pieces_and_are_all_right() -> None:
    hashes = [hashlib.sha256(str(number).encode()).digest() for number in range(100)]
    kv = [np.zeros((100, 1 << 17), np.uint8)]
    content = BlockContent(kv)
    content.write(hashes, range(100))
    np.testing.assert_array_equal(kv[0][77], content.bytes_of(hashes[77:78])[0])
    assert content.count_wrong(hashes, range(100)) == 0


def test_another_ranks_bytes_are_wrong_bytes() -> None:
    kv = tensors(4096)
    first, second = BlockContent(kv, rank=0), BlockContent(kv, rank=1)
    second.write(HASHES, range(6))
    assert second.count_wrong(HASHES, range(6)) == 0
    assert first.count_wrong(HASHES, range(6)) > 6 * 4000
