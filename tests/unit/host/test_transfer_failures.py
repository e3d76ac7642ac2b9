"""What a store can fail at, refuse or keep, and what becomes of the values and of their buffers."""

import contextlib
import sys
import threading

import pytest

from kvtiers.api import NotKept, RateLimit, StoreContractError
from kvtiers.host.messages import Status
from kvtiers.host.store_calls import RateLimiter

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
            raise NotKept("full")

    store = Full()
    moved = kit.mover(store).store(kit.run(keys))
    assert set(moved.statuses) == {DROPPED}
    assert (moved.error, moved.retries, store.count("write")) == ("", 0, len(keys))


def test_a_value_that_never_fits_is_dropped_and_counted_and_said_once_with_the_store_s_reason(kit, keys, caplog):
    class Small(kit.DictStore):
        def write(self, name, src):
            raise NotKept(f"an item has at most 1024 bytes, this one has {len(src)}")

    mover = kit.mover(Small())
    for _ in range(2):
        assert set(mover.store(kit.run(keys)).statuses) == {DROPPED}
    [line] = [record.getMessage() for record in caplog.records]
    assert "Small: no room for a value of 4096 bytes: an item has at most 1024 bytes" in line
    assert "dropped and counted (dropped_full)" in line


def test_a_full_store_may_also_say_so_for_a_whole_batch(kit, keys):
    class Full(kit.BatchStore):
        def write_many(self, names, srcs):
            raise NotKept("full")

    moved = kit.mover(Full()).store(kit.run(keys))
    assert set(moved.statuses) == {DROPPED}
    assert moved.error == ""


def test_a_batch_that_was_full_in_part_drops_that_part(kit, keys):
    class HalfFull(kit.BatchStore):
        def write_many(self, names, srcs):
            room = 3 - len(self.values)
            super().write_many(names[:room], srcs[:room])
            return [None if number < room else NotKept("half full") for number in range(len(names))]

    mover = kit.mover(HalfFull())
    assert list(mover.store(kit.run(keys)).statuses) == [DONE] * 3 + [DROPPED] * 3
    assert list(mover.store(kit.run(keys)).statuses) == [PRESENT] * 3 + [DROPPED] * 3


def test_what_a_store_refuses_for_a_reason_is_dropped_without_a_retry_and_is_not_full(kit, keys, caplog):
    class OneNodeDown(kit.BatchStore):
        def write_many(self, names, srcs):
            super().write_many(names[:2], srcs[:2])
            down = NotKept("node 3:\n connection refused " + "!" * 1000, full=False)
            return [None, None, NotKept("full"), *[down] * (len(names) - 3)]

    store = OneNodeDown()
    mover = kit.mover(store)
    moved = mover.store(kit.run(keys))
    assert list(moved.statuses) == [DONE, DONE, DROPPED, *[Status.REFUSED] * (len(keys) - 3)]
    assert moved.error.startswith("node 3: connection refused !!!")
    assert len(moved.error) <= 500
    assert moved.retries == 0
    assert not any("node 3" in line for line in caplog.messages), "the engine's side says it"


def test_a_store_that_is_read_and_takes_nothing_says_why_without_a_retry_or_a_failure(kit, keys, caplog):
    class ReadOnly(kit.DictStore):
        transient_errors = (Exception,)

        def write(self, name, src):
            self.calls.append(("write", name))
            raise NotKept("the disk has become\nread-only", full=False)

    store = ReadOnly()
    moved = kit.mover(store).store(kit.run(keys))
    assert set(moved.statuses) == {Status.REFUSED}
    assert (moved.error, moved.retries) == ("the disk has become read-only", 0)
    assert "no room" not in caplog.text


@pytest.mark.parametrize(("answer", "said"), [(True, "True"), (False, "False"), (OSError("down"), "OSError('down')")])
def test_a_batch_whose_answer_is_another_error_or_a_bool_breaks_the_contract(kit, keys, caplog, answer, said):
    class Odd(kit.BatchStore):
        def write_many(self, names, srcs):
            return [None] * (len(names) - 1) + [answer]

    moved = kit.mover(Odd()).store(kit.run(keys))
    assert set(moved.statuses) == {FAILED}
    assert f"Odd.write_many answered {said} for a value; expected None for one that is kept" in moved.error


