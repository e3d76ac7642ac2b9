"""Rows that have no room for a seal: their values lie beside them, and only what is sound reaches a row."""

import ctypes
import re
import threading
from pathlib import Path

import pytest
from tests.stores import DictStore

from kvtiers.api import make_offload_key
from kvtiers.host.bounce_buffers import BounceBufferViews, value_views
from kvtiers.host.messages import Status
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.host.value_run import ValueRun
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.storage_name import StorageNames
from kvtiers.region.memfd import HUGE_PAGE_BYTES

ROW, VALUE, ROWS = 4096, 8192, 16
NAMES = StorageNames("test/model-0123456789abcdef01234567/", b"layout-1")
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(6)]
EMPTY = b"\xdb" * ROW


class Store(DictStore):
    """``kept``: the views that it did not give back."""

    def __init__(self, keeps=False):
        super().__init__()
        self.kept = []
        self.keeps = keeps

    def read_into(self, name, dst):
        found = super().read_into(name, dst)
        if found and self.keeps:
            self.kept.append(dst[:])
        return found


@pytest.fixture
def memory():
    return bytearray(EMPTY * ROWS)


def mover(memory, store):
    views = value_views(memoryview(memory), ROW, VALUE)
    return ValueMover(store, views, MoverOptions([(ROW, VALUE)]), threading.Event())


def run(rows=range(6)):
    return ValueRun(NAMES, KEYS, list(rows), give_up_at=float("inf"))


def content(number):
    return bytes([number + 1]) * ROW


def filled(memory, store):
    """A mover that has stored six rows, all of which have been overwritten since."""
    for number in range(6):
        memory[number * ROW : (number + 1) * ROW] = content(number)
    moving = mover(memory, store)
    assert set(moving.store(run()).statuses) == {Status.DONE}
    memory[:] = EMPTY * ROWS
    return moving


def row(memory, number):
    return bytes(memory[number * ROW : (number + 1) * ROW])


def test_whole_rows_come_back_and_no_byte_beside_them_changes(memory):
    moving = filled(memory, Store())
    rows = [9, 3, 5, 1, 12, 7]
    assert set(moving.load(run(rows)).statuses) == {Status.DONE}
    assert [row(memory, number) for number in rows] == [content(number) for number in range(6)]
    assert all(row(memory, number) == EMPTY for number in range(ROWS) if number not in rows)


