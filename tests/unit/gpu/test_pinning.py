"""Pinning: in pieces, behind the pre-faulting, undone as one; what pins is played, everything else is real."""

import logging
import threading
from types import SimpleNamespace

import pytest

from kvtiers.gpu import pin_pace
from kvtiers.gpu.copier import CudaError
from kvtiers.gpu.pin_pace import IDLE_SHARE, PinPace
from kvtiers.gpu.pinning import PinnedRows
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region.client import JoinStatus, RegionJoin

LAYOUT = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, 100),))
STRIDE = LAYOUT.row_stride
ADDRESS = 1 << 40


class Pinner:
    """Notes what is pinned; refuses from the ``limit``-th piece on."""

    def __init__(self, limit=None):
        self.pieces, self.unpinned, self.limit = {}, [], limit
        self.threads = set()

    def enter(self):
        self.threads.add(threading.current_thread().name)

    def pin(self, address, nbytes):
        if self.limit is not None and len(self.pieces) >= self.limit:
            raise CudaError("cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY")
        assert all(address >= at + n or address + nbytes <= at for at, n in self.pieces.items())
        self.pieces[address] = nbytes

    def unpin(self, address):
        self.unpinned.append(address)


class Join(RegionJoin):
    """A rank whose region the test populates."""

    def populate(self, rows, ended=False, memory_is_short=False):
        self._set(JoinStatus("ready", "", rows, ended, memory_is_short))


@pytest.fixture
def join():
    join = Join("e", LAYOUT, 0)
    join.num_rows = 10
    join.populate(0)
    yield join
    join.close()


def start(pinner, join, settle=lambda: None, piece=3 * STRIDE, **how):
    pace = PinPace(1.0, 0.002, most_bytes=piece)  # pieces of one size, without a rest
    return PinnedRows(pinner, join, ADDRESS, settle, how.pop("pace", pace), **how)


def until(condition):
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("nothing came of it in 30 s")


def test_pieces_follow_the_prefault_end_on_row_borders_and_cover_every_row(join):
    pinner = Pinner()
    pinned = start(pinner, join)
    assert pinned.rows == 0
    join.populate(7)
    until(lambda: pinned.rows == 6)  # two whole pieces of three rows; the third is not populated yet
    assert pinned.lease(7) == 6
    pinned.release()
    assert pinned.lease(6) == 6
    pinned.release()
    join.populate(10, ended=True)
    assert pinned.wait(60)
    assert pinner.pieces == {ADDRESS + row * STRIDE: min(3, 10 - row) * STRIDE for row in (0, 3, 6, 9)}
    assert pinner.threads == {"kvtiers-pin"}
    pinned.close()
    assert pinner.unpinned == [ADDRESS + row * STRIDE for row in (9, 6, 3, 0)]
    assert not pinned.lease(1)


def test_a_failure_unpins_everything_last_first_once_no_copy_needs_it_and_says_so_once(join, caplog):
    pinner, settled = Pinner(limit=2), []
    pinned = start(pinner, join, settle=lambda: settled.append(list(pinner.unpinned)))
    join.populate(6)
    until(lambda: pinned.rows == 6)
    assert pinned.lease(6)  # a copy is being launched
    with caplog.at_level(logging.WARNING, "kvtiers.gpu"):
        join.populate(10, ended=True)
        until(lambda: pinned.rows == 0)
        assert not pinned.lease(1)
        assert pinner.unpinned == []
        pinned.release()
        assert not pinned.wait(60)
        until(lambda: pinned.given_up)
    assert settled == [[]]  # it waited for the copies before it unpinned a byte
    assert pinner.unpinned == [ADDRESS + 3 * STRIDE, ADDRESS]
    (record,) = caplog.records
    assert "rows cannot be pinned" in record.message
    assert "copies to and from the GPU go on, slower" in record.message
    pinned.close()
    assert len(pinner.unpinned) == 2


def test_a_failure_on_a_lost_device_is_reported_to_the_waiting_thread_and_ends_the_thread_in_order(join):
    def lost():
        raise CudaError("cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED")

    pinner = Pinner(limit=2)
    pinned = start(pinner, join, settle=lost)
    join.populate(10, ended=True)
    assert not pinned.wait(60)
    assert "OUT_OF_MEMORY" in pinned.given_up
    assert pinner.unpinned == [ADDRESS + 3 * STRIDE, ADDRESS]
    pinned.close()


def test_closing_stops_in_the_middle_and_unpins_what_there_was(join):
    pinner = Pinner()
    pinned = start(pinner, join)
    join.populate(4)
    until(lambda: pinned.rows == 3)
    pinned.close()
    assert pinner.unpinned == [ADDRESS]


