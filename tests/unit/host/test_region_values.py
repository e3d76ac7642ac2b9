"""Values in a client's region: moved from and to their parts, and not at all once their job is detached from them."""

import threading

import numpy as np
import pytest
from tests.stores import DictStore
from tests.unit.encryption.keyed import ring

from kvtiers.api import make_offload_key
from kvtiers.encryption import seal as encrypted_seal
from kvtiers.encryption.seal import EncryptedSeal
from kvtiers.host import bounce_buffers
from kvtiers.host.bounce_buffers import BounceBufferViews
from kvtiers.host.messages import JobDone, JobReleased, Status, StoreJob
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.host.transfer_pool import PoolOptions, TransferPool
from kvtiers.host.value_run import ValueRun
from kvtiers.layout import seal as plain_seal
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.storage_name import StorageNames

PAYLOAD, VALUE, ROWS, COUNT = 10_000, 12_288, 2, 6
PATIENCE = 60.0
NAMES = StorageNames("test/model-0123456789abcdef01234567/", b"layout-1")
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(COUNT)]


class Gathering(DictStore):
    """A store that gathers by itself; ``before``: called in each of its methods, first."""

    def __init__(self):
        super().__init__()
        self.before = lambda method: None
        self.parts = []

    def exists(self, names):
        self.before("exists")
        return super().exists(names)

    def read_into(self, name, dst):
        self.before("read_into")
        return super().read_into(name, dst)

    def write(self, name, src):
        self.before("write")
        super().write(name, src)

    batch_values = 1

    def write_many(self, names, srcs):
        self.before("write_many")
        for name, parts in zip(names, srcs, strict=True):
            if len(parts) > 1:
                self.parts.append([len(part) for part in parts])
            super().write(name, memoryview(b"".join(parts)))
        return [None] * len(names)

    def read_many_into(self, names, dsts):
        return [self.read_into(name, dst) for name, [dst] in zip(names, dsts, strict=True)]


class Plain(Gathering):
    batch_values = read_many_into = write_many = None


class Bench:
    def __init__(self, store, cuts):
        self.rows_memory = memoryview(bytearray(ROWS * VALUE))
        self.memory = memoryview(bytearray(COUNT * 16_384))
        self.region = np.frombuffer(self.memory, np.uint8)
        self.views = ValueViews(self.rows_memory, VALUE)
        self.callers = BounceBufferViews(self.rows_memory, VALUE, VALUE, self.memory)
        self.options = MoverOptions([(PAYLOAD, VALUE)])
        self.mover = self.mover_of(store)
        # From the end to the start, and a byte apart.
        self.cuts = cuts
        self.rows = range(ROWS, ROWS + COUNT)
        self.run = self.new_run()

    def mover_of(self, store, keys=None):
        seal = keys and EncryptedSeal("", keys)
        return ValueMover(store, self.views, self.options, threading.Event(), seal, callers=self.callers)

    def parts(self, row):
        at, found = (row - ROWS + 1) * 16_384, []
        for length in self.cuts:
            at -= length + 1
            found.append((at, length))
        return found

    def new_run(self):
        """Make a run of all values, that of the job that ``take_back`` detaches."""
        parts = [self.parts(row) for row in self.rows]
        self.run = ValueRun(NAMES, KEYS, list(self.rows), give_up_at=float("inf"), parts=parts)
        return self.run

    def fill(self, seed):
        for row in self.rows:
            content, at = np.random.default_rng(seed + row).integers(0, 256, PAYLOAD, np.uint8), 0
            for offset, length in self.parts(row):
                self.region[offset : offset + length] = content[at : at + length]
                at += length

    def content(self, row):
        return b"".join(self.region[offset : offset + length].tobytes() for offset, length in self.parts(row))

    def take_back(self):
        self.run.fence.detach(lambda: None)


