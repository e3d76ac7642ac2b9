"""The exposition: the figures of engines and clients as Prometheus takes them, under one naming scheme.

``kvtiers_`` and the part that counts (the engine's own figures have none, then ``primary_``, ``tier_``, ``client_``,
``what_if_``), the figure, and what Prometheus adds by its kind. docs/metrics.md lists all of them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from kvtiers.metrics.counts import (
    PRIMARY_HELP,
    TIER_HELP,
    WHAT_IF_COUNTERS,
    WHAT_IF_HELP,
    WHAT_IF_LABELS,
    ClientMetrics,
    EngineMetrics,
    Histogram,
    TierMetrics,
    help_texts,
    what_if_figures,
)

__all__ = ["Described", "Found", "described", "export", "families", "name_of_own"]

_GAUGES = {
    "unread_bytes",
    "pinned_rows",
    "quarantined_rows",
    "running_jobs",
    "loading_chunks",
    "out_of_use",
    "too_slow",
    "switched_off",
    "switched_read_only",
    "generation",
}
_CLIENT_ROWS = {
    "bounce_rows": "Bounce rows of the client.",
    "free_bounce_rows": "Bounce rows that no call and no job uses.",
}
_HELP: Mapping[str, Mapping[str, str]] = {
    "": help_texts(EngineMetrics),
    "client": help_texts(ClientMetrics) | _CLIENT_ROWS,
    "primary": PRIMARY_HELP,
    "tier": TIER_HELP,
    "what_if": WHAT_IF_HELP,
}
"""By part, the help text of each figure."""
_HISTOGRAMS = {
    (part, name)
    for part, kind in (("", EngineMetrics), ("tier", TierMetrics))
    for name, value in kind().as_data().items()
    if isinstance(value, Mapping)
}
_OWN_HELP = "A figure of the tier's own store."
_ENDINGS = ("", "_total", "_created", "_seconds", "_seconds_bucket", "_seconds_count", "_seconds_sum")
_CORE_NAMES = frozenset(name + ending for name in TierMetrics.__slots__ for ending in _ENDINGS)
"""Of core's figures of a tier, and of all that Prometheus makes of them: a name that comes twice spoils the page."""

Found: TypeAlias = tuple[Mapping[str, str], Mapping[str, Any]]
"""What an engine or a client counts (its ``stats()``), and the labels that distinguish it from others."""


class Described(NamedTuple):
    """A metric: its name on the page, less what Prometheus adds to samples; its type, labels and help text.

    ``part``: what counts it, "" is the engine; ``figure``: the name that it has there.
    """

    part: str
    figure: str
    name: str
    type: str
    labels: tuple[str, ...]
    help: str


def described() -> list[Described]:
    """Return every metric of core's, in the order of the parts that count them."""
    return [_described(part, figure, text) for part, texts in _HELP.items() for figure, text in texts.items()]


def _described(part: str, figure: str, text: str) -> Described:
    name = _name(part, figure)
    labels = {"tier": ("tier",), "what_if": WHAT_IF_LABELS.get(figure, ())}.get(part, ())
    if (part, figure) in _HISTOGRAMS:
        return Described(part, figure, f"{name}_seconds", "histogram", labels, text)
    return Described(part, figure, name, "gauge" if _is_gauge(part, figure) else "counter", labels, text)


def _name(part: str, figure: str) -> str:
    return f"kvtiers_{part}_{figure}" if part else f"kvtiers_{figure}"


def _is_gauge(part: str, figure: str) -> bool:
    if part == "tier":  # what a store counts begins again with its host
        return figure in _GAUGES or figure not in TierMetrics.__slots__
    if part == "what_if":
        return figure not in WHAT_IF_COUNTERS
    return part == "primary" or figure in _CLIENT_ROWS or figure in _GAUGES


def export(stats: Callable[[], Mapping[str, Any]], registry: Any = None) -> Any:
    """Export ``manager.stats`` to Prometheus: ``kvtiers.metrics.export(manager.stats)``. Returns the collector.

    ``client.stats`` is taken as well: its own counts are ``kvtiers_client_<name>``, its tiers' as those of a manager.
    Needs the extra ``kvtiers[metrics]``; ``registry`` defaults to the client library's own. A tier's own figures are
    gauges ``kvtiers_tier_<name>``, or ``kvtiers_tier_own_<name>`` where core has a figure of that name.
    """
    from prometheus_client import REGISTRY  # an extra, so imported only where it is wanted

    class _Collector:
        def collect(self) -> Iterator[Any]:
            yield from families([({}, stats())])

    collector = _Collector()
    (registry or REGISTRY).register(collector)
    return collector


def families(found: Iterable[Found]) -> Iterator[Any]:
    """Yield the client library's families of all these figures. Needs the extra ``kvtiers[metrics]``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    known: dict[str, Any] = {}
    for labels, stats in found:
        for part, figure, own_labels, value in _flatten(stats):
            name, every = _name(part, figure), {**labels, **own_labels}
            names, text = list(every), _HELP[part].get(figure, _OWN_HELP)
            if isinstance(value, Mapping):
                family = known.setdefault(name, HistogramMetricFamily(f"{name}_seconds", text, labels=names))
                family.add_metric(list(every.values()), _cumulative(value["buckets"]), value["sum"])
                continue
            kind = GaugeMetricFamily if _is_gauge(part, figure) else CounterMetricFamily
            known.setdefault(name, kind(name, text, labels=names)).add_metric(list(every.values()), value)
    yield from known.values()


def _flatten(stats: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, str], float | Mapping[str, Any]]]:
    """Yield each figure: its part, its name, its labels, its value."""
    if "engine" not in stats:
        yield from _flatten_client(stats)
        return
    for part, figures in (("", stats["engine"]), ("primary", stats["primary"])):
        for name, value in figures.items():
            yield part, name, {}, value
    for name, labels, figure in what_if_figures(stats.get("what_if")):
        yield "what_if", name, labels, figure
    for tier, figures in stats["tiers"].items():
        label = {"tier": tier}
        for name, value in figures.items():
            if name != "own":
                yield "tier", name, label, value
        for name, value in _own(figures["own"]).items():
            yield "tier", name, label, value


def _flatten_client(stats: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, str], float | Mapping[str, Any]]]:
    for name, value in stats.items():
        if name == "events":
            yield "", "event_batches", {}, value["batches"]
            yield "", "event_chunks", {}, value["chunks"]
            yield "", "dropped_event_chunks", {}, value["dropped_chunks"]
            yield "", "replayed_event_batches", {}, value["replayed_batches"]
        elif name != "tiers":
            yield "client", name, {}, value
    for tier, figures in stats["tiers"].items():
        label = {"tier": tier}
        for name, value in figures["transfers"].items():
            yield "tier", name, label, value
        for name, value in _own(figures).items():
            yield "tier", name, label, value


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
