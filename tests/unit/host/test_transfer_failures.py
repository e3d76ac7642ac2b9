"""What a store can fail at, refuse or keep, and what becomes of the values and of their buffers."""

import sys
import threading

import pytest

from kvtiers.api import RateLimit, StoreFull
from kvtiers.host.messages import Status
from kvtiers.host.rate_limiter import RateLimiter

DONE, MISSING = Status.DONE, Status.MISSING
FAILED, DROPPED, PRESENT = Status.FAILED, Status.DROPPED, Status.PRESENT


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(6)]


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
    mover = kit.stored(store, keys)
    moved = mover.load(kit.run(keys))
    assert set(moved.statuses) == {DONE}
    assert moved.retries == len(keys)


def test_a_store_that_goes_on_failing_ends_the_run_with_its_error(kit, store, keys):
    mover = kit.stored(store, keys)

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
    mover = kit.stored(store, keys)
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
    mover = kit.stored(store, keys[:3])
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
    moved = kit.stored(store, keys).load(kit.run(keys)) if is_load else kit.mover(store).store(kit.run(keys))
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
    mover = kit.stored(store, keys)
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
    mover = kit.stored(store, keys)
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
    mover = kit.stored(kit.DictStore(), keys[:1])
    assert list(mover.load(kit.run(keys[:1])).statuses) == [DONE]
    assert turns == [(0, True), (kit.VALUE, False), (kit.VALUE, True)], "a question, a store, a load"


def test_a_tier_that_is_being_closed_does_not_wait_for_its_turn(kit, keys):
    stop = threading.Event()
    mover = kit.mover(kit.DictStore(), stop=stop, rate_limit=RateLimit(requests_per_second=0.001))
    mover.store(kit.run(keys[:1]))
    stop.set()
    assert set(mover.store(kit.run(keys)).statuses) == {FAILED}
