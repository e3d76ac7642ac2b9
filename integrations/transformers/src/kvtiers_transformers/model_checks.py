"""Checks of a model: one before its cache is opened, and one before each call. A call that does not pass has no cache.

Before: a few tokens are computed, in one go and in two. What a cache restores is right only if a prefix's KV does not
depend on what follows it, and if the model continues from a cache of several tokens as it would have gone on itself.
Most do; some that look at a whole prompt at once do not.

Each time: the model is the one that its identity was computed of. Weights that were changed are recognised by their
place, by their version, which PyTorch counts with each write, and by some of their numbers: it does not count what is
written through ``.data``.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.modules import module as nn_module
from transformers import DynamicCache

from kvtiers.api import ConfigError
from kvtiers_transformers.geometry import Geometry, geometry_of
from kvtiers_transformers.identity import config_digest

__all__ = ["ModelGuard", "base_model", "probe"]

_PREFIX, _REST = 16, 8
_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}  # of the largest number; a wrong state is off by tenths
_COARSE = 0.1
_SAMPLES = 64  # numbers of each tensor
_Named: TypeAlias = tuple[tuple[str, str], torch.Tensor]
"""A tensor, with the names of its module and of itself."""
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


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


class ModelGuard:
    """Compares a model with itself as it was when its identity was computed. ConfigError if it was not plain then."""

    def __init__(self, model: Any) -> None:
        self._model = model
        tensors, problem = self._walk()
        if problem:
            raise ConfigError(f"{problem}; what the model computes may be another KV than its weights give")
        self._weights = _versions(tensors)
        self._samples = _sampled(tensors)
        self._config = config_digest(model)

    def problem(self) -> str:
        """Return why the model must be used without the cache now; "" if nothing speaks against it."""
        tensors, problem = self._walk()
        if problem:
            return problem
        if _versions(tensors) != self._weights or not _same(_sampled(tensors), self._samples):
            return "the model's weights have changed since the cache was opened; open a new PrefixCache"
        if config_digest(self._model) != self._config:
            return "the model's config has changed since the cache was opened; open a new PrefixCache"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast is on, which computes with another type"
        return ""

    def _walk(self) -> tuple[list[_Named], str]:
        """Return all parameters and buffers, shared ones at each place, and what is wrong with a module, "" if nothing.

        One pass over the modules' own dictionaries: this is done before and after each call.
        """
        tensors: list[_Named] = []
        if any(getattr(nn_module, name, None) for name in _GLOBAL_HOOKS):
            return tensors, "there are forward hooks on all modules"
        for name, module in self._model.named_modules():
            if module._forward_hooks or module._forward_pre_hooks:  # noqa: SLF001 -- no other way says it
                return tensors, f"there is a forward hook on {name or 'the model'}"
            if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
                return tensors, f"forward() of {name or 'the model'} was replaced"
            if module.training:
                return tensors, "the model, or a part of it, is in training mode; call model.eval()"
            for held in (module._parameters, module._buffers):  # noqa: SLF001 -- the named iterators are slow
                tensors.extend(((name, key), tensor) for key, tensor in held.items() if tensor is not None)
        return tensors, ""


def _versions(tensors: Sequence[_Named]) -> list[tuple[tuple[str, str], int, int, torch.device]]:
    return [(name, it.data_ptr(), it._version, it.device) for name, it in tensors]  # noqa: SLF001 -- no other way says it


@torch.no_grad()
def _sampled(tensors: Sequence[_Named]) -> dict[tuple[torch.device, torch.dtype], torch.Tensor]:
    """Return numbers of all tensors, those of one type as one tensor: a comparison waits for the device."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for _, tensor in tensors:
        count = tensor.numel()
        step = max(1, count // _SAMPLES)
        # Of a contiguous one by one call instead of two: there are hundreds.
        whole = tensor.is_contiguous()
        some = tensor.as_strided((-(-count // step),), (step,)) if whole else tensor.reshape(-1)[::step]
        found.setdefault((tensor.device, tensor.dtype), []).append(some)
    return {of: torch.cat(parts) for of, parts in found.items()}


def _same(
    ones: dict[tuple[torch.device, torch.dtype], torch.Tensor],
    others: dict[tuple[torch.device, torch.dtype], torch.Tensor],
) -> bool:
    return ones.keys() == others.keys() and all(
        torch.equal(one.view(torch.uint8), others[of].view(torch.uint8)) for of, one in ones.items()
    )
