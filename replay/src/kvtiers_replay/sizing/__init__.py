"""Sizing: the bytes of a model's KV cache, chunk sizes, and break-even prefix lengths of tiers."""

from kvtiers_replay.sizing.links import LINKS, Link, TierSuggestion, break_even_tokens, suggest
from kvtiers_replay.sizing.model import DTYPE_BYTES, LayerGroup, ModelShape, read_model

__all__ = [
    "DTYPE_BYTES",
    "LINKS",
    "LayerGroup",
    "Link",
    "ModelShape",
    "TierSuggestion",
    "break_even_tokens",
    "read_model",
    "suggest",
]
