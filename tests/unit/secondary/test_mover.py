"""What a store can do wrong, and what becomes of the value."""

import sys
import threading
from dataclasses import replace

import pytest

from kvtiers.api import RateLimit, StoreFull
from kvtiers.rows.names import StorageNames
from kvtiers.secondary.limits import RateLimiter
from kvtiers.secondary.protocol import Status

DONE, MISSING, CORRUPT = Status.DONE, Status.MISSING, Status.CORRUPT
FAILED, DROPPED, PRESENT = Status.FAILED, Status.DROPPED, Status.PRESENT


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(6)]


def stored(kit, store, keys, **options):
    """A mover that has stored these chunks, whose rows have been poisoned since."""
    mover = kit.mover(store, **options)
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    assert set(mover.store(kit.run(keys)).statuses) == {DONE}
    for row in range(len(keys)):
        kit.rows.poison(row)
    return mover


def dear(kit):
    """A store that is asked one name at a time."""
    store = kit.DictStore()
    store.exists_per_call = 1
    return store


@pytest.fixture(params=["DictStore", "BatchStore"])
def store(kit, request):
    return getattr(kit, request.param)()


def test_what_was_stored_comes_back(kit, store, keys):
    mover = stored(kit, store, keys)
    moved = mover.load(kit.run(keys))
    assert set(moved.statuses) == {DONE}
    assert moved.nbytes == len(keys) * kit.VALUE
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))


def test_values_are_named_after_their_keys_and_sealed(kit, store, keys):
    stored(kit, store, keys)
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
    mover = stored(kit, store, keys)
    name = kit.NAMES.name(keys[2])
    store.values[name] = damage(store.values[name])
    moved = mover.load(kit.run(keys))
    assert list(moved.statuses) == [DONE, DONE, CORRUPT, DONE, DONE, DONE]
    assert moved.nbytes == 5 * kit.VALUE
    assert name not in store.values
    assert len(store.values) == 5


def test_two_values_that_were_swapped_are_both_misses(kit, store, keys):
    mover = stored(kit, store, keys)
    first, second = kit.NAMES.names(keys[:2])
    store.values[first], store.values[second] = store.values[second], store.values[first]
    assert list(mover.load(kit.run(keys)).statuses) == [CORRUPT, CORRUPT, DONE, DONE, DONE, DONE]
    assert {first, second}.isdisjoint(store.values)


def test_a_read_only_tier_deletes_nothing(kit, store, keys):
    stored(kit, store, keys)
    name = kit.NAMES.name(keys[2])
    store.values[name] = flip(7)(store.values[name])
    moved = kit.mover(store, read_only=True).load(kit.run(keys))
    assert moved.statuses[2] == CORRUPT
    assert name in store.values
    assert store.count("delete") == 0


def test_a_value_of_another_length_is_never_read_as_valid(kit, store, keys):
    mover = stored(kit, store, keys)
    for name, length in zip(kit.NAMES.names(keys[:3]), (4095, 8192, 0), strict=True):
        store.values[name] = (store.values[name] * 2)[:length]
    assert list(mover.load(kit.run(keys)).statuses) == [MISSING] * 3 + [DONE] * 3


def test_a_store_that_fills_only_half_and_says_all_is_found_out(kit, keys):
    class Short(kit.DictStore):
        def read_into(self, name, dst):
            dst[:2048] = self.values[name][:2048]
            return True

    store = Short()
    mover = stored(kit, store, keys)
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


def test_what_the_store_has_but_never_gives_is_written_over_at_the_next_store(kit, store, keys):
    """Else a value of another layout, format or length would stand in the way for as long as the store keeps it."""
    kit.mover(store).store(kit.run(keys, names=StorageNames(kit.NAMES.prefix, b"layout-2")))
    store.values[kit.NAMES.name(keys[0])] = b"short"
    mover = kit.mover(store)
    assert set(mover.load(kit.run(keys)).statuses) == {MISSING}
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    assert set(mover.store(kit.run(keys)).statuses) == {DONE}
    assert set(mover.load(kit.run(keys)).statuses) == {DONE}
    assert set(mover.store(kit.run(keys)).statuses) == {PRESENT}


# -- what is there already


def test_a_value_that_the_store_has_is_not_written_again(kit, store, keys):
    stored(kit, store, keys[:4])
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
    mover = stored(kit, store, keys)
    asked = store.count("exists")
    assert set(mover.store(kit.run(keys)).statuses) == {PRESENT}
    assert store.count("exists") == asked


def test_what_another_has_written_is_asked_for_once(kit, store, keys):
    stored(kit, store, keys)
    mover = kit.mover(store)
    for _ in range(2):
        asked = store.count("exists")
        assert set(mover.store(kit.run(keys)).statuses) == {PRESENT}
    assert store.count("exists") == asked


def test_presence_is_asked_in_calls_of_the_size_that_the_store_wants(kit, keys):
    class Few(kit.DictStore):
        exists_per_call = 4

    store = Few()
    stored(kit, store, keys)
    assert [len(call[1]) for call in store.calls if call[0] == "exists"] == [4, 2]


