import inspect
import random

import pytest

from kvtiers.api import ConfigError, NotKept, SupportsBatch, SupportsListing, SupportsStats, TierContext
from kvtiers_example import memory_store
from kvtiers_example.config import MemoryConfig
from kvtiers_example.memory import kvtiers_tier
from kvtiers_example.memory_store import MemoryStore

PAGE = 4096


def value(byte, pages=1):
    return memoryview(bytes([byte]) * (pages * PAGE)).toreadonly()


def names_in(store):
    return sorted(entry.name for entry in store.list(""))


def test_the_store_that_authors_copy_is_under_60_lines():
    assert len(inspect.getsource(memory_store).splitlines()) < 60


def test_the_least_recently_used_value_makes_room():
    store = MemoryStore(3 * PAGE)
    for byte, name in enumerate("abc"):
        store.write(name, value(byte))
    store.write("d", value(3))
    assert names_in(store) == ["b", "c", "d"]


def test_a_read_counts_as_use():
    store = MemoryStore(3 * PAGE)
    for byte, name in enumerate("abc"):
        store.write(name, value(byte))
    assert store.read_into("a", memoryview(bytearray(PAGE)))
    store.write("d", value(3))
    assert names_in(store) == ["a", "c", "d"]


def test_a_write_of_a_held_value_counts_as_use_and_takes_no_more_room():
    store = MemoryStore(3 * PAGE)
    for byte, name in enumerate("abca"):
        store.write(name, value(byte))
    assert names_in(store) == ["a", "b", "c"]
    store.write("d", value(3))
    assert names_in(store) == ["a", "c", "d"]


def test_being_asked_for_or_listed_or_missed_is_no_use():
    store = MemoryStore(3 * PAGE)
    for byte, name in enumerate("abc"):
        store.write(name, value(byte))
    assert store.exists(["a"]) == [True]
    assert names_in(store) == ["a", "b", "c"]
    assert store.read_into("a", memoryview(bytearray(PAGE - 1))) == 0
    store.write("d", value(3))
    assert names_in(store) == ["b", "c", "d"]


def test_a_value_larger_than_the_store_is_dropped_and_nothing_else_is():
    store = MemoryStore(3 * PAGE)
    store.write("a", value(1))
    store.write("b", value(2))
    with pytest.raises(NotKept, match="larger than the whole store"):
        store.write("a", value(3, pages=4))
    back = bytearray(PAGE)
    assert store.read_into("a", memoryview(back))
    assert back == value(1)
    assert names_in(store) == ["a", "b"]


def test_the_capacity_is_never_exceeded_and_what_is_counted_is_what_is_held():
    store, choice = MemoryStore(10 * PAGE), random.Random(1)
    for _ in range(2000):
        name = choice.choice("abcdefghijkl")
        if choice.random() < 0.2:
            store.delete([name, name])
        else:
            store.write(name, value(1, pages=choice.randint(1, 10)))
        held = sum(entry.nbytes for entry in store.list(""))
        assert held <= 10 * PAGE
        assert store.stats() == {"held_bytes": held, "held_values": len(names_in(store))}


def test_its_abilities_are_listing_and_stats():
    store = MemoryStore(PAGE)
    assert isinstance(store, SupportsListing)
    assert isinstance(store, SupportsStats)
    assert not isinstance(store, SupportsBatch)


def test_a_capacity_without_room_for_one_value_is_one_clear_line():
    config = MemoryConfig(type="memory", capacity="1MiB")
    context = TierContext("small", 2 << 20, "ns", read_only=False, region=memoryview(b""), row_stride=2 << 20)
    with pytest.raises(ConfigError, match="small: capacity 1048576 bytes has no room for one value of 2097152 bytes"):
        kvtiers_tier().open(config, context)
