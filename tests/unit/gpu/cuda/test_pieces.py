"""What the CUDA copies order the device to do, done here by hand in host memory: every byte must land in its place."""

import ctypes
import importlib.util
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtiers.gpu.copy_plan import plan_copy, writers_turn
from kvtiers.gpu.cuda.copy import _PAGES_PER_PIECE
from kvtiers.gpu.cuda.driver import MAX_ENTRIES
from kvtiers.gpu.cuda.geometry import UNIT_BYTES, group_geometry
from kvtiers.gpu.cuda.pieces import page_pieces, staged_pieces
from kvtiers.gpu.tensors import blocks_of_groups, kv_pages
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.rank_map import runs_of_rank
from kvtiers.types import BlockSpec

spec = importlib.util.spec_from_file_location("gpu_cases", Path(__file__).parents[3] / "gpu" / "cases.py")
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)

SLOTS = [1 << 15, 1 << 20]


class Hands:
    """One rank's device, played by memmove."""

    def __init__(self, layout, rank, kv, region, rank_map=None):
        self.layout, self.rank, self.rank_map = layout, rank, rank_map
        self.kv, self.region = kv, region
        pages = kv_pages(layout, rank, kv)
        runs = runs_of_rank(layout, rank, rank_map)
        self.groups = [group_geometry(layout, rank, group, pages, runs) for group in range(len(layout.groups))]
        self.num_blocks = blocks_of_groups(layout, pages)

    def move(self, spec, chunk_ids, method, slot_bytes, *, store):
        rows = len(self.region) // self.layout.row_stride
        plan = plan_copy(self.layout, spec, chunk_ids, num_blocks=self.num_blocks, num_rows=rows, into_rows=store)
        if store:
            plan = list(writers_turn(self.layout, self.rank, self.rank_map, plan))
        for part in plan:
            geometry = self.groups[part.group]
            if not len(part.blocks) or not geometry.block_bytes:
                continue
            if method == "staged":
                for piece in staged_pieces(part, geometry, slot_bytes, 7 * 64):
                    self.staged(geometry, piece, slot_bytes, store)
            else:
                for piece in page_pieces(part, geometry, 5):
                    (self.direct if method == "direct" else self.pages)(geometry, piece, store)

    def staged(self, geometry, piece, slot_bytes, store):
        assert len(piece.blocks) <= 7 * 64
        slot = np.zeros(slot_bytes, np.uint8)
        copies = piece.row_copies(geometry)
        assert (copies.others + copies.nbytes).max() <= slot_bytes
        kernel = lambda: self.kernel(  # noqa: E731
            geometry.units(image=True),
            piece,
            slot.ctypes.data,
            geometry.block_bytes * piece.per_tensor,
            store,
        )
        if store:
            kernel()
        self.engine(copies, slot.ctypes.data, store)
        if not store:
            kernel()

    def direct(self, geometry, piece, store):
        base = self.region.ctypes.data + geometry.cell_offset
        self.kernel(geometry.units(image=False), piece, base, geometry.row_stride, store)

    def pages(self, geometry, piece, store):
        self.engine(piece.page_copies(geometry), 0, store)

    def engine(self, copies, base, store):
        for row, other, nbytes in zip(copies.rows, copies.others, copies.nbytes, strict=True):
            self.move_bytes(self.region.ctypes.data + int(row), base + int(other), int(nbytes), store)

    def kernel(self, units, piece, base, stride, store):
        for block, row, place in piece.entries:
            for kv, block_stride, tensor, page, within, nbytes in units.tolist():
                assert 0 < nbytes <= UNIT_BYTES
                at = base + int(row) * stride + tensor * piece.per_tensor + (int(place) - piece.first) * page + within
                self.move_bytes(at, kv + int(block) * block_stride, nbytes, store)

    def move_bytes(self, row, kv, nbytes, store):
        ctypes.memmove(*((row, kv) if store else (kv, row)), nbytes)


def case_of_a_rank_without_bytes():
    """Return a transfer of two ranks' layout for the rank that holds nothing of any KV group."""
    layout = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, (0, 1)),), world_size=2)
    transfer = BlockSpec(np.array([25]), (1,), (0,))
    return cases.Case(layout, 0, transfer, np.array([0], np.int32), num_rows=2, padding=0, seed=0)


