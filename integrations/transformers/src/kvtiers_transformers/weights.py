"""The identity of a model's weights: a digest of what is in memory, or the hub's commit and samples of what is there.

A folder's or a commit's name says what was loaded. The numbers in memory may be others by now (a fine-tune, a merged
adapter, another type), and they are what KV is computed from. So they are what is read: all of them, at some GB/s.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from kvtiers.api import ConfigError

__all__ = ["tensors_of", "weights_identity"]

_PIECE_BYTES = 64 << 20  # of a tensor on a device, copied at a time
_SAMPLE_BYTES = 4096
_SAMPLES = 4  # spread over a tensor


def weights_identity(model: Any, weights: str) -> str:
    """Return what names the weights. ConfigError if they have no such name, or cannot be read.

    ``weights``: "digest": every byte of every parameter and buffer; "commit": the hub's commit that the model was
    loaded from, with a few samples of each tensor.
    """
    if weights == "digest":
        return f"digest-{_digest(model, whole=True)}"
    commit = getattr(model.config, "_commit_hash", None)
    if weights != "commit":
        raise ConfigError(f"weights is {weights!r}, expected 'digest' or 'commit'")
    if not commit:
        raise ConfigError("weights is 'commit', but the model was not loaded from a hub; use 'digest'")
    return f"commit-{commit}-{_digest(model, whole=False)}"


def tensors_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers by name, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(model: Any, *, whole: bool) -> str:
    state = hashlib.sha256()
    for name, tensor in tensors_of(model):
        _check(name, tensor)
        state.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for piece in _pieces(flat) if whole else _samples(flat):
            state.update(xxhash.xxh3_128_digest(piece.cpu().numpy().data))
    return state.hexdigest()[:32]


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise ConfigError(f"{name} is not in memory (offloaded, or never loaded), so that its content has no name")
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        raise ConfigError(f"{name} is a {type(tensor).__name__}, whose content cannot be named: quantised or sharded?")
    if tensor.is_inference():
        raise ConfigError(f"{name} was made under torch.inference_mode(), so that changes cannot be seen; load without")


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), _PIECE_BYTES):
        yield flat[start : start + _PIECE_BYTES]


def _samples(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    last = max(0, flat.numel() - _SAMPLE_BYTES)
    for index in range(_SAMPLES):
        start = last * index // (_SAMPLES - 1)
        yield flat[start : start + _SAMPLE_BYTES]