CUTS = {"one": [PAYLOAD], "some": [1, 4096, 99, PAYLOAD - 4196], "most": [PAYLOAD // 80] * 80}


@pytest.fixture(params=CUTS)
def cuts(request):
    return CUTS[request.param]


@pytest.fixture(params=[Gathering, Plain])
def store(request):
    return request.param()


@pytest.fixture
def bench(store, cuts):
    return Bench(store, cuts)


def test_values_come_back_to_the_same_places_and_nothing_beside_them_changes(bench, store, cuts):
    bench.fill(1)
    before = bench.region.copy()
    assert set(bench.mover.store(bench.run).statuses) == {Status.DONE}
    assert (bench.region == before).all()
    for row in bench.rows:
        for offset, length in bench.parts(row):
            bench.region[offset : offset + length] = 0
    assert set(bench.mover.load(bench.new_run()).statuses) == {Status.DONE}
    assert (bench.region == before).all()
    assert set(bench.run.fence.statuses(bench.rows)) == {Status.DONE}
    gathers = isinstance(store, Gathering) and store.write_many is not None and len(cuts) <= 63
    assert store.parts == [[*cuts, VALUE - PAYLOAD]] * (COUNT if gathers else 0)


def test_what_is_damaged_is_not_found_and_touches_no_memory(bench, store):
    bench.fill(1)
    bench.mover.store(bench.run)
    for key in KEYS:
        name = NAMES.name(key)
        store.values[name] = store.values[name][:500] + b"?" + store.values[name][501:]
    bench.fill(2)
    before = bench.region.copy()
    assert set(bench.mover.load(bench.new_run()).statuses) == {Status.CORRUPT}
    assert (bench.region == before).all()
    assert store.values == {}, "what is damaged is removed"


def test_encrypted_values_come_back_to_the_same_places_and_their_parts_are_never_a_stores(bench, store):
    bench.fill(1)
    before = bench.region.copy()
    mover = bench.mover_of(store, ring())
    assert set(mover.store(bench.run).statuses) == {Status.DONE}
    assert (bench.region == before).all()
    bench.fill(2)
    assert set(mover.load(bench.new_run()).statuses) == {Status.DONE}
    assert all((bench.region == before).tolist())
    assert store.parts == []
    assert not any(bench.content(row)[:32] in value for row in bench.rows for value in store.values.values())
    for name, value in store.values.items():
        store.values[name] = value[:500] + bytes([value[500] ^ 1]) + value[501:]
    assert set(mover.load(bench.new_run()).statuses) == {Status.CORRUPT}
    assert (bench.region == before).all(), "what is forged touches no memory"


def test_memory_that_is_anothers_before_it_was_read_is_not_stored(bench, store):
    bench.fill(1)

    def take_back(method):
        bench.take_back()
        bench.fill(2)

    store.before = take_back
    moved = bench.mover.store(bench.run)
    assert (set(moved.statuses), store.values) == ({Status.FAILED}, {})
    assert "the call is over" in moved.error


@pytest.mark.parametrize("keys", [None, ring()], ids=["in clear", "encrypted"])
def test_memory_that_is_anothers_while_it_is_copied_or_hashed_is_not_stored(bench, store, cuts, monkeypatch, keys):
    """What was read may be of either: it would be stored as sound, under the key of the first."""
    gathers = store.write_many is not None and len(cuts) <= 63
    module, step = (plain_seal, "seal_parts") if gathers else (bounce_buffers, "copy_memory")
    if keys is not None:
        module, step = encrypted_seal, "encrypt_value"
    step_of_it = getattr(module, step)

    def change(*args):
        bench.fill(2)
        step_of_it(*args)
        bench.take_back()

    monkeypatch.setattr(module, step, change)
    bench.fill(1)
    moved = bench.mover_of(store, keys).store(bench.run)
    assert (set(moved.statuses), store.values) == ({Status.FAILED}, {})


def test_memory_that_is_anothers_while_it_is_written_is_never_read_as_what_it_was(bench, store):
    """Where the value is a copy, it is the one to store; else it may be torn, and is removed again."""
    bench.fill(1)
    expected = [bench.content(row) for row in bench.rows]
    wanted = ["write", "write_many"]

    def take_back(method):
        if method in wanted:
            wanted.clear()
            bench.take_back()
            bench.fill(2)

    store.before = take_back
    moved = bench.mover.store(bench.run)
    assert list(moved.statuses).count(Status.DONE) == len(store.values) == (not store.parts)
    store.before = lambda method: None
    assert list(bench.mover.load(bench.new_run()).statuses).count(Status.DONE) == len(store.values)
    if store.values:
        assert bench.content(ROWS) == expected[0]


def test_what_a_failed_call_has_written_of_memory_that_is_anothers_is_removed_and_no_further_one_begins(bench, store):
    """Torn, it would be found, and fail; a further attempt would write what the memory holds then."""
    store.transient_errors = (ConnectionError,)
    method = "write" if store.write_many is None else "write_many"
    write, calls = getattr(store, method), []

    def failing(*values):
        calls.append(method)
        write(*values)
        bench.take_back()
        bench.fill(2)
        raise ConnectionError("the value behind it")

    bench.fill(1)
    setattr(store, method, failing)
    bench.mover = bench.mover_of(store)
    moved = bench.mover.store(bench.run)
    assert (calls, Status.DONE in moved.statuses) == ([method], False)
    assert len(store.values) == (not store.parts), "a value in one view was whole"


def test_what_is_read_when_the_call_is_over_does_not_land(bench, store):
    bench.fill(1)
    bench.mover.store(bench.run)
    bench.fill(2)
    before = bench.region.copy()
    bench.new_run()

    def take_back(method):
        bench.take_back()

    store.before = take_back
    moved = bench.mover.load(bench.run)
    assert set(moved.statuses) == {Status.FAILED}
    assert (bench.region == before).all()


def test_values_in_rows_and_in_the_region_are_moved_by_one_job_and_by_jobs_side_by_side(bench, store):
    bench.fill(1)
    bench.mover.store(bench.run)
    expected = [bench.content(row) for row in bench.rows]
    bench.fill(2)
    both = ValueRun(NAMES, KEYS[:2], [1, ROWS], give_up_at=float("inf"), parts=[(), bench.parts(ROWS)])
    assert list(bench.mover.load(both).statuses) == [Status.DONE] * 2
    assert bench.rows_memory[VALUE : VALUE + PAYLOAD] == expected[0]
    assert bench.content(ROWS) == expected[1]
    alone = ValueRun(NAMES, KEYS[2:3], [1], give_up_at=float("inf"))
    assert list(bench.mover.load(alone).statuses) == [Status.DONE]
    assert bench.rows_memory[VALUE : VALUE + PAYLOAD] == expected[2]


@pytest.mark.parametrize("parts", [[(0, PAYLOAD - 1)], [(0, PAYLOAD), (PAYLOAD, 1)], [(COUNT * 16_384 - 1, PAYLOAD)]])
def test_parts_that_are_no_value_of_the_region_are_refused(parts):
    bench = Bench(Gathering(), [PAYLOAD])
    run = ValueRun(NAMES, KEYS[:1], [ROWS], give_up_at=float("inf"), parts=[parts])
    with pytest.raises(IndexError, match="does not lie in these parts"):
        bench.mover.store(run)


class Gate(Gathering):
    """It waits in the read or the write of its second value."""

    batch_values = 1

    def __init__(self):
        super().__init__()
        self.calls, self.begun, self.go_on = 0, threading.Event(), threading.Event()
        self.waits_in = ""

        def wait(method):
            self.calls += method == self.waits_in
            if self.calls == 2:
                self.begun.set()
                assert self.go_on.wait(PATIENCE)

        self.before = wait


@pytest.fixture
def pooled():
    """A pool with one thread, and its events."""
    store = Gate()
    bench, events = Bench(store, [1000, PAYLOAD - 1000]), []
    opened = threading.Event()

    def emit(event):
        events.append(event)
        opened.set()

    options = PoolOptions(bench.options, "test", 1, PATIENCE, (1.0, 1.0))
    pool = TransferPool(lambda: store, bench.views, NAMES, options, emit, callers=bench.callers)
    assert opened.wait(PATIENCE)
    yield pool, bench, store, events
    store.go_on.set()
    pool.close(PATIENCE)


def job(number, bench, *, is_load):
    rows = list(bench.rows)
    return StoreJob(number, is_load, KEYS, rows, parts=[bench.parts(row) for row in rows])


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_a_load_that_is_detached_says_what_has_landed_and_nothing_lands_later(pooled):
    pool, bench, store, events = pooled
    bench.fill(1)
    expected = bench.content(ROWS)
    pool.submit(job(1, bench, is_load=False))
    assert pool.drain(PATIENCE)
    bench.fill(2)
    before = [bench.content(row) for row in bench.rows]
    store.waits_in = "read_into"
    pool.submit(job(2, bench, is_load=True))
    assert store.begun.wait(PATIENCE)
    pool.release(2)
    assert of(JobReleased, events) == [JobReleased(2, bytes([Status.DONE] + [Status.FAILED] * (COUNT - 1)))]
    store.go_on.set()
    assert pool.drain(PATIENCE)
    assert [bench.content(row) for row in bench.rows] == [expected, *before[1:]]
    assert of(JobDone, events)[-1].statuses == bytes([Status.DONE] + [Status.FAILED] * (COUNT - 1))


def test_a_store_that_is_detached_in_its_write_leaves_nothing_of_what_the_memory_holds_then(pooled):
    pool, bench, store, events = pooled
    bench.fill(1)
    expected = bench.content(ROWS)
    store.waits_in = "write_many"
    pool.submit(job(1, bench, is_load=False))
    assert store.begun.wait(PATIENCE)
    pool.release(1)
    assert [event.job_id for event in of(JobReleased, events)] == [1]
    bench.fill(2)
    store.go_on.set()
    assert pool.drain(PATIENCE)
    assert [value[:PAYLOAD] for value in store.values.values()] == [expected]
    assert list(of(JobDone, events)[-1].statuses).count(Status.DONE) == 1


def test_a_job_in_rows_that_are_used_where_they_lie_is_not_detached(pooled):
    pool, _, store, events = pooled
    store.waits_in = "write_many"
    pool.submit(StoreJob(1, False, KEYS[:2], [0, 1]))
    assert store.begun.wait(PATIENCE)
    pool.release(1)
    store.go_on.set()
    assert pool.drain(PATIENCE)
    assert of(JobReleased, events) == []
    assert list(of(JobDone, events)[-1].statuses) == [Status.DONE] * 2
