import threading
from types import SimpleNamespace

import pytest

from kvtiers.host.messages import JobDone, JobFailed, JobStarted, Opened, Probed, Status, StoreJob
from kvtiers.layout.storage_name import StorageNames

HOUR = 3600.0
DONE, FAILED, PRESENT = Status.DONE, Status.FAILED, Status.PRESENT


def load(job_id, keys, rows=None):
    return StoreJob(job_id, True, keys, list(rows if rows is not None else range(len(keys))))


def store(job_id, keys, rows=None):
    return StoreJob(job_id, False, keys, list(rows if rows is not None else range(len(keys))))


@pytest.fixture
def keys(kit):
    keys = [kit.key(number) for number in range(16)]
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    return keys


def done(events, job_id):
    """Wait for a job's result."""
    return events.wait(JobDone, having=lambda event: event.job_id == job_id)[0]


def test_a_job_is_reported_as_started_and_then_as_done_once(kit, keys):
    pool, events = kit.pool(kit.DictStore(), threads=4)
    pool.submit(store(1, keys))
    result = done(events, 1)
    assert set(result.statuses) == {DONE}
    assert result.nbytes == len(keys) * kit.VALUE
    for row in range(len(keys)):
        kit.rows.poison(row)
    pool.submit(load(2, keys))
    assert set(done(events, 2).statuses) == {DONE}
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))
    assert [event for event in events.all() if not isinstance(event, Opened)] == [
        JobStarted(1),
        result,
        JobStarted(2),
        done(events, 2),
    ]


def test_many_jobs_at_once_each_get_one_result(kit):
    pool, events = kit.pool(kit.BatchStore(), threads=8)
    for number in range(200):
        pool.submit(store(number, [kit.key(number, 0), kit.key(number + 1000, 0)], [number % 64, (number + 1) % 64]))
    assert pool.drain(kit.PATIENCE)
    reported = [event.job_id for event in events.of(JobDone)]
    assert sorted(reported) == list(range(200))
    assert len(events.of(JobStarted)) == 200


def test_a_large_job_runs_on_all_threads_at_once(kit, keys):
    gated = kit.GatedStore("read")
    pool, events = kit.pool(gated, threads=4)
    pool.submit(store(1, keys))
    done(events, 1)
    pool.submit(load(2, keys))
    gated.await_calls(4)
    assert gated.most_running["read"] == 4
    gated.gate.set()
    assert set(done(events, 2).statuses) == {DONE}


def test_loads_go_before_stores_and_stores_leave_one_thread_free(kit, keys):
    gated = kit.GatedStore("write")
    pool, events = kit.pool(gated, threads=3)
    for number, key in enumerate(keys[:8]):
        gated.values[kit.NAMES.name(keys[8])] = b""
        pool.submit(store(number, [key], [number]))
    gated.await_calls(2)
    pool.submit(load(100, keys[8:10], [8, 9]))
    done(events, 100)
    assert gated.most_running["write"] == 2
    assert not [event for event in events.of(JobDone) if event.job_id < 8]
    gated.gate.set()
    assert pool.drain(kit.PATIENCE)
    assert gated.most_running["write"] == 2


def test_one_thread_serves_stores_too(kit, keys):
    pool, events = kit.pool(kit.DictStore(), threads=1)
    pool.submit(store(1, keys))
    assert set(done(events, 1).statuses) == {DONE}


def test_questions_do_not_stand_behind_transfers(kit, keys):
    gated = kit.GatedStore("read", "write")
    pool, events = kit.pool(gated, threads=2)
    gated.values = dict.fromkeys(kit.NAMES.names(keys), b"")
    pool.submit(load(1, keys))
    gated.await_calls(2)
    pool.probe(7, keys[:3], is_prefix=True)
    assert events.wait(Probed) == [Probed(7, bytes([1, 1, 1]))]


def test_a_question_that_has_waited_too_long_is_not_asked_any_more(kit, keys):
    asked = []

    class Slow(kit.DictStore):
        def exists(self, names):
            asked.extend(names)
            return super().exists(names)

    pool, events = kit.pool(Slow(), deadline=0.0)
    events.wait(Opened)
    asked.clear()
    pool.probe(1, keys, is_prefix=True)
    (answer,) = events.wait(Probed)
    assert answer == Probed(1, b"", "it was not asked in time")
    assert asked == []


