"""What a fingerprint stands for, left beside the values: which fields differ, and nothing that anything depends on."""

import dataclasses
import json

import pytest
from tests.stores import DictStore

from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.fingerprint_record import (
    compare_layouts,
    describe_layout,
    is_layout_record,
    read_layout,
    write_layout,
)
from kvtiers.layout.storage_name import StorageNames, parse_name

MODEL = ModelIdentity("org/Model", weights="w1", kv_dtype="bfloat16", rope="x" * 500)
LAYOUT = CacheLayout(MODEL, (KVGroup("g", 16),), tuple(KVTensor(f"t{i}", 0, 4000) for i in range(400)))


def described(layout=LAYOUT, release="vLLM 0.32.0"):
    names = StorageNames.of_layout("ns", layout)
    return names, describe_layout(layout, release, names.fingerprint)


def other(**fields):
    return dataclasses.replace(LAYOUT, model=dataclasses.replace(MODEL, **fields))


@pytest.fixture
def store():
    return DictStore()


def test_what_is_written_is_read_by_its_fingerprint_and_as_the_last(store):
    names, document = described()
    assert read_layout(store, "ns", "org-model") == {}
    write_layout(store, names, document)
    assert read_layout(store, "ns", names.model, names.fingerprint) == json.loads(document)
    assert read_layout(store, "ns", names.model) == json.loads(document)
    assert all(len(value) == 4096 for value in store.values.values()), "a page, however many layers a model has"


def test_the_last_is_that_of_the_last_engine_to_store_and_each_keeps_its_own(store):
    first, second = described(), described(other(kv_dtype="fp8"))
    for names, document in (first, second):
        write_layout(store, names, document)
    assert read_layout(store, "ns", "org-model")["model"]["kv_dtype"] == "fp8"
    assert read_layout(store, "ns", "org-model", first[0].fingerprint)["model"]["kv_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("layout", "release", "differences"),
    [
        (LAYOUT, "vLLM 0.33.0", ["release: 'vLLM 0.33.0' there, 'vLLM 0.32.0' here"]),
        (other(kv_dtype="fp8"), "vLLM 0.32.0", ["kv_dtype: 'fp8' there, 'bfloat16' here"]),
        (other(weights="w2", kv_layout="digest"), "vLLM 0.32.0", ["weights: 'w2' there, 'w1' here"]),
        (other(kv_layout="digest"), "vLLM 0.32.0", ["kv_layout: 'digest' there, '' here"]),
        (LAYOUT, "vLLM 0.32.0", []),
    ],
)
def test_the_fields_that_differ_are_named_with_both_values(layout, release, differences):
    theirs, ours = (json.loads(document) for _, document in (described(layout, release), described()))
    assert compare_layouts(theirs, ours) == differences


def test_a_record_is_no_value_and_a_value_is_no_record(store):
    names, document = described()
    write_layout(store, names, document)
    assert all(is_layout_record(name) and parse_name(name) is None for name in store.values)
    assert not is_layout_record(names.name(bytes(36)))


@pytest.mark.parametrize("place", [0, 100, 4040])
def test_a_damaged_record_says_nothing(store, place):
    names, document = described()
    write_layout(store, names, document)
    for name, value in store.values.items():
        store.values[name] = value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]
    assert read_layout(store, "ns", names.model) == {}


def test_one_that_never_writes_over_a_value_of_its_length_has_the_last_one_too(store):
    class Keeps(DictStore):
        def write(self, name, src):
            if len(self.values.get(name, b"")) != len(src):
                super().write(name, src)

    keeps = Keeps()
    for names, document in (described(), described(other(kv_dtype="fp8"))):
        write_layout(keeps, names, document)
    assert read_layout(keeps, "ns", "org-model")["model"]["kv_dtype"] == "fp8"
