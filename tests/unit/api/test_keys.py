import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.api import block_hash_of, group_of, make_offload_key
from kvtiers.api.keys import count_in_group, key_ending, tenant_of, without_tenant

TENANTS = st.just("") | st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)


def test_a_key_is_the_block_hash_and_the_group_in_four_bytes():
    assert make_offload_key(b"\x01\x02", 0x0A0B) == bytes.fromhex("0102 00000a0b")
    assert type(make_offload_key(b"\x01", 0)) is bytes


@given(st.binary(min_size=1, max_size=80), st.integers(0, 2**24 - 1), TENANTS)
def test_a_key_can_be_taken_apart_again(block_hash, group, tenant):
    key = make_offload_key(block_hash, group, tenant)
    assert (block_hash_of(key), group_of(key), tenant_of(key)) == (block_hash, group, tenant)
    assert key == block_hash + key_ending(group, tenant)
    assert without_tenant(key) == make_offload_key(block_hash, group)


PARTS = st.tuples(st.binary(min_size=1, max_size=8), st.integers(0, 3), TENANTS)


@given(PARTS, PARTS)
def test_two_chunks_have_two_keys_whatever_bytes_their_hashes_are(one, other):
    assert (make_offload_key(*one) == make_offload_key(*other)) == (one == other)


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=8), st.integers(0, 3) | st.just(2**24 - 1), TENANTS)),
    st.integers(0, 3),
)
def test_the_keys_of_a_group_are_counted(parts, group):
    keys = [make_offload_key(*part) for part in parts]
    assert count_in_group(keys, group) == sum(group_of(key) == group for key in keys)


def test_a_hash_of_no_bytes_is_refused():
    with pytest.raises(ValueError, match="at least one byte"):
        make_offload_key(b"", 0)


@pytest.mark.parametrize("group", [-1, 2**24])
def test_a_group_that_three_bytes_cannot_hold_is_refused(group):
    with pytest.raises(OverflowError):
        make_offload_key(b"hash", group)
