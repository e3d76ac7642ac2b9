"""The whole stack's config: the file, or the object, that ``kvtiers_config`` names."""

from collections.abc import Mapping
from typing import Any

from kvtiers.api import ConfigError
from kvtiers.config import OffloadConfig, load_config

__all__ = ["CONFIG_KEY", "load_stack_config"]

CONFIG_KEY = "kvtiers_config"
"""The key in kv_connector_extra_config whose value is a file's path, or what the file would hold."""


def load_stack_config(extra_config: Mapping[str, Any]) -> tuple[OffloadConfig, str | None]:
    """Return the config without its model, which the engine knows itself, and the name it gives the weights.

    ConfigError with one line for each problem.
    """
    given = extra_config.get(CONFIG_KEY)
    if not given:
        raise ConfigError(f"kv_connector_extra_config: {CONFIG_KEY} is missing; give the path of kvtiers' config file")
    config = load_config(given)
    if config.model is None:
        return config, None
    known = sorted(config.model.identity().keys() - {"name", "weights"})
    if known:
        raise ConfigError([f"model.{name}: the engine says that itself; leave it out" for name in known])
    return config.model_copy(update={"model": None}), config.model.revision
