"""A replay whose blocks lie in torch tensors, as on a GPU: here in host memory; `make test-gpu` runs it on a device."""

import pytest
import torch

from kvtiers.api import ConfigError
from kvtiers.gpu.device_blocks import DeviceBlocks
from kvtiers_replay.run import ReplayOptions, replay

from .setups import config

MEMORY = {"type": "memory", "io": "thread", "capacity": "64MiB"}


def options(**more) -> ReplayOptions:
    return ReplayOptions(bytes_per_chunk=4032, blocks_per_chunk=3, primary_chunks=60, **more)


@pytest.fixture
def made(monkeypatch) -> list[DeviceBlocks]:
    """Blocks that a replay with `--device cuda` makes, in torch tensors of the host."""
    made: list[DeviceBlocks] = []

    def make(num_blocks, page_bytes, rank):
        made.append(DeviceBlocks(num_blocks, page_bytes, rank, device="cpu"))
        return made[-1]

    monkeypatch.setattr("kvtiers_replay.engine.ranks.DeviceBlocks", make)
    monkeypatch.setattr("kvtiers_replay.options.cuda_problem", lambda: "")
    return made


def test_a_replay_in_torch_tensors_hits_what_one_in_arrays_hits_and_every_byte_is_right(workload, made) -> None:
    in_tensors = replay(config(MEMORY), workload, options(device="cuda"))
    assert made
    assert any(blocks.tensor.any() for blocks in made)
    assert in_tensors.wrong_bytes == 0
    in_arrays = replay(config(MEMORY), workload, options())
    assert in_tensors.prefix_hits == in_arrays.prefix_hits > 0
    assert in_tensors.hits["primary"] > 50


def test_a_byte_that_changes_in_a_tensor_is_counted_as_wrong(workload, made, monkeypatch) -> None:
    there = DeviceBlocks.__getitem__

    def flip(self, block_ids):
        read = there(self, block_ids)
        read[0, 0] ^= 1
        return read

    monkeypatch.setattr(DeviceBlocks, "__getitem__", flip)
    assert replay(config(MEMORY), workload, options(device="cuda")).wrong_bytes > 0


def test_without_a_device_it_is_one_clear_line(workload, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^--device cuda: torch finds no CUDA device$"):
        replay(config(MEMORY), workload, options(device="cuda"))
