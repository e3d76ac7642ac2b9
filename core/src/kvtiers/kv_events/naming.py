"""The names in KV events: of an engine, its KV groups, and the places where blocks are."""

from collections.abc import Sequence
from typing import NamedTuple

from kvtiers.api import TierConfig
from kvtiers.config import EventsConfig
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.plugins import is_remote, load_tier

__all__ = ["OWN_NAMES", "PRIMARY", "EventNaming", "GroupFacts", "Place", "event_groups", "place_of"]

_KINDS = {"state_space": "mamba"}  # in the words of vLLM's events; the others are the same


class EventNaming(NamedTuple):
    """How KV events name an engine. ``rank``: of data-parallel engines. ``groups``: its numbers of the KV groups."""

    rank: int = 0
    groups: Sequence[int] = ()


OWN_NAMES = EventNaming()
"""An engine of its own, whose KV groups have the layout's numbers."""


class GroupFacts(NamedTuple):
    """What events say of a KV group. ``number``: the engine's own; ``window``: in tokens, of a sliding window."""

    number: int
    tokens_per_block: int
    kind: str
    window: int | None = None


class Place(NamedTuple):
    """Where blocks are, in the words of events. ``tier``: a secondary tier's name; None: the primary, or not said."""

    medium: str
    locality: str | None = None
    tier: str | None = None


PRIMARY = Place("CPU", "LOCAL")


def place_of(tier: TierConfig, config: EventsConfig) -> Place:
    """Return a tier's place: as the config says, or by the tier's type, which is installed."""
    said = config.tiers.get(tier.tier_name)
    locality = (said and said.locality) or ("REMOTE" if is_remote(load_tier(tier.type)) else "LOCAL")
    return Place(said.medium if said else "STORAGE", locality, tier.tier_name if config.ownership else None)


def event_groups(layout: CacheLayout, naming: EventNaming) -> list[GroupFacts]:
    """Return what events say of a layout's KV groups."""
    numbers = naming.groups or range(len(layout.groups))
    return [
        GroupFacts(number, group.tokens_per_block, _KINDS.get(group.kind, group.kind), group.window)
        for number, group in zip(numbers, layout.groups, strict=True)
    ]