def test_a_store_that_is_dear_to_ask_is_not_asked_before_a_write(kit, keys):
    store = dear(kit)
    mover = stored(kit, store, keys)
    assert set(mover.store(kit.run(keys)).statuses) == {PRESENT}, "what it has written is known"
    assert set(kit.mover(store).store(kit.run(keys)).statuses) == {DONE}
    assert store.count("exists") == 0


def test_what_a_question_about_a_prefix_has_found_in_a_dear_store_is_not_written(kit, keys):
    store = dear(kit)
    stored(kit, store, keys[:4])
    mover = kit.mover(store)
    mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)
    assert list(mover.store(kit.run(keys)).statuses) == [PRESENT] * 4 + [DONE] * 2


def test_what_was_only_thought_to_be_in_a_dear_store_is_written_once_a_load_has_missed_it(kit, keys):
    store = dear(kit)
    stored(kit, store, keys)
    del store.values[kit.NAMES.names(keys[2:3])[0]]
    mover = kit.mover(store)
    mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)
    assert mover.load(kit.run(keys)).statuses[2] == MISSING
    assert mover.store(kit.run(keys)).statuses[2] == DONE


def test_what_an_eviction_took_is_written_again_once_a_load_or_a_lookup_has_missed_it(kit, store, keys):
    mover = stored(kit, store, keys)
    store.values.clear()
    assert list(mover.load(kit.run(keys[:1])).statuses) == [MISSING]
    assert mover.probe(kit.NAMES, keys[1:2], is_prefix=False, give_up_at=sys.maxsize) == [False]
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    assert list(mover.store(kit.run(keys)).statuses) == [DONE, DONE, PRESENT, PRESENT, PRESENT, PRESENT]


# -- a store that is full, fails or lies


def test_a_full_store_drops_the_write_without_retry(kit, keys):
    class Full(kit.DictStore):
        transient_errors = (Exception,)

        def write(self, name, src):
            self.calls.append(("write", name))
            raise StoreFull

    store = Full()
    moved = kit.mover(store).store(kit.run(keys))
    assert set(moved.statuses) == {DROPPED}
    assert (moved.error, moved.retries, store.count("write")) == ("", 0, len(keys))


def test_a_full_store_may_also_say_so_for_a_whole_batch(kit, keys):
    class Full(kit.BatchStore):
        def write_many(self, names, srcs):
            raise StoreFull

    moved = kit.mover(Full()).store(kit.run(keys))
    assert set(moved.statuses) == {DROPPED}
    assert moved.error == ""


def test_a_batch_that_was_full_in_part_drops_that_part(kit, keys):
    class HalfFull(kit.BatchStore):
        def write_many(self, names, srcs):
            room = 3 - len(self.values)
            super().write_many(names[:room], srcs[:room])
            return [number < room for number in range(len(names))]

    mover = kit.mover(HalfFull())
    assert list(mover.store(kit.run(keys)).statuses) == [DONE] * 3 + [DROPPED] * 3
    assert list(mover.store(kit.run(keys)).statuses) == [PRESENT] * 3 + [DROPPED] * 3


def test_a_transient_error_is_retried_and_counted(kit, keys):
    class Flaky(kit.DictStore):
        fail = True

        def read_into(self, name, dst):
            self.fail = not self.fail
            if not self.fail:
                raise ConnectionResetError("reset")
            return super().read_into(name, dst)

    store = Flaky()
    mover = stored(kit, store, keys)
    moved = mover.load(kit.run(keys))
    assert set(moved.statuses) == {DONE}
    assert moved.retries == len(keys)


def test_a_store_that_goes_on_failing_ends_the_run_with_its_error(kit, store, keys):
    mover = stored(kit, store, keys)

    def fail(*_):
        raise OSError("disk on fire")

    store.read_into = store.read_many_into = fail
    moved = mover.load(kit.run(keys))
    assert set(moved.statuses) == {FAILED}
    assert moved.error == "OSError: disk on fire"


class BrokenTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


def test_an_exception_without_a_text_is_still_a_failed_value(kit, store, keys):
    def fail(*_):
        raise BrokenTextError

    store.write = store.write_many = fail
    moved = kit.mover(store).store(kit.run(keys))
    assert set(moved.statuses) == {FAILED}
    assert moved.error == "BrokenTextError"


LIES = {
    "nothing": lambda answers: None,
    "a number": lambda answers: 1,
    "one answer too few": lambda answers: answers[:-1],
    "one answer too many": lambda answers: [*answers, True],
    "no answers": lambda answers: [],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@pytest.mark.parametrize("method", ["read_many_into", "write_many", "exists"])
def test_a_wrong_number_or_kind_of_answers_fails_the_values(kit, keys, method, lie):
    store = kit.BatchStore()
    mover = stored(kit, store, keys)
    honest = getattr(store, method)
    setattr(store, method, lambda *args: lie(honest(*args)))
    mover = kit.mover(store)
    moved = mover.load(kit.run(keys)) if method == "read_many_into" else mover.store(kit.run([*keys, kit.key(77)]))
    if method == "write_many":
        assert moved.statuses[-1] == FAILED
    else:
        assert set(moved.statuses) == {FAILED}
    assert moved.error


def test_answers_that_are_no_booleans_count_as_what_they_are_worth(kit, keys):
    class Odd(kit.DictStore):
        def read_into(self, name, dst):
            return super().read_into(name, dst) or None

        def exists(self, names):
            return (1 if name in self.values else None for name in names)

    store = Odd()
    mover = stored(kit, store, keys[:3])
    assert list(mover.load(kit.run(keys)).statuses) == [DONE] * 3 + [MISSING] * 3
    assert mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)[:4] == [True, True, True, False]


