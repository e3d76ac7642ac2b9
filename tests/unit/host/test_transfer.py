"""What was stored comes back, or is a miss; what is there already is not written again."""

import sys
import threading
from dataclasses import replace

import pytest

from kvtiers.host.messages import Status
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.seal import PlainSeal
from kvtiers.layout.storage_name import StorageNames

DONE, MISSING, CORRUPT = Status.DONE, Status.MISSING, Status.CORRUPT
FAILED, DROPPED, PRESENT = Status.FAILED, Status.DROPPED, Status.PRESENT


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(6)]


def dear(kit):
    """A store that is asked one name at a time."""
    store = kit.DictStore()
    store.asks_one_by_one = True
    return store


def test_what_was_stored_comes_back(kit, store, keys):
    mover = kit.stored(store, keys)
    moved = mover.load(kit.run(keys))
    assert set(moved.statuses) == {DONE}
    assert moved.nbytes == len(keys) * kit.VALUE
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))


def test_values_are_named_after_their_keys_and_sealed(kit, store, keys):
    kit.stored(store, keys)
    assert sorted(store.values) == sorted(kit.NAMES.names(keys))
    assert all(len(value) == kit.VALUE and value[-64:-57] == b"kvtSEAL" for value in store.values.values())


# -- values that are not what was stored


def flip(at):
    def change(value):
        changed = bytearray(value)
        changed[at] ^= 0x10
        return bytes(changed)

    return change