def test_a_refusal_that_was_caught_and_answered_holds_no_buffer(kit, keys):
    class Careless(kit.BatchStore):
        def write_many(self, names, srcs):
            answers = []
            for name, views in zip(names, srcs, strict=True):
                try:
                    self.put(name, views)
                except NotKept as error:
                    answers.append(error)
            return answers

        def put(self, name, views):
            raise NotKept("full")

    moved = kit.mover(Careless()).store(kit.run(keys))
    assert (set(moved.statuses), moved.kept) == ({DROPPED}, [])


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
    "one answer too many": lambda answers: [*answers, answers[0]],
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


def test_answers_of_exists_that_are_no_booleans_count_as_what_they_are_worth(kit, keys):
    class Odd(kit.DictStore):
        def exists(self, names):
            return (1 if name in self.values else None for name in names)

    store = Odd()
    mover = kit.stored(store, keys[:3])
    assert list(mover.load(kit.run(keys)).statuses) == [DONE] * 3 + [MISSING] * 3
    assert mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)[:4] == [True, True, True, False]


def accusations(caplog):
    return [record.getMessage() for record in caplog.records if "a bug of the tier's plugin" in record.getMessage()]


@pytest.mark.parametrize("wrong", [[], [True], None, True], ids=["none", "too_few", "None", "a_bool"])
def test_exists_with_another_number_of_answers_is_one_line_that_names_class_and_method(kit, keys, caplog, wrong):
    class Forgetful(kit.DictStore):
        def exists(self, names):
            return wrong

    mover = kit.mover(Forgetful())
    for _ in range(3):
        with pytest.raises(StoreContractError, match=r"Forgetful\.exists "):
            mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.maxsize)
    (line,) = accusations(caplog)
    assert "Forgetful.exists " in line
    assert "one answer for each" in line or "one for each" in line
    moved = mover.store(kit.run(keys))
    assert set(moved.statuses) == {FAILED}
    assert "Forgetful.exists " in moved.error


@pytest.mark.parametrize("answer", [None, True, False, -1, 4097, 4096.0], ids=repr)
@pytest.mark.parametrize("batched", [False, True])
def test_a_read_that_answers_no_length_fails_the_value_and_is_one_line_that_names_class_and_method(
    kit, keys, caplog, answer, batched
):
    class Silent(kit.DictStore):
        def read_into(self, name, dst):
            super().read_into(name, dst)
            return answer

    class SilentBatch(kit.BatchStore):
        def read_many_into(self, names, dsts):
            return [answer for _ in super().read_many_into(names, dsts)]

    moved = kit.stored(SilentBatch() if batched else Silent(), keys).load(kit.run(keys))
    assert FAILED in moved.statuses
    assert not {MISSING, DONE, Status.CORRUPT} & set(moved.statuses), "no silent miss, and no damage"
    named = "SilentBatch.read_many_into" if batched else "Silent.read_into"
    assert f"{named} answered {answer!r} for a value; expected its length in bytes, 0 to 4096" in moved.error
    (line,) = accusations(caplog)
    assert f"{named} answered {answer!r}" in line


def test_a_broken_promise_is_not_asked_for_again_whatever_the_store_calls_transient(kit, keys):
    class Silent(kit.DictStore):
        transient_errors = (Exception,)

        def read_into(self, name, dst):
            super().read_into(name, dst)

    store = Silent()
    mover = kit.stored(store, keys[:1])
    assert mover.load(kit.run(keys[:1])).retries == 0
    assert store.count("read") == 1


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
    assert f"Keeper.{'read_into' if is_load else 'write'} kept the buffer" in moved.error
    assert "Copy what is kept: bytes(...)" in moved.error
    (loan,) = moved.kept
    assert not loan.is_free()
    store.kept = None
    assert loan.is_free()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("is_load", [True, False])
def test_a_whole_view_that_is_kept_is_found_too_and_is_of_no_use_any_more(kit, keys, caplog, is_load, batched):
    views = []

    class Hoarder(kit.DictStore):
        def read_into(self, name, dst):
            views.extend([dst] if is_load else [])
            return super().read_into(name, dst)

        def write(self, name, src):
            super().write(name, src)
            views.extend([] if is_load else [src])

    class BatchHoarder(kit.BatchStore):
        def read_many_into(self, names, dsts):
            views.extend([dst for [dst] in dsts] if is_load else [])
            return super().read_many_into(names, dsts)

        def write_many(self, names, srcs):
            views.extend([] if is_load else [src for [src] in srcs])
            return super().write_many(names, srcs)

    store = BatchHoarder() if batched else Hoarder()
    moved = kit.stored(store, keys).load(kit.run(keys)) if is_load else kit.mover(store).store(kit.run(keys))
    assert set(moved.statuses) == {FAILED}
    one, many = ("read_into", "read_many_into") if is_load else ("write", "write_many")
    named = f"{type(store).__name__}.{many if batched else one} kept the buffer"
    assert named in moved.error
    (line,) = accusations(caplog)
    assert named in line
    (loan,) = moved.kept
    assert loan.is_free(), "the row behind it can be used again at once"
    with pytest.raises(ValueError, match="released"):
        bytes(views[0])