def test_where_the_systems_pages_are_larger_than_rows_no_page_is_pinned_twice(join, monkeypatch):
    monkeypatch.setattr(pin_pace, "mmap", SimpleNamespace(PAGESIZE=4 * STRIDE))
    pinner = Pinner()
    join.populate(10, ended=True)
    pinned = start(pinner, join, piece=STRIDE)
    assert pinned.wait(60)
    assert pinner.pieces == {ADDRESS + row * STRIDE: min(4, 10 - row) * STRIDE for row in (0, 4, 8)}
    pinned.close()


def test_a_region_without_prefault_is_pinned_all_the_same(join):
    pinner = Pinner()
    join.populate(0, ended=True)
    pinned = start(pinner, join)
    assert pinned.wait(60)
    pinned.close()


class Machine:
    """A played driver, and time that only pinning and resting take."""

    def __init__(self, seconds_a_row):
        self.now, self.pinning = 0.0, 0.0
        self.seconds_a_row = seconds_a_row
        self.pieces, self.rests = [], []

    def enter(self):
        pass

    def pin(self, address, nbytes):
        self.pieces.append((address - ADDRESS, nbytes))
        self.now += nbytes // STRIDE * self.seconds_a_row

    def unpin(self, address):
        self.pieces = [piece for piece in self.pieces if piece[0] != address - ADDRESS]

    def rest(self, seconds):
        self.rests.append(seconds)
        self.now += seconds


class Paced(PinnedRows):
    def _pause(self, seconds):
        self._pinner.rest(seconds)


@pytest.mark.parametrize(("busy", "share"), [(True, 0.05), (False, IDLE_SHARE)])
def test_pinning_takes_no_more_than_its_share_of_the_time_while_the_engine_works(join, busy, share):
    machine = Machine(seconds_a_row=0.001)
    join.num_rows = 100
    join.populate(100, ended=True)
    pace = PinPace(0.05, 0.002, most_bytes=8 * STRIDE)
    pinned = Paced(machine, join, ADDRESS, lambda: None, pace, lambda: busy, lambda: machine.now)
    assert pinned.wait(60)
    until(lambda: len(machine.rests) == len(machine.pieces))
    assert 100 * 0.001 / machine.now == pytest.approx(share)
    assert max(nbytes for _, nbytes in machine.pieces[3:]) <= 2 * STRIDE  # two rows of a millisecond
    pinned.close()
    assert machine.pieces == []


def test_pinning_follows_the_window_and_no_further(join):
    pinner = Pinner()
    pinned = start(pinner, join, piece=STRIDE)
    for rows in (2, 3, 7):
        join.populate(rows)
        until(lambda rows=rows: pinned.rows == rows)
    assert len(pinner.pieces) == 7
    pinned.close()
    assert len(pinner.unpinned) == 7


def test_rows_whose_memory_is_not_there_are_never_pinned(join):
    pinner = Pinner()
    pinned = start(pinner, join)
    settled = []
    join.settle = lambda: settled.append(pinned.rows)
    join.populate(4)
    join.populate(4, ended=True, memory_is_short=True)
    until(lambda: settled)
    assert settled == [4]
    assert sum(pinner.pieces.values()) == 4 * STRIDE
    pinned.close()


def test_closing_does_not_wait_for_a_rest(join):
    pinner = Pinner()
    join.populate(10, ended=True)
    pace = PinPace(1e-9, 0.002, most_bytes=STRIDE)  # after a piece it would rest for hours
    pinned = start(pinner, join, pace=pace, clock=iter(range(100)).__next__)
    until(lambda: pinned.rows)
    pinned.close()
    assert pinner.unpinned == [ADDRESS]


def test_some_of_the_rows_are_leased_as_far_as_they_are_pinned(join):
    pinned = start(Pinner(), join)
    assert pinned.lease(5) == 0
    join.populate(7)
    until(lambda: pinned.rows == 6)
    assert (pinned.lease(9), pinned.lease(4)) == (6, 4)
    pinned.release()
    pinned.release()
    pinned.close()


def test_nothing_is_pinned_within_a_pause(join):
    pinner = Pinner()
    pinned = start(pinner, join, piece=STRIDE)
    join.populate(2)
    until(lambda: pinned.rows == 2)
    with pinned.paused():
        join.populate(10, ended=True)
        assert not pinned.wait(0.05)
        assert len(pinner.pieces) == 2
    assert pinned.wait(60)
    pinned.close()