DAMAGE = {
    "a flipped bit at the start": flip(0),
    "a flipped bit in the middle": flip(2000),
    "a flipped bit in the seal": flip(-20),
    "no seal": lambda value: value[:-64] + bytes(64),
    "zeros": lambda value: bytes(len(value)),
    "its second half lost": lambda value: value[: len(value) // 2] + bytes(len(value) // 2),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_value_is_a_miss_and_is_deleted(kit, store, keys, damage):
    mover = kit.stored(store, keys)
    name = kit.NAMES.name(keys[2])
    store.values[name] = damage(store.values[name])
    moved = mover.load(kit.run(keys))
    assert list(moved.statuses) == [DONE, DONE, CORRUPT, DONE, DONE, DONE]
    assert moved.nbytes == 5 * kit.VALUE
    assert name not in store.values
    assert len(store.values) == 5


def test_two_values_that_were_swapped_are_both_misses(kit, store, keys):
    mover = kit.stored(store, keys)
    first, second = kit.NAMES.names(keys[:2])
    store.values[first], store.values[second] = store.values[second], store.values[first]
    assert list(mover.load(kit.run(keys)).statuses) == [CORRUPT, CORRUPT, DONE, DONE, DONE, DONE]
    assert {first, second}.isdisjoint(store.values)


def test_a_read_only_tier_deletes_nothing(kit, store, keys):
    kit.stored(store, keys)
    name = kit.NAMES.name(keys[2])
    store.values[name] = flip(7)(store.values[name])
    moved = kit.mover(store, read_only=True).load(kit.run(keys))
    assert moved.statuses[2] == CORRUPT
    assert name in store.values
    assert store.count("delete") == 0


def test_a_value_of_another_length_is_never_read_as_valid(kit, store, keys):
    mover = kit.stored(store, keys)
    for name, length in zip(kit.NAMES.names(keys[:3]), (4095, 8192, 0), strict=True):
        store.values[name] = (store.values[name] * 2)[:length]
    assert list(mover.load(kit.run(keys)).statuses) == [MISSING] * 3 + [DONE] * 3


def test_a_store_that_fills_only_half_and_says_all_is_found_out(kit, keys):
    class Short(kit.DictStore):
        def read_into(self, name, dst):
            dst[:2048] = self.values[name][:2048]
            return len(dst)

    store = Short()
    mover = kit.stored(store, keys)
    assert set(mover.load(kit.run(keys)).statuses) == {CORRUPT}


def test_a_value_of_a_foreign_layout_is_a_miss_and_not_ours_to_delete(kit, store, keys):
    foreign = StorageNames(kit.NAMES.prefix, b"layout-2")
    mover = kit.mover(store)
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    mover.store(kit.run(keys, names=foreign))
    assert set(mover.load(kit.run(keys)).statuses) == {MISSING}
    assert store.count("delete") == 0
    assert len(store.values) == len(keys)


# -- what is there already


def test_what_is_to_be_overwritten_is_written_whatever_the_store_or_the_mover_thinks_to_have(kit, store, keys):
    """Else a value of another layout, format or length would stand in the way for as long as the store keeps it."""
    kit.mover(store).store(kit.run(keys, names=StorageNames(kit.NAMES.prefix, b"layout-2")))
    store.values[kit.NAMES.name(keys[0])] = b"short"
    mover = kit.mover(store)
    assert set(mover.load(kit.run(keys)).statuses) == {MISSING}
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    assert set(mover.store(kit.run(keys)).statuses) == {PRESENT}, "it says so when it is asked"
    assert (
        list(mover.store(replace(kit.run(keys), overwrites=bytes([1] * 4 + [0] * 2))).statuses)
        == [DONE] * 4 + [PRESENT] * 2
    )
    assert list(mover.load(kit.run(keys)).statuses) == [DONE] * 4 + [MISSING] * 2


def test_a_value_that_the_store_has_is_not_written_again(kit, store, keys):
    kit.stored(store, keys[:4])
    replica = kit.mover(store)
    writes = len(store.calls)
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    moved = replica.store(kit.run(keys))
    assert list(moved.statuses) == [PRESENT] * 4 + [DONE] * 2
    assert moved.nbytes == 2 * kit.VALUE
    written = [call for call in store.calls[writes:] if call[0].startswith("write")]
    assert sum(len(call[1]) if call[0] == "write_many" else 1 for call in written) == 2


def test_what_is_known_to_be_there_is_not_even_asked_for(kit, store, keys):
    mover = kit.stored(store, keys)
    asked = store.count("exists")
    assert set(mover.store(kit.run(keys)).statuses) == {PRESENT}
    assert store.count("exists") == asked


def test_what_another_has_written_is_asked_for_once(kit, store, keys):
    kit.stored(store, keys)
    mover = kit.mover(store)
    for _ in range(2):
        asked = store.count("exists")
        assert set(mover.store(kit.run(keys)).statuses) == {PRESENT}
    assert store.count("exists") == asked


def test_presence_is_asked_in_calls_of_many_names(kit, store):
    keys = [kit.key(number) for number in range(300)]
    kit.mover(store).store(kit.run(keys, within=0.0))
    assert [len(call[1]) for call in store.calls if call[0] == "exists"] == [256, 44]


def test_a_store_that_is_dear_to_ask_is_not_asked_before_a_write(kit, keys):
    store = dear(kit)
    mover = kit.stored(store, keys)
    assert set(mover.store(kit.run(keys)).statuses) == {PRESENT}, "what it has written is known"
    assert set(kit.mover(store).store(kit.run(keys)).statuses) == {DONE}
    assert store.count("exists") == 0


def test_what_a_question_about_a_prefix_has_found_in_a_dear_store_is_not_written(kit, keys):
    store = dear(kit)
    kit.stored(store, keys[:4])
    mover = kit.mover(store)
    mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)
    assert list(mover.store(kit.run(keys)).statuses) == [PRESENT] * 4 + [DONE] * 2


def test_what_was_only_thought_to_be_in_a_dear_store_is_written_once_a_load_has_missed_it(kit, keys):
    store = dear(kit)
    kit.stored(store, keys)
    del store.values[kit.NAMES.names(keys[2:3])[0]]
    mover = kit.mover(store)
    mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)
    assert mover.load(kit.run(keys)).statuses[2] == MISSING
    assert mover.store(kit.run(keys)).statuses[2] == DONE


def test_what_an_eviction_took_is_written_again_once_a_load_or_a_lookup_has_missed_it(kit, store, keys):
    mover = kit.stored(store, keys)
    store.values.clear()
    assert list(mover.load(kit.run(keys[:1])).statuses) == [MISSING]
    assert mover.probe(kit.NAMES, keys[1:2], is_prefix=False, give_up_at=sys.maxsize) == [False]
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    assert list(mover.store(kit.run(keys)).statuses) == [DONE, DONE, PRESENT, PRESENT, PRESENT, PRESENT]


# -- questions


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("present", [0, 1, 2, 5, 50, 99, 100])
def test_the_end_of_a_prefix_is_found_by_bisection(kit, length, present):
    store = dear(kit)
    keys = [kit.key(number) for number in range(length)]
    present = min(present, length)
    store.values = dict.fromkeys(kit.NAMES.names(keys[:present]), b"")
    answers = kit.mover(store).probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)
    assert answers == [True] * present + [False] * (present < length)
    most = 2 + max(1, length).bit_length() if 0 < present < length else 2
    assert store.count("exists") <= most, "of known prompts all is there, and two questions are enough"


