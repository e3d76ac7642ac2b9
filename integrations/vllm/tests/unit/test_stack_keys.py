"""Keys of the whole stack: what an adapter or a salt changes, and in which order a prefix is looked up."""

import hashlib
import json
from itertools import combinations
from pathlib import Path

import pytest

from kvtiers.api import make_offload_key
from kvtiers_vllm.stack.keys import REQUEST_KEY_FORMAT, GroupKeys, RequestKeys, derive_hash, digest_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "vllm-request-key-1.json").read_text(encoding="utf-8"))
HASHES = [bytes([number]) * 32 for number in range(6)]


def vllm_key(place, group=0):
    return HASHES[place] + group.to_bytes(4, "big")


def keys(adapter=b"", salt="", hashes=HASHES, groups=None):
    return RequestKeys(groups or {0: GroupKeys(0, 1, whole_prefix=True)}, hashes, adapter, salt)


def test_a_request_with_neither_adapter_nor_salt_has_vllms_own_keys():
    assert keys().of(vllm_key(3)) == vllm_key(3)


def test_adapters_salts_and_what_is_called_like_either_never_collide():
    requests = [
        {},
        {"adapter": b"one"},
        {"adapter": b"two"},
        {"salt": "one"},
        {"salt": "two"},
        {"adapter": b"one", "salt": "one"},
        {"adapter": b"one", "salt": "two"},
        {"adapter": b"two", "salt": "one"},
    ]
    for first, second in combinations(requests, 2):
        assert keys(**first).of(vllm_key(0)) != keys(**second).of(vllm_key(0)), (first, second)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['adapter']}-{case['salt']}")
def test_keys_of_this_format_never_change(case):
    assert REQUEST_KEY_FORMAT == 1, "another format needs a golden file of its own, beside this"
    adapter, salt = digest_of(case["adapter"].encode()), digest_of(case["salt"])
    assert derive_hash(bytes.fromhex(case["block_hash"]), adapter, salt).hex() == case["hash"]


def test_a_salt_is_read_once_a_request_however_long_it_is(monkeypatch):
    """One of ten megabytes took a prompt of a thousand chunks a minute, on the engine's thread."""
    hashed = []

    class Counted:
        @staticmethod
        def sha256(data):
            hashed.append(len(data))
            return hashlib.sha256(data)

    monkeypatch.setattr("kvtiers_vllm.stack.keys.hashlib", Counted)
    salted = keys(salt="s" * 1_000_000)
    assert len({salted.of(vllm_key(place)) for place in range(len(HASHES))}) == len(HASHES)
    assert [nbytes for nbytes in hashed if nbytes > 1_000] == [1_000_000]


def test_a_salt_may_have_half_a_surrogate_pair():
    assert keys(salt="\ud800").of(vllm_key(0)) != keys(salt="\udfff").of(vllm_key(0))


def test_groups_are_named_by_their_place_in_the_layout():
    sparse = keys(groups={0: GroupKeys(0, 1, whole_prefix=True), 2: GroupKeys(1, 1, whole_prefix=False)})
    assert sparse.of(vllm_key(1, group=2)) == make_offload_key(HASHES[1], 1)


def following(request, key):
    place = request.place(key)
    return place, request.groups()[0].keys[place:]


def test_what_follows_a_chunk_is_the_rest_of_the_prompt_in_its_group():
    assert following(keys(), vllm_key(4)) == (4, [vllm_key(4), vllm_key(5)])


@pytest.mark.parametrize(("hashes_per_chunk", "chunks"), [(1, 6), (2, 3), (4, 1)])
def test_a_chunk_is_named_by_its_last_hash(hashes_per_chunk, chunks):
    every = keys(groups={0: GroupKeys(0, hashes_per_chunk, whole_prefix=True)})
    expected = [vllm_key((chunk + 1) * hashes_per_chunk - 1) for chunk in range(chunks)]
    assert following(every, expected[0]) == (0, expected)


def test_a_prompt_that_grows_has_more_chunks():
    hashes = HASHES[:2]
    growing = keys(hashes=hashes)
    assert len(following(growing, vllm_key(0))[1]) == 2
    hashes.append(HASHES[2])
    assert following(growing, vllm_key(0)) == (0, [vllm_key(0), vllm_key(1), vllm_key(2)])


def test_an_adapters_chunks_stand_in_the_same_order():
    adapted = keys(adapter=b"one")
    place, rest = following(adapted, vllm_key(3))
    assert (place, rest[0]) == (3, adapted.of(vllm_key(3)))


def test_what_is_no_chunk_of_the_prompt_has_no_place():
    assert keys(groups={0: GroupKeys(0, 1, whole_prefix=False)}).place(vllm_key(0)) == 0
    assert keys().place(b"tail" * 8 + (0).to_bytes(4, "big")) is None


def test_a_load_needs_all_of_full_attention_what_windows_read_and_what_speculative_decoding_proves():
    groups = {
        0: GroupKeys(0, 1, whole_prefix=True, tokens_per_chunk=16, ahead=1),
        1: GroupKeys(1, 1, whole_prefix=False, window=33, tokens_per_chunk=16),
        2: GroupKeys(2, 2, whole_prefix=False, window=1, tokens_per_chunk=32),
    }
    every = keys(groups=groups)
    named = [[vllm_key(place, group=group) for place in range(6)] for group in range(2)]
    wanted = [(named[0], 0, 1), (named[1], 33, 0), ([vllm_key(place, group=2) for place in (1, 3, 5)], 1, 0)]
    assert [tuple(group) for group in every.groups()] == wanted
    assert every.needed(16, 64) == [*named[0][1:5], *named[1][1:4], vllm_key(3, group=2)]
    assert every.needed(16, 65) == [*named[0][1:6], *named[1][2:5], vllm_key(5, group=2)]
    assert every.needed(16, 16) == []
    assert [list(prefix) for prefix in every.prefixes()] == [named[0]]
