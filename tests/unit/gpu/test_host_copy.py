"""Copies between KV tensors in host memory and rows; ``tests/gpu`` checks every byte, for all kinds of memory."""

import numpy as np
import pytest
import torch

from kvtiers.api import ConfigError
from kvtiers.gpu.copy_plan import GeometryError, plan_copy
from kvtiers.gpu.host_copy import HostCopier
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.types import BlockSpec


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
        (spec([1], sizes=(1.0,)), [0], "group_sizes is (1.0,), expected integers"),
        (spec([1], sizes="1"), [0], "group_sizes is '1', expected integers"),
        (spec([1], indices=(None,)), [0], "block_indices is (None,), expected integers"),
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


def test_sizes_in_numpys_small_types_are_counted_right() -> None:
    layout = CacheLayout(
        ModelIdentity("m"), (KVGroup("a", 16), KVGroup("b", 16)), (KVTensor("t", 0, 8), KVTensor("u", 1, 8))
    )
    sizes = (np.int8(100), np.int8(100))  # together more than an int8 holds
    transfer = BlockSpec(np.tile(np.arange(100), 2), sizes, (np.int8(0), np.int8(0)))
    plan = plan_copy(layout, transfer, np.arange(200), num_blocks=[100, 100], num_rows=200, into_rows=True)
    assert [len(part.blocks) for part in plan] == [100, 100]


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
        (one_group(), 0, [[1, 2]], "kv_tensors[0] ('t'): expected a torch tensor or a numpy array, got list"),
        (one_group(), 0, [np.zeros((2, 63), np.uint8)], "a block has 63 bytes, but the layout's page_bytes is 64"),
        (one_group(), 0, [np.zeros((64, 64), np.uint8).T[:, ::2]], "each of them contiguous"),
        (one_group(), 0, [np.zeros(64, np.uint8)], "expected a writable array of blocks"),
        (one_group(), 0, [np.broadcast_to(np.zeros(64, np.uint8), (4, 64))], "expected a writable array of blocks"),
        (one_group(row_layout="replicated"), 0, [None], "expected a torch tensor or a numpy array, got NoneType"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused_by_name(layout, rank, tensors, text) -> None:
    with pytest.raises(ConfigError) as refused:
        HostCopier(layout, rank, tensors)
    assert text in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_cpu_tensors_of_types_that_numpy_has_not_are_copied_in_place(dtype) -> None:
    layout = one_group(page=32)
    kv = torch.arange(4 * 64, dtype=torch.uint8).view(dtype).reshape(2, 4, -1)[1]  # keys and values: the second half
    region = np.zeros(4 * layout.row_stride, np.uint8)
    copier = HostCopier(layout, 0, [kv])
    copier.attach(memoryview(region))
    sum(copier.store(spec([1, 3]), np.array([2, 0], np.int32)))
    sum(copier.load(spec([0]), np.array([2], np.int32)))
    after = kv.view(torch.uint8).numpy()
    np.testing.assert_array_equal(region.reshape(4, -1)[2, :32], np.arange(128 + 32, 128 + 64))
    np.testing.assert_array_equal(after[0], after[1])


def test_after_detach_no_view_of_the_region_is_left() -> None:
    copier, _, _ = copier_for(one_group())
    region = bytearray(4096 * 2)
    copier.attach(memoryview(region))
    sum(copier.store(spec([1]), np.array([1], np.int32)))
    with pytest.raises(BufferError):
        region.extend(b"x")
    copier.detach()
    region.extend(b"x")
