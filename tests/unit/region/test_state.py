"""The pages beside the rows: what one process writes, another one reads."""

import mmap
import os

import pytest

from kvtiers.region.state import SETTLED, Desk, Progress, RegionState


@pytest.fixture
def state():
    state = RegionState.create("test", 8, 4096, 1 << 20)
    yield state
    state.close()


def test_what_the_owner_writes_is_read_through_a_descriptor_that_cannot_write(state):
    reader = RegionState(state.fd, writable=False)
    assert reader.shape == (8, 4096, 1 << 20)
    assert reader.progress == Progress(0, prefault_ended=False)
    for progress in (Progress(5, False), Progress(7, True), Progress(6, True, True)):
        state.progress = progress
        assert reader.progress == progress
    with pytest.raises(TypeError):
        reader.progress = Progress(8, True)
    with pytest.raises(PermissionError):
        mmap.mmap(state.fd, mmap.PAGESIZE)


def test_a_desk_is_silent_until_its_rank_says_something_and_again_when_it_is_blanked():
    desk = Desk.create("test")
    rank = Desk(desk.fd, writable=True)
    assert desk.pinned is None
    for rows in (0, 5, 2**40, SETTLED, None):
        rank.pinned = rows
        assert desk.pinned == rows
    desk.close()


def test_a_page_that_is_closed_holds_no_descriptor(state):
    desk = Desk.create("test")
    fd = desk.fd
    desk.close()
    desk.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
