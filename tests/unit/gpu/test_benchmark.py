"""What the benchmark of copies measures in canonical rows is what it says; the measurement itself takes a GPU."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from kvtiers.gpu.worker import GpuWorker
from kvtiers.region.client import RegionJoin
from kvtiers.region.region import AnonymousRegion
from kvtiers.types import BlockSpec

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("rigs.gpu_rows")


@pytest.mark.parametrize("page", [16 << 10, 64 << 10])
def test_a_canonical_row_takes_the_ranks_heads_first_and_gives_them_back(rows, page) -> None:
    layout, rank_map = rows.rows_of(page, canonical=True)
    shape = (2, rows.HEADS // rows.RANKS, rows.TOKENS, -1)  # parts, heads, tokens, bytes
    fill = np.random.default_rng(1)
    kv = [fill.integers(0, 256, (3, page), np.uint8) for _ in layout.tensors]
    region = AnonymousRegion.create(layout, num_rows=2)
    worker = GpuWorker(layout, kv, RegionJoin.in_process(region, layout, 0), rank_map=rank_map)
    blocks, chunks = BlockSpec(np.array([2, 0]), (2,), (0,)), np.array([1, 0])
    worker.submit_store(1, blocks, chunks)
    worker.wait([1])
    memory = np.frombuffer(region.view, np.uint8).reshape(2, layout.row_stride)
    for index, tensor in enumerate(kv):
        first = index * rows.RANKS * page
        for block, row in ((2, 1), (0, 0)):
            heads_first = tensor[block].reshape(shape).swapaxes(0, 1)
            np.testing.assert_array_equal(memory[row, first : first + page], heads_first.reshape(-1))
            assert not memory[row, first + page : first + 2 * page].any(), "the other rank's half"
    stored = [tensor.copy() for tensor in kv]
    for tensor in kv:
        tensor[[0, 2]] = 0
    worker.submit_load(2, chunks, blocks)
    worker.wait([2])
    assert [(result.success, result.nbytes) for result in worker.get_finished()] == 2 * [(True, 64 * page)]
    for tensor, before in zip(kv, stored, strict=True):
        np.testing.assert_array_equal(tensor, before)
    worker.shutdown()


def test_a_direct_row_has_no_map(rows) -> None:
    layout, rank_map = rows.rows_of(4096, canonical=False)
    assert (layout.row_layout, layout.world_size, rank_map) == ("direct", 1, None)
