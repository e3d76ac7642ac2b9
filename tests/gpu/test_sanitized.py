"""A few copies of each kind through the kernel, few enough to run under compute-sanitizer."""

import numpy as np
import pytest

from kvtiers.gpu.settings import CopySettings
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.types import BlockSpec

from .conftest import Place


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["staged", "direct"])
def test_the_kernel_touches_what_its_arguments_name_and_nothing_else(open_worker, method) -> None:
    pages = (1, 7, 16, 24, 100, 4096, 8192, 8200, 20_001)
    layout = CacheLayout(
        ModelIdentity("m"),
        (KVGroup("g", 16),),
        tuple(KVTensor(f"t{page}", 0, page) for page in pages),
        blocks_per_chunk=3,
    )
    place = Place("cuda", CopySettings(store=method, load=method, ring_bytes=1 << 20))
    rng = np.random.default_rng(3)
    kv = [rng.integers(0, 256, (40, page), np.uint8) for page in pages]
    tensors = [place.put(array) for array in kv]
    worker, _ = open_worker(layout, tensors, place, num_rows=20)
    blocks = rng.permutation(20)
    worker.submit_store(1, BlockSpec(blocks, (20,), (2,)), np.arange(8))
    worker.wait([1])
    worker.submit_load(2, np.arange(8), BlockSpec(blocks + 20, (20,), (2,)))
    worker.wait([2])
    assert [result.error for result in worker.get_finished() if not result.success] == []
    for tensor, array in zip(tensors, kv, strict=True):
        np.testing.assert_array_equal(place.get(tensor)[20:], array[:20])
