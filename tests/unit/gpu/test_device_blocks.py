"""Blocks of the reference engine in a torch tensor: written, read and found wrong as in an array."""

import numpy as np
import pytest
import torch

from kvtiers.api import ConfigError
from kvtiers.gpu.device_blocks import DeviceBlocks, cuda_problem
from kvtiers_replay.content import BlockContent


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def blocks(request):
    if request.param == "cuda" and cuda_problem():
        pytest.skip("no CUDA device; run `make test-gpu` on a machine that has one")
    return [DeviceBlocks(8, size, device=request.param) for size in (24, 40)]


def test_what_is_written_is_read_and_a_wrong_byte_is_counted(blocks):
    content, hashes = BlockContent(blocks), [b"a", b"b", b"c"]
    content.write(hashes, [5, 0, 7])
    assert content.count_wrong(hashes, [5, 0, 7]) == 0
    np.testing.assert_array_equal(blocks[1][np.array([7])][0], content.bytes_of([b"c"])[0, 24:])
    blocks[1].tensor[7, 3] += 1
    assert content.count_wrong(hashes, [5, 0, 7]) == 1
    assert not blocks[0][np.array([1, 2, 3, 4, 6])].any()


def test_without_a_cuda_device_it_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no blocks in GPU memory: torch finds no CUDA device"):
        DeviceBlocks(8, 8)
