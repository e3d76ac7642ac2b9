"""Adapters (PEFT): which of them take part in a call. Their weights are in the identity, whichever are active.

An adapter can be switched between two calls, so what is active is a part of each call's keys.
"""

import json
from collections.abc import Iterator
from typing import Any

from kvtiers.api import ConfigError

__all__ = ["active_adapters", "adapter_configs", "refuse_adapters"]

_PER_TOKEN = {"LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA"}
"""Kinds that change each token's numbers by themselves. Others add tokens, or look at the whole prompt."""
_WHOLE_PROMPT = ("alora_invocation_tokens",)  # where these tokens are decides for those before them
_CALL_STATE = ("active_adapters", "merged_adapters", "disable_adapters", "scaling", "use_dora")


def adapter_configs(model: Any) -> dict[str, Any]:
    """Return the settings of each adapter of the model, by its name; none if it has none."""
    configs = getattr(model, "peft_config", None) or {}
    return {name: config.to_dict() for name, config in configs.items()}


def refuse_adapters(model: Any) -> None:
    """Raise ConfigError for an adapter with which the KV of a prefix depends on more than the prefix."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in _PER_TOKEN or any(getattr(config, option, None) for option in _WHOLE_PROMPT):
            raise ConfigError(
                f"adapter {name!r} ({kind}): a prefix's KV may depend on what follows it, or on more tokens"
            )


def active_adapters(model: Any) -> str:
    """Return what the adapters' layers do at present, as text; "" without adapters."""
    if not getattr(model, "peft_config", None):
        return ""
    return json.dumps([[name, _state(layer)] for name, layer in _layers(model)], sort_keys=True, default=repr)


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "merged_adapters") and hasattr(module, "adapter_layer_names"):
            yield name, module


def _state(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name, None) for name in _CALL_STATE}
