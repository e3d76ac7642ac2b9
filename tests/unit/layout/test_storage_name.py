import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.storage_name import NAME_FORMAT, StorageNames, check_namespace, model_slug, parse_name

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "storage-name-1.json").read_text(encoding="utf-8"))


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


@given(st.text(), st.binary(min_size=1, max_size=47))
def test_a_name_is_what_stores_were_promised_and_can_be_taken_apart_again(model, key):
    names = StorageNames.of_layout("prod", layout(model))
    name = names.name(key)
    assert len(name) <= 250
    assert name == name.lower()
    assert re.fullmatch(r"[a-z0-9._/-]+", name)
    assert not {"", ".", ".."} & set(name.split("/"))
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.namespace, parsed.tenant, parsed.key) == ("prod", "", key)
    assert parsed.model == model_slug(model)
    assert parsed.fingerprint == layout(model).fingerprint[:24]


@given(st.binary(min_size=48, max_size=300), st.binary(min_size=48, max_size=300))
def test_a_name_fits_into_memcached_s_250_bytes_however_long_hash_namespace_and_model_are(key, other):
    names = StorageNames.of_layout("n" * 64, layout("m" * 500))
    assert len(names.name(key)) <= 250
    assert len(names.name(key[:47])) == 249, "the longest there is"
    assert names.names([key, other]) == [names.name(key), names.name(other)]
    assert (names.name(key) == names.name(other)) == (key == other)
    parsed = parse_name(names.name(key))
    assert parsed is not None
    assert parsed.key[-4:] == key[-4:], "the group can still be read"


def test_two_models_of_one_slug_have_other_names():
    one, other = (StorageNames.of_layout("prod", layout(name)).prefix for name in ("org/Model", "org-model"))
    assert model_slug("org/Model") == model_slug("org-model")
    assert one != other


def test_a_reader_accepts_the_reserved_tenant_part():
    name = StorageNames.of_layout("prod", layout()).name(b"key")
    namespace, rest = name.split("/", 1)
    parsed = parse_name(f"{namespace}/t-acme/{rest}")
    assert parsed is not None
    assert (parsed.namespace, parsed.tenant, parsed.key) == ("prod", "acme", b"key")


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
