"""The whole stack's config: the file, or the object, that ``kvtiers_config`` names."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtiers.api import ConfigError

if TYPE_CHECKING:
    from kvtiers.config import OffloadConfig
    from kvtiers_vllm.plugin_figures import Types

__all__ = [
    "CONFIG_KEY", "CONNECTOR_NAME", "SPEC_NAME", "VARIABLE", "load_stack_config", "note_tier_types", "noted_tier_types",
    "way_in",
]  # fmt: skip

CONNECTOR_NAME = "KvtiersConnector"
"""The whole stack's name in vLLM's ``kv_connector``."""
SPEC_NAME = "KvtiersOffloadingSpec"
"""The name of its spec, by which vLLM's own factory finds it; and, under vLLM's own connector, its old spelling."""

CONFIG_KEY = "kvtiers_config"
"""The key in kv_connector_extra_config whose value is a file's path, or what the file would hold."""

VARIABLE = "KVTIERS_CONFIG"
"""Names the whole stack's config file; empty is as good as unset."""

_TYPES_KEY = "kvtiers_tier_types"
_SYNC_LOADS = "sync_load_budget_bytes"  # vLLM 0.33: loads that the step waits for, whose request runs in it


def load_stack_config(extra_config: Mapping[str, Any]) -> "tuple[OffloadConfig, str | None]":
    """Return the config without its model, which comes from the engine, and the name that it gives the weights.

    ConfigError with one line for each problem.
    """
    if extra_config.get(_SYNC_LOADS):
        raise ConfigError(
            f"kv_connector_extra_config: {_SYNC_LOADS}: a load within a step cannot fail and be computed; leave it out"
        )
    given = extra_config.get(CONFIG_KEY)
    if not given:
        raise ConfigError(f"kv_connector_extra_config: {CONFIG_KEY} is missing; give the path of kvtiers' config file")
    from kvtiers.config import load_config  # late: every process of every vLLM has this module, and few get here

    config = load_config(given)
    if config.model is None:
        return config, None
    known = sorted(config.model.identity().keys() - {"name", "weights"})
    if known:
        raise ConfigError([f"model.{name}: the engine sets it; remove it" for name in known])
    return config.model_copy(update={"model": None}), config.model.revision


def note_tier_types(extra_config: MutableMapping[str, Any]) -> None:
    """Record the types of the stack's tiers beside its config, for ``noted_tier_types`` in each process.

    Processes that are given this config take the same for their figures, also if the file changes while the engine
    starts. Problems of the config are ConfigErrors.
    """
    if extra_config.get(CONFIG_KEY) and _TYPES_KEY not in extra_config:
        config, _ = load_stack_config(extra_config)
        extra_config[_TYPES_KEY] = sorted({tier.type for tier in config.secondary})


def noted_tier_types(extra_config: Mapping[str, Any]) -> "Types":
    """Return the recorded types, sorted; None where nothing was recorded."""
    types = extra_config.get(_TYPES_KEY)
    return None if types is None else tuple(types)


def way_in(extra_config: Any) -> str:
    """Return how the whole stack was switched on, from vLLM's ``kv_connector_extra_config``."""
    path, given = os.environ.get(VARIABLE, ""), extra_config.get(CONFIG_KEY)
    if not isinstance(given, str):
        return "by a config in its arguments"
    return f"by {VARIABLE}={given}" if path and str(Path(path).absolute()) == given else f"by {given}"
