import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.api import ConfigError, group_of, make_offload_key, tenant_of
from kvtiers.api.keys import without_tenant
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import SealingKey
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.storage_name import (
    HASHED_NAME_FORMAT,
    NAME_FORMAT,
    StorageNames,
    check_namespace,
    check_tenant,
    model_slug,
    parse_name,
)

OF_TENANTS = json.loads(
    (Path(__file__).parents[2] / "golden" / "storage-name-1-tenants.json").read_text(encoding="utf-8")
)
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "storage-name-1.json").read_text(encoding="utf-8"))
OF_LONG_KEYS = json.loads((Path(__file__).parents[2] / "golden" / "storage-name-3.json").read_text(encoding="utf-8"))


def layout(name="meta-llama/Llama-3.1-8B-Instruct"):
    return CacheLayout(ModelIdentity(name), (KVGroup("g", 16),), (KVTensor("t", 0, 4096),))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_names_of_this_format_never_change(case):
    assert NAME_FORMAT == 1, "another format needs a golden file of its own, beside this"
    names = StorageNames.of_layout(case["namespace"], layout(case["model"]))
    key = bytes.fromhex(case["key"])
    assert names.name(key) == case["name"]
    assert names.names([key, key]) == [case["name"]] * 2
    assert names.layout_id.hex() == case["layout_id"] == layout(case["model"]).fingerprint[:16]


@given(st.text(), st.binary(min_size=1, max_size=43))
def test_a_name_is_what_stores_were_promised_and_can_be_taken_apart_again(model, block_hash):
    key = make_offload_key(block_hash, 7)
    names = StorageNames.of_layout("prod", layout(model))
    name = names.name(key)
    assert len(name) <= 250
    assert name == name.lower()
    assert re.fullmatch(r"[a-z0-9._/-]+", name)
    assert not {"", ".", ".."} & set(name.split("/"))
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.namespace, parsed.tenant, parsed.key) == ("prod", "", key)
    assert not parsed.is_hashed
    assert parsed.model == model_slug(model)
    assert parsed.fingerprint == layout(model).fingerprint[:24]


@given(st.binary(min_size=44, max_size=300), st.binary(min_size=44, max_size=300))
def test_a_name_fits_into_memcached_s_250_bytes_however_long_hash_namespace_and_model_are(one, other):
    key, other = make_offload_key(one, 0), make_offload_key(other, 0)
    names = StorageNames.of_layout("n" * 64, layout("m" * 500))
    assert len(names.name(key)) <= 250
    assert len(names.name(make_offload_key(one[:43], 0))) == 249, "the longest there is"
    assert names.names([key, other]) == [names.name(key), names.name(other)]
    assert (names.name(key) == names.name(other)) == (key == other)
    parsed = parse_name(names.name(key))
    assert parsed is not None
    assert parsed.key[-4:] == key[-4:], "the group can still be read"


HASHES = st.binary(min_size=1, max_size=43) | st.binary(min_size=44, max_size=100)
OFFLOAD_KEYS = st.builds(make_offload_key, HASHES, st.integers(0, 2**24 - 1), st.sampled_from(["", "blue", "blue.2"]))


@given(st.lists(OFFLOAD_KEYS, min_size=1, max_size=8))
def test_no_two_keys_have_one_name_though_some_are_hashes_of_others(keys):
    names = StorageNames.of_layout("prod", layout())
    every = {*keys, *map(without_tenant, keys)}
    for key in list(every):
        digest = hashlib.sha256(key).digest()
        last = names.name(key).rpartition("/")[2].encode()
        tails = {key[-4:], bytes(4), b"blue\x04" + key[-3:]}
        every |= {block_hash + tail for block_hash in (digest, digest[:24], last) for tail in tails}
    assert len({names.name(key) for key in every}) == len(every)
    assert names.names(every) == [names.name(key) for key in every]
    keyed = KeyedNames.of(names, SealingKey(bytes(32), "prod"))
    assert len({keyed.name(key) for key in every} | {names.name(key) for key in every}) == 2 * len(every)


@given(st.binary(min_size=44, max_size=100), st.integers(0, 2**24 - 1))
def test_the_name_of_a_long_key_says_that_it_has_a_hash_and_the_group(block_hash, group):
    key = make_offload_key(block_hash, group)
    name = StorageNames.of_layout("prod", layout()).name(key)
    assert name.rpartition("/")[2] == f"h{hashlib.sha256(key).hexdigest()}{group:08x}"
    parsed = parse_name(name)
    assert parsed is not None
    assert parsed.is_hashed
    assert group_of(parsed.key) == group


def test_two_models_of_one_slug_have_other_names():
    one, other = (StorageNames.of_layout("prod", layout(name)).prefix for name in ("org/Model", "org-model"))
    assert model_slug("org/Model") == model_slug("org-model")
    assert one != other


