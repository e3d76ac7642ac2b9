"""GPU blocks for programs that generate KV, such as replay: read and written by their ids, like an array."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtiers.api import ConfigError
from kvtiers.gpu.tensors import Bytes

__all__ = ["DeviceBlocks", "cuda_problem"]


def cuda_problem() -> str:
    """Return in one line why no CUDA device can be used; "" if one can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed: pip install 'kvtiers[torch]'"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


class DeviceBlocks:
    """``num_blocks`` zeroed blocks of ``page_bytes`` on one of the machine's devices, assigned to ranks in turns.

    ``tensor`` is what a worker is given. Reads and writes are in the order of the current stream.
    """

    def __init__(self, num_blocks: int, page_bytes: int, rank: int = 0, device: str = "cuda") -> None:
        import torch  # late: kvtiers imports without it

        if device == "cuda":
            if problem := cuda_problem():
                raise ConfigError(f"no blocks in GPU memory: {problem}")
            device = f"cuda:{rank % torch.cuda.device_count()}"
        self._torch = torch
        self.tensor = torch.zeros((num_blocks, page_bytes), dtype=torch.uint8, device=device)
        self.shape = (num_blocks, page_bytes)

    def __getitem__(self, block_ids: npt.NDArray[Any]) -> Bytes:
        read: Bytes = self.tensor[self._there(block_ids)].cpu().numpy()
        return read

    def __setitem__(self, block_ids: npt.NDArray[Any], values: Bytes) -> None:
        self.tensor[self._there(block_ids)] = self._there(values)

    def _there(self, array: npt.NDArray[Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(array)).to(self.tensor.device)
