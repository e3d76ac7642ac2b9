"""Values in a client's caller's memory: moved from and to many places, and not at all once their call is over."""

import fcntl
import os
import struct
import threading
import time

import numpy as np
import pytest
from tests.stores import DictStore
from tests.unit.encryption.keyed import ring

from kvtiers.api import make_offload_key
from kvtiers.encryption import seal as encrypted_seal
from kvtiers.encryption.seal import EncryptedSeal
from kvtiers.host import bounce_buffers, claimed_views
from kvtiers.host.claimed_views import ClaimedViews
from kvtiers.host.messages import JobDone, Status, StoreJob
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.host.transfer_pool import PoolOptions, TransferPool
from kvtiers.host.value_run import ValueRun
from kvtiers.layout import seal as plain_seal
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.storage_name import StorageNames
from kvtiers.region.claims import RECORD_BYTES, ClaimState, ClaimTable
from kvtiers.region.memfd import create_memfd, map_memory

PAYLOAD, VALUE, ROWS, COUNT = 10_000, 12_288, 2, 6
NAMES = StorageNames("test/model-0123456789abcdef01234567/", b"layout-1")
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(COUNT)]
PARTS_FROM = ROWS * VALUE + COUNT * RECORD_BYTES
NBYTES = PARTS_FROM + COUNT * 16_384


class Gathering(DictStore):
    """A store that gathers and scatters by itself; ``before``: called in each of its methods, first."""

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
        if [len(parts) for parts in dsts] == [1]:
            return [self.read_into(names[0], dsts[0][0])]
        return [self.read_parts(name, parts) for name, parts in zip(names, dsts, strict=True)]

    def read_parts(self, name, parts):
        self.before("read_parts")
        self.parts.append([len(part) for part in parts])
        value, at = self.values.get(name, b""), 0
        if len(value) != sum(map(len, parts)):
            return 0
        for part in parts:
            part[:] = value[at : at + len(part)]
            at += len(part)
        return at


class Plain(Gathering):
    batch_values = read_many_into = write_many = None


class Bench:
    def __init__(self, store, cuts):
        fd = create_memfd("kvtiers-test", NBYTES)
        self.mapping = map_memory(fd, NBYTES, NBYTES)
        region = self.mapping.view[PARTS_FROM:]
        self.table = ClaimTable(fd, self.mapping.view, region, first=ROWS, at=ROWS * VALUE, count=COUNT)
        self.memory = np.frombuffer(self.mapping.view, np.uint8)
        self.region = np.frombuffer(region, np.uint8)
        self.fd = fd
        self.views = ValueViews(self.mapping.view[: ROWS * VALUE], VALUE)
        self.mover = self.mover_of(store)
        # From the end to the start, and a byte apart.
        self.cuts = cuts
        self.rows = range(ROWS, ROWS + COUNT)

    def close(self):
        os.close(self.fd)

    def mover_of(self, store, keys=None):
        claimed, options = ClaimedViews(self.table, VALUE), MoverOptions([(PAYLOAD, VALUE)])
        seal = keys and EncryptedSeal("", keys)
        return ValueMover(store, self.views, options, threading.Event(), seal, claimed=claimed)

    def parts(self, row):
        at, found = (row - ROWS + 1) * 16_384, []
        for length in self.cuts:
            at -= length + 1
            found.append((at, length))
        return found

    def open(self, in_place=False):
        for row in self.rows:
            self.table.open(row, self.parts(row), in_place=in_place)

    def fill(self, seed):
        for row in self.rows:
            content, at = np.random.default_rng(seed + row).integers(0, 256, PAYLOAD, np.uint8), 0
            for offset, length in self.parts(row):
                self.region[offset : offset + length] = content[at : at + length]
                at += length

    def content(self, row):
        return b"".join(self.region[offset : offset + length].tobytes() for offset, length in self.parts(row))

    def is_locked(self, row):
        """Return whether this process holds off the end of a claim: another kind of lock is in conflict with that."""
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, ROWS * VALUE + (row - ROWS) * RECORD_BYTES, 1, 0)
        return struct.unpack_from("h", fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, wanted))[0] != fcntl.F_UNLCK

    def revoke(self):
        return [self.table.revoke(row) for row in self.rows]

    @property
    def run(self):
        return ValueRun(NAMES, KEYS, list(self.rows), give_up_at=float("inf"))


