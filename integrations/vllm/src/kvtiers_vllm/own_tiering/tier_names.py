"""vLLM's names for kvtiers' tiers and eviction policies under its own tiering. Every vLLM process has this module."""

from collections.abc import Mapping
from typing import Any

__all__ = ["PREFIX", "policy_name", "tier_names"]

PREFIX = "kvtiers-"
"""In front of a tier's type, in vLLM's names for tiers, and of an eviction policy's name."""
_VLLMS_POLICIES = ("lru", "arc")


def policy_name(name: str) -> str:
    """Return vLLM's name for the eviction policy that a config calls so."""
    return name if name in _VLLMS_POLICIES else f"{PREFIX}{name}"


def tier_names(extra_config: Mapping[str, Any]) -> list[str]:
    """Return the names of all kvtiers tiers of the engine, by which metrics and reports name them."""
    entries = [entry for entry in extra_config.get("secondary_tiers", ()) if isinstance(entry, Mapping)]
    types = [str(entry.get("type", "")) for entry in entries]
    return [
        str(entry.get("name", type_name.removeprefix(PREFIX)))
        for entry, type_name in zip(entries, types, strict=True)
        if type_name.startswith(PREFIX)
    ]
