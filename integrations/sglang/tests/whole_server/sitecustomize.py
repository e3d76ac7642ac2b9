"""What a whole server lacks on a machine without a GPU; Python runs this at the start of each of its processes.

SGLang's wheel has no kernels for the CPU. Three functions that its fallbacks want are here in PyTorch's terms: rotary
embedding, the copy between the device's KV and the pools, and pinning, which pins nothing. Packages for images, audio
and grammars, which a prompt of tokens needs none of, have stand-ins.
"""

import builtins
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import without_torchvision

without_torchvision.STANDS_IN_FOR.update({"soundfile", "outlines", "anthropic", "smg_grpc_servicer"})


def rotary_embedding(positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, *_: Any) -> None:
    """Rotate in place, with the two halves of each head (``is_neox``)."""
    import torch

    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, -1)
    for part in (query, key):
        heads = part.view(part.shape[0], -1, head_size)
        first, second = heads.float().chunk(2, -1)
        heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype))


def transfer_kv_direct(*, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Copy the rows of these tokens, layer by layer."""
    assert len(src_indices) % page_size == 0
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


class PinsNothing:
    """What ``torch.cuda.cudart()`` gives, without CUDA."""

    @staticmethod
    def cudaHostRegister(*_: Any) -> int:  # noqa: N802 -- CUDA's
        """Succeed."""
        return 0

    cudaHostUnregister = cudaHostRegister  # noqa: N815


builtins.transfer_kv_direct = transfer_kv_direct  # type: ignore[attr-defined]  # where its module looks last
vllm, custom_ops = ModuleType("vllm"), ModuleType("vllm._custom_ops")
vllm.__spec__, vllm.__path__ = importlib.machinery.ModuleSpec("vllm", None), []  # type: ignore[attr-defined]
custom_ops.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
sys.modules |= {"vllm": vllm, "vllm._custom_ops": custom_ops}
if any("spawn_main" in argument or "launch_server" in argument for argument in sys.orig_argv):
    import torch

    torch.cuda.cudart = lambda: PinsNothing