def test_a_question_that_the_store_cannot_answer_is_an_error(kit, keys):
    class Broken(kit.DictStore):
        def exists(self, names):
            if names[0].endswith("/_epoch"):  # what core asks for itself while it opens a store
                return super().exists(names)
            raise PermissionError("403")

    pool, events = kit.pool(Broken())
    pool.probe(7, keys, is_prefix=True)
    assert events.wait(Probed) == [Probed(7, b"", "PermissionError: 403")]


def test_a_job_has_the_names_that_were_current_when_it_was_submitted(kit, keys):
    gated = kit.GatedStore("write")
    pool, events = kit.pool(gated, threads=1)
    other = StorageNames("test/other-0123456789abcdef01234567/", b"layout-2")
    pool.submit(store(1, keys[:1], [0]))
    pool.submit(store(2, keys[:1], [0]))
    pool.set_names(other)
    pool.submit(store(3, keys[:1], [0]))
    pool.probe(9, keys[:1], is_prefix=False)
    gated.gate.set()
    assert pool.drain(kit.PATIENCE)
    assert sorted(gated.values) == sorted([kit.NAMES.name(keys[0]), other.name(keys[0])])
    assert events.wait(Probed)[0].answers in {b"\x00", b"\x01"}
    assert other.layout_id in gated.values[other.name(keys[0])]


# -- opening


def test_a_store_that_cannot_be_opened_is_tried_again_until_it_can(kit, keys):
    tries = []

    def open_store():
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionRefusedError(111, "refused")
        return kit.DictStore()

    pool, events = kit.pool(open_store)
    opened = events.wait(Opened, 4)
    assert [event.error for event in opened] == ["ConnectionRefusedError: [Errno 111] refused"] * 3 + [""]
    pool.submit(store(1, keys))
    assert set(done(events, 1).statuses) == {DONE}


@pytest.mark.parametrize("error", [SystemExit("no licence"), KeyboardInterrupt(), RecursionError()])
def test_whatever_opening_raises_is_a_reason_and_not_a_lost_thread(kit, error):
    def open_store():
        raise error

    _, events = kit.pool(open_store)
    assert events.wait(Opened, 2)[0].error.startswith(type(error).__name__)


@pytest.mark.parametrize("method", ["read_into", "exists"])
@pytest.mark.parametrize("error", [SystemExit("no licence"), BaseException("odd"), ValueError("odd")])
def test_whatever_a_store_raises_while_its_tier_opens_is_a_reason_and_not_a_lost_thread(kit, method, error):
    def fail(*_):
        raise error

    failing = kit.DictStore()
    if method == "read_into":
        failing.exists = lambda names: [True for _ in names]
    setattr(failing, method, fail)
    _, events = kit.pool(lambda: failing)
    assert events.wait(Opened, 2)[0].error.startswith(type(error).__name__)


@pytest.mark.parametrize(
    ("attribute", "value"), [("transient_errors", None), ("batch_values", "many"), ("transient_errors", 3)]
)
def test_a_store_with_nonsense_for_attributes_is_not_opened(kit, attribute, value):
    nonsense = kit.BatchStore()
    setattr(nonsense, attribute, value)
    _, events = kit.pool(lambda: nonsense)
    assert "Error" in events.wait(Opened)[0].error
    kit.wait_until(lambda: nonsense.closed >= 1)


def test_a_store_that_opens_after_the_end_is_closed(kit):
    gate, opening = threading.Event(), threading.Event()
    late = kit.DictStore()

    def open_store():
        opening.set()
        gate.wait(kit.PATIENCE)
        return late

    pool, events = kit.pool(open_store)
    assert opening.wait(kit.PATIENCE)
    pool.close(0.01)
    gate.set()
    kit.wait_until(lambda: late.closed == 1, "the late store's close()")
    assert not [event for event in events.of(Opened) if not event.error]


# -- failing


def test_a_store_that_calls_exit_loses_no_result_and_no_thread(kit, keys):
    class Exits(kit.DictStore):
        def read_into(self, name, dst):
            raise SystemExit(1)

    pool, events = kit.pool(Exits(), threads=1)
    for number in range(3):
        pool.submit(load(number, keys[:2]))
        result = done(events, number)
        assert (set(result.statuses), result.error) == ({FAILED}, "SystemExit: 1")


