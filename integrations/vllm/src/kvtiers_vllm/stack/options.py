"""The whole stack's config: the file, or the object, that ``kvtiers_config`` names."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtiers.api import ConfigError
from kvtiers.config import OffloadConfig, load_config

__all__ = ["CONFIG_KEY", "CONNECTOR_NAME", "SPEC_NAME", "VARIABLE", "load_stack_config", "way_in"]

CONNECTOR_NAME = "KvtiersConnector"
"""The whole stack's name in vLLM's ``kv_connector``."""
SPEC_NAME = "KvtiersOffloadingSpec"
"""The name of its spec, by which vLLM's own factory finds it; and, under vLLM's own connector, its old spelling."""

CONFIG_KEY = "kvtiers_config"
"""The key in kv_connector_extra_config whose value is a file's path, or what the file would hold."""

VARIABLE = "KVTIERS_CONFIG"
"""Names the whole stack's config file; empty is as good as unset."""

_SYNC_LOADS = "sync_load_budget_bytes"  # vLLM 0.33: loads that the step waits for, whose request runs in it


def load_stack_config(extra_config: Mapping[str, Any]) -> tuple[OffloadConfig, str | None]:
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
    config = load_config(given)
    if config.model is None:
        return config, None
    known = sorted(config.model.identity().keys() - {"name", "weights"})
    if known:
        raise ConfigError([f"model.{name}: the engine sets it; remove it" for name in known])
    return config.model_copy(update={"model": None}), config.model.revision


def way_in(extra_config: Any) -> str:
    """Return how the whole stack was switched on, from vLLM's ``kv_connector_extra_config``."""
    path, given = os.environ.get(VARIABLE, ""), extra_config.get(CONFIG_KEY)
    if not isinstance(given, str):
        return "by a config in its arguments"
    return f"by {VARIABLE}={given}" if path and str(Path(path).absolute()) == given else f"by {given}"
