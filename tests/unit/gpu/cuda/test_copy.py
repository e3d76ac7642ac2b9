"""CUDA copies' beginning and end on a device that refuses: played, since a real one seldom does."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.gpu.copier import CudaError, LostDeviceError
from kvtiers.gpu.copy_plan import GroupCopy
from kvtiers.gpu.cuda import copy as cuda_copy
from kvtiers.gpu.cuda.autotune import Choice
from kvtiers.gpu.cuda.copy import CudaCopies
from kvtiers.gpu.cuda.geometry import group_geometry
from kvtiers.gpu.settings import CopySettings
from kvtiers.gpu.tensors import kv_pages
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.rank_map import runs_of_rank

LAYOUT = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, 4096),))


class Memory(np.ndarray):
    def data_ptr(self):
        return self.ctypes.data


class LostDriver:
    def close(self):
        raise CudaError("cuCtxPushCurrent failed")


class Device(CudaCopies):
    """Copies on no device: what pins, and what runs, is noted."""

    def __init__(self, *, failure=None, lost=False):
        self.failure, self.lost = failure, lost
        self._lanes, self._groups = {"store": self}, []
        self.notes, self.pinned = [], set()
        self.stream = self.region = 0
        self.to_rows, self.slot_bytes = True, 1 << 20
        self._settings, self._has_kernel = CopySettings(), True
        self._driver = self
        self._device = "cuda:0"
        self._torch = self.cuda = self

    def get_device_name(self, device):
        return f"{device} {id(self)}"

    def _new_memory(self, nbytes):
        if isinstance(self.failure, RuntimeError):
            raise self.failure
        return np.zeros(nbytes, np.uint8).view(Memory)

    def _with_units(self, geometry):
        del geometry
        raise self.failure

    def settle(self):
        self.notes.append("settled")

    def pin(self, address, nbytes):
        del nbytes
        self.pinned.add(address)

    def unpin(self, address):
        self.notes.append("unpinned")
        self.pinned.remove(address)

    def raise_if_lost(self):
        if self.lost:
            raise LostDeviceError("cuda:0 is lost")


def geometry_of_one_page():
    pages = kv_pages(LAYOUT, 0, [np.zeros((4, 4096), np.uint8)])
    return group_geometry(LAYOUT, 0, 0, pages, runs_of_rank(LAYOUT, 0, None))


def choice_on(device):
    geometry = geometry_of_one_page()
    before = dict(cuda_copy._measured)
    try:
        return device._choice(geometry, device)
    finally:
        assert cuda_copy._measured == before  # the next start may do better


def test_a_measurement_that_fails_leaves_nothing_pinned_and_copies_go_the_usual_way():
    device = Device(failure=CudaError("cuLaunchKernel failed"))
    assert choice_on(device) == Choice("staged", "staged", 0)
    assert device.notes == ["settled", "unpinned"]
    assert not device.pinned


def test_what_was_measured_for_a_shape_and_direction_is_not_measured_again(monkeypatch):
    monkeypatch.setattr(cuda_copy, "_measured", {})
    device, measured = Device(), []

    def measure(*_):
        measured.append(device.to_rows)
        return Choice("direct", "staged", 7)

    device._measured_on = measure
    for device.to_rows in (True, False, True, False):
        assert device._choice(geometry_of_one_page(), device) == Choice("direct", "staged", 7)
    assert measured == [True, False]


def test_where_there_is_no_gpu_memory_to_measure_with_copies_go_the_usual_way():
    device = Device(failure=RuntimeError("CUDA out of memory"))
    assert choice_on(device) == Choice("staged", "staged", 0)
    assert not device.pinned


def test_a_device_that_is_lost_in_the_measurement_is_said_to_be_lost():
    device = Device(failure=CudaError("cuLaunchKernel failed"), lost=True)
    with pytest.raises(LostDeviceError):
        choice_on(device)
    assert not device.pinned


@pytest.mark.parametrize(("lost", "raised"), [(True, LostDeviceError), (False, RuntimeError)])
def test_a_job_that_comes_when_the_device_is_lost_already_fails_with_that_reason(lost, raised):
    def no_event():
        raise RuntimeError("CUDA error: device-side assert triggered")

    device = Device(lost=lost)
    device.Event = no_event
    with pytest.raises(raised):
        device.mark()


def test_to_close_on_a_lost_device_raises_nothing_and_may_come_again():
    device = Device()
    device._driver = LostDriver()
    device.close()
    device.close()
    assert not device._lanes


class Growing:
    """Rows of which more are pinned each time they are asked for; ``held``: leases that have not ended."""

    def __init__(self, steps):
        self.steps, self.held = list(steps), 0

    def lease(self, rows):
        pinned = min(rows, self.steps.pop(0) if len(self.steps) > 1 else self.steps[0])
        self.held += bool(pinned)
        return pinned

    def release(self):
        self.held -= 1


@given(
    rows=st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=40),
    steps=st.lists(st.integers(0, 45), min_size=1, max_size=6).map(sorted),
)
def test_a_copy_of_rows_that_are_partly_pinned_moves_each_block_once_and_takes_pinned_rows_as_such_only(rows, steps):
    device = Device()
    geometry = dataclasses.replace(geometry_of_one_page(), blocks_per_chunk=2)
    device._groups, device.pinned = [SimpleNamespace(geometry=geometry)], Growing(steps)
    device._method = lambda *_, **__: "pages"
    launched = []

    def launch(part, group, method, lane, mark, *, pinned):
        del group, method, lane, mark
        assert device.pinned.held == 1 or not pinned
        launched.extend((b, r, p, pinned) for b, r, p in zip(part.blocks, part.rows, part.places, strict=True))
        yield len(part.blocks)

    device._launch = launch
    numbers = np.repeat(np.array(rows), 2)
    plan = [GroupCopy(0, np.arange(len(numbers)), numbers, np.arange(len(numbers)) % 2)]
    assert sum(device._pieces(plan, None, 0)) == len(numbers)
    assert sorted((b, r, p) for b, r, p, _ in launched) == [(i, numbers[i], i % 2) for i in range(len(numbers))]
    assert all(row < max(steps) for _, row, _, pinned in launched if pinned)
    assert device.pinned.held == 0


def test_a_large_copy_into_rows_that_are_not_pinned_looks_again_for_those_that_have_been_pinned_meanwhile():
    device = Device()
    geometry = geometry_of_one_page()
    device._groups = [SimpleNamespace(geometry=geometry)]
    device._method = lambda *_, **__: "pages"
    first = cuda_copy._UNPINNED_BYTES // (geometry.block_bytes * geometry.blocks_per_chunk)
    device.pinned, parts = Growing([0, 10 * first]), []

    def launch(part, *_, pinned):
        parts.append((len(part.blocks), pinned))
        yield 1

    device._launch = launch
    rows = np.arange(3 * first)
    list(device._pieces([GroupCopy(0, rows, rows, np.zeros_like(rows))], None, 0))
    assert parts == [(first * geometry.blocks_per_chunk, False), (3 * first - first * geometry.blocks_per_chunk, True)]
