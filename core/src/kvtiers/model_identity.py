"""The model's identity: put together from the config and from what the caller says, and whether others can have it.

Shared by the roots that open tiers: an engine's manager and workers (``runtime.py``), and clients (``client/``).
"""

import dataclasses
import logging
import secrets

from kvtiers.api import ConfigError
from kvtiers.config import OffloadConfig
from kvtiers.layout.cache_layout import CacheLayout, ModelIdentity
from kvtiers.layout.fingerprint_record import Described, describe_layout
from kvtiers.layout.storage_name import StorageNames

__all__ = ["described", "is_shared", "with_model", "with_weights"]

_log = logging.getLogger("kvtiers")
_RANDOM = "random-"  # what stands before a name that is this process's alone


def with_model(config: OffloadConfig, layout: CacheLayout) -> CacheLayout:
    """Return the layout with the model's identity from both sources; ConfigError where they contradict each other."""
    if config.model is None:
        return layout
    identity = dataclasses.asdict(layout.model)
    defaults = dataclasses.asdict(ModelIdentity(name=""))
    problems = []
    for name, value in config.model.identity().items():
        if identity[name] not in {defaults[name], value}:
            problems.append(
                f"model.{name}: the config says {value!r}, the engine says {identity[name]!r}; make them equal"
            )
        identity[name] = value
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(layout, model=ModelIdentity(**identity))


def with_weights(layout: CacheLayout) -> CacheLayout:
    """Return the layout; where the weights have no name, with one that no other process has, and say so in the log."""
    if layout.model.weights:
        return layout
    _log.warning(
        "no weights identity from the engine or 'model.revision': nothing is shared, nothing survives a restart"
    )
    weights = f"{_RANDOM}{secrets.token_hex(16)}"
    return dataclasses.replace(layout, model=dataclasses.replace(layout.model, weights=weights))


def is_shared(model: ModelIdentity) -> bool:
    """Return whether another process can reproduce the keys and the weights' name."""
    return not (model.weights.startswith(_RANDOM) or model.hash_seed.startswith(_RANDOM))


def described(names: StorageNames, layout: CacheLayout, release: str) -> Described | None:
    """Return what the fingerprint stands for; None where no other process could have it."""
    if not is_shared(layout.model):
        return None
    return Described(names.prefix, describe_layout(layout, release, names.fingerprint))