def test_a_job_that_is_given_up_before_it_began_ends_at_once(kit, keys):
    gated = kit.GatedStore("write")
    pool, events = kit.pool(gated, threads=1)
    pool.submit(store(1, keys[:1], [0]))
    gated.await_calls(1)
    pool.submit(store(2, keys[1:4], [1, 2, 3]))
    pool.abandon(2)
    result = done(events, 2)
    assert (set(result.statuses), result.error) == ({FAILED}, "given up before it began")
    gated.gate.set()
    assert set(done(events, 1).statuses) == {DONE}
    assert sorted(gated.values) == kit.NAMES.names(keys[:1])


def test_a_job_that_is_given_up_while_it_runs_begins_nothing_more(kit, keys):
    gated = kit.GatedStore("write")
    pool, events = kit.pool(gated, threads=2)
    pool.submit(store(1, keys))
    gated.await_calls(1)
    pool.abandon(1)
    gated.gate.set()
    statuses = done(events, 1).statuses
    assert statuses.count(DONE) == 1
    assert statuses.count(FAILED) == 15


def test_giving_up_what_is_not_there_is_nothing(kit):
    pool, _ = kit.pool(kit.DictStore())
    pool.abandon(12345)


def test_no_value_begins_after_the_deadline_that_runs_from_the_first(kit, keys, monkeypatch):
    clock = kit.Clock()
    for module in ("value_run", "transfer_pool"):
        monkeypatch.setattr(f"kvtiers.host.{module}.time", SimpleNamespace(monotonic=clock))

    class Slow(kit.GatedStore):
        def read_into(self, name, dst):
            clock.now += 5
            return super().read_into(name, dst)

    slow = Slow("write")
    slow.gate.set()
    pool, events = kit.pool(slow, threads=1, deadline=12)
    pool.submit(store(1, keys[:8]))
    done(events, 1)
    slow.gate.clear()
    pool.submit(store(2, keys[8:9], [8]))
    slow.await_calls(9)
    pool.submit(load(3, keys[:8]))
    clock.now += 100  # it waits for the thread, and that counts for nothing
    slow.gate.set()
    result = done(events, 3)
    assert result.statuses.count(DONE) == 3
    assert result.error == "no time left"


# -- kept buffers


class Keeper:
    """Mixed into a store: keeps the buffers of reads until they are released."""

    def read_into(self, name, dst):
        self.__dict__.setdefault("kept", []).append(dst[:1])
        return super().read_into(name, dst)


def test_a_kept_buffer_fails_the_job_at_once_and_its_result_waits_until_it_is_released(kit, keys):
    class KeepingStore(Keeper, kit.DictStore):
        pass

    keeping = KeepingStore()
    pool, events = kit.pool(keeping, threads=2)
    pool.submit(store(1, keys))
    done(events, 1)
    pool.submit(load(2, keys))
    (failed,) = events.wait(JobFailed)
    assert failed.job_id == 2
    assert "KeepingStore.read_into kept the buffer" in failed.error
    kit.wait_until(lambda: pool._kept, "the end of the last slice")
    assert pool.check_kept()
    assert not pool.drain(0.0)
    assert [event.job_id for event in events.of(JobDone)] == [1]
    keeping.kept.clear()
    assert not pool.check_kept()
    assert FAILED in done(events, 2).statuses
    assert len(events.of(JobFailed)) == 1


def test_a_drain_notices_that_a_kept_buffer_was_released(kit, keys):
    class KeepingStore(Keeper, kit.DictStore):
        pass

    keeping = KeepingStore()
    pool, events = kit.pool(keeping, threads=1)
    pool.submit(store(1, keys[:1]))
    pool.submit(load(2, keys[:1]))
    events.wait(JobFailed)
    threading.Timer(0.1, keeping.kept.clear).start()
    assert pool.drain(kit.PATIENCE)


# -- the end


def test_a_drain_waits_for_what_runs_and_drops_what_has_not_begun_in_time(kit, keys):
    gated = kit.GatedStore("write")
    pool, events = kit.pool(gated, threads=1)
    pool.submit(store(1, keys[:1], [0]))
    gated.await_calls(1)
    for number in range(2, 10):
        pool.submit(store(number, keys[:2]))
    assert not pool.drain(0.05)
    dropped = events.of(JobDone)
    assert [event.job_id for event in dropped] == list(range(2, 10))
    assert {event.error for event in dropped} == {"dropped at shutdown"}
    gated.gate.set()
    assert pool.drain(kit.PATIENCE)
    assert set(done(events, 1).statuses) == {DONE}