CUTS = {"one": [PAYLOAD], "some": [1, 4096, 99, PAYLOAD - 4196], "most": [PAYLOAD // 80] * 80}


@pytest.fixture(params=CUTS)
def cuts(request):
    return CUTS[request.param]


@pytest.fixture(params=[Gathering, Plain])
def store(request):
    return request.param()


@pytest.fixture
def bench(store, cuts):
    bench = Bench(store, cuts)
    yield bench
    bench.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_values_come_back_to_the_same_places_and_nothing_beside_them_changes(bench, store, cuts, in_place):
    bench.fill(1)
    before = bench.region.copy()
    bench.open()
    assert set(bench.mover.store(bench.run).statuses) == {Status.DONE}
    assert (bench.region == before).all()
    for row in bench.rows:
        for offset, length in bench.parts(row):
            bench.region[offset : offset + length] = 0
    bench.open(in_place=in_place)
    assert set(bench.mover.load(bench.run).statuses) == {Status.DONE}
    assert (bench.region == before).all()
    assert set(bench.revoke()) == {ClaimState.LANDED}
    gathers = isinstance(store, Gathering) and store.write_many is not None and len(cuts) <= 63
    assert store.parts == [[*cuts, VALUE - PAYLOAD]] * (COUNT * (1 + in_place) if gathers else 0)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_damaged_is_not_found_and_only_in_place_touches_the_memory(bench, store, in_place):
    bench.fill(1)
    bench.open()
    bench.mover.store(bench.run)
    for key in KEYS:
        name = NAMES.name(key)
        store.values[name] = store.values[name][:500] + b"?" + store.values[name][501:]
    bench.fill(2)
    before = bench.region.copy()
    bench.open(in_place=in_place)
    assert set(bench.mover.load(bench.run).statuses) == {Status.CORRUPT}
    assert set(bench.revoke()) == {ClaimState.OPEN}
    if not store.parts or not in_place:
        assert (bench.region == before).all()
    assert store.values == {}, "what is damaged is removed"


@pytest.mark.parametrize("in_place", [False, True])
def test_encrypted_values_come_back_to_the_same_places_and_their_parts_are_never_a_stores(bench, store, in_place):
    bench.fill(1)
    before = bench.region.copy()
    bench.open()
    mover = bench.mover_of(store, ring())
    assert set(mover.store(bench.run).statuses) == {Status.DONE}
    assert (bench.region == before).all()
    bench.fill(2)
    bench.open(in_place=in_place)
    assert set(mover.load(bench.run).statuses) == {Status.DONE}
    assert all((bench.region == before).tolist())
    assert store.parts == []
    assert not any(bench.content(row)[:32] in value for row in bench.rows for value in store.values.values())
    for name, value in store.values.items():
        store.values[name] = value[:500] + bytes([value[500] ^ 1]) + value[501:]
    bench.open(in_place=in_place)
    assert set(mover.load(bench.run).statuses) == {Status.CORRUPT}
    assert (bench.region == before).all(), "what is forged touches no memory"


def test_memory_that_is_anothers_while_it_is_encrypted_is_not_stored(bench, store, monkeypatch):
    encrypt = encrypted_seal.encrypt_value

    def change(*args):
        bench.fill(2)
        encrypt(*args)
        bench.revoke()

    monkeypatch.setattr(encrypted_seal, "encrypt_value", change)
    bench.fill(1)
    bench.open()
    moved = bench.mover_of(store, ring()).store(bench.run)
    assert (set(moved.statuses), store.values) == ({Status.FAILED}, {})


@pytest.mark.parametrize("how", ["damaged", "half", "raises"])
def test_what_a_second_tier_damages_in_place_is_not_found_though_the_first_one_landed_it(bench, store, how):
    """The first tier's host has ended before its result was known, so that the next tier gets the same claims."""
    second = type(store)()
    bench.fill(1)
    bench.open()
    bench.mover.store(bench.run)
    for name, value in store.values.items():
        second.values[name] = value[:500] + b"?" + value[501:]
    if how != "damaged" and second.read_many_into is not None:
        whole = second.read_parts

        def read_half(name, parts):
            whole(name, parts)
            if how == "raises":
                raise OSError("it was to")
            return 0

        second.read_parts = read_half
    bench.open(in_place=True)
    assert set(bench.mover.load(bench.run).statuses) == {Status.DONE}
    before = bench.region.copy()
    assert Status.DONE not in bench.mover_of(second).load(bench.run).statuses
    states = bench.revoke()
    for row, state in zip(bench.rows, states, strict=True):
        for offset, length in bench.parts(row):
            is_whole = (bench.region[offset : offset + length] == before[offset : offset + length]).all()
            assert is_whole or state is ClaimState.OPEN, "its call would take it"
    if second.parts:
        assert ClaimState.OPEN in states


def test_a_host_that_ends_in_the_middle_of_a_copy_leaves_nothing_to_be_found(bench, monkeypatch):
    """The claims had landed before, from another tier, whose value may have other bytes."""
    bench.fill(1)
    bench.open()
    bench.mover.store(bench.run)
    bench.open()
    assert set(bench.mover.load(bench.run).statuses) == {Status.DONE}
    seen = []

    def copy(source, at, target, to, nbytes):
        if target is bench.table.region:
            seen.append([bench.table.state(row) for row in bench.rows].count(ClaimState.OPEN))

    monkeypatch.setattr(claimed_views, "copy_memory", copy)
    bench.mover.load(bench.run)
    assert seen
    assert set(seen) == {1}
    assert set(bench.revoke()) == {ClaimState.LANDED}


def test_memory_that_is_anothers_before_it_was_read_is_not_stored(bench, store):
    bench.fill(1)
    bench.open()

    def take_back(method):
        bench.revoke()
        bench.fill(2)

    store.before = take_back
    moved = bench.mover.store(bench.run)
    assert (set(moved.statuses), store.values) == ({Status.FAILED}, {})
    assert "the call is over" in moved.error


def test_memory_that_is_anothers_while_it_is_copied_or_hashed_is_not_stored(bench, store, cuts, monkeypatch):
    """What was copied, or hashed, may be of either: it would be stored as sound, under the key of the first."""
    gathers = store.write_many is not None and len(cuts) <= 63
    module, step = (plain_seal, "seal_parts") if gathers else (bounce_buffers, "copy_memory")
    step_of_it = getattr(module, step)

    def change(*args):
        bench.fill(2)
        step_of_it(*args)
        bench.revoke()

    monkeypatch.setattr(module, step, change)
    bench.fill(1)
    bench.open()
    moved = bench.mover.store(bench.run)
    assert (set(moved.statuses), store.values) == ({Status.FAILED}, {})


def test_memory_that_is_anothers_while_it_is_written_is_never_read_as_what_it_was(bench, store):
    """Where the value is a copy, it is the one to store; else it may be torn, and is removed again."""
    bench.fill(1)
    bench.open()
    expected = [bench.content(row) for row in bench.rows]
    wanted = ["write", "write_many"]

    def take_back(method):
        if method in wanted:
            wanted.clear()
            bench.revoke()
            bench.fill(2)

    store.before = take_back
    moved = bench.mover.store(bench.run)
    assert list(moved.statuses).count(Status.DONE) == len(store.values) == (not store.parts)
    store.before = lambda method: None
    bench.open()
    assert list(bench.mover.load(bench.run).statuses).count(Status.DONE) == len(store.values)
    if store.values:
        assert bench.content(ROWS) == expected[0]


def test_what_is_read_when_the_call_is_over_does_not_land(bench, store):
    bench.fill(1)
    bench.open()
    bench.mover.store(bench.run)
    bench.fill(2)
    before = bench.region.copy()
    bench.open()

    def take_back(method):
        bench.revoke()

    store.before = take_back
    moved = bench.mover.load(bench.run)
    assert set(moved.statuses) == {Status.FAILED}
    assert (bench.region == before).all()


def test_a_store_that_keeps_a_part_that_it_read_into_fails_the_value():
    store = Gathering()
    bench = Bench(store, [PAYLOAD])
    bench.fill(1)
    bench.open()
    bench.mover.store(bench.run)
    kept = []
    read = store.read_parts
    store.read_parts = lambda name, parts: kept.append(parts[0][:1]) or read(name, parts)
    bench.open(in_place=True)
    moved = bench.mover.load(bench.run)
    assert Status.DONE not in moved.statuses
    assert "read_many_into" in moved.error
    assert moved.kept
    bench.close()


def test_a_part_that_is_kept_for_a_moment_holds_off_the_calls_end_until_its_job_is_reported():
    store = Gathering()
    bench = Bench(store, [PAYLOAD])
    bench.fill(1)
    bench.open()
    bench.mover.store(bench.run)
    kept, events = [], []
    read = store.read_parts
    store.read_parts = lambda name, parts: kept.append(parts[0][:1]) or read(name, parts)
    pool = TransferPool(
        lambda: store,
        bench.views,
        NAMES,
        PoolOptions(MoverOptions([(PAYLOAD, VALUE)]), "test", 1, 60.0, (1.0, 1.0)),
        lambda event: events.append((event, bench.is_locked(ROWS))),
        claimed=ClaimedViews(bench.table, VALUE),
    )
    bench.open(in_place=True)
    pool.submit(StoreJob(1, True, KEYS[:2], [ROWS, ROWS + 1]))
    until = time.monotonic() + 60
    while not pool._kept and time.monotonic() < until:
        time.sleep(0.005)
    assert pool.check_kept()
    assert bench.is_locked(ROWS)
    kept.clear()
    assert not pool.check_kept()
    [is_locked] = [is_locked for event, is_locked in events if isinstance(event, JobDone)]
    assert not is_locked, "the next call with this claim would never end"
    pool.close(60)
    bench.close()


def test_values_in_rows_and_claims_are_moved_side_by_side(bench, store):
    bench.fill(1)
    bench.open()
    bench.mover.store(bench.run)
    run = ValueRun(NAMES, KEYS[:1], [1], give_up_at=float("inf"))
    assert list(bench.mover.load(run).statuses) == [Status.DONE]
    assert bench.memory[VALUE : VALUE + PAYLOAD].tobytes() == bench.content(ROWS)
