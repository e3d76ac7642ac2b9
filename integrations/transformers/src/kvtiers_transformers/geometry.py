"""A model's cache, taken apart: which tensors its layers keep, and of which of them a stored value consists.

What a layer keeps decides what can be restored from it, at a boundary between two chunks of tokens:

==================  =======================================  ===================================================
kind of value       holds, for all layers of its kind        to restore at a boundary, one needs
==================  =======================================  ===================================================
rows                a chunk's rows of keys and values, and   those of all chunks before it
                    an indexer's keys
window              the last rows of a chunk that a later    those that reach a window back from it
                    token can still see
state               convolution and recurrent states, as     the one at it
                    they are behind the last of its tokens
==================  =======================================  ===================================================

So a boundary can be restored only where all kinds of a model are there. Nothing is read off a model's config: two
tokens are computed, and the cache that they leave is looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import cache_utils

from kvtiers.api import ConfigError

__all__ = ["Geometry", "Part", "ValueKind", "geometry_of"]

_ALIGN = 16  # bytes: any type of number can be viewed in place
_ROWS = ("keys", "values", "indexer_keys")
_STATES = ("conv_states", "recurrent_states")
_KNOWN = {
    "DynamicLayer",
    "DynamicIndexedLayer",
    "DynamicSlidingWindowLayer",
    "DummyLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""What is restored from outside depends on all that a class keeps: of these that is known, not of subclasses."""


@dataclass(frozen=True)
class Part:
    """One tensor of one layer, as it lies in a value. ``shape``: of one sequence; ``rows_at``: its dimension of tokens.

    ``state``: which of a layer's states it is, and ``kernel`` its convolution's length.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    rows_at: int | None
    dtype: torch.dtype
    device: torch.device
    offset: int
    state: int = 0
    kernel: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in a value."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def of(self, layer: Any) -> torch.Tensor:
        """Return this tensor of a cache's layer, with its batch dimension."""
        found = getattr(layer, self.name)
        return found[self.state] if self.rows_at is None else found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ValueKind:
    """Values of one length. ``rows``: of each chunk, 0 for states. ``window``: rows that a restored layer has at most.

    ``name`` goes into the key. ``back``: the values before a boundary that are needed there; 0: all.
    """

    name: str
    kind: Literal["rows", "window", "state"]
    rows: int
    window: int
    back: int
    parts: tuple[Part, ...]
    nbytes: int


@dataclass(frozen=True)
class Geometry:
    """All values of a model. ``layers``: each layer's class, by its name."""

    chunk_tokens: int
    layers: tuple[str, ...]
    kinds: tuple[ValueKind, ...]

    @property
    def rows(self) -> ValueKind | None:
        """The values of layers that keep every token."""
        return next((kind for kind in self.kinds if kind.kind == "rows"), None)

    @property
    def at_boundaries(self) -> tuple[ValueKind, ...]:
        """Values that exist only where a computation has stopped, or has kept more than it needs."""
        return tuple(kind for kind in self.kinds if kind.kind != "rows")

    @property
    def has_states(self) -> bool:
        """Whether a boundary must be stopped at."""
        return any(kind.kind == "state" for kind in self.kinds)

    @property
    def has_indexer(self) -> bool:
        """Whether the model picks the tokens that it attends to."""
        return any(part.name == "indexer_keys" for kind in self.kinds for part in kind.parts)

    def describe(self) -> list[Any]:
        """Return what the bytes of the values mean, for the fingerprint; where they were computed is no part of it."""
        return [
            [kind.name, kind.rows, kind.window, kind.nbytes, [_described(part) for part in kind.parts]]
            for kind in self.kinds
        ] + [list(self.layers), self.chunk_tokens]


def _described(part: Part) -> list[Any]:
    return [part.layer, part.name, list(part.shape), str(part.dtype), part.offset, part.state, part.kernel]


def geometry_of(cache: Any, chunk_tokens: int) -> Geometry:
    """Return the values of a model that has left this cache behind some tokens. ConfigError for what cannot be kept."""
    if type(cache) is not cache_utils.DynamicCache:
        raise ConfigError(
            f"the model keeps a {type(cache).__name__}; what can be stored and restored is a DynamicCache"
        )
    names = [type(layer).__name__ for layer in cache.layers]
    if unknown := sorted({name for name, layer in zip(names, cache.layers, strict=True) if not _is_known(layer)}):
        raise ConfigError(f"the model's cache has layers of a kind that cannot be restored: {', '.join(unknown)}")
    if not any(isinstance(layer, cache_utils.CacheLayerMixin) for layer in cache.layers):
        raise ConfigError("the model has no attention layer, and generate() continues no cache without one")
    groups: dict[tuple[Literal["rows", "window", "state"], int], list[Part]] = {}
    for part, window in _parts(cache.layers):
        kind: Literal["rows", "window", "state"] = "state" if part.rows_at is None else "window" if window else "rows"
        groups.setdefault((kind, window), []).append(part)
    kinds = [_value(kind, window, chunk_tokens, parts) for (kind, window), parts in sorted(groups.items())]
    if not kinds:
        raise ConfigError("the model has kept nothing of two tokens")
    return Geometry(chunk_tokens, tuple(names), tuple(kinds))


def _is_known(layer: Any) -> bool:
    return type(layer).__module__ == cache_utils.__name__ and type(layer).__name__ in _KNOWN


def _parts(layers: list[Any]) -> Iterator[tuple[Part, int]]:
    """Return each tensor that is kept, without its place in a value, and the rows to which its layer is bounded."""
    for index, layer in enumerate(layers):
        if getattr(layer, "indexer_position_ids", None) is not None:
            raise ConfigError(f"layer {index} keeps positions for its indexer, which cannot be restored")
        window = max(0, getattr(layer, "sliding_window", 0) - 1)
        for name in _ROWS:
            tensor = getattr(layer, name, None)
            if tensor is not None and tensor.numel():
                at = tensor.ndim - 3  # [heads, tokens, width], or without heads
                yield Part(index, name, tuple(tensor.shape[1:]), at, tensor.dtype, tensor.device, 0), window
        for name in _STATES:
            for state, tensor in getattr(layer, name, {}).items():
                if tensor is not None:
                    kernel = (layer.conv_kernel_size[state] or 0) if name == "conv_states" else 0
                    shape = tuple(tensor.shape[1:])
                    yield Part(index, name, shape, None, tensor.dtype, tensor.device, 0, state, kernel), 0


def _value(kind: Literal["rows", "window", "state"], window: int, chunk_tokens: int, parts: list[Part]) -> ValueKind:
    rows = 0 if kind == "state" else min(chunk_tokens, window) if kind == "window" else chunk_tokens
    placed, offset = [], 0
    for part in parts:
        shape = part.shape
        if part.rows_at is not None:
            shape = (*shape[: part.rows_at], rows, *shape[part.rows_at + 1 :])
        placed.append(
            Part(part.layer, part.name, shape, part.rows_at, part.dtype, part.device, offset, part.state, part.kernel)
        )
        offset += -(-placed[-1].nbytes // _ALIGN) * _ALIGN
    back = 0 if kind == "rows" else 1 if kind == "state" else -(-window // chunk_tokens)
    name = f"{kind}-{window}" if kind == "window" else kind
    return ValueKind(name, kind, rows, window, back, tuple(placed), offset)
