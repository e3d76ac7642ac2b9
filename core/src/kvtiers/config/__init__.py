"""The YAML file: read, validated and explained. ``load_config`` is the way in."""

from kvtiers.config.load import load_config, read_config
from kvtiers.config.models import (
    BudgetConfig,
    EventsConfig,
    EventTierConfig,
    ModelConfig,
    OffloadConfig,
    PrimaryConfig,
    RecordConfig,
)

__all__ = [
    "BudgetConfig",
    "EventTierConfig",
    "EventsConfig",
    "ModelConfig",
    "OffloadConfig",
    "PrimaryConfig",
    "RecordConfig",
    "load_config",
    "read_config",
]
