"""Eviction policies, which choose the chunk that leaves the primary next, and their registry by name."""

from collections.abc import Callable, Mapping

from kvtiers._failures import error_text
from kvtiers.api import ConfigError, TierPluginError
from kvtiers.primary.eviction.arc import ARCPolicy
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.primary.eviction.forecast import WithForecast
from kvtiers.primary.eviction.hinted import HintedPolicy
from kvtiers.primary.eviction.lru import LRUPolicy
from kvtiers.primary.eviction.shares import TenantShares
from kvtiers.primary.eviction.turn_hazard import TurnHazardPolicy

__all__ = [
    "BUILT_IN",
    "ARCPolicy",
    "EvictionPolicy",
    "HintedPolicy",
    "LRUPolicy",
    "TenantShares",
    "TurnHazardPolicy",
    "WithForecast",
    "make_policy",
    "policy_class",
]

BUILT_IN: Mapping[str, type[EvictionPolicy]] = {"arc": ARCPolicy, "lru": LRUPolicy, "turn-hazard": TurnHazardPolicy}


def policy_class(name: str) -> type[EvictionPolicy]:
    """Return the policy of this name: one of ``BUILT_IN``, or an entry point in the group ``kvtiers.eviction``.

    ConfigError, one line, if there is none or it is not a complete EvictionPolicy.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    # Only a name that is not ours is worth a walk over all installed distributions.
    from kvtiers.plugins import EVICTION_GROUP, did_you_mean, installed_names, load_class, shown_name

    installed = installed_names(EVICTION_GROUP)
    if name not in installed:
        known = sorted({*BUILT_IN, *installed})
        hint, names = did_you_mean(name, known), ", ".join(known)
        text = f"unknown eviction policy {shown_name(name)}.{hint} Eviction policies: {names}."
        raise ConfigError(text)
    try:
        found = load_class(EVICTION_GROUP, name, "eviction policy")
    except TierPluginError as error:
        raise ConfigError(str(error)) from error
    if not issubclass(found, EvictionPolicy):
        raise ConfigError(f"eviction policy {name!r}: expected a subclass of EvictionPolicy, got {found!r}")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"eviction policy {name!r}: {found.__name__} does not define {', '.join(missing)}")
    return found


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
