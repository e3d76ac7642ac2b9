"""Checks of a tier's classes: half abilities, and methods that look like the contract but are no part of it.

A method under another name, or without the one that it goes with, is no ability: core would silently never call it.
So it is an error in the kit, in ``kvtiers check``, and where the tier is opened.
"""

import difflib
import inspect
from abc import ABC
from collections.abc import Iterator
from typing import Any

from kvtiers.api.config import HOST_OPTIONS, TierConfig
from kvtiers.api.store import (
    ChunkStore,
    SupportsBatch,
    SupportsDiagnosis,
    SupportsListing,
    SupportsPieces,
    SupportsStats,
)
from kvtiers.api.tier import SecondaryTierManager, SupportsQuotas

__all__ = ["ABILITIES", "class_problems", "option_problems"]

ABILITIES = (SupportsBatch, SupportsPieces, SupportsListing, SupportsDiagnosis, SupportsStats)
"""The optional abilities of a store, each a runtime Protocol."""

_OF_MANAGERS = (SupportsQuotas, SupportsDiagnosis, SupportsStats)

_CLOSE = 0.85  # 'diagnoze' and 'stat' are; 'state' is not
_ORDINARY = frozenset({"status"})  # close to 'stats', and a sensible name for something else


def members_of(ability: type) -> list[str]:
    """Return the methods and attributes that make up an ability."""
    methods = [name for name, value in vars(ability).items() if inspect.isfunction(value) and not name.startswith("_")]
    return [*inspect.get_annotations(ability), *methods]


def class_problems(tier_class: type) -> list[str]:
    """Return what is wrong with the public methods of a ``ChunkStore`` or ``SecondaryTierManager``, a line each."""
    return [*_no_lookup(tier_class), *_half_abilities(tier_class), *_near_misses(tier_class)]


def option_problems(config: type[TierConfig], kind: str) -> list[str]:
    """Return what is wrong with the options of a tier of this kind that every tier has, a line each.

    A subclass may change a default, but must keep the option's type and description: core would apply the old meaning.
    A "manager" may reuse the names of options that concern a store's tier host.
    """
    own = {name for part in _above(config, TierConfig) for name in inspect.get_annotations(part)}
    common = own & set(TierConfig.model_fields) - {"type"} - (HOST_OPTIONS if kind == "manager" else frozenset())
    return [_redeclared(config, name) for name in sorted(common) if _means_something_else(config, name)]


def _means_something_else(config: type[TierConfig], name: str) -> bool:
    mine, common = config.model_fields[name], TierConfig.model_fields[name]
    return (mine.annotation, mine.description) != (common.annotation, common.description)


def _redeclared(config: type[TierConfig], name: str) -> str:
    return (
        f"{config.__name__} declares the option {name!r}, which every tier has "
        f"({TierConfig.model_fields[name].description}); choose another name, such as 'server_{name}'. "
        "To change its default alone, keep its type and its description"
    )


def _no_lookup(tier_class: type) -> Iterator[str]:
    base = SecondaryTierManager
    if issubclass(tier_class, base) and (tier_class.lookup, tier_class.lookup_many) == (base.lookup, base.lookup_many):
        yield (
            f"{tier_class.__name__} has neither lookup nor lookup_many: each would ask the other, without end; write "
            "one of them"
        )


def _half_abilities(tier_class: type) -> Iterator[str]:
    for ability in ABILITIES if issubclass(tier_class, ChunkStore) else ():
        has = [name for name in members_of(ability) if getattr(tier_class, name, None) is not None]
        lacks = [name for name in members_of(ability) if name not in has]
        if has and lacks:
            attributes = [name for name in inspect.get_annotations(ability) if name in lacks]
            how = f" ({', '.join(attributes)}: on the class, since one that __init__ sets is not seen)"
            yield (
                f"{tier_class.__name__} has {', '.join(has)} but not {', '.join(lacks)}: {ability.__name__} is all of "
                f"them, so core would use none; add {', '.join(lacks)}{how if attributes else ''}, or take "
                f"{', '.join(has)} away"
            )


def _near_misses(tier_class: type) -> Iterator[str]:
    contract = ChunkStore if issubclass(tier_class, ChunkStore) else SecondaryTierManager
    abilities = ABILITIES if contract is ChunkStore else _OF_MANAGERS
    known = {name for name in vars(contract) if not name.startswith("_")}
    known |= {name for ability in abilities for name in members_of(ability)}
    own: dict[str, Any] = {name: value for part in _above(tier_class, contract) for name, value in vars(part).items()}
    for name in own:
        if name in known or name.startswith("_") or name in _ORDINARY:
            continue
        close = difflib.get_close_matches(name, known - set(own), n=1, cutoff=_CLOSE)
        if close:
            yield (
                f"{tier_class.__name__} has {name!r}, which is no part of the contract and is never used. "
                f"Did you mean {close[0]!r}? If not, begin it with an underscore"
            )


def _above(own: type, contract: type) -> list[type]:
    """Return the classes that the author has added to a class of the contract."""
    return [part for part in own.__mro__ if part not in {*contract.__mro__, ABC, object}]
