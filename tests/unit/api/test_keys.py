import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.api import block_hash_of, group_of, make_offload_key
from kvtiers.api.keys import count_in_group


def test_a_key_is_the_block_hash_and_the_group_in_four_bytes():
    assert make_offload_key(b"\x01\x02", 0x0A0B) == bytes.fromhex("0102 00000a0b")
    assert type(make_offload_key(b"\x01", 0)) is bytes


@given(st.binary(min_size=1, max_size=80), st.integers(0, 2**32 - 1))
def test_a_key_can_be_taken_apart_again(block_hash, group):
    key = make_offload_key(block_hash, group)
    assert (block_hash_of(key), group_of(key)) == (block_hash, group)


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=8), st.integers(0, 3) | st.just(2**32 - 1))), st.integers(0, 3)
)
def test_the_keys_of_a_group_are_counted(parts, group):
    keys = [make_offload_key(*part) for part in parts]
    assert count_in_group(keys, group) == sum(group_of(key) == group for key in keys)


def test_a_hash_of_no_bytes_is_refused():
    with pytest.raises(ValueError, match="at least one byte"):
        make_offload_key(b"", 0)


@pytest.mark.parametrize("group", [-1, 2**32])
def test_a_group_that_four_bytes_cannot_hold_is_refused(group):
    with pytest.raises(OverflowError):
        make_offload_key(b"hash", group)
