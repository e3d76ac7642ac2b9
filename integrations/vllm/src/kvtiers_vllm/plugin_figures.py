"""The figures of tiers' own stores, which vLLM's ``/metrics`` need before there is a tier.

Both processes ask here, the one that defines them and the engine that reports them, each for the same tier types:
those of the engine's config, as it was when vLLM made its own (``Types``). A server whose engine has others all the
same, as on another node, has their figures by a label (``OTHERS``).
"""

import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from kvtiers.api import KvtiersError
from kvtiers.metrics import name_of_own
from kvtiers.plugins import installed_tiers, load_tier

__all__ = ["OTHERS", "Types", "plugin_gauges", "plugin_values", "under_defined_names"]

_log = logging.getLogger("kvtiers.vllm")
_PREFIX = "kvtiers_tier_"

Types: TypeAlias = tuple[str, ...] | None
"""Tier types; None: all that are installed, where nothing says which an engine has. Importing one takes 10 to 20 ms."""

OTHERS = "kvtiers_tier_own_figure"
"""The gauge of those that a tier type does not name beforehand; by the label ``figure``."""


@functools.cache
def plugin_gauges(types: Types = None) -> Mapping[str, str]:
    """Return what each figure that one of these tier types names is, by its name in ``/metrics``.

    They are gauges: a counter would restart from 0 with the tier host.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(entry.name for entry in installed_tiers()) if types is None else types:
        try:
            figures = load_tier(name).figures
        except KvtiersError as error:  # opening such a tier reports it
            _log.debug("%s: its figures are not known: %s", name, error)
            continue
        for figure, text in figures.items():
            found.setdefault(_PREFIX + name_of_own(figure), text)
    return found


def plugin_values(
    own: Mapping[str, Any], known: Collection[str], types: Types = None
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield a tier's own figures: name, labels after the tier's, value. ``known``: names that are reported anyway."""
    gauges = plugin_gauges(types)
    for figure, value in own.items():
        name = _PREFIX + name_of_own(figure)
        if isinstance(value, (int, float)) and name not in known:
            yield (name, (), float(value)) if name in gauges else (OTHERS, (figure,), float(value))


def under_defined_names(stats: Mapping[str, Any], defined: Collection[str]) -> Mapping[str, Any]:
    """Return vLLM's report of an engine with each tier's own figure that is not ``defined`` as one of ``OTHERS``."""
    data = stats.get("data", {})
    unknown = [name for name in data if name.startswith(_PREFIX) and name not in defined]
    if not unknown:
        return stats
    kinds = dict(stats["types"])
    kinds[OTHERS] = kinds[unknown[0]]  # all are gauges
    named = {name: values for name, values in data.items() if name not in unknown}
    others = dict(named.get(OTHERS, {}))
    for name in unknown:
        figure = name.removeprefix(_PREFIX)
        others |= {(*labels, figure): value for labels, value in data[name].items()}
    return {**stats, "data": {**named, OTHERS: others}, "types": kinds}