def test_close_ends_all_threads_and_closes_the_store_once_after_all_calls(kit, keys):
    before = set(threading.enumerate())
    plain = kit.DictStore()
    pool, events = kit.pool(plain, threads=4)
    pool.submit(store(1, keys))
    done(events, 1)
    pool.close(kit.PATIENCE)
    assert plain.closed == 1
    assert set(threading.enumerate()) <= before
    pool.submit(store(2, keys))
    result = done(events, 2)
    assert (set(result.statuses), result.error) == ({FAILED}, "the tier is closed")


@pytest.mark.parametrize("stuck", ["write", "exists", "close"])
def test_a_call_that_hangs_does_not_hold_up_the_end(kit, keys, stuck):
    gated = kit.GatedStore(stuck)
    pool, events = kit.pool(gated)
    events.wait(Opened)
    pool.submit(store(1, keys[:1], [0]))
    if stuck != "close":
        gated.await_calls(1)
    else:
        done(events, 1)
    pool.close(0.2)
    if stuck == "close":
        gated.await_calls(1)
    assert stuck in gated.running
    assert gated.closed == 0


def test_a_store_that_waits_between_attempts_is_not_waited_for(kit, keys):
    tried = threading.Event()

    class Down(kit.DictStore):
        def write(self, name, src):
            tried.set()
            raise ConnectionError("down")

    down = Down()
    pool, events = kit.pool(down, retries=1000, retry_pauses=(HOUR, HOUR), deadline=1000 * HOUR)
    pool.submit(store(1, keys))
    assert tried.wait(kit.PATIENCE)
    pool.close(kit.PATIENCE)
    assert set(done(events, 1).statuses) == {FAILED}
    assert down.closed == 1, "no thread was left behind in its pause"


# -- figures


def test_the_stores_own_figures_are_passed_on(kit):
    class Counting(kit.DictStore):
        def stats(self):
            return {"held_values": len(self.values), "share": 0.5}

    pool, events = kit.pool(Counting())
    events.wait(Opened)
    kit.wait_until(lambda: "share" in pool.stats(), "the first figures")
    assert pool.stats() == {"held_values": 0.0, "share": 0.5, "queued_loads": 0, "queued_stores": 0}


def test_of_very_many_figures_only_some_are_passed_on(kit):
    class Talkative(kit.DictStore):
        def stats(self):
            return {f"figure {number} {'x' * 200}": number for number in range(10_000)}

    pool, events = kit.pool(Talkative())
    events.wait(Opened)
    kit.wait_until(lambda: len(pool.stats()) > 2, "the first figures")
    assert len(pool.stats()) < 300
    assert max(map(len, pool.stats())) <= 100


@pytest.mark.parametrize("stats", [lambda: None, lambda: {"a": "many"}, lambda: [1], lambda: 1 / 0])
def test_figures_that_make_no_sense_do_no_harm(kit, keys, stats):
    class Odd(kit.DictStore):
        def stats(self):
            return stats()

    pool, events = kit.pool(Odd())
    pool.probe(1, keys, is_prefix=True)
    events.wait(Probed)
    pool.probe(2, keys, is_prefix=True)
    events.wait(Probed, 2)
    assert set(pool.stats()) == {"queued_loads", "queued_stores"}


def cannot_start(monkeypatch, count):
    """Let only so many threads be started."""
    start, started = threading.Thread.start, []

    def start_some(thread):
        if len(started) == count:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)


def test_a_pool_that_gets_fewer_threads_works_with_those_and_says_so(kit, keys, monkeypatch, caplog):
    cannot_start(monkeypatch, 3)
    pool, events = kit.pool(kit.DictStore(), threads=16)
    pool.submit(store(1, keys))
    assert set(done(events, 1).statuses) == {DONE}
    pool.submit(load(2, keys))
    assert set(done(events, 2).statuses) == {DONE}
    pool.probe(3, keys, is_prefix=False)
    events.wait(Probed)
    pool.close(60)  # the thread that has opened the store has ended then, and with it what it logs
    (line,) = [record.getMessage() for record in caplog.records if "threads have started" in record.getMessage()]
    assert "2 of its 16 threads have started: can't start new thread; raise the limit" in line


def test_a_pool_that_gets_no_thread_for_its_lookups_says_why_it_is_not_open(kit, monkeypatch):
    cannot_start(monkeypatch, 1)
    _, events = kit.pool(kit.DictStore(), threads=4)
    assert "can't start new thread; raise the limit" in events.wait(Opened)[0].error
