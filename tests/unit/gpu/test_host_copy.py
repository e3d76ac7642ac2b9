"""Copies between KV tensors and rows, against a slow reference that walks a row byte by byte."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers.base import BlockSpec
from kvtiers.gpu.copy_plan import GeometryError, plan_copy
from kvtiers.gpu.host_copy import HostCopier
from kvtiers.rows.layout import CacheLayout, KVGroup, KVTensor, ModelIdentity

NUM_BLOCKS = 40


@dataclass
class Case:
    layout: CacheLayout
    rank: int
    spec: BlockSpec
    chunk_ids: np.ndarray
    num_rows: int
    padding: int
    seed: int

    def tensors(self) -> list[np.ndarray | None]:
        rng = np.random.default_rng(self.seed)
        return [
            rng.integers(0, 256, (NUM_BLOCKS, page + self.padding), np.uint8)
            if (page := t.page_on(self.rank))
            else None
            for t in self.layout.tensors
        ]

    def region(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed + 1)
        return rng.integers(0, 256, self.num_rows * self.layout.row_stride, np.uint8)

    def pages(self):
        """Yield (tensor, block id, first byte in the region, page bytes) of every page that this transfer moves."""
        blocks, chunks = list(self.spec.block_ids), list(self.chunk_ids)
        per_chunk = self.layout.blocks_per_chunk
        for group, size in enumerate(self.spec.group_sizes):
            place = self.spec.block_indices[group] % per_chunk
            chunk = None
            for _ in range(size):
                if chunk is None or place == per_chunk:
                    chunk, place = chunks.pop(0), 0 if chunk is not None else place
                block = blocks.pop(0)
                for tensor, offset, page in self._cell(group, place):
                    yield tensor, block, int(chunk) * self.layout.row_stride + offset, page
                place += 1

    def _cell(self, group: int, wanted_place: int):
        """Walk a chunk of this group as the layout's drawing shows it; yield where this rank's pages of a place lie."""
        at = 0
        ranks = range(self.layout.world_size) if self.layout.row_layout == "direct" else [self.rank]
        for rank in ranks:
            for index, tensor in enumerate(self.layout.tensors):
                for place in range(self.layout.blocks_per_chunk if tensor.group == group else 0):
                    page = tensor.page_on(rank)
                    if rank == self.rank and place == wanted_place and page:
                        yield index, at, page
                    at += page


@st.composite
def cases(draw) -> Case:
    row_layout = draw(st.sampled_from(["direct", "replicated"]))
    world = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 5))
    page = st.integers(1, 70)
    tensors = []
    for group in range(groups):
        for index in range(draw(st.integers(1, 3))):
            by_rank = row_layout == "direct" and draw(st.booleans())
            sizes = draw(st.lists(st.integers(0, 40), min_size=world, max_size=world).filter(any)) if by_rank else None
            tensors.append(KVTensor(f"g{group}.t{index}", group, tuple(sizes) if sizes else draw(page)))
    layout = CacheLayout(
        ModelIdentity("m"),
        tuple(KVGroup(f"g{group}", 16) for group in range(groups)),
        tuple(draw(st.permutations(tensors))),
        blocks_per_chunk=draw(st.integers(1, 9)),
        world_size=world,
        row_layout=row_layout,
    )
    sizes = tuple(draw(st.integers(0, 12)) for _ in range(groups))
    indices = tuple(draw(st.integers(0, 100)) for _ in range(groups))
    per_chunk = layout.blocks_per_chunk
    needed = sum(-(-(n + i % per_chunk) // per_chunk) for n, i in zip(sizes, indices, strict=True) if n)
    blocks = [b for n in sizes for b in draw(st.permutations(range(NUM_BLOCKS)))[:n]]
    rows = needed + draw(st.integers(0, 5))
    return Case(
        layout,
        rank=draw(st.integers(0, world - 1)),
        spec=BlockSpec(np.array(blocks, np.int64), sizes, indices),
        chunk_ids=np.array(draw(st.permutations(range(rows)))[:needed], np.int32),
        num_rows=rows,
        padding=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 2**30)),
    )


@settings(deadline=None, max_examples=150)
@given(cases())
def test_a_store_puts_every_byte_in_its_place_and_changes_no_other(case: Case) -> None:
    tensors, region = case.tensors(), case.region()
    expected = region.copy()
    moved = 0
    if case.layout.row_layout == "direct" or case.rank == 0:
        for tensor, block, at, page in case.pages():
            expected[at : at + page] = tensors[tensor][block, :page]
            moved += page
    before = [None if tensor is None else tensor.copy() for tensor in tensors]
    copier = HostCopier(case.layout, case.rank, tensors)
    copier.attach(memoryview(region))
    assert sum(copier.store(case.spec, case.chunk_ids)) == moved
    np.testing.assert_array_equal(region, expected)
    for tensor, untouched in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor, untouched)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_a_load_puts_every_byte_in_its_place_and_changes_no_other(case: Case) -> None:
    tensors, region = case.tensors(), case.region()
    expected = [None if tensor is None else tensor.copy() for tensor in tensors]
    moved = 0
    for tensor, block, at, page in case.pages():
        expected[tensor][block, :page] = region[at : at + page]
        moved += page
    untouched = region.copy()
    copier = HostCopier(case.layout, case.rank, tensors)
    copier.attach(memoryview(region))
    assert sum(copier.load(case.spec, case.chunk_ids)) == moved
    np.testing.assert_array_equal(region, untouched)
    for tensor, right in zip(tensors, expected, strict=True):
        np.testing.assert_array_equal(tensor, right)


@settings(deadline=None, max_examples=50)
@given(cases())
def test_what_all_ranks_store_each_of_them_loads_again(case: Case) -> None:
    region = case.region()
    loaded, wanted = [], []
    ranks = range(case.layout.world_size)
    for rank in ranks:
        case.rank = rank
        tensors = case.tensors()
        copier = HostCopier(case.layout, rank, tensors)
        copier.attach(memoryview(region))
        sum(copier.store(case.spec, case.chunk_ids))
        wanted.append(tensors)
    for rank in ranks:
        case.rank = rank
        tensors = [None if tensor is None else np.zeros_like(tensor) for tensor in wanted[rank]]
        copier = HostCopier(case.layout, rank, tensors)
        copier.attach(memoryview(region))
        sum(copier.load(case.spec, case.chunk_ids))
        loaded.append(tensors)
    for rank in ranks:
        case.rank = rank
        for tensor, block, _, page in case.pages():
            np.testing.assert_array_equal(loaded[rank][tensor][block, :page], wanted[rank][tensor][block, :page])


def one_group(per_chunk: int = 1, page: int = 64, **options) -> CacheLayout:
    return CacheLayout(
        ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, page),), blocks_per_chunk=per_chunk, **options
    )


def copier_for(layout: CacheLayout, blocks: int = 8, rows: int = 8) -> tuple[HostCopier, np.ndarray, np.ndarray]:
    kv = np.zeros((blocks, layout.tensors[0].page_on(0)), np.uint8)
    region = np.zeros(rows * layout.row_stride, np.uint8)
    copier = HostCopier(layout, 0, [kv])
    copier.attach(memoryview(region))
    return copier, kv, region


def spec(blocks, sizes=None, indices=(0,)) -> BlockSpec:
    return BlockSpec(np.array(blocks, np.int64), (len(blocks),) if sizes is None else sizes, indices)


def test_a_million_tokens_are_one_transfer_in_pieces_of_bounded_size() -> None:
    blocks, rows = 62_500, -(-62_500 // 64)
    layout = one_group(per_chunk=64, page=128)
    copier, kv, region = copier_for(layout, blocks, rows)
    kv[:] = np.arange(blocks, dtype=np.uint32).view(np.uint8).reshape(-1, 4).repeat(32, axis=1)
    pieces = list(copier.store(spec(np.arange(blocks)), np.arange(rows, dtype=np.int32)))
    assert sum(pieces) == kv.nbytes
    assert max(pieces) <= 1 << 20
    payload = region.reshape(rows, layout.row_stride)[:, : 64 * 128].reshape(-1, 128)[:blocks]
    np.testing.assert_array_equal(payload, kv)


def test_tensors_of_any_type_and_with_padding_between_blocks_are_copied_in_place() -> None:
    layout = one_group(page=48)
    backing = np.arange(8 * 2 * 4 * 4, dtype=np.float32).reshape(8, 2, 4, 4)
    kv = backing[::2]  # every second block: contiguous blocks, a gap between them
    region = np.zeros(4 * layout.row_stride, np.uint8)
    copier = HostCopier(layout, 0, [kv])
    copier.attach(memoryview(region))
    sum(copier.store(spec([1, 3]), np.array([2, 0], np.int32)))
    rows = region.reshape(4, -1)
    np.testing.assert_array_equal(rows[2, :48].view(np.float32), backing[2].ravel()[:12])
    np.testing.assert_array_equal(rows[0, :48].view(np.float32), backing[6].ravel()[:12])
    sum(copier.load(spec([0]), np.array([0], np.int32)))
    np.testing.assert_array_equal(backing[0].ravel()[:12], backing[6].ravel()[:12])


@pytest.mark.parametrize(
    ("blocks", "chunks", "text"),
    [
        (spec([1, 2], sizes=(3,)), [0, 1, 2], "group_sizes (3,) sum to 3, not to the 2 block ids"),
        (spec([1, 2], sizes=(1, 1), indices=(0,)), [0], "group_sizes has 2 entries, expected one for each of 1 groups"),
        (spec([1, 2], indices=(0, 0)), [0], "block_indices has 2 entries"),
        (spec([1], indices=(-1,)), [0], "expected no negative number"),
        (spec([1, 2, 3, 4], indices=(1,)), [0], "1 chunk ids, but group_sizes (4,) from block_indices (1,)"),
        (spec([1, 2, 3, 4], indices=(0,)), [0, 1], "need 1"),
        (spec([8]), [0], "group 0: block id 8 does not exist; there are 8 blocks in its tensors"),
        (spec([-1]), [0], "group 0: block id -1 does not exist"),
        (spec([1]), [8], "chunk id 8 does not exist; there are 8 rows in the region"),
        (spec([1]), [-3], "chunk id -3 does not exist"),
        (BlockSpec(np.zeros((1, 1), np.int64), (1,), (0,)), [0], "block_ids is an array of shape (1, 1)"),
        (BlockSpec(np.array([1.5]), (1,), (0,)), [0], "expected 1-D integers"),
    ],
)
def test_geometry_that_does_not_add_up_is_refused_before_a_byte_moves(blocks, chunks, text) -> None:
    copier, kv, region = copier_for(one_group(per_chunk=4))
    kv[:] = 7
    with pytest.raises(GeometryError) as refused:
        sum(copier.store(blocks, np.array(chunks)))
    assert text in str(refused.value)
    assert not region.any()


def test_a_destination_that_is_named_twice_is_refused() -> None:
    layout = one_group(per_chunk=2)
    options = {"num_blocks": [8], "num_rows": 8}
    with pytest.raises(GeometryError, match="chunk id 3 would be written twice"):
        plan_copy(layout, spec([1, 2, 4, 5]), np.array([3, 3]), **options, into_rows=True)
    with pytest.raises(GeometryError, match="group 0: block id 1 would be written twice"):
        plan_copy(layout, spec([1, 2, 1]), np.array([3, 4]), **options, into_rows=False)


def test_an_empty_transfer_is_valid() -> None:
    copier, _, _ = copier_for(one_group())
    assert list(copier.store(spec([]), np.array([]))) == []


@pytest.mark.parametrize(
    ("layout", "rank", "tensors", "text"),
    [
        (one_group(), 1, [np.zeros((2, 64), np.uint8)], "rank 1 does not exist"),
        (one_group(), 0, [], "0 KV tensors, but the layout names 1"),
        (one_group(), 0, [[1, 2]], "kv_tensors[0] ('t'): expected a numpy array, got list"),
        (one_group(), 0, [np.zeros((2, 63), np.uint8)], "a block has 63 bytes, but the layout's page_bytes is 64"),
        (one_group(), 0, [np.zeros((64, 64), np.uint8).T[:, ::2]], "each of them contiguous"),
        (one_group(), 0, [np.zeros(64, np.uint8)], "expected a writable array of blocks"),
        (one_group(), 0, [np.broadcast_to(np.zeros(64, np.uint8), (4, 64))], "expected a writable array of blocks"),
        (one_group(row_layout="replicated"), 0, [None], "expected a numpy array, got NoneType"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused_by_name(layout, rank, tensors, text) -> None:
    with pytest.raises(ConfigError) as refused:
        HostCopier(layout, rank, tensors)
    assert text in str(refused.value)


def test_a_canonical_row_layout_is_refused_in_one_line() -> None:
    layout = CacheLayout(
        ModelIdentity("m"),
        (KVGroup("g", 16),),
        (KVTensor("t", 0, 64, canonical_page_bytes=64),),
        row_layout="canonical",
    )
    with pytest.raises(ConfigError, match="row_layout 'canonical' cannot be copied"):
        HostCopier(layout, 0, [np.zeros((2, 64), np.uint8)])


def test_after_detach_no_view_of_the_region_is_left() -> None:
    copier, _, _ = copier_for(one_group())
    region = bytearray(4096 * 2)
    copier.attach(memoryview(region))
    sum(copier.store(spec([1]), np.array([1], np.int32)))
    with pytest.raises(BufferError):
        region.extend(b"x")
    copier.detach()
    region.extend(b"x")
