"""Callers' memory and bounce rows: any parts, gathered and scattered; rows that are leased, held and free again."""

import threading
import time

import numpy as np
import pytest

from kvtiers.client.buffers import gather, length_of, parts_of, scatter
from kvtiers.client.rows import BounceRows

PATIENCE = 60.0


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