def test_a_store_leaves_every_row_as_it_is(memory):
    before = bytes(range(256)) * (ROW // 256)
    memory[:] = before * ROWS
    mover(memory, Store()).store(run())
    assert bytes(memory) == before * ROWS


@pytest.mark.parametrize("damage", [lambda v: bytes(len(v)), lambda v: v[:100] + b"?" + v[101:], lambda v: v[:4096]])
def test_what_is_damaged_or_short_never_touches_a_row(memory, damage):
    store = Store()
    moving = filled(memory, store)
    name = NAMES.name(KEYS[2])
    store.values[name] = damage(store.values[name])
    statuses = moving.load(run()).statuses
    assert [index for index, status in enumerate(statuses) if status != Status.DONE] == [2]
    assert row(memory, 2) == EMPTY


def test_a_buffer_that_a_store_keeps_is_not_used_again(memory):
    store = Store(keeps=True)
    moving = filled(memory, store)
    moved = moving.load(run())
    assert len(moved.kept) == 1
    assert "kept the buffer" in moved.error
    kept, before = store.kept[0], bytes(store.kept[0])
    store.keeps = False
    assert set(moving.load(run()).statuses) == {Status.DONE}
    assert bytes(kept) == before
    kept[:] = bytes(VALUE)
    assert row(memory, 0) == content(0)


def test_threads_do_not_share_their_memory(memory):
    store = Store()
    moving = filled(memory, store)
    inside, done = threading.Barrier(2), []
    read_into = store.read_into

    def wait_for_the_other(name, dst):
        inside.wait(60)  # both have their places
        read = read_into(name, dst)
        inside.wait(60)  # both have read, neither has landed
        return read

    store.read_into = wait_for_the_other

    def load(row, key):
        done.append(moving.load(ValueRun(NAMES, [key], [row], give_up_at=float("inf"))).statuses[0])

    threads = [threading.Thread(target=load, args=pair) for pair in ((0, KEYS[0]), (1, KEYS[1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [Status.DONE, Status.DONE]
    assert [row(memory, 0), row(memory, 1)] == [content(0), content(1)]


def test_values_that_fit_their_rows_lie_in_them(memory):
    assert type(value_views(memoryview(memory), ROW, ROW)) is ValueViews
    assert type(value_views(memoryview(memory), ROW, ROW + 1)) is BounceBufferViews


@pytest.mark.parametrize("nbytes", [0, VALUE + 1])
def test_a_value_of_another_length_is_refused(memory, nbytes):
    views = BounceBufferViews(memoryview(memory), ROW, VALUE)
    views.begin([1])
    with pytest.raises(IndexError, match="in a value of 8192"):
        views.own([1], [nbytes])


def test_a_row_that_is_not_there_is_refused(memory):
    views = BounceBufferViews(memoryview(memory), ROW, VALUE)
    views.begin([16])
    with pytest.raises(IndexError, match="row 16"):
        views.join(16, ROW)


def test_the_memory_beside_the_rows_lies_in_whole_huge_pages_where_there_are_some(memory):
    views = BounceBufferViews(memoryview(memory), ROW, VALUE)
    views.begin([3])
    (borrowed,) = views.own([3], [VALUE])
    address = ctypes.addressof((ctypes.c_ubyte * 0).from_buffer(borrowed))
    mappings = re.findall(
        r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.DOTALL | re.MULTILINE
    )
    ((end, flags),) = [
        (int(end, 16), flags.split()) for start, end, flags in mappings if int(start, 16) <= address < int(end, 16)
    ]
    assert "hg" in flags, "the kernel was asked for them"
    assert address + HUGE_PAGE_BYTES["2MiB"] <= end


class Gathering(Store):
    """It notes in which views it is given values."""

    batch_values = 1

    def __init__(self, keeps=False):
        super().__init__()
        self.lengths = []
        self.keeps_a_part = keeps

    def read_many_into(self, names, dsts):
        return [self.read_into(name, dst) for name, [dst] in zip(names, dsts, strict=True)]

    def write_many(self, names, srcs):
        for name, parts in zip(names, srcs, strict=True):
            self.lengths.append([len(part) for part in parts])
            assert all(part.readonly for part in parts)
            if self.keeps_a_part:
                self.kept.append(parts[1][:1])
            self.write(name, memoryview(b"".join(parts)))
        return [None] * len(names)


def test_a_store_that_gathers_gets_the_row_itself_and_the_same_value_as_others(memory):
    gathering, plain = Gathering(), Store()
    for number in range(6):
        memory[number * ROW : (number + 1) * ROW] = content(number)
    before = bytes(memory)
    for store in (gathering, plain):
        moved = mover(memory, store).store(run())
        assert list(moved.statuses) == [Status.DONE] * 6
        assert moved.nbytes == 6 * VALUE
    assert gathering.lengths == [[ROW, VALUE - ROW]] * 6
    assert {name: bytes(value) for name, value in gathering.values.items()} == {
        name: bytes(value) for name, value in plain.values.items()
    }
    assert memory == before
    memory[:] = EMPTY * ROWS
    assert list(mover(memory, gathering).load(run()).statuses) == [Status.DONE] * 6
    assert memory[: 6 * ROW] == b"".join(map(content, range(6)))


def test_a_part_that_a_store_keeps_fails_the_value(memory):
    moved = mover(memory, Gathering(keeps=True)).store(run())
    assert Status.DONE not in moved.statuses
    assert "Gathering.write_many" in moved.error
    assert "kept the buffer" in moved.error
    assert moved.kept
