"""Registration of a tier plugin.

A distribution declares an entry point in the group ``kvtiers.tiers``, named as the ``type`` in the YAML file, that
leads to a module with one hook::

    @hookimpl
    def kvtiers_tier() -> TierPlugin:
        return TierPlugin(name="memory", kind="store", config=MemoryConfig, open=open_memory, api_version=1)

The module imports no client library: in the engine's process only the config model is wanted. ``open`` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pluggy

from kvtiers.api.config import TierConfig
from kvtiers.api.store import ChunkStore
from kvtiers.api.tier import SecondaryTierManager

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "OLD_API_VERSIONS",
    "WHEN_FULL",
    "TierContext",
    "TierPlugin",
    "hookimpl",
    "hookspec",
]

API_VERSION = 1
"""The number of the contract in this package. A plugin states, as a literal, the one it was written for."""

OLD_API_VERSIONS: frozenset[int] = frozenset()
"""Older numbers whose plugins still work as they are: each is loaded with a warning. There is none so far."""

ENTRY_POINT_GROUP = "kvtiers.tiers"

WHEN_FULL = "give it more room, or have it evict by itself"
"""The advice of a type that gives none."""

hookspec = pluggy.HookspecMarker("kvtiers")
hookimpl = pluggy.HookimplMarker("kvtiers")


@dataclass(frozen=True, slots=True)
class TierContext:
    """The parameters that a tier is opened with.

    ``value_bytes``: the largest value's length; each ``dst`` and ``src`` has its own. ``namespace``: the first part
    of every storage name. ``read_only``: nothing will be written or deleted. ``region``: the whole shared region as
    a flat, writable view of bytes, row after row, for a tier that registers memory with a device or a library;
    rows are ``row_stride`` bytes apart. A ``ChunkStore`` seldom needs it.
    """

    tier_name: str
    value_bytes: int
    namespace: str
    read_only: bool
    region: memoryview
    row_stride: int


@dataclass(frozen=True, slots=True)
class TierPlugin:
    """One tier type: its name (the YAML ``type``), its rung, its config model, and how to open it.

    ``kind`` is ``"store"`` if ``open`` returns a ``ChunkStore``, ``"manager"`` if it returns a
    ``SecondaryTierManager``. ``open(config, context)`` may block and may raise; a ``"store"`` is opened in the
    tier's host process. It raises ``ConfigError`` for what the user has to mend (a directory that is not his, a
    capacity without room for a value), ``TierUnavailable`` for a backend that is not there now, each with one line that
    says what to do. Either way the tier is out of use, its lookups miss, and ``open`` is called again, after
    ``breaker.delay``, doubling to ``breaker.max_delay``; with ``required: true`` the engine does not start.
    ``api_version`` is the literal number of the contract that the plugin was written for. The rest are facts about the
    type, of which a ``"manager"`` has ``figures`` and ``shareable`` alone.
    """

    name: str
    kind: Literal["store", "manager"]
    config: type[TierConfig]
    open: Callable[[Any, TierContext], ChunkStore | SecondaryTierManager]
    api_version: int

    shareable: bool = False
    """Several processes may have the store open at the same time, and each finds what the others have written. Only
    then may the tier have more than one tier host: ``processes``."""

    writes_locally: bool = False
    """Writing a value takes this machine's processors for as long as it lasts, as copying into a file does, and does
    not wait for another machine. Only some of the threads write at the same time then: ``store_threads``."""

    figures: Mapping[str, str] = field(default_factory=dict)
    """The store's own figures (``SupportsStats``) and their help texts, for exporters that need them beforehand, such
    as an engine's ``/metrics``. One that is not named here is a label of ``kvtiers_tier_own_figure`` there."""

    shared_figures: frozenset[str] = frozenset()
    """Those of the store's own figures that say how the store is, not what one tier host has done: each has the same,
    so they are not added up."""

    when_full: str = WHEN_FULL
    """What to do once the store takes no more values (``NotKept``), for the line of the log that says so."""


class TierHookSpec:
    """The hooks that core calls in a plugin's entry module."""

    @hookspec
    def kvtiers_tier(self) -> TierPlugin:  # type: ignore[empty-body]
        """Return the tier that this module offers. Called once; must not import a client library."""