@pytest.mark.parametrize("case", OF_TENANTS, ids=lambda case: case["tenant"])
def test_names_of_tenants_never_change(case):
    names = StorageNames.of_layout(case["namespace"], layout(case["model"]))
    key = bytes.fromhex(case["key"])
    assert tenant_of(key) == case["tenant"]
    if len(without_tenant(key)) <= 47:
        assert names.name(key) == case["name"]
    else:  # until format 3, its name was that of a short key
        head, _, digest = case["name"].rpartition("/")
        assert names.name(key) == f"{head}/h{digest}"


@pytest.mark.parametrize("case", OF_LONG_KEYS, ids=lambda case: case["name"][-20:])
def test_names_of_long_keys_never_change(case):
    assert HASHED_NAME_FORMAT == 3, "another format needs a golden file of its own, beside this"
    names = StorageNames.of_layout(case["namespace"], layout(case["model"]))
    key = bytes.fromhex(case["key"])
    assert tenant_of(key) == case["tenant"]
    assert names.names([key]) == [case["name"]]


TENANTS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True).filter(lambda tenant: ".." not in tenant)


@given(st.binary(min_size=1, max_size=90), TENANTS, TENANTS)
def test_a_tenants_values_have_names_of_their_own(block_hash, tenant, other):
    names = StorageNames.of_layout("prod", layout())
    key = make_offload_key(block_hash, 3, tenant)
    name = names.name(key)
    namespace, segment, rest = name.split("/", 2)
    assert (namespace, segment) == ("prod", f"t-{tenant}")
    assert f"{namespace}/{rest}" == names.name(make_offload_key(block_hash, 3)), "behind the tenant all is as without"
    parsed = parse_name(name)
    assert parsed is not None
    assert parsed.tenant == tenant
    assert parsed.key[-4:] == bytes([0, 0, 0, 3])
    assert (names.name(make_offload_key(block_hash, 3, other)) == name) == (other == tenant)
    assert names.names([key, key]) == [name] * 2
    assert names.of_epoch("e" * 32).name(key).startswith(f"prod/t-{tenant}/")


def test_the_longest_name_with_a_tenant_is_no_longer_than_without():
    names = StorageNames.of_layout("n" * 20, layout("m" * 500))
    assert check_tenant("t" * 41, "n" * 20)
    assert len(names.name(make_offload_key(bytes(43), 0, "t" * 41))) == 249


@pytest.mark.parametrize("ending", [b"Blue\x04", b"../x\x04", b"\xff\x01", b"a/b\x03", b"\x40", b"a" * 70 + b"\x46"])
def test_a_key_that_names_no_tenant_is_in_no_tenants_space(ending):
    key = b"hash" + ending + bytes(3)
    name = StorageNames.of_layout("prod", layout()).name(key)
    assert "/t-" not in name
    assert name != StorageNames.of_layout("prod", layout()).name(make_offload_key(b"hash", 0))


@pytest.mark.parametrize("tenant", ["", "Blue", "a/b", "..", "a..b", "-a", ".a", "x" * 65, "a\n", "\u00fc", "_a"])
def test_a_tenant_that_cannot_stand_in_a_name_is_one_clear_line(tenant):
    with pytest.raises(ConfigError, match="cannot be used; expected 1 to 64"):
        check_tenant(tenant)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "prod",
        "_check/prod/probe",
        "prod/_meta/x",
        "prod/model-0123456789abcdef01234567/",
        "prod/model-0123456789abcdef01234567/abc",
        "prod/model-0123456789abcdef01234567/ABCD",
        "prod/model-0123456789abcdef0123456/ab",
        "prod/model-0123456789abcdef01234567/ab/cd",
        "prod/model-0123456789abcdef01234567/ab\n",
        "/prod/model-0123456789abcdef01234567/ab",
        f"prod/model-0123456789abcdef01234567/h{'0' * 71}",
        f"prod/model-0123456789abcdef01234567/h{'0' * 74}",
    ],
)
def test_a_name_that_is_not_ours_is_no_error(name):
    assert parse_name(name) is None


@pytest.mark.parametrize("namespace", ["prod", "a", "team-1.kv_cache", "0", "x" * 64])
def test_namespaces(namespace):
    assert check_namespace(namespace) == namespace


@pytest.mark.parametrize(
    "namespace", ["", "_core", "Prod", "a/b", "..", "a..b", ".a", "-a", "t-acme", "x" * 65, "a\n", "ü", "a b"]
)
def test_a_namespace_that_cannot_stand_in_a_name_is_one_clear_line(namespace):
    with pytest.raises(ConfigError, match="cannot be used; expected"):
        check_namespace(namespace)