@pytest.mark.parametrize("method", ["staged", "direct", "pages"])
@settings(deadline=None, max_examples=60)
@example(case=case_of_a_rank_without_bytes(), slot_bytes=SLOTS[0])
@given(case=cases.cases() | cases.cases_of_many_groups(), slot_bytes=st.sampled_from(SLOTS))
def test_the_pieces_of_a_transfer_move_every_byte_to_its_place_and_no_other(method, case, slot_bytes):
    for store in (True, False):
        kv, region = [None if t is None else t.copy() for t in case.kv[case.rank]], case.region.copy()
        hands = Hands(case.layout, case.rank, kv, region, case.rank_map(case.rank))
        wanted_kv, wanted_region = [None if t is None else t.copy() for t in kv], region.copy()
        for tensor, block, start, at, nbytes in case.written(case.rank) if store else case.fragments(case.rank):
            if store:
                wanted_region[at : at + nbytes] = kv[tensor][block, start : start + nbytes]
            else:
                wanted_kv[tensor][block, start : start + nbytes] = region[at : at + nbytes]
        hands.move(case.spec, case.chunk_ids, method, slot_bytes, store=store)
        np.testing.assert_array_equal(region, wanted_region)
        for got, wanted in zip(kv, wanted_kv, strict=True):
            np.testing.assert_array_equal(got, wanted)


def geometry_of(per_chunk=1, pages=(4096,) * 32):
    layout = CacheLayout(
        ModelIdentity("m"),
        (KVGroup("g", 16),),
        tuple(KVTensor(f"t{i}", 0, page) for i, page in enumerate(pages)),
        blocks_per_chunk=per_chunk,
    )
    kv = [np.zeros((200, page), np.uint8) for page in pages]
    geometry = group_geometry(layout, 0, 0, kv_pages(layout, 0, kv), runs_of_rank(layout, 0, None))
    return layout, kv, geometry


