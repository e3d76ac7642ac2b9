"""Counters, gauges and histograms, as plain data: cheap to count on the engine's thread, easy to export.

Each part counts into an object of its own; ``TieringManager.stats()`` puts them together. A histogram's bounds are
fixed powers of two, in seconds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EngineMetrics", "Histogram", "TierMetrics", "export"]

_SMALLEST = 2.0**-14  # 61 us
_BUCKETS = 20  # up to 32 s


class Histogram:
    """Counts of observations (seconds) by power-of-two buckets; ``bounds[i]`` is bucket i's upper edge."""

    bounds = tuple(_SMALLEST * 2**i for i in range(_BUCKETS))
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (_BUCKETS + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count ``times`` observations of this many seconds."""
        index = 0 if seconds <= _SMALLEST else min((int(seconds / _SMALLEST - 1e-9)).bit_length(), _BUCKETS)
        self.counts[index] += times
        self.total += seconds * times

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bucket in which this quantile (0 to 1) lies; 0.0 with no observation."""
        wanted = share * sum(self.counts)
        seen = 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return float(self.bounds[min(index, _BUCKETS - 1)])
        return 0.0

    def copy(self) -> "Histogram":
        """Return a copy that does not change any more."""
        other = Histogram()
        other.counts = self.counts.copy()
        other.total = self.total
        return other

    def as_data(self) -> dict[str, Any]:
        """Return count, sum and the buckets as plain data."""
        return {"count": sum(self.counts), "sum": self.total, "buckets": list(self.counts)}


@dataclass(slots=True)
class TierMetrics:
    """What happened between the manager and one secondary tier. Bytes and seconds are of finished transfers."""

    lookups: int = 0
    hits: int = 0
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    failed_loads: int = 0
    stored_chunks: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    failed_stores: int = 0
    dropped_cascades: int = 0
    dropped_promotions: int = 0
    expired_jobs: int = 0
    refused_results: int = 0
    raised: int = 0
    unread_bytes: int = 0
    pinned_rows: int = 0
    quarantined_rows: int = 0
    running_jobs: int = 0
    out_of_use: int = 0
    promotion_latency: Histogram = field(default_factory=Histogram)
    cascade_latency: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class EngineMetrics:
    """What the manager itself did; ``engine_seconds`` is the time that its calls took on the engine's thread."""

    steps: int = 0
    lookups: int = 0
    primary_hits: int = 0
    misses: int = 0
    wait_expired: int = 0
    recomputed_cheaper: int = 0
    refused_stores: int = 0
    stored_chunks: int = 0
    loaded_chunks: int = 0
    failed_gpu_stores: int = 0
    dropped_dirty: int = 0
    misuse: int = 0
    generation: int = 0
    engine_seconds: float = 0.0
    step_latency: Histogram = field(default_factory=Histogram)


def freeze(metrics: TierMetrics | EngineMetrics) -> dict[str, Any]:
    """Return the metrics' current values as plain data that no longer changes."""
    data = {}
    for name in metrics.__slots__:
        value = getattr(metrics, name)
        data[name] = value.as_data() if isinstance(value, Histogram) else value
    return data


def export(stats: Callable[[], Mapping[str, Any]], registry: Any = None) -> Any:
    """Export ``manager.stats`` to Prometheus: ``kvtiers.metrics.export(manager.stats)``. Returns the collector.

    Needs the extra ``kvtiers[metrics]``; ``registry`` defaults to the client library's own.
    """
    from prometheus_client import REGISTRY  # an extra, so imported only where it is wanted
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    gauges = {"unread_bytes", "pinned_rows", "quarantined_rows", "running_jobs", "out_of_use", "generation"}

    class _Collector:
        def collect(self) -> Iterator[Any]:
            families: dict[str, Any] = {}
            for name, labels, value, is_gauge in _flatten(stats(), gauges):
                if isinstance(value, Mapping):
                    family = families.setdefault(
                        name, HistogramMetricFamily(f"{name}_seconds", name, labels=list(labels))
                    )
                    family.add_metric(list(labels.values()), _cumulative(value["buckets"]), value["sum"])
                elif is_gauge:
                    family = families.setdefault(name, GaugeMetricFamily(name, name, labels=list(labels)))
                    family.add_metric(list(labels.values()), value)
                else:
                    family = families.setdefault(name, CounterMetricFamily(name, name, labels=list(labels)))
                    family.add_metric(list(labels.values()), value)
            yield from families.values()

    collector = _Collector()
    (registry or REGISTRY).register(collector)
    return collector


def _flatten(
    stats: Mapping[str, Any], gauges: set[str]
) -> Iterator[tuple[str, dict[str, str], float | Mapping[str, Any], bool]]:
    for name, value in stats["engine"].items():
        yield f"kvtiers_{name}", {}, value, name in gauges
    for name, value in stats["primary"].items():
        yield f"kvtiers_primary_{name}", {}, value, True
    for tier, figures in stats["tiers"].items():
        for name, value in figures.items():
            if name != "own":
                yield f"kvtiers_tier_{name}", {"tier": tier}, value, name in gauges
        for name, value in figures["own"].items():
            yield f"kvtiers_tier_{name}", {"tier": tier}, value, True


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    seen = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, Histogram.bounds), "+Inf"), counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets
