"""A tier's figures: for vLLM's own ``/metrics`` and for ``kvtiers status``.

vLLM gets counters as increments since the last report, gauges as values.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtiers.metrics import TierMetrics
from kvtiers.status import StatusSocket, answer_status
from kvtiers_vllm.own_tiering.build import OpenedTier
from kvtiers_vllm.plugin_figures import OTHERS, plugin_gauges, plugin_values

__all__ = ["COUNTERS", "EVERY_SECONDS", "GAUGES", "LABELS", "TierFigures", "open_status", "tier_definitions"]

EVERY_SECONDS = 0.1
"""The interval of reports: vLLM asks in every step, and a report takes 0.1 ms for each tier."""

LABELS = ("tier",)
COUNTERS = {
    "kvtiers_tier_lookups": "Chunks for which the tier has answered a lookup.",
    "kvtiers_tier_lookup_questions": "Lookups that the tier has answered, each of chunks of one prefix.",
    "kvtiers_tier_lookup_seconds": "Seconds from these lookups to their answers.",
    "kvtiers_tier_wait_expired": "Chunks recomputed because the lookup or load wait budget expired.",
    "kvtiers_tier_recomputed_cheaper": "Chunks recomputed because the tier's recent loads were too slow.",
    "kvtiers_tier_left_out_requests": "Requests that used no tier, since their salt is hashed without a tag.",
    "kvtiers_tier_loaded_chunks": "Chunks loaded from the tier, each checked.",
    "kvtiers_tier_loaded_tokens": "Tokens whose KV these hold.",
    "kvtiers_tier_loaded_bytes": "Bytes of these chunks.",
    "kvtiers_tier_load_seconds": "Seconds that loading them took.",
    "kvtiers_tier_loads": "Load jobs that have loaded at least one chunk.",
    "kvtiers_tier_computing_seconds": "Seconds that computing the loaded tokens would have taken, once a load.",
    "kvtiers_tier_saved_seconds": "Computing seconds less those of loading; a load that took longer subtracts nothing.",
    "kvtiers_tier_failed_loads": "Chunks that were absent, damaged, or too late.",
    "kvtiers_tier_stored_chunks": "Chunks that the tier has stored, or had already.",
    "kvtiers_tier_stored_bytes": "Bytes written.",
    "kvtiers_tier_store_seconds": "Seconds that writing them took.",
    "kvtiers_tier_failed_stores": "Chunks that were sent down and are not in the tier.",
    "kvtiers_tier_dropped_cascades": "Chunks not sent down, since the tier was not available.",
    "kvtiers_tier_expired_jobs": "Jobs that did not end within the deadline.",
    "kvtiers_tier_raised": "Calls in which the tier raised.",
    "kvtiers_tier_seal_failures": "Values whose bytes were not those that were stored.",
    "kvtiers_tier_missing": "Values that were absent when they were read, though a lookup had found them.",
    "kvtiers_tier_already_present": "Values that needed no write.",
    "kvtiers_tier_dropped_queue": "Values dropped since too many were waiting to be written.",
    "kvtiers_tier_dropped_full": "Values dropped since the store was full.",
    "kvtiers_tier_errors": "Calls of the store that failed.",
    "kvtiers_tier_retries": "Further attempts after a transient error.",
    "kvtiers_tier_breaker_opened": "How often the breaker opened.",
    "kvtiers_tier_host_starts": "Starts of the tier's hosts.",
}
GAUGES = {
    "kvtiers_tier_running_jobs": "Jobs in flight.",
    "kvtiers_tier_loading_chunks": "Chunks being loaded.",
    "kvtiers_tier_storing_chunks": "Chunks being stored.",
    "kvtiers_tier_queued_loads": "Parts of loads that wait for a thread.",
    "kvtiers_tier_queued_stores": "Parts of stores that wait for a thread.",
    "kvtiers_tier_unread_bytes": "Bytes written and not read since.",
    "kvtiers_tier_quarantined_rows": "Rows of jobs that were given up and that something may still touch.",
    "kvtiers_tier_breaker_state": "0: in use, 1: out of use, 2: being tried.",
    "kvtiers_tier_full": "1: the tier's store accepts no more values; the log says what to do.",
    "kvtiers_tier_too_slow": "1: the tier's loads would land too late, so the chunks are computed.",
    "kvtiers_tier_open": "1: the tier's store is open.",
    "kvtiers_tier_hosts": "The tier's hosts (helper processes).",
    "kvtiers_tier_hosts_open": "Those of them in which the store is open.",
    "kvtiers_tier_off": "1: the tier is off in this engine; the log says why.",
    "kvtiers_tier_shared": "1: another process can find what this one stores; 0: the log says why not.",
}
_KNOWN = frozenset((*COUNTERS, *GAUGES))
_PREFIX = "kvtiers_tier_"


def tier_definitions(
    counter: Callable[..., Any], gauge: Callable[..., Any], counters: Mapping[str, str], gauges: Mapping[str, str]
) -> dict[str, Any]:
    """Return the definitions of a tier's figures: these, and those of the installed tiers' own stores."""
    found = {name: counter(text, LABELS) for name, text in counters.items()}
    found |= {name: gauge(text, LABELS) for name, text in plugin_gauges().items()}
    found |= {name: gauge(text, LABELS) for name, text in gauges.items()}
    return found | {OTHERS: gauge("A figure of the tier's own store.", (*LABELS, "figure"))}


class _Stats(Protocol):
    """vLLM's collection of figures."""

    def increase_counter(self, name: str, value: float, labels: tuple[str, ...], /) -> None:
        """Add to a counter."""

    def set_gauge(self, name: str, value: float, labels: tuple[str, ...], /) -> None:
        """Set a gauge."""


