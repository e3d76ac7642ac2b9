"""The choice of a way to copy: by what was measured, and never for a small gain at the model's cost."""

import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from kvtiers.gpu.cuda import autotune
from kvtiers.gpu.cuda.autotune import Choice, Scratch, choose
from kvtiers.gpu.cuda.geometry import group_geometry
from kvtiers.gpu.tensors import kv_pages
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.rank_map import runs_of_rank


class Memory(np.ndarray):
    """Device memory, played by an array."""

    def data_ptr(self):
        return self.ctypes.data


class Driver:
    def __init__(self):
        self.pinned = []

    def pin(self, address, nbytes):
        self.pinned.append((address, nbytes))

    def unpin(self, address):
        self.pinned = [piece for piece in self.pinned if piece[0] != address]


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def scratch(driver):
    layout = CacheLayout(
        ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("a", 0, 5000), KVTensor("b", 0, 3000)), blocks_per_chunk=4
    )
    kv = [np.zeros((2, 5000), np.uint8), np.zeros((2, 3000), np.uint8)]
    geometry = group_geometry(layout, 0, 0, kv_pages(layout, 0, kv), runs_of_rank(layout, 0, None))
    scratch = Scratch(geometry, driver, lambda nbytes: np.zeros(nbytes, np.uint8).view(Memory), 1 << 20)
    yield scratch
    scratch.close()
    assert driver.pinned == []


def test_the_measurement_stays_in_memory_of_its_own(scratch):
    part = scratch.part(scratch.rows)
    geometry = scratch.geometry
    copies = geometry.page_copies(part.blocks, part.rows, part.places)
    assert copies.rows.min() == 0
    assert (copies.rows + copies.nbytes).max() <= scratch.host.nbytes
    first = scratch.kv.data_ptr()
    assert copies.others.min() == first
    assert (copies.others + copies.nbytes).max() == first + scratch.kv.nbytes
    assert copies.nbytes.sum() == scratch.kv.nbytes


def test_its_memory_is_pinned_a_little_at_a_time_each_page_once(scratch, driver):
    """The engine's launches wait for each call, and a page that is pinned twice is refused."""
    pieces = driver.pinned
    assert len(pieces) > 1
    assert max(nbytes for _, nbytes in pieces) <= (1 << 20) + 4 * scratch.geometry.row_stride
    assert all(address % mmap.PAGESIZE == 0 for address, _ in pieces)
    ends = [address + nbytes for address, nbytes in pieces]
    assert [address for address, _ in pieces] == [scratch.address, *ends[:-1]]
    assert ends[-1] == scratch.address + scratch.host.nbytes


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        ({"staged": 20, "pages": 21, "direct": 19}, "staged"),
        ({"staged": 20, "pages": 30, "direct": 17}, "staged"),  # not worth a multiprocessor
        ({"staged": 20, "pages": 30, "direct": 5}, "direct"),
        ({"staged": 20, "pages": 8, "direct": 20}, "pages"),
    ],
)
def test_what_is_a_good_deal_faster_than_staging_is_chosen(scratch, milliseconds, chosen, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def copy(method, parts):
        many = sum(len(part.blocks) for part in parts) > 4
        now[0] += milliseconds[method] if many else 2 if method == "pages" else 20

    choice = choose(scratch, list(milliseconds), copy)
    assert choice.bulk == chosen
    assert choice.small == "pages"
    assert choice.of(choice.small_bytes) == "pages"
    assert choice.of(choice.small_bytes + 1) == chosen


def test_the_way_that_is_measured_first_does_not_pay_for_a_gpu_that_has_just_been_idle(scratch, monkeypatch):
    now, copies = [0.0], [0]
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def copy(method, _parts):
        copies[0] += 1
        now[0] += 20 if method == "pages" else 60 if copies[0] < 8 else 19

    assert choose(scratch, ["staged", "pages"], copy).small == "staged"


def test_a_choice_is_by_size():
    choice = Choice("direct", "staged", 1000)
    assert [choice.of(nbytes) for nbytes in (1, 1000, 1001)] == ["direct", "direct", "staged"]
