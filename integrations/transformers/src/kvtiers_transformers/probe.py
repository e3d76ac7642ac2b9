"""A look at a model before its cache is opened: a few tokens are computed, in one go and in two.

What a cache restores is right only if a prefix's KV does not depend on what follows it, and if the model continues from
a cache of several tokens as it would have gone on itself. Most do; some that look at a whole prompt at once do not.
"""

from typing import Any

import torch
from transformers import DynamicCache

from kvtiers.api import ConfigError
from kvtiers_transformers.geometry import Geometry, geometry_of

__all__ = ["base_model", "probe"]

_PREFIX, _REST = 16, 8
_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}  # of the largest number; a wrong state is off by tenths
_COARSE = 0.1


def base_model(model: Any) -> Any:
    """Return the model under PEFT's wrapper, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def probe(model: Any, config: Any, chunk_tokens: int) -> Geometry:
    """Return the geometry of the model's cache. ConfigError, in one line, if its prefixes cannot be restored."""
    if model.training:
        raise ConfigError("the model is in training mode; call model.eval() first")
    vocabulary = int(config.vocab_size)
    tokens = (torch.arange(_PREFIX + 2 * _REST) * 7 + 3) % vocabulary
    prefix, rest, other = (part.to(model.device)[None] for part in tokens.split([_PREFIX, _REST, _REST]))
    if not base_model(model)._supports_default_dynamic_cache():  # noqa: SLF001 -- as generate() asks
        raise ConfigError(f"{type(base_model(model)).__name__} brings a cache of its own, which cannot be restored")
    with torch.no_grad():
        try:
            in_two = DynamicCache(config=config)
            model(input_ids=prefix, cache=in_two, use_cache=True)
            continued = model(input_ids=rest, cache=in_two, use_cache=True).logits[:, -1]
            at_once, changed = DynamicCache(config=config), DynamicCache(config=config)
            whole = model(input_ids=torch.cat([prefix, rest], 1), cache=at_once, use_cache=True).logits[:, -1]
            model(input_ids=torch.cat([prefix, other], 1), cache=changed, use_cache=True)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AttributeError) as error:
            raise ConfigError(f"the model does not continue from a cache: {type(error).__name__}: {error}") from None
    geometry = geometry_of(in_two, chunk_tokens)
    if not _near(continued, whole):
        raise ConfigError("the model continues otherwise from a cache than without one")
    for kind in geometry.kinds:
        for part in kind.parts:
            if part.rows_at is not None and (not kind.window or kind.window > _PREFIX + _REST):
                rows = [
                    part.of(cache.layers[part.layer])[0].narrow(part.rows_at, 0, _PREFIX)
                    for cache in (at_once, changed)
                ]
                if not _near(*rows):
                    raise ConfigError("the KV of a prefix depends on what follows it in the prompt")
    return geometry


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    scale = float(one.abs().max())
    return float((one - other).abs().max()) <= _TOLERANCE.get(one.dtype, _COARSE) * scale + 1e-9
