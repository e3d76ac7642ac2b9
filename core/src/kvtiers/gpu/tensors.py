"""An engine's KV tensors as plain memory: where each block starts, for numpy arrays and torch tensors alike."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import CacheLayout

__all__ = ["Bytes", "KVPages", "blocks_of_groups", "kv_pages"]

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class KVPages:
    """Block b of a tensor starts at ``address + b * stride``; the first ``page_bytes`` of it are KV.

    ``device``: the CUDA device's number, None for host memory. ``owner`` keeps the memory alive.
    """

    address: int
    num_blocks: int
    stride: int
    page_bytes: int
    device: int | None
    owner: Any = field(repr=False, compare=False)

    def host_bytes(self) -> Bytes:
        """Return the blocks' memory as flat bytes, from the first block's first byte to the last one's end."""
        nbytes = (self.num_blocks - 1) * self.stride + self.page_bytes
        return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)), np.uint8)


def kv_pages(layout: CacheLayout, rank: int, kv_tensors: Sequence[Any]) -> list[KVPages | None]:
    """Return the tensors' memory, None for what this rank does not hold. ConfigError if they do not fit the layout.

    ``kv_tensors[i]`` holds the pages of ``layout.tensors[i]``: first axis the blocks, the rest contiguous, at least a
    page long (more is padding, which is not copied). All of them lie on one device.
    """
    if not 0 <= rank < layout.world_size:
        raise ConfigError(f"rank {rank} does not exist; the layout's world_size is {layout.world_size}")
    if len(kv_tensors) != len(layout.tensors):
        raise ConfigError(f"{len(kv_tensors)} KV tensors, but the layout names {len(layout.tensors)}")
    pages = [_pages(layout, rank, index, tensor) for index, tensor in enumerate(kv_tensors)]
    devices = {page.device for page in pages if page is not None}
    if len(devices) > 1:
        names = sorted("host memory" if device is None else f"cuda:{device}" for device in devices)
        raise ConfigError(f"a rank's KV tensors lie on one device, these lie on {' and '.join(names)}")
    return pages


def blocks_of_groups(layout: CacheLayout, pages: Sequence[KVPages | None]) -> list[int]:
    """Return how many blocks each KV group has; without bound where this rank holds nothing of the group."""
    return [
        min((p.num_blocks for p, t in zip(pages, layout.tensors, strict=True) if p and t.group == group), default=2**62)
        for group in range(len(layout.groups))
    ]


def _pages(layout: CacheLayout, rank: int, index: int, tensor: Any) -> KVPages | None:
    page = layout.tensors[index].page_on(rank)
    if page == 0:
        return None
    where = f"kv_tensors[{index}] ({layout.tensors[index].name!r})"
    if isinstance(tensor, np.ndarray):
        address, item, device = tensor.ctypes.data, tensor.itemsize, None
        shape, strides, writable = tensor.shape, tensor.strides, tensor.flags.writeable
    elif hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):
        address, item, device = tensor.data_ptr(), tensor.element_size(), _device(where, tensor)
        shape, strides, writable = tuple(tensor.shape), tuple(s * item for s in tensor.stride()), True
    else:
        raise ConfigError(f"{where}: expected a torch tensor or a numpy array, got {type(tensor).__name__}")
    inner = [(size, stride) for size, stride in zip(shape[1:], strides[1:], strict=True) if size != 1]
    block_bytes = item
    for size, stride in reversed(inner):
        writable = writable and stride == block_bytes
        block_bytes *= size
    apart = len(shape) > 1 and (shape[0] == 1 or strides[0] >= block_bytes)
    if not writable or not apart or not block_bytes or not shape[0]:
        raise ConfigError(
            f"{where}: expected a writable array of blocks, each of them contiguous, got shape {shape} "
            f"and strides of {strides} bytes"
        )
    if block_bytes < page:
        raise ConfigError(f"{where}: a block has {block_bytes} bytes, but the layout's page_bytes is {page}")
    return KVPages(address, shape[0], max(strides[0], block_bytes), page, device, tensor)


def _device(where: str, tensor: Any) -> int | None:
    if tensor.device.type == "cuda":
        return int(tensor.device.index)
    if tensor.device.type == "cpu":
        return None
    raise ConfigError(f"{where}: expected a tensor on a CUDA device or in host memory, it is on {tensor.device}")