# -- buffers


@pytest.mark.parametrize("is_load", [True, False])
def test_a_store_that_keeps_its_buffer_fails_the_job_by_name_and_its_loan_is_handed_on(kit, keys, is_load):
    class Keeper(kit.DictStore):
        kept = None

        def read_into(self, name, dst):
            self.kept = dst[:10]
            return super().read_into(name, dst)

        def write(self, name, src):
            super().write(name, src)
            if not is_load:
                self.kept = memoryview(src)[5:6]

    store = Keeper()
    moved = stored(kit, store, keys).load(kit.run(keys)) if is_load else kit.mover(store).store(kit.run(keys))
    assert set(moved.statuses) == {FAILED}
    assert "Keeper kept the buffer" in moved.error
    (loan,) = moved.kept
    assert not loan.is_free()
    store.kept = None
    assert loan.is_free()


def test_a_store_may_keep_the_memoryview_itself_which_is_of_no_use_to_it_any_more(kit, keys):
    class Hoarder(kit.DictStore):
        def __init__(self):
            super().__init__()
            self.views = []

        def read_into(self, name, dst):
            self.views.append(dst)
            return super().read_into(name, dst)

    store = Hoarder()
    mover = stored(kit, store, keys)
    assert set(mover.load(kit.run(keys)).statuses) == {DONE}
    with pytest.raises(ValueError, match="released"):
        store.views[0][0] = 1


# -- time


def test_nothing_begins_after_the_deadline(kit, store, keys):
    moved = kit.mover(store).store(kit.run(keys, within=0.0))
    assert set(moved.statuses) == {FAILED}
    assert moved.error == "no time left"
    assert not store.values


def test_nothing_begins_for_a_job_that_nobody_wants_any_more(kit, keys):
    store = kit.DictStore()
    mover = stored(kit, store, keys)
    reads_before = store.count("read")
    moved = mover.load(kit.run(keys, wanted=lambda: store.count("read") < reads_before + 2))
    assert list(moved.statuses) == [DONE, DONE, FAILED, FAILED, FAILED, FAILED]
    calls_before = len(store.calls)
    assert set(kit.mover(store).store(kit.run(keys, wanted=lambda: False)).statuses) == {FAILED}
    assert len(store.calls) == calls_before, "not even a question"


def test_a_rate_limit_that_the_deadline_does_not_allow_fails_the_values(kit, keys):
    store = kit.DictStore()
    mover = kit.mover(store, rate_limit=RateLimit(requests_per_second=0.001))
    moved = mover.store(kit.run(keys, within=5.0))
    assert set(moved.statuses) == {FAILED}
    assert "no turn under the rate limit" in moved.error


def test_under_a_rate_limit_loads_take_their_turn_before_stores(kit, keys, monkeypatch):
    turns, honest = [], RateLimiter.wait

    def wait(self, nbytes, *, urgent, give_up_at):
        turns.append((nbytes, urgent))
        return honest(self, nbytes, urgent=urgent, give_up_at=give_up_at)

    monkeypatch.setattr(RateLimiter, "wait", wait)
    mover = stored(kit, kit.DictStore(), keys[:1])
    assert list(mover.load(kit.run(keys[:1])).statuses) == [DONE]
    assert turns == [(0, True), (kit.VALUE, False), (kit.VALUE, True)], "a question, a store, a load"


def test_a_tier_that_is_being_closed_does_not_wait_for_its_turn(kit, keys):
    stop = threading.Event()
    mover = kit.mover(kit.DictStore(), stop=stop, rate_limit=RateLimit(requests_per_second=0.001))
    mover.store(kit.run(keys[:1]))
    stop.set()
    assert set(mover.store(kit.run(keys)).statuses) == {FAILED}


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
    assert store.count("exists") <= 1 + max(1, length).bit_length()


def test_questions_about_a_prefix_end_at_its_first_absence(kit):
    class Few(kit.DictStore):
        exists_per_call = 8

    store = Few()
    keys = [kit.key(number) for number in range(64)]
    store.values = dict.fromkeys(kit.NAMES.names([*keys[:10], *keys[20:]]), b"")
    mover = kit.mover(store)
    answers = mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)
    assert answers[:11] == [True] * 10 + [False]
    assert store.count("exists") == 2
    assert len(mover.probe(kit.NAMES, keys, is_prefix=False, give_up_at=sys.maxsize)) == 64


def test_a_row_that_is_not_in_the_region_is_never_touched(kit, keys):
    run = replace(kit.run(keys[:1]), rows=[10_000])
    with pytest.raises(IndexError):
        kit.mover(kit.DictStore()).store(run)
