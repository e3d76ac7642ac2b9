"""Values in and out of a cache: packed from its tensors, and laid into a new cache's layers.

A cache here has one sequence. Tensors of rows are never written to after they were made (an update makes new ones), so
a value may be packed from them later, by another thread; states are, and are copied first (``frozen``).
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvtiers_transformers.geometry import Geometry, Part, ValueKind

__all__ = ["Frozen", "Restored", "freeze", "held", "new_values", "pack", "views_of"]


class Frozen:
    """What a cache of one sequence had at ``tokens`` for a kind of values: tensors that are not written to any more."""

    def __init__(self, tokens: int, tensors: Sequence[torch.Tensor]) -> None:
        self.tokens = tokens
        self.tensors = tensors
        """Of each part, without the batch dimension."""


def freeze(cache: Any, tokens: int, kind: ValueKind) -> Frozen:
    """Hold on to what a kind of values needs of a cache that is at ``tokens``."""
    tensors = []
    for part in kind.parts:
        tensor = part.of(cache.layers[part.layer])[0].detach()
        tensors.append(tensor.clone() if part.rows_at is None else tensor)
    return Frozen(tokens, tensors)


def held(kind: ValueKind, frozen: Frozen, chunk: int, chunk_tokens: int) -> bool:
    """Return whether this chunk's value can be packed from it."""
    end = (chunk + 1) * chunk_tokens
    if kind.kind == "state":
        return frozen.tokens == end
    part = kind.parts[0]
    assert part.rows_at is not None
    first = frozen.tokens - frozen.tensors[0].shape[part.rows_at]
    return first <= max(0, end - kind.rows) and end <= frozen.tokens


def new_values(count: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory for so many values, [count, nbytes], or for fewer if the device is short of it.

    It is on the host for a device whose memory a client cannot use.
    """
    place = device if device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None) else "cpu"
    while True:
        try:
            return torch.empty((count, nbytes), dtype=torch.uint8, device=place)
        except torch.OutOfMemoryError:
            if count == 1:
                raise
            count //= 2


def views_of(values: torch.Tensor) -> list[Any]:
    """Return each value of [values, nbytes] as a client takes it, on the host or on a GPU."""
    return [value if value.is_cuda else value.numpy() for value in values]


def pack(kind: ValueKind, frozen: Frozen, chunk: int, chunk_tokens: int, into: torch.Tensor) -> None:
    """Copy a chunk's value into ``nbytes`` bytes of memory."""
    end = (chunk + 1) * chunk_tokens
    for part, whole in zip(kind.parts, frozen.tensors, strict=True):
        tensor = whole
        if part.rows_at is not None:
            first = frozen.tokens - tensor.shape[part.rows_at]
            tensor = tensor.narrow(part.rows_at, end - kind.rows - first, kind.rows)
        _place(part, into).copy_(tensor)
        _clear_gap(part, into)


def _place(part: Part, value: torch.Tensor) -> torch.Tensor:
    numbers = value[..., part.offset : part.offset + part.nbytes].view(part.dtype)
    placed: torch.Tensor = numbers.unflatten(-1, part.shape)
    return placed


def _clear_gap(part: Part, value: torch.Tensor) -> None:
    end = part.offset + part.nbytes
    value[end : -(-end // 16) * 16].zero_()  # equal values have equal bytes


class Restored:
    """A new cache of one sequence, filled value by value up to a boundary, and made when all are there."""

    def __init__(self, geometry: Geometry, config: Any, chunks: int) -> None:
        self._geometry = geometry
        self._config = config
        self._chunks = chunks
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}

    def put(self, kind: ValueKind, first: int, values: torch.Tensor) -> None:
        """Take the values of consecutive chunks, from ``first`` on: ``values`` is [chunks, nbytes], on any device."""
        start = self.first_chunk(kind)
        for index, part in enumerate(kind.parts):
            place = _place(part, values).to(part.device)
            if part.rows_at is None:
                self._tensors[kind.name, index] = place[0].clone()
                continue
            target = self._target(kind, index, self._chunks - start)
            rows = target.narrow(part.rows_at, (first - start) * kind.rows, len(values) * kind.rows)
            rows.unflatten(part.rows_at, (len(values), kind.rows)).copy_(place.movedim(0, part.rows_at))

    def first_chunk(self, kind: ValueKind) -> int:
        """Return the first chunk whose value is needed."""
        return max(0, self._chunks - kind.back) if kind.back else 0

    def _target(self, kind: ValueKind, index: int, chunks: int) -> torch.Tensor:
        if (kind.name, index) not in self._tensors:
            part = kind.parts[index]
            assert part.rows_at is not None
            shape = (*part.shape[: part.rows_at], chunks * kind.rows, *part.shape[part.rows_at + 1 :])
            self._tensors[kind.name, index] = torch.empty(shape, dtype=part.dtype, device=part.device)
        return self._tensors[kind.name, index]

    def cache(self) -> Any:
        """Return the cache, at the boundary."""
        cache = DynamicCache(config=self._config)
        tokens = self._chunks * self._geometry.chunk_tokens
        for kind in self._geometry.kinds:
            for index, part in enumerate(kind.parts):
                tensor = self._tensors[kind.name, index]
                if part.rows_at is not None and kind.window:
                    keep = min(tokens, kind.window)
                    have = tensor.shape[part.rows_at]
                    tensor = tensor.narrow(part.rows_at, have - keep, keep).contiguous()
                set_tensor(cache.layers[part.layer], part, tensor[None])
        for kind in self._geometry.kinds:
            for part in kind.parts:
                set_length(cache.layers[part.layer], tokens)
        return cache


def set_tensor(layer: Any, part: Part, tensor: torch.Tensor) -> None:
    """Give a tensor, with its batch dimension, to a layer of a new cache."""
    if part.rows_at is None:
        size = {"conv_kernel_size": part.kernel} if part.kernel else {}
        layer.lazy_initialization(**{part.name: tensor}, state_idx=part.state, **size)
        getattr(layer, part.name)[part.state].copy_(tensor)
        layer.has_previous_state[part.state] = True
    elif part.name == "indexer_keys":
        layer.lazy_initialization_indexer(tensor)
        layer.indexer_keys = tensor
    else:
        if not layer.is_initialized:
            layer.lazy_initialization(tensor, tensor)
        setattr(layer, part.name, tensor)


def set_length(layer: Any, tokens: int) -> None:
    """Say how many tokens a layer has had, where it counts them."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = tokens
