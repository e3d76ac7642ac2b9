"""Computation up to boundaries: a prompt in pieces, so that windows and states can be kept where they can be restored.

A model that keeps every token is not run from here for a single prompt: ``generate`` computes what is missing. A window
has forgotten what a later boundary needs, and a state is of one place: those are taken between two pieces.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, cache_utils

from kvtiers_transformers.geometry import Geometry
from kvtiers_transformers.model_checks import base_model
from kvtiers_transformers.values import set_length, set_tensor

__all__ = ["Prefill", "stack"]

_PIECE_TOKENS = 2048


class Prefill:
    """Runs a model over a prompt's tokens, piece by piece. ``state_tokens``: between boundaries that keep states."""

    def __init__(self, model: Any, geometry: Geometry, state_tokens: int) -> None:
        chunk = geometry.chunk_tokens
        self._model = model
        self._chunk = chunk
        accepts = inspect.signature(base_model(model).forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}
        self._records = all(name != "LinearAttentionAndSlidingWindowAttentionLayer" for name in geometry.layers)
        windows = [kind.window for kind in geometry.kinds if kind.kind == "window"]
        piece = _PIECE_TOKENS if self._records else min(_PIECE_TOKENS, *windows)
        self._piece = max(chunk, (min(piece, state_tokens) if geometry.has_states else piece) // chunk * chunk)

    def stops(self, start: int, end: int) -> list[int]:
        """Return the boundaries to stop at, from ``start`` up to the last one within ``end`` tokens."""
        last = end // self._chunk * self._chunk
        return [*range((start // self._piece + 1) * self._piece, last, self._piece), *([last] if last > start else [])]

    def run(self, ids: torch.Tensor, cache: Any, start: int, stops: Sequence[int], at: Callable[[int], None]) -> None:
        """Compute ``ids``, one prompt's, from ``start`` on; call ``at`` where the cache stands at each stop."""
        with torch.no_grad():
            for stop in stops:
                sliding = self._sliding(cache)
                for layer in sliding:
                    layer.record_past = True  # keep what falls out of the window, too
                self.forward(ids[start:stop], cache)
                at(stop)
                for layer in sliding:
                    layer.crop(0)  # back to the window
                    layer.record_past = False
                start = stop

    def forward(self, ids: torch.Tensor, cache: Any) -> Any:
        """Compute these tokens behind those of the cache. Returns the model's output."""
        return self._model(input_ids=ids[None], cache=cache, use_cache=True, return_dict=True, **self._last_logits)

    def _sliding(self, cache: Any) -> list[Any]:
        if not self._records:
            return []
        return [layer for layer in cache.layers if isinstance(layer, cache_utils.DynamicSlidingWindowLayer)]


def stack(geometry: Geometry, config: Any, caches: Sequence[Any], tokens: int) -> Any:
    """Return one cache for all prompts, which are padded on the left up to so many tokens."""
    stacked = DynamicCache(config=config)
    for kind in geometry.kinds:
        for part in kind.parts:
            tensors = [part.of(cache.layers[part.layer]) for cache in caches]
            if part.rows_at is not None:
                rows = min(tokens, kind.window) if kind.window else tokens
                tensors = [_padded(tensor, part.rows_at + 1, rows) for tensor in tensors]
            set_tensor(stacked.layers[part.layer], part, torch.cat(tensors))
    for kind in geometry.kinds:
        for part in kind.parts:
            set_length(stacked.layers[part.layer], tokens)
    return stacked


def _padded(tensor: torch.Tensor, at: int, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[at]
    if not missing:
        return tensor
    shape = [*tensor.shape]
    shape[at] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=at)