@dataclass(slots=True)
class TierFigures:
    """One tier's figures, and those reported last. ``collection``: vLLM's class for changes."""

    opened: OpenedTier
    collection: Callable[[], _Stats]
    clock: Callable[[], float] = time.monotonic
    _next: float = 0.0
    _reported: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def __call__(self) -> _Stats | None:
        """Return the changes; None if that was done a moment ago, since vLLM asks in every step."""
        now = self.clock()
        if now < self._next:
            return None
        self._next = now + EVERY_SECONDS
        stats = self.collection()
        for name, more, value in self._figures():
            labels = (self.opened.name, *more)
            before = self._reported.get((name, labels))
            if value == before:
                continue
            self._reported[name, labels] = value
            if name not in COUNTERS:
                stats.set_gauge(name, value, labels)
            elif value > (before or 0.0):
                stats.increase_counter(name, value - (before or 0.0), labels)
        return stats

    def _figures(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        driver = self.opened.driver
        own: Mapping[str, Any] = driver.own_stats()
        extra = {
            "left_out_requests": driver.left_out_requests,
            "loaded_tokens": driver.loaded_tokens,
            "off": int(bool(self.opened.off)),
            "shared": int(self.opened.shared),
        }
        for full_name in (*COUNTERS, *GAUGES):
            name = full_name.removeprefix(_PREFIX)
            value = extra.get(name, own.get(name, getattr(driver.metrics, name, None)))
            if isinstance(value, (int, float)):
                yield full_name, (), float(value)
        yield from plugin_values(own, _KNOWN)


def open_status(opened: OpenedTier, engine: str) -> StatusSocket:
    """Answer ``kvtiers status`` about a tier from now on."""
    return answer_status(
        engine,
        opened.model,
        [opened.name],
        lambda: {opened.name: _figures_of(opened)},
        namespace=opened.namespace,
        fingerprint=lambda: opened.fingerprint,
    )


def _figures_of(opened: OpenedTier) -> dict[str, Any]:
    """Return a tier's figures as of now, each as it is when it is read: the engine's thread counts on meanwhile."""
    driver = opened.driver
    counted = {name: getattr(driver.metrics, name) for name in TierMetrics.__slots__}
    return counted | {
        "off": opened.off,
        "shared": opened.shared,
        "hits": driver.metrics.loaded_chunks,
        "tokens": driver.loaded_tokens,
        "left_out_requests": driver.left_out_requests,
        "own": driver.own_stats(),
    }
