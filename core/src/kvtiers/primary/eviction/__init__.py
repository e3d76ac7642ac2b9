"""Eviction policies, which choose the chunk that leaves the primary next, and their registry by name."""

from collections.abc import Callable, Mapping

from kvtiers._failures import error_text
from kvtiers.api import ConfigError
from kvtiers.primary.eviction.arc import ARCPolicy
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.primary.eviction.hinted import HintedPolicy
from kvtiers.primary.eviction.lru import LRUPolicy
from kvtiers.primary.eviction.shares import TenantShares

__all__ = [
    "BUILT_IN",
    "ARCPolicy",
    "EvictionPolicy",
    "HintedPolicy",
    "LRUPolicy",
    "TenantShares",
    "make_policy",
    "policy_class",
]

BUILT_IN: Mapping[str, type[EvictionPolicy]] = {"arc": ARCPolicy, "lru": LRUPolicy}


def policy_class(name: str) -> type[EvictionPolicy]:
    """Return the policy of this name: one of ``BUILT_IN``, or an entry point in the group ``kvtiers.eviction``.

    ConfigError, one line, if there is none or it is not a complete EvictionPolicy.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    # Only a name that is not ours is worth a walk over all installed distributions.
    from kvtiers.plugins import (
        EVICTION_GROUP,
        comes_with,
        did_you_mean,
        installed_names,
        load_subclass,
        shown_name,
    )

    installed = installed_names(EVICTION_GROUP)
    if name not in installed and not comes_with(EVICTION_GROUP, name):
        known = sorted({*BUILT_IN, *installed})
        hint, names = did_you_mean(name, known), ", ".join(known)
        raise ConfigError(f"unknown eviction policy {shown_name(name)}.{hint} Eviction policies: {names}.")
    return load_subclass(EVICTION_GROUP, name, "eviction policy", EvictionPolicy)  # type: ignore[type-abstract]


def make_policy(name: str, capacity: int, clock: Callable[[], float] | None = None) -> EvictionPolicy:
    """Return a new policy of this name for a primary of ``capacity`` rows; ConfigError if that is impossible."""
    policy = policy_class(name)
    try:
        made = policy(capacity)
        if clock is not None:
            made.clock = clock
    except Exception as error:
        raise ConfigError(
            f"eviction policy {name!r} cannot be made for {capacity} rows: {error_text(error)}"
        ) from error
    return made
