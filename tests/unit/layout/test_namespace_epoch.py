"""The record of a bump, and the names that follow from it."""

import pytest
from tests.stores import DictStore

from kvtiers.api import ChunkCorrupt, StoreContractError
from kvtiers.layout.namespace_epoch import is_record, new_epoch, read_epoch, write_epoch
from kvtiers.layout.storage_name import StorageNames, parse_name

NAMES = StorageNames("prod/llama-" + "5f" * 12 + "/", bytes.fromhex("5f" * 8))
KEY = bytes(36)


def test_a_namespace_that_was_never_bumped_has_the_names_that_it_always_had():
    assert read_epoch(DictStore(), "prod") == ""
    assert NAMES.of_epoch("") is NAMES


def test_a_bump_is_found_by_every_reader_of_the_store_and_concerns_its_namespace_alone():
    store = DictStore()
    write_epoch(store, "prod", "0123456789abcdef")
    assert read_epoch(store, "prod") == "0123456789abcdef"
    assert read_epoch(store, "test") == ""
    assert [is_record(name) for name in (*store.values, NAMES.name(KEY))] == [True, False]
    assert parse_name(*store.values) is None


def test_each_epoch_has_names_and_seals_of_its_own_for_the_same_model():
    epochs = ["", *(new_epoch() for _ in range(20))]
    names = [NAMES.of_epoch(epoch) for epoch in epochs]
    assert len({name.prefix for name in names}) == len({name.layout_id for name in names}) == len(epochs)
    for each in names:
        parsed = parse_name(each.name(KEY))
        assert (parsed.namespace, parsed.model, parsed.key) == ("prod", "llama", KEY)
        assert bytes.fromhex(parsed.fingerprint)[:8] == each.layout_id


def test_the_names_of_an_epoch_never_change():
    golden = StorageNames("prod/llama-f01323ce88298673d2f6a019/", bytes.fromhex("f01323ce88298673"))
    assert NAMES.of_epoch("0123456789abcdef") == golden


@pytest.mark.parametrize("at", [0, 15, 4033, 4065])
def test_a_record_with_a_wrong_bit_says_nothing_and_is_no_epoch(at):
    store = DictStore()
    write_epoch(store, "prod", new_epoch())
    (name,) = store.values
    damaged = bytearray(store.values[name])
    damaged[at] ^= 1
    store.values[name] = bytes(damaged)
    with pytest.raises(ChunkCorrupt, match=r"prod/_epoch is damaged.*store bump"):
        read_epoch(store, "prod")


def test_a_record_of_another_length_or_namespace_says_nothing():
    store = DictStore()
    write_epoch(store, "prod", new_epoch())
    for content in (store.values["prod/_epoch"][:100], store.values["prod/_epoch"]):
        store.values["test/_epoch"] = content
        with pytest.raises(ChunkCorrupt):
            read_epoch(store, "test")


@pytest.mark.parametrize("reads", [0, 4096])
def test_a_store_that_says_of_every_name_that_it_is_there_is_no_damaged_record(reads):
    class Lies(DictStore):
        def exists(self, names):
            return [True] * len(names)

        def read_into(self, name, dst):
            return reads

    with pytest.raises(
        StoreContractError, match=r"Lies\.exists answered True for prod/_[0-9a-f]+, which was never written"
    ):
        read_epoch(Lies(), "prod")
