"""Chained block hashes: equal only if everything that decides the KV is equal."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.scheduler import BlockHashChain

from .harness import TOKENS, Bench, Request, layout_of


def hashes(tokens, size: int = 4, **identity: str) -> list[bytes]:
    chain = BlockHashChain(size, **identity)
    chain.extend(tokens)
    return chain.hashes


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes(range(count))) for count in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert {len(one) for one in hashes(range(8))} == {32}


def test_a_hash_covers_its_whole_prefix() -> None:
    one, other = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != other[1]
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[0] == one[0]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**40), max_size=9), max_size=6), st.integers(1, 5))
def test_it_does_not_matter_in_which_pieces_the_tokens_come(pieces, size) -> None:
    chain = BlockHashChain(size)
    for piece in pieces:
        before = list(chain.hashes)
        chain.extend(np.array(piece, np.int64))
        assert chain.hashes[: len(before)] == before
    assert chain.hashes == hashes([token for piece in pieces for token in piece], size)


@pytest.mark.parametrize("name", ["adapter", "salt", "seed"])
def test_adapter_salt_and_seed_change_every_hash(name) -> None:
    assert not set(hashes(range(12))) & set(hashes(range(12), **{name: "x"}))


def test_one_part_never_passes_for_another() -> None:
    different = [
        hashes(range(4)),
        hashes(range(4), adapter="x"),
        hashes(range(4), salt="x"),
        hashes(range(4), adapter="xsalt"),
        hashes(range(4), adapter="x", salt="x"),
        hashes(range(4), adapter="xx"),
        hashes(range(4), salt="xx"),
        hashes(range(4), seed="0adapter"),
        hashes(range(4), seed="00"),
    ]
    assert len({one[0] for one in different}) == len(different)


def test_what_a_placeholder_stands_for_changes_its_block_and_all_later_ones() -> None:
    def with_image(digest: bytes, at: int) -> list[bytes]:
        chain = BlockHashChain(4)
        chain.extend(range(at))
        chain.mix(digest)
        chain.extend(range(at, 12))
        return chain.hashes

    plain, cat, dog = hashes(range(12)), with_image(b"cat", 6), with_image(b"dog", 6)
    assert plain[0] == cat[0] == dog[0]
    for place in (1, 2):
        assert len({plain[place], cat[place], dog[place]}) == 3
    assert with_image(b"cat", 5)[1] != cat[1]
    assert with_image(b"cat", 4)[0] == plain[0]


def test_a_hash_is_the_same_in_every_release() -> None:
    chain = BlockHashChain(4, adapter="lora/1", salt="tenant", seed="7")
    chain.extend([1, 2, 3])
    chain.mix(b"image")
    chain.extend([4, 5, 6, 7, 128_000])
    assert [one.hex() for one in chain.hashes] == [
        "9affb76ea89f201430c981e65a1a2d8da13e9e42d9365358addd7d77b49d204a",
        "f925dc93c6e0e98ff6a1c8717936f908545ac015e96611c0a60bc4892d4532f0",
    ]


def test_requests_of_other_adapters_or_salts_never_hit_each_others_chunks() -> None:
    bench = Bench(layout_of())

    def request(name: str, **identity: str) -> Request:
        own = bench.request(name, 4 * TOKENS)
        own.block_hashes[0][:] = hashes(range(4 * TOKENS), TOKENS, **identity)
        return own

    bench.serve(request("a", adapter="lora/1", salt="tenant"))
    assert bench.lookup(request("b", adapter="lora/1", salt="tenant")) == 3 * TOKENS
    for number, identity in enumerate(
        [{}, {"adapter": "lora/1"}, {"salt": "tenant"}, {"adapter": "lora/2", "salt": "tenant"}]
    ):
        assert bench.lookup(request(f"c{number}", **identity)) == 0
