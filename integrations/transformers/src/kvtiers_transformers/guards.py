"""What may change between two calls of a model, looked at before each: a call that is not covered has no cache.

A pass over the modules and tensors takes about a millisecond. Weights that were changed are recognised by their place,
by their version, which PyTorch counts with each write, and by some of their numbers: it does not count what is written
through ``.data``.
"""

from typing import Any

import torch
from torch.nn.modules import module as nn_module

from kvtiers.api import ConfigError
from kvtiers_transformers.identity import config_digest
from kvtiers_transformers.weights import tensors_of

__all__ = ["ModelGuard"]

_SAMPLES = 64  # numbers of each tensor
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ModelGuard:
    """Compares a model with itself as it was when its identity was computed. ConfigError if it was not plain then."""

    def __init__(self, model: Any) -> None:
        self._model = model
        if problem := self._hooked():
            raise ConfigError(f"{problem}, so that its KV may be another one than its weights give")
        self._weights = self._versions()
        self._samples = self._sampled()
        self._config = config_digest(model)

    def problem(self) -> str:
        """Return why the model must be used without the cache now; "" if nothing speaks against it."""
        if any(module.training for module in self._model.modules()):
            return "the model, or a part of it, is in training mode; call model.eval()"
        if self._versions() != self._weights or not _same(self._sampled(), self._samples):
            return "the model's weights have changed since the cache was opened; open a new PrefixCache"
        if config_digest(self._model) != self._config:
            return "the model's config has changed since the cache was opened; open a new PrefixCache"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast is on, which computes with another type"
        return self._hooked()

    def _versions(self) -> list[tuple[str, int, int, torch.device]]:
        return [(name, it.data_ptr(), it._version, it.device) for name, it in tensors_of(self._model)]  # noqa: SLF001 -- no other way says it

    def _sampled(self) -> dict[tuple[torch.device, torch.dtype], torch.Tensor]:
        """Return numbers of all tensors, those of one type as one tensor: a comparison waits for the device."""
        found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for _, tensor in tensors_of(self._model):
            flat = tensor.detach().reshape(-1)
            found.setdefault((tensor.device, tensor.dtype), []).append(flat[:: max(1, len(flat) // _SAMPLES)])
        return {of: torch.cat(parts) for of, parts in found.items()}

    def _hooked(self) -> str:
        if any(getattr(nn_module, name, None) for name in _GLOBAL_HOOKS):
            return "there are forward hooks on all modules"
        for name, module in self._model.named_modules():
            if module._forward_hooks or module._forward_pre_hooks:  # noqa: SLF001 -- no other way says it
                return f"there is a forward hook on {name or 'the model'}"
            if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
                return f"forward() of {name or 'the model'} was replaced"
        return ""


def _same(
    ones: dict[tuple[torch.device, torch.dtype], torch.Tensor],
    others: dict[tuple[torch.device, torch.dtype], torch.Tensor],
) -> bool:
    return ones.keys() == others.keys() and all(
        torch.equal(one.view(torch.uint8), others[of].view(torch.uint8)) for of, one in ones.items()
    )