def test_a_view_that_a_pool_s_thread_drops_a_moment_after_the_call_is_not_kept(kit, keys):
    class Pooled(kit.DictStore):
        def __init__(self):
            super().__init__()
            self.late = []

        def write(self, name, src):
            super().write(name, src)
            holds = threading.Event()
            self.late.append(threading.Thread(target=self.hold, args=([src], holds)))
            self.late[-1].start()
            assert holds.wait(kit.PATIENCE)

        def hold(self, task, holds):
            holds.set()
            with contextlib.suppress(ValueError):  # released: core has asked for it back
                while task[0].nbytes:
                    pass
            task.clear()

    store = Pooled()
    moved = kit.mover(store).store(kit.run(keys[:1]))
    for thread in store.late:
        thread.join(kit.PATIENCE)
    assert (list(moved.statuses), moved.kept) == ([DONE], [])


# -- time


def test_nothing_begins_after_the_deadline(kit, store, keys):
    moved = kit.mover(store).store(kit.run(keys, within=0.0))
    assert set(moved.statuses) == {FAILED}
    assert moved.error == "no time left"
    assert not store.values


def test_nothing_begins_for_a_job_that_was_abandoned(kit, keys):
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


# -- what is logged of failures


def broken(kit, way, error, *args):
    """Return a store that reads by this method alone, and raises this each time."""

    def fail(self, *_):
        raise error(*args)

    base = kit.BatchStore if way == "read_many_into" else kit.DictStore
    methods = {way: fail}
    if way == "read_pieces":
        methods["reads_in_pieces"] = lambda _self, _nbytes: True
    return type("Broken", (base,), methods)()


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["read_into", "read_many_into", "read_pieces"])
def test_the_first_failure_of_each_method_by_each_type_is_one_line_however_values_are_read(
    kit, keys, caplog, way, error
):
    store = broken(kit, way, error, 3)
    mover = kit.mover(store)
    for _ in range(3):
        moved = mover.load(kit.run(keys))
        assert set(moved.statuses) == {FAILED}
        assert moved.error == f"{error.__name__}: 3"
    [line] = caplog.messages
    assert line.startswith(f"Broken: its store's {way} failed: {error.__name__}: 3;")
    assert "\n" not in line


def test_writes_questions_and_removals_that_fail_have_a_line_each(kit, keys, caplog):
    class Broken(kit.DictStore):
        def exists(self, names):
            raise ConnectionError("refused")

        def write(self, name, src):
            raise OSError("no")

        def delete(self, names):
            raise PermissionError("no")

    store = Broken()
    mover = kit.mover(store)
    with pytest.raises(ConnectionError):
        mover.probe(kit.NAMES, keys, is_prefix=True, give_up_at=sys.float_info.max)
    for _ in range(2):
        mover.store(kit.run(keys))
        mover.delete(kit.run(keys))
    store.exists = lambda names: [False] * len(names)
    mover.store(kit.run(keys))
    assert [line.split(";")[0] for line in caplog.messages] == [
        "Broken: its store's exists failed: ConnectionError: refused",
        "Broken: its store's delete failed: PermissionError: no",
        "Broken: its store's write failed: OSError: no",
    ]


# -- a store that hangs


def test_a_call_that_does_not_return_is_named_with_its_place_once(kit, keys, caplog):
    begun, go_on = threading.Event(), threading.Event()

    class Hangs(kit.DictStore):
        def read_into(self, name, dst):
            begun.set()
            go_on.wait(60)
            return 0

    mover = kit.mover(Hangs())
    mover.log_hung(0.0)
    loading = threading.Thread(target=mover.load, args=(kit.run(keys[:1]),))
    loading.start()
    assert begun.wait(60)
    mover.log_hung(3600.0)
    assert not caplog.messages
    for _ in range(3):
        mover.log_hung(0.0)
    go_on.set()
    loading.join(60)
    mover.log_hung(0.0)
    [line] = caplog.messages
    assert line.startswith("Hangs: its store has not answered for 0 s: it is in ")
    assert "Hangs.read_into (test_transfer_failures.py:" in line