def test_questions_about_a_prefix_end_at_its_first_absence(kit, store):
    keys = [kit.key(number) for number in range(600)]
    store.values = dict.fromkeys(kit.NAMES.names([*keys[:300], *keys[550:]]), b"")
    mover = kit.mover(store)
    answers = mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)
    assert answers[:301] == [True] * 300 + [False]
    assert store.count("exists") == 2
    assert len(mover.probe(kit.NAMES, keys, is_prefix=False, give_up_at=sys.maxsize)) == 600


def test_a_row_that_is_not_in_the_region_is_never_touched(kit, keys):
    run = replace(kit.run(keys[:1]), rows=[10_000])
    with pytest.raises(IndexError):
        kit.mover(kit.DictStore()).store(run)


# -- threads that wait for the processor


def moved_in_turns(kit, nbytes, count):
    """Return what a mover does with values of this size, stored and loaded; "way": it gives way."""

    class Store(kit.DictStore):
        asks_one_by_one = True  # else it is asked what it has before it is given something

    store, keys = Store(), [kit.key(number) for number in range(count)]
    options = MoverOptions([(nbytes - 4096, nbytes)], give_way=lambda: store.calls.append(("way", "")))
    mover = ValueMover(store, ValueViews(memoryview(bytearray(count * nbytes)), nbytes), options, threading.Event())
    assert set(mover.store(kit.run(keys)).statuses) == {DONE}
    assert set(mover.load(kit.run(keys)).statuses) == {DONE}
    return [what for what, _ in store.calls]


def test_the_processor_is_yielded_to_a_waiting_thread_after_each_large_value(kit):
    """However its work is cut: what is sealed and written, or read and checked, counts."""
    assert moved_in_turns(kit, 2 << 20, 2) == 2 * ["write", "way"] + 2 * ["read", "way"]
    assert moved_in_turns(kit, 4 << 20, 1) == ["way", "write", "way", "read", "way", "way"]


def test_of_small_values_many_are_moved_in_one_go(kit):
    did = moved_in_turns(kit, 1 << 16, 64)
    assert did.count("way") == 64 * 2 * ((1 << 17) - 4096) // (3 << 20)


def test_a_store_that_takes_no_processor_for_long_is_left_alone(kit):
    assert "way" not in moved_in_turns(kit, 1 << 14, 16)


# -- rows that another tier's host is sealing at the same time


@pytest.mark.parametrize("batched", [False, True])
def test_a_store_with_an_epoch_of_its_own_leaves_the_rows_as_they_are(kit, keys, batched):
    store = kit.BatchStore() if batched else kit.DictStore()
    options = MoverOptions([(kit.PAYLOAD, kit.VALUE)])
    mover = ValueMover(store, kit.rows.views, options, threading.Event(), PlainSeal("0123456789abcdef"))
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    before = bytes(kit.rows.memory)
    assert set(mover.store(kit.run(keys)).statuses) == {DONE}
    assert bytes(kit.rows.memory) == before, "the place of the seal is another tier's, if it has no epoch"
    for row in range(len(keys)):
        kit.rows.poison(row)
    assert set(mover.load(kit.run(keys)).statuses) == {DONE}
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))


def test_views_beside_the_rows_are_closed_with_those_of_the_rows(kit):
    ValueMover(kit.DictStore(), kit.rows.views, MoverOptions([(10, kit.VALUE)]), threading.Event(), PlainSeal("1" * 16))
    kit.rows.views.close()
    kit.rows.memory.release()  # BufferError if they still held it


# -- values that are there and were not given


def test_what_is_to_be_overwritten_is_deleted_first_and_nothing_else_is(kit, store, keys):
    mover = kit.stored(store, keys)
    store.calls.clear()
    mover.store(replace(kit.run(keys), overwrites=bytes([0, 1, 0, 0, 1, 0])))
    names = [kit.NAMES.name(keys[1]), kit.NAMES.name(keys[4])]
    assert store.calls[0] == ("delete", tuple(names))
    assert store.calls[1:] in ([("write", name) for name in names], [("write_many", tuple(names))])


def test_a_store_that_cannot_delete_is_still_asked_to_overwrite(kit, store, keys, monkeypatch):
    mover = kit.stored(store, keys)

    def refuse(_names):
        raise PermissionError("no deletes for this user")

    monkeypatch.setattr(store, "delete", refuse)
    assert set(mover.store(replace(kit.run(keys), overwrites=bytes([1] * 6))).statuses) == {DONE}
