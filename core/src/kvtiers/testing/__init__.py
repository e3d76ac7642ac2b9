"""The conformance kit: what core demands of a tier, as tests that its author subclasses.

``ChunkStoreTests`` for a store, ``SecondaryTierTests`` for a tier of the third rung, ``TierPluginTests`` for the
entry module and its options; each wants one fixture. ``pip install 'kvtiers[testing]'`` brings pytest and the
plugin that leaves out tests which do not apply. ``docs/write-a-tier.md`` shows the whole of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtiers.testing.chunk_store import ChunkStoreTests
    from kvtiers.testing.secondary_tier import SecondaryTierTests
    from kvtiers.testing.tier_plugin import TierPluginTests

__all__ = ["ChunkStoreTests", "SecondaryTierTests", "TierPluginTests"]

_HOME = {
    "ChunkStoreTests": "kvtiers.testing.chunk_store",
    "SecondaryTierTests": "kvtiers.testing.secondary_tier",
    "TierPluginTests": "kvtiers.testing.tier_plugin",
}


def __getattr__(name: str) -> object:
    # pytest loads this package in every run, in any project, for the plugin beside it: it must stay light.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
