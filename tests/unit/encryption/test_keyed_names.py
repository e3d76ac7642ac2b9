"""Keyed names: every character, that they are alike for all who have the key, and show nothing to others."""

import hashlib
import json
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.encryption.keyed import NAMES, key, names

from kvtiers.api import make_offload_key
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import SealingKey, token_of
from kvtiers.layout.storage_name import KEYED_NAME_FORMAT, StorageNames, parse_name

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "storage-name-2.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"][-20:])
def test_keyed_names_of_this_format_never_change(case):
    assert KEYED_NAME_FORMAT == 2, "another format needs a golden file of its own, beside this"
    made_with = SealingKey(bytes.fromhex(case["master"]), case["prefix"].partition("/")[0])
    keyed = KeyedNames.of(StorageNames(case["prefix"], bytes(8)), made_with)
    assert keyed.name(bytes.fromhex(case["key"])) == case["name"]
    assert made_with.id == case["key_id"]


HASHES = st.binary(min_size=1, max_size=200)


@settings(deadline=None)
@given(*[HASHES.map(lambda block_hash: make_offload_key(block_hash, 0))] * 2)
def test_a_keyed_name_is_what_stores_were_promised_and_gives_its_token_to_who_has_the_key(one, other):
    keyed = KeyedNames.of(StorageNames(f"{'n' * 64}/{'m' * 64}-{'0' * 24}/", bytes(8)), key())
    name = keyed.name(one)
    assert len(name) <= 249
    assert re.fullmatch(r"[a-z0-9._/-]+", name)
    assert keyed.names([one, other]) == [name, keyed.name(other)]
    assert (name == keyed.name(other)) == (one == other)
    parsed = parse_name(name)
    assert (parsed.namespace, parsed.fingerprint, parsed.key_id) == ("n" * 64, "0" * 24, key().id)
    assert key().reveal(parsed.key, keyed.prefix) == token_of(one)
    assert key(2).reveal(parsed.key, keyed.prefix) is None
    assert key().reveal(parsed.key, NAMES.prefix) is None, "a name is of one model"


@given(HASHES)
def test_a_tenant_stands_in_clear_before_the_hidden_key_of_the_same_tokens(block_hash):
    plain, blue, red = (names().name(make_offload_key(block_hash, 0, tenant)) for tenant in ("", "blue", "red"))
    parsed = parse_name(blue)
    assert (parsed.namespace, parsed.tenant, parsed.key_id) == ("test", "blue", key().id)
    assert blue.startswith("test/t-blue/model-")
    assert len({name.rpartition("/")[2] for name in (plain, blue, red)}) == 3, "it is authenticated"
    token = token_of(make_offload_key(block_hash, 0))
    assert key().reveal(parsed.key, blue.rpartition("/")[0] + "/") == token
    assert key().reveal(parsed.key, red.rpartition("/")[0] + "/") is None


def test_nothing_of_a_key_or_of_its_hash_is_in_its_name():
    offload_key = bytes(range(36))
    name = names().name(offload_key)
    for hidden in (offload_key, hashlib.sha256(offload_key).digest(), token_of(offload_key)):
        assert not any(hidden[at : at + 3].hex() in name.rpartition("/")[2][9:] for at in range(len(hidden) - 2))


def test_another_key_model_or_epoch_gives_other_names():
    offload_key = bytes(36)
    other_model = KeyedNames.of(StorageNames("test/model-" + "1" * 24 + "/", bytes(8)), key())
    tails = [
        keyed.name(offload_key).rpartition("/")[2] for keyed in (names(), names(2), other_model, names().of_epoch("e"))
    ]
    assert len({tail[9:] for tail in tails}) == 4
    bumped = names().of_epoch("0123456789abcdef")
    assert bumped.prefix == NAMES.of_epoch("0123456789abcdef").prefix
    assert bumped.key is not None
    assert names().of_epoch("").name(offload_key) == names().name(offload_key)


def test_threads_that_share_a_key_make_the_same_names():
    keyed, keys = names(), [number.to_bytes(36, "big") for number in range(300)]
    expected, found = keyed.names(keys), []
    threads = [threading.Thread(target=lambda: found.append(keyed.names(keys))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.parametrize("tail", ["k", "k" + "0" * 87, "k" + "0" * 89, "k" + "0" * 87 + "g", "K" + "0" * 88])
def test_what_is_no_keyed_name_is_not_one_of_ours(tail):
    assert parse_name(NAMES.prefix + tail) is None


def test_a_key_never_prints_and_never_leaves_its_process():
    import pickle

    made = key()
    assert repr(made) == f"SealingKey({made.id})" == str(made)
    assert f"ring=KeyRing({made.id})" in repr(names())
    with pytest.raises(TypeError, match="not to be copied"):
        pickle.dumps(made)