def parts(layout, blocks, first=0):
    chunks = -(-(blocks + first) // layout.blocks_per_chunk)
    transfer = BlockSpec(np.arange(blocks), (blocks,), (first,))
    return plan_copy(layout, transfer, np.arange(chunks), num_blocks=[200], num_rows=chunks, into_rows=True)


@pytest.mark.parametrize("per_chunk", [1, 4])
def test_a_whole_row_is_one_copy_whatever_its_pages(per_chunk):
    layout, _, geometry = geometry_of(per_chunk)
    (part,) = parts(layout, 40)
    (piece,) = staged_pieces(part, geometry, 1 << 30, 480)
    copies = piece.row_copies(geometry)
    assert copies.nbytes.tolist() == [32 * 4096 * per_chunk] * (40 // per_chunk)


def test_the_blocks_of_a_chunk_that_is_not_whole_are_one_copy_a_tensor():
    layout, _, geometry = geometry_of(per_chunk=4)
    (part,) = parts(layout, 10, first=1)  # 3 blocks, 4 blocks, 3 blocks
    (piece,) = staged_pieces(part, geometry, 1 << 30, 480)
    assert sorted(piece.row_copies(geometry).nbytes.tolist()) == [3 * 4096] * 64 + [32 * 4 * 4096]


def test_pages_that_lie_side_by_side_on_both_sides_are_one_copy():
    layout, _, geometry = geometry_of(per_chunk=8, pages=(4096,))
    (part,) = parts(layout, 8)
    (piece,) = page_pieces(part, geometry, 480)
    assert piece.page_copies(geometry).nbytes.tolist() == [8 * 4096]


def test_a_row_that_is_larger_than_a_slot_goes_in_parts():
    layout, _, geometry = geometry_of(per_chunk=64)
    (part,) = parts(layout, 128)
    pieces = list(staged_pieces(part, geometry, 10 * 32 * 4096 + 5, 480))
    assert [len(piece.blocks) for piece in pieces] == [10, 10, 10, 10, 10, 10, 4] * 2
    assert pieces[1].row_copies(geometry).nbytes.tolist() == [10 * 4096] * 32


@pytest.mark.parametrize("slot_blocks", [1, 2, 3, 4, 7, 8, 100])
def test_a_chunk_that_is_loaded_twice_in_one_transfer_arrives_twice_whatever_the_slot_holds(slot_blocks):
    layout, kv, geometry = geometry_of(per_chunk=4, pages=(96, 32))
    region = np.random.default_rng(0).integers(0, 256, 3 * layout.row_stride, np.uint8)
    hands = Hands(layout, 0, kv, region)
    transfer = BlockSpec(np.arange(12), (12,), (0,))
    hands.move(transfer, np.array([1, 1, 2]), "staged", slot_blocks * geometry.block_bytes, store=False)
    row = region[layout.row_stride :]
    np.testing.assert_array_equal(kv[0][:8].ravel(), np.tile(row[: 4 * 96], 2))
    np.testing.assert_array_equal(kv[1][:8].ravel(), np.tile(row[4 * 96 : 4 * 128], 2))
    np.testing.assert_array_equal(kv[0][8:12].ravel(), row[layout.row_stride :][: 4 * 96])


class MillionTokens:
    """62,500 blocks of 16 tokens, 64 tensors of one word a block: so many words that a table of all is 96 MB."""

    blocks, tensors, per_chunk = 62_500, 64, 5

    def __init__(self):
        rows = self.blocks // self.per_chunk
        pages = (8,) * self.tensors
        self.layout = CacheLayout(
            ModelIdentity("m"),
            (KVGroup("g", 16),),
            tuple(KVTensor(f"t{i}", 0, page) for i, page in enumerate(pages)),
            blocks_per_chunk=self.per_chunk,
        )
        self.kv = np.arange(self.tensors * self.blocks, dtype=np.int64)
        self.region = np.full(rows * self.layout.row_stride // 8, -1, np.int64)
        tensors = list(self.kv.view(np.uint8).reshape(self.tensors, self.blocks, 8))
        runs = runs_of_rank(self.layout, 0, None)
        self.geometry = group_geometry(self.layout, 0, 0, kv_pages(self.layout, 0, tensors), runs)
        self.block_ids = np.arange(self.blocks)[::-1].copy()  # no two neighbours: nothing merges but whole rows
        self.chunk_ids = np.arange(rows)
        at = self.kv.reshape(self.tensors, -1)[:, self.block_ids].reshape(self.tensors, rows, self.per_chunk)
        self.wanted = at.transpose(1, 0, 2).reshape(rows, -1)

    def plan(self):
        transfer = BlockSpec(self.block_ids, (self.blocks,), (0,))
        limits = {"num_blocks": [self.blocks], "num_rows": len(self.chunk_ids), "into_rows": True}
        (part,) = plan_copy(self.layout, transfer, self.chunk_ids, **limits)
        return part

    def kernel(self, piece, image_of, units, rows, row_bytes):
        """Store a piece's words into rows (or images), all at once."""
        kv, stride, tensor, page, within, _ = units.T
        block, row, place = (column[:, None].astype(np.int64) for column in piece.entries.T)
        at = row * row_bytes + tensor * piece.per_tensor + (place - piece.first) * page + within
        rows[(image_of + at) // 8] = self.kv[(kv + block * stride - self.kv.ctypes.data) // 8]

    def store(self, method):
        geometry, slot_bytes = self.geometry, 30 << 20
        if method == "staged":
            slot = np.zeros(MAX_ENTRIES * geometry.block_bytes // 8, np.int64)
            units = geometry.units(image=True)
            for piece in staged_pieces(self.plan(), geometry, slot_bytes, MAX_ENTRIES):
                self.kernel(piece, 0, units, slot, geometry.block_bytes * piece.per_tensor)
                copies = piece.row_copies(geometry)
                for row, image, nbytes in zip(copies.rows // 8, copies.others // 8, copies.nbytes // 8, strict=True):
                    self.region[row : row + nbytes] = slot[image : image + nbytes]
        elif method == "direct":
            units = geometry.units(image=False)
            for piece in page_pieces(self.plan(), geometry, MAX_ENTRIES):
                self.kernel(piece, geometry.cell_offset, units, self.region, geometry.row_stride)
        else:
            for piece in page_pieces(self.plan(), geometry, _PAGES_PER_PIECE // self.tensors):
                copies = piece.page_copies(geometry)
                assert len(copies.rows) <= _PAGES_PER_PIECE
                assert (copies.nbytes == 8).all()
                self.region[copies.rows // 8] = self.kv[(copies.others - self.kv.ctypes.data) // 8]


@pytest.mark.parametrize("method", ["staged", "direct", "pages"])
def test_a_million_tokens_are_one_transfer_whose_descriptors_take_bounded_memory(method):
    million = MillionTokens()
    tracemalloc.start()
    try:
        million.store(method)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What grows with the blocks is a few words for each, whatever the number of tensors; the rest is one piece's.
    assert peak < 12 * million.blocks * 8 + (4 << 20)
    rows = million.region.reshape(len(million.chunk_ids), -1)[:, : million.per_chunk * million.tensors]
    np.testing.assert_array_equal(rows, million.wanted)
