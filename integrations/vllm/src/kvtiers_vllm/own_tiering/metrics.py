"""A tier's figures: for vLLM's own ``/metrics`` and for ``kvtiers status``.

vLLM gets counters as increments since the last report, gauges as values.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvtiers.control import ControlSocket
from kvtiers.metrics import TIER_HELP
from kvtiers.status import Troubles, answer_status
from kvtiers_vllm.plugin_figures import OTHERS, Types, plugin_gauges, plugin_values

if TYPE_CHECKING:
    from kvtiers_vllm.own_tiering.build import OpenedTier

__all__ = [
    "COUNTERS",
    "EVERY_SECONDS",
    "GAUGES",
    "LABELS",
    "TierFigures",
    "described",
    "open_status",
    "tier_definitions",
]

EVERY_SECONDS = 0.1
"""The interval of reports: vLLM asks in every step, and a report takes 0.1 ms for each tier."""

LABELS = ("tier",)
_PREFIX = "kvtiers_tier_"


def described(prefix: str, texts: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the help texts of these figures, which core counts, by their names in ``/metrics``."""
    return {prefix + name: texts[name] for name in names}


COUNTERS = {
    **described(
        _PREFIX, TIER_HELP,
        "lookups", "lookup_questions", "lookup_seconds", "wait_expired", "recomputed_cheaper", "loaded_chunks",
        "loaded_bytes", "load_seconds", "loads", "computing_seconds", "saved_seconds", "failed_loads",
        "stored_chunks", "stored_bytes", "store_seconds", "failed_stores", "dropped_cascades", "expired_jobs",
        "raised", "seal_failures", "missing", "already_present", "dropped_queue", "dropped_full", "dropped_refused",
        "dropped_quota", "quota_deleted",
        "errors", "retries", "breaker_opened", "host_starts",
    ),
    "kvtiers_tier_loaded_tokens": "Tokens whose KV the loaded chunks hold.",
    "kvtiers_tier_left_out_requests": "Requests that used no tier, for their salt or their tenant or as sessions.",
}  # fmt: skip
GAUGES = {
    **described(
        _PREFIX, TIER_HELP,
        "running_jobs", "loading_chunks", "storing_chunks", "queued_loads", "queued_stores", "unread_bytes",
        "quarantined_rows", "breaker_state", "full", "refusing", "too_slow", "open", "hosts",
        "hosts_open",
    ),
    "kvtiers_tier_off": "1: the tier is off in this engine; the log says why.",
    "kvtiers_tier_shared": "1: another process can find what this one stores; 0: the log says why not.",
}  # fmt: skip
_KNOWN = frozenset((*COUNTERS, *GAUGES))


def tier_definitions(
    counter: Callable[..., Any],
    gauge: Callable[..., Any],
    counters: Mapping[str, str],
    gauges: Mapping[str, str],
    types: Types = None,
) -> dict[str, Any]:
    """Return the definitions of a tier's figures: these, and those of the own stores of these tier types."""
    found = {name: counter(text, LABELS) for name, text in counters.items()}
    found |= {name: gauge(text, LABELS) for name, text in plugin_gauges(types).items()}
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
    """One tier's figures, and those reported last. ``collection``: vLLM's class for changes; ``types``: the tier's."""

    opened: "OpenedTier"
    collection: Callable[[], _Stats]
    clock: Callable[[], float] = time.monotonic
    types: Types = None
    _next: float = 0.0
    _reported: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def __call__(self) -> _Stats | None:
        """Return the changes since the last report; None less than ``EVERY_SECONDS`` after it."""
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
        yield from plugin_values(own, _KNOWN, self.types)


def open_status(opened: "OpenedTier", troubles: Troubles, engine: str) -> ControlSocket:
    """Answer ``kvtiers status`` about a tier from now on. The primary and the engine are vLLM's."""
    driver = opened.driver

    def about(_: str, figures: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "off": opened.off,
            "shared": opened.shared,
            "hits": figures["loaded_chunks"],
            "tokens": driver.loaded_tokens,
            "left_out_requests": driver.left_out_requests,
        }

    def stats() -> dict[str, Any]:
        return {
            "engine": {},
            "primary": {},
            "tiers": {opened.name: driver.metrics.as_data() | {"own": driver.own_stats()}},
        }

    return answer_status(
        engine,
        opened.model,
        troubles,
        stats,
        about,
        namespace=opened.namespace,
        fingerprint=lambda: opened.fingerprint,
        tend=driver.tend,
    )
