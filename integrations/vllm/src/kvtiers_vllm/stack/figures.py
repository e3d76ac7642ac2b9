"""The figures of the whole stack: for vLLM's own ``/metrics`` and for ``kvtiers status``.

Both call ``TieringManager.stats``, which reads all figures of one moment, on any thread.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.status import StatusSocket, Troubles, answer_status
from kvtiers_vllm.own_tiering.metrics import COUNTERS, EVERY_SECONDS, GAUGES, tier_definitions
from kvtiers_vllm.plugin_figures import plugin_values

__all__ = ["StackFacts", "StackFigures", "definitions", "open_stack_status"]

_TIER_COUNTERS = {
    **COUNTERS,
    "kvtiers_tier_hits": "Chunks loaded from the tier, counted at their first use by a request.",
    "kvtiers_tier_dropped_promotions": "Chunks that the tier has but that got no row in the primary.",
    "kvtiers_tier_budget_misses": "Lookups that skipped the tier, since it may pin no more rows.",
}
_TIER_GAUGES = {
    **GAUGES,
    "kvtiers_tier_pinned_rows": "Rows that the tier's jobs, reservations and quarantine hold.",
    "kvtiers_tier_out_of_use": "1: the tier reported jobs or keys that it was never given, and is no longer used.",
}
_TIER_NAMES = dict.fromkeys((*_TIER_COUNTERS, *_TIER_GAUGES))
_ENGINE_COUNTERS = {
    "kvtiers_lookups": "Chunks that requests looked up.",
    "kvtiers_primary_hits": "Chunks that requests read and that no tier had loaded for them.",
    "kvtiers_stored_chunks": "Chunks stored in the primary by the engine.",
    "kvtiers_refused_stores": "Chunks for which there was no room in the primary.",
    "kvtiers_wait_expired": "Chunks recomputed because the lookup or load wait budget expired.",
    "kvtiers_recomputed_cheaper": "Chunks that were computed though a tier had them, since that was faster.",
    "kvtiers_failed_gpu_stores": "Chunks whose copy out of the engine failed.",
    "kvtiers_failed_gpu_loads": "Chunks whose copy into the engine failed; they were computed.",
    "kvtiers_engine_seconds": "Seconds that kvtiers took of the engine's thread.",
}
_PRIMARY_GAUGES = {
    "kvtiers_primary_rows": "Rows of the primary.",
    "kvtiers_primary_free_rows": "Rows that hold nothing.",
    "kvtiers_primary_pending_rows": "Rows into which something is being copied.",
    "kvtiers_primary_pinned_rows": "Rows that a copy or a tier holds.",
    "kvtiers_primary_quarantined_rows": "Rows of jobs that were given up and that something may still touch.",
    "kvtiers_primary_closed_rows": "Rows that are not used yet, since a rank has not pinned them.",
    "kvtiers_primary_retired_rows": "Rows that are never used, since their memory was not available when needed.",
}


def definitions(counter: Callable[..., Any], gauge: Callable[..., Any]) -> dict[str, Any]:
    """Return the figures' definitions. ``counter``, ``gauge``: vLLM's classes for them."""
    found = tier_definitions(counter, gauge, _TIER_COUNTERS, _TIER_GAUGES)
    found |= {name: counter(text) for name, text in _ENGINE_COUNTERS.items()}
    return found | {name: gauge(text) for name, text in _PRIMARY_GAUGES.items()}


@dataclass(frozen=True, slots=True)
class StackFacts:
    """The sources of the figures. ``shared``: another process can reproduce the keys and the weights' name."""

    stats: Callable[[], Mapping[str, Any]]
    layout: CacheLayout
    shared: bool

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
        """Return the changes; None if they were returned a moment ago, since vLLM asks in every step."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + EVERY_SECONDS
        changes = self._collection()
        for name, labels, value in self._figures():
            before = self._reported.get((name, labels))
            if value == before:
                continue
            self._reported[name, labels] = value
            if name not in _TIER_COUNTERS and name not in _ENGINE_COUNTERS:
                changes.set_gauge(name, value, labels)
            elif value > (before or 0.0):
                changes.increase_counter(name, value - (before or 0.0), labels)
        return changes

    def _figures(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        facts = self._facts
        stats = facts.stats()
        for tier, figures in stats["tiers"].items():
            ours = {"off": 0, "shared": int(facts.shared)}
            known = {**figures, **figures["own"], **ours}
            yield from _numbers(_TIER_NAMES, "kvtiers_tier_", known, (tier,))
            for name, more, value in plugin_values(figures["own"], _TIER_NAMES):
                yield name, (tier, *more), value
        yield from _numbers(_PRIMARY_GAUGES, "kvtiers_primary_", stats["primary"], ())
        yield from _numbers(_ENGINE_COUNTERS, "kvtiers_", stats["engine"], ())


def _numbers(
    names: Any, prefix: str, figures: Mapping[str, Any], labels: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for name in names:
        value = figures.get(name.removeprefix(prefix))
        if isinstance(value, (int, float)):
            yield name, labels, float(value)


def open_stack_status(
    facts: StackFacts, troubles: Troubles, engine: str, namespace: str = "", fingerprint: Callable[[], str] = lambda: ""
) -> StatusSocket:
    """Answer questions about the stack's tiers from now on."""

    def figures() -> dict[str, dict[str, Any]]:
        return {name: _with_facts(facts, known) for name, known in facts.stats()["tiers"].items()}

    model = facts.layout.model.name
    return answer_status(engine, model, troubles, figures, namespace=namespace, fingerprint=fingerprint)


def _with_facts(facts: StackFacts, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {**figures, "tokens": facts.tokens(figures), "off": "", "shared": facts.shared}
