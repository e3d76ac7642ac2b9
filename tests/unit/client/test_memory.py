"""Callers' memory and bounce rows: any parts, gathered and scattered; rows that are leased, held and free again."""

import fcntl
import mmap
import os
import tempfile
import threading
import time

import numpy as np
import pytest

from kvtiers.api import StartError
from kvtiers.client.buffers import gather, length_of, parts_of, scatter
from kvtiers.client.rows import BounceRows, CallersMemory, UnmappableMemoryError

PATIENCE = 60.0
SEAL_FUTURE_WRITE = 0x10  # fcntl.F_SEAL_FUTURE_WRITE, which Python has from 3.13 on


@pytest.fixture
def rows():
    rows = BounceRows(4, 4096)
    yield rows
    rows.end()
    rows.close()


@pytest.mark.parametrize(
    "parts",
    [
        b"all of it",
        [b"a", bytearray(b"bc"), memoryview(b"def")],
        (np.arange(12, dtype=np.float32).reshape(3, 4), b"", np.ones((2, 2, 2), np.int16)),
        [np.arange(64, dtype=np.uint8).reshape(8, 8)[2:4]],
        memoryview(bytearray(range(32))).cast("i"),
    ],
)
def test_parts_lie_in_a_row_one_behind_the_other_and_come_back(rows, parts):
    flat = parts_of(parts, writable=False)
    expected = b"".join(bytes(memoryview(part)) for part in (parts if isinstance(parts, list | tuple) else [parts]))
    row = rows.row(2, len(expected))
    assert length_of(flat) == len(expected)
    gather(flat, row)
    assert bytes(row) == expected
    back = [np.zeros(part.nbytes, np.uint8) for part in flat]
    scatter(row, back)
    assert b"".join(map(bytes, back)) == expected


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ("text", TypeError),
        (None, TypeError),
        ([b"a", 1], TypeError),
        (np.arange(64, dtype=np.uint8)[::2], ValueError),
        (np.zeros((4, 4), np.uint8).T[:2], ValueError),
        (np.asfortranarray(np.zeros((4, 3), np.uint8)), ValueError),
    ],
)
def test_what_is_no_contiguous_buffer_is_refused(parts, error):
    with pytest.raises((error, BufferError, TypeError)):
        parts_of(parts, writable=False)


def test_a_buffer_to_read_into_must_be_writable():
    with pytest.raises(ValueError, match="read-only"):
        parts_of([bytearray(4), b"1234"], writable=True)


def test_rows_are_free_again_with_their_last_holder(rows):
    lease = rows.take(3, 0.0)
    assert len(lease.rows) == 3
    lease.hold()
    lease.release()
    assert len(rows.free) == 1
    lease.release()
    assert sorted(rows.free) == [0, 1, 2, 3]


def test_some_rows_are_better_than_none_and_none_are_waited_for_until_the_time_is_over(rows):
    first = rows.take(3, 0.0)
    second = rows.take(3, time.monotonic() + PATIENCE)
    assert sorted([*first.rows, *second.rows]) == [0, 1, 2, 3]
    assert rows.take(1, time.monotonic() + 0.01) is None


@pytest.mark.parametrize("what", ["release", "end"])
def test_who_waits_for_rows_goes_on_when_there_are_some_or_never_will_be(rows, what):
    lease = rows.take(4, 0.0)
    got = []
    thread = threading.Thread(target=lambda: got.append(rows.take(1, time.monotonic() + PATIENCE)))
    thread.start()
    (lease.release if what == "release" else rows.end)()
    thread.join(PATIENCE)
    assert [one is None for one in got] == [what == "end"]


PAGE = mmap.PAGESIZE


@pytest.fixture
def shared():
    """A descriptor of shared memory of eight pages, and the caller's mapping of all but its first two."""
    fd = os.memfd_create("kvtiers-test")
    os.ftruncate(fd, 8 * PAGE)
    yield fd, mmap.mmap(fd, 6 * PAGE, mmap.MAP_SHARED, offset=2 * PAGE)
    os.close(fd)


