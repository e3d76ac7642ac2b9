"""The figures of the whole stack: for vLLM's own ``/metrics`` and for ``kvtiers status``.

Both call ``TieringManager.stats``, which reads all figures of one moment, on any thread.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtiers.control import Action, ControlSocket
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.metrics import (
    BUDGET_FIGURES,
    PRIMARY_HELP,
    TIER_HELP,
    WHAT_IF_COUNTERS,
    WHAT_IF_HELP,
    WHAT_IF_LABELS,
    EngineMetrics,
    help_texts,
    what_if_figures,
)
from kvtiers.status import Troubles, answer_status
from kvtiers_vllm.own_tiering.metrics import COUNTERS, EVERY_SECONDS, GAUGES, described, tier_definitions
from kvtiers_vllm.plugin_figures import Types, plugin_values

__all__ = ["StackFacts", "StackFigures", "definitions", "open_stack_status"]

_TIER_COUNTERS = COUNTERS | described(
    "kvtiers_tier_", TIER_HELP, "hits", "dropped_promotions", "budget_misses", "declined_cascades", "missed_cascades",
    *BUDGET_FIGURES,
)  # fmt: skip
_TIER_GAUGES = GAUGES | described("kvtiers_tier_", TIER_HELP, "pinned_rows", "out_of_use")
_TIER_NAMES = dict.fromkeys((*_TIER_COUNTERS, *_TIER_GAUGES))
_ENGINE_COUNTERS = described(
    "kvtiers_", help_texts(EngineMetrics),
    "lookups", "primary_hits", "stored_chunks", "refused_stores", "refused_tenants", "declined_stores",
    "dropped_dirty", "wait_expired", "recomputed_cheaper", "unusable_prefixes",
    "failed_gpu_stores", "failed_gpu_loads", "late_loads", "engine_seconds", "event_batches", "event_chunks",
    "dropped_event_chunks", "replayed_event_batches", "prefetched_chunks", "dropped_prefetches",
)  # fmt: skip
_COUNTERS = frozenset((*_TIER_COUNTERS, *_ENGINE_COUNTERS, *(f"kvtiers_what_if_{name}" for name in WHAT_IF_COUNTERS)))
_PRIMARY_GAUGES = described(
    "kvtiers_primary_", PRIMARY_HELP,
    "rows", "free_rows", "pending_rows", "pinned_rows", "quarantined_rows", "closed_rows", "retired_rows",
    "kept_rows", "kept_over_share", "kept_given_up", "pool",
)  # fmt: skip
_OF_A_DETACHED_TIER = {"kvtiers_tier_open": math.nan, "kvtiers_tier_shared": math.nan}
"""What gauges say that would tell of a trouble with 0, as all others say; vLLM keeps each series to its own end."""


def definitions(counter: Callable[..., Any], gauge: Callable[..., Any], types: Types = None) -> dict[str, Any]:
    """Return the figures' definitions. ``counter``, ``gauge``: vLLM's classes for them; ``types``: the tiers'."""
    found = tier_definitions(counter, gauge, _TIER_COUNTERS, _TIER_GAUGES, types)
    found |= {name: counter(text) for name, text in _ENGINE_COUNTERS.items()}
    found |= {name: gauge(text) for name, text in _PRIMARY_GAUGES.items()}
    for name, text in WHAT_IF_HELP.items():
        kind = counter if name in WHAT_IF_COUNTERS else gauge
        found[f"kvtiers_what_if_{name}"] = kind(text, WHAT_IF_LABELS.get(name, ()))
    return found


@dataclass(frozen=True, slots=True)
class StackFacts:
    """The sources of the figures. ``shared``: another process can reproduce the keys and the weights' name.

    ``types``: the tiers' at the start.
    """

    stats: Callable[[], Mapping[str, Any]]
    layout: CacheLayout
    shared: bool
    types: Types = None

    def tokens(self, figures: Mapping[str, Any]) -> int:
        """Return the tokens of prompts whose KV was loaded from a tier."""
        return int(figures["prefix_hits"]) * self.layout.tokens_per_chunk(self.layout.prefix_group)


class StackFigures:
    """The figures that have changed since the last call, in vLLM's form. ``collection``: vLLM's class for that."""

    def __init__(
        self, facts: StackFacts, collection: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._facts = facts
        self._collection = collection
        self._clock = clock
        self._next = 0.0
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}

    def __call__(self) -> Any:
        """Return the changes since the last report; None less than ``EVERY_SECONDS`` after it."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + EVERY_SECONDS
        changes = self._collection()
        stats = self._facts.stats()
        for name, labels in [key for key in self._reported if _is_of_a_tier_besides(key, stats["tiers"])]:
            del self._reported[name, labels]
            if name not in _COUNTERS:
                changes.set_gauge(name, _OF_A_DETACHED_TIER.get(name, 0.0), labels)
        for name, labels, value in self._figures(stats):
            before = self._reported.get((name, labels))
            if value == before:
                continue
            self._reported[name, labels] = value
            if name not in _COUNTERS:
                changes.set_gauge(name, value, labels)
            elif value > (before or 0.0):
                changes.increase_counter(name, value - (before or 0.0), labels)
        return changes

    def _figures(self, stats: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], float]]:
        facts = self._facts
        for tier, figures in stats["tiers"].items():
            ours = {"off": 0, "shared": int(facts.shared)}
            known = {**figures, **figures["own"], **ours}
            yield from _numbers(_TIER_NAMES, "kvtiers_tier_", known, (tier,))
            for name, more, value in plugin_values(figures["own"], _TIER_NAMES, facts.types):
                yield name, (tier, *more), value
        yield from _numbers(_PRIMARY_GAUGES, "kvtiers_primary_", stats["primary"], ())
        yield from _numbers(_ENGINE_COUNTERS, "kvtiers_", stats["engine"], ())
        for name, labels, value in what_if_figures(stats.get("what_if")):
            yield f"kvtiers_what_if_{name}", tuple(labels.values()), float(value)


def _is_of_a_tier_besides(key: tuple[str, tuple[str, ...]], tiers: Mapping[str, Any]) -> bool:
    name, labels = key
    return name.startswith("kvtiers_tier_") and labels[0] not in tiers


def _numbers(
    names: Any, prefix: str, figures: Mapping[str, Any], labels: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for name in names:
        value = figures.get(name.removeprefix(prefix))
        if isinstance(value, (int, float)):
            yield name, labels, float(value)


def open_stack_status(
    facts: StackFacts,
    troubles: Troubles,
    engine: str,
    namespace: str = "",
    fingerprint: Callable[[], str] = lambda: "",
    actions: Mapping[str, Action] | None = None,
    tend: Callable[[], None] = lambda: None,
) -> ControlSocket:
    """Answer the engine's operator from now on. ``actions``: besides ``status``; ``tend``: the manager's."""

    def about(_: str, figures: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": facts.tokens(figures), "off": "", "shared": facts.shared}

    return answer_status(
        engine,
        facts.layout.model.name,
        troubles,
        facts.stats,
        about,
        namespace=namespace,
        fingerprint=fingerprint,
        actions=actions,
        tend=tend,
    )
