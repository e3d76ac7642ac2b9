"""The figures of the installed tiers' own stores, which vLLM's ``/metrics`` need before there is a tier.

Both processes ask here, the one that defines them and the engine that reports them: they are the same two times.
"""

import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvtiers.api import KvtiersError
from kvtiers.metrics import name_of_own
from kvtiers.plugins import installed_tiers, load_tier

__all__ = ["OTHERS", "plugin_gauges", "plugin_values"]

_log = logging.getLogger("kvtiers.vllm")
_PREFIX = "kvtiers_tier_"

OTHERS = "kvtiers_tier_own_figure"
"""The gauge of those that a tier type does not name beforehand; by the label ``figure``."""


@functools.cache
def plugin_gauges() -> Mapping[str, str]:
    """Return what each figure that an installed tier type names is, by its name in ``/metrics``.

    They are gauges: a counter would restart from 0 with the tier host.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(entry.name for entry in installed_tiers()):
        try:
            figures = load_tier(name).config.figures
        except KvtiersError as error:  # opening such a tier reports it
            _log.debug("%s: its figures are not known: %s", name, error)
            continue
        for figure, text in figures.items():
            found.setdefault(_PREFIX + name_of_own(figure), text)
    return found


def plugin_values(own: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield a tier's own figures: name, labels after the tier's, value. ``known``: names that are reported anyway."""
    for figure, value in own.items():
        name = _PREFIX + name_of_own(figure)
        if isinstance(value, (int, float)) and name not in known:
            yield (name, (), float(value)) if name in plugin_gauges() else (OTHERS, (figure,), float(value))