def test_shared_memory_of_a_callers_own_is_found_in_its_file_wherever_it_is_mapped(shared):
    fd, mapped = shared
    assert CallersMemory(fd, mapped).at == 2 * PAGE
    part = memoryview(mapped)[PAGE + 24 : 5 * PAGE]
    assert (CallersMemory(fd, part).at, len(CallersMemory(fd, part).view)) == (3 * PAGE + 24, 4 * PAGE - 24)
    assert CallersMemory(fd, np.frombuffer(mapped, np.float32).reshape(-1, 8)).at == 2 * PAGE
    mapped.madvise(mmap.MADV_DONTFORK, PAGE, 2 * PAGE)  # the kernel lists it in three parts now
    assert CallersMemory(fd, mapped).at == 2 * PAGE


def test_memory_that_is_not_of_the_descriptor_or_not_shared_is_refused_in_one_line(shared):
    fd, mapped = shared
    private = mmap.mmap(fd, 4 * PAGE, mmap.MAP_PRIVATE)
    other = os.memfd_create("kvtiers-test-other")
    os.ftruncate(other, 8 * PAGE)
    elsewhere = mmap.mmap(other, 4 * PAGE, mmap.MAP_SHARED)
    with tempfile.TemporaryFile() as file:
        for what, memory in ((fd, private), (fd, elsewhere), (file.fileno(), mapped), (fd, bytearray(4 * PAGE))):
            with pytest.raises(UnmappableMemoryError, match="no shared mapping of descriptor") as refused:
                CallersMemory(what, memory)
            assert "\n" not in str(refused.value)
    with pytest.raises(StartError, match="cannot be written") as mistake:
        CallersMemory(fd, memoryview(mapped).toreadonly())
    assert not isinstance(mistake.value, UnmappableMemoryError), "the caller's own mistake"
    os.ftruncate(fd, 4 * PAGE)
    with pytest.raises(UnmappableMemoryError, match="no shared mapping"):
        CallersMemory(fd, mapped)
    os.close(other)
    with pytest.raises(UnmappableMemoryError, match=r"descriptor -1: .*Bad file descriptor"):
        CallersMemory(-1, mapped)


def test_memory_that_the_caller_can_use_and_a_tier_host_cannot_map_is_refused():
    """Sealed after the caller has mapped it: no later mapping can be written."""
    fd = os.memfd_create("kvtiers-test-sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    mapped = mmap.mmap(fd, PAGE, mmap.MAP_SHARED)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
    mapped[:4] = b"mine"
    with pytest.raises(
        UnmappableMemoryError, match=f"descriptor {fd}: cannot map .*Operation not permitted"
    ) as refused:
        CallersMemory(fd, mapped)
    assert "\n" not in str(refused.value)
    os.close(fd)


def test_a_client_has_a_descriptor_of_the_callers_memory_until_it_is_closed(shared):
    fd, mapped = shared
    rows = BounceRows(4, 4096, CallersMemory(fd, mapped), 4)
    callers = rows.for_tiers([], core_dumps=False).callers
    mine = callers["fd"]
    assert mine != fd
    assert callers == {"fd": mine, "at": 2 * PAGE, "nbytes": 6 * PAGE}
    assert rows.region.nbytes == 6 * PAGE
    assert os.fstat(mine).st_ino == os.fstat(fd).st_ino
    rows.end()
    rows.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(mine)


def test_parts_that_follow_each_other_in_the_region_are_one_and_others_are_not_of_it(shared):
    fd, mapped = shared
    rows = BounceRows(4, 4096, CallersMemory(fd, mapped), 4)
    region = np.frombuffer(mapped, np.uint8)
    in_region = rows.in_region
    assert in_region.parts_of([region[8:20], region[:0], region[20:30], region[40:41], region[30:40]]) == [
        (8, 22),
        (40, 1),
        (30, 10),
    ]
    assert in_region.parts_of([region[:8], np.zeros(8, np.uint8)]) is None
    assert in_region.parts_of([region[at : at + 1] for at in range(0, 510, 2)]) is not None
    assert in_region.parts_of([region[at : at + 1] for at in range(0, 512, 2)]) is None, (
        "more parts than a value may have"
    )
    rows.end()
    rows.close()
