"""The metrics: counters, gauges and histograms as plain data, cheap to count on the engine's thread, easy to export.

Each part counts into an object of its own; ``TieringManager.stats()`` puts them together. A histogram's bounds are
fixed powers of two, in seconds.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EngineMetrics", "Histogram", "TierMetrics", "export", "name_of_own"]

_SMALLEST = 2.0**-14  # 61 us
_BUCKETS = 20  # up to 32 s


class Histogram:
    """Counts of observations (seconds) by power-of-two buckets; ``bounds[i]`` is bucket i's upper edge."""

    bounds = tuple(_SMALLEST * 2**i for i in range(_BUCKETS))
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (_BUCKETS + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation of this many seconds."""
        index = 0 if seconds <= _SMALLEST else min((int(seconds / _SMALLEST - 1e-9)).bit_length(), _BUCKETS)
        self.counts[index] += 1
        self.total += seconds

    def as_data(self) -> dict[str, Any]:
        """Return count, sum (seconds) and the counts by bucket as plain data."""
        return {"count": sum(self.counts), "sum": self.total, "buckets": self.counts.copy()}

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bucket in which this quantile (0 to 1) lies; 0.0 with no observation."""
        wanted = share * sum(self.counts)
        seen = 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return float(self.bounds[min(index, _BUCKETS - 1)])
        return 0.0


class _Metrics:
    """The base of all metrics classes."""

    __slots__: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return the current numbers and histograms by name, as plain data."""
        figures = {name: getattr(self, name) for name in self.__slots__}
        return {name: it.as_data() if isinstance(it, Histogram) else it for name, it in figures.items()}


@dataclass(slots=True)
class TierMetrics(_Metrics):
    """The counters of one secondary tier, as the manager sees it. Bytes and seconds are of finished transfers."""

    lookups: int = 0
    """Answers that the tier gave."""
    hits: int = 0
    """Chunks loaded from this tier, at their first read by a request; counted once a request and chunk."""
    prefix_hits: int = 0
    """Those hits that are of the first full-attention group: they measure prompt length, however many groups exist."""
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    loads: int = 0
    """Jobs that have brought something."""
    computing_seconds: float = 0.0
    """Seconds that computing the loaded tokens would have taken, at the engine's prefill speed when they were used.

    Tokens that were used before this engine had computed anything are not counted.
    """
    saved_seconds: float = 0.0
    """``computing_seconds`` less the time of loading; a load that took longer counts as 0, not below."""
    failed_loads: int = 0
    """Chunks of promotions that were absent, damaged, or late."""
    stored_chunks: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    failed_stores: int = 0
    """Chunks whose store into the tier failed."""
    dropped_cascades: int = 0
    """Chunks not sent to the tier: a pin budget was used up, or the tier was not available."""
    dropped_promotions: int = 0
    """Chunks that the tier has but that got no row: a pin budget or all rows outside the stores' reserve were used up.

    Counted once a request and chunk.
    """
    budget_misses: int = 0
    """Lookups that skipped this tier, as if it had nothing, because its pin budget was used up."""
    wait_expired: int = 0
    """Chunks recomputed because the request's wait for this tier's answer or load expired."""
    recomputed_cheaper: int = 0
    """Chunks recomputed, though this tier has or may have them, because computing was faster."""
    expired_jobs: int = 0
    refused_results: int = 0
    raised: int = 0
    unread_bytes: int = 0
    """Bytes written and not read since."""
    pinned_rows: int = 0
    """Rows that the tier's jobs, reservations and quarantine hold."""
    quarantined_rows: int = 0
    running_jobs: int = 0
    loading_chunks: int = 0
    """Chunks reserved for this tier's promotions or being promoted: its queue."""
    out_of_use: int = 0
    too_slow: int = 0
    """1 while nearly all of its answers and loads come too late."""
    promotion_latency: Histogram = field(default_factory=Histogram)
    cascade_latency: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class EngineMetrics(_Metrics):
    """The counters of the manager itself; ``engine_seconds`` is the time of its calls on the engine's thread."""

    steps: int = 0
    lookups: int = 0
    """Chunks that requests looked up; counted once a request and chunk."""
    primary_hits: int = 0
    """Chunks that a request read and that were not loaded from a tier for it; counted once a request and chunk."""
    wait_expired: int = 0
    """Chunks recomputed because the request's wait expired; several tiers may be late with one chunk."""
    recomputed_cheaper: int = 0
    stored_chunks: int = 0
    refused_stores: int = 0
    """Chunks for which there was no room in the primary."""
    failed_gpu_stores: int = 0
    failed_gpu_loads: int = 0
    dropped_dirty: int = 0
    """Chunks evicted from the primary before they were stored in a tier with ``on_eviction``."""
    dropped_events: int = 0
    dropped_records: int = 0
    """Requests missing in the recording because its writer was too slow."""
    dropped_log_lines: int = 0
    """Log lines of this process that were dropped because the log was too slow."""
    misuse: int = 0
    """Calls that did not fit and were ignored: a plan completed twice, a request that is over."""
    generation: int = 0
    engine_seconds: float = 0.0
    step_latency: Histogram = field(default_factory=Histogram)


_GAUGES = {
    "unread_bytes",
    "pinned_rows",
    "quarantined_rows",
    "running_jobs",
    "loading_chunks",
    "out_of_use",
    "too_slow",
    "generation",
}
_ENDINGS = ("", "_total", "_created", "_seconds", "_seconds_bucket", "_seconds_count", "_seconds_sum")
_CORE_NAMES = frozenset(name + ending for name in TierMetrics.__slots__ for ending in _ENDINGS)
"""Of core's figures of a tier, and of all that Prometheus makes of them: a name that comes twice spoils the page."""


def export(stats: Callable[[], Mapping[str, Any]], registry: Any = None) -> Any:
    """Export ``manager.stats`` to Prometheus: ``kvtiers.metrics.export(manager.stats)``. Returns the collector.

    Needs the extra ``kvtiers[metrics]``; ``registry`` defaults to the client library's own. A tier's own figures are
    gauges ``kvtiers_tier_<name>``, or ``kvtiers_tier_own_<name>`` where core has a figure of that name.
    """
    from prometheus_client import REGISTRY  # an extra, so imported only where it is wanted
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    class _Collector:
        def collect(self) -> Iterator[Any]:
            families: dict[str, Any] = {}
            for name, labels, value, is_gauge in _flatten(stats()):
                names = list(labels)
                if isinstance(value, Mapping):
                    family = families.setdefault(name, HistogramMetricFamily(f"{name}_seconds", name, labels=names))
                    family.add_metric(list(labels.values()), _cumulative(value["buckets"]), value["sum"])
                    continue
                kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
                families.setdefault(name, kind(name, name, labels=names)).add_metric(list(labels.values()), value)
            yield from families.values()

    collector = _Collector()
    (registry or REGISTRY).register(collector)
    return collector


def _flatten(
    stats: Mapping[str, Any],
) -> Iterator[tuple[str, dict[str, str], float | Mapping[str, Any], bool]]:
    for name, value in stats["engine"].items():
        yield f"kvtiers_{name}", {}, value, name in _GAUGES
    for name, value in stats["primary"].items():
        yield f"kvtiers_primary_{name}", {}, value, True
    for tier, figures in stats["tiers"].items():
        label = {"tier": tier}
        for name, value in figures.items():
            if name != "own":
                yield f"kvtiers_tier_{name}", label, value, name in _GAUGES
        for name, value in _own(figures["own"]).items():
            yield f"kvtiers_tier_{name}", label, value, True


def _own(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return those of a tier's own figures that are numbers, by names that Prometheus takes and core does not use."""
    return {name_of_own(name): value for name, value in figures.items() if isinstance(value, (int, float))}


def name_of_own(figure: str) -> str:
    """Return the name of a tier's own figure, less ``kvtiers_tier_``: one that core does not use."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", figure)
    return f"own_{name}" if name in _CORE_NAMES else name


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    seen = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, Histogram.bounds), "+Inf"), counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets
