"""The Grafana dashboard of ``examples/observability``, built with Grafana's own SDK: its JSON fits Grafana's schema.

``python tools/dashboard.py --write`` writes ``examples/observability/dashboard.json``; a test compares the two, and
asks a real Prometheus every query. Names with ``(_total)?`` are counts of a tier's own store: gauges where kvtiers
makes the page, counters in vLLM's.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode, LegendDisplayMode, LegendPlacement, VisibilityMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh, VariableSort

FILE = Path(__file__).parents[1] / "examples" / "observability" / "dashboard.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
ENGINE = 'job=~"$job", instance=~"$instance"'
TIER = f'{ENGINE}, tier=~"$tier"'


class Query(NamedTuple):
    """A query in PromQL, and how its series are labelled."""

    expr: str
    legend: str = "{{tier}}"


class Panel(NamedTuple):
    """A panel. ``span``: of 24 columns."""

    title: str
    unit: str
    text: str
    queries: tuple[Query, ...]
    span: int = 8
    is_number: bool = False
    most: float | None = None


def rate(name: str, labels: str = TIER) -> str:
    """Return what a counter of each tier grows by a second."""
    return f"sum by (tier) (rate({name}{{{labels}}}[$__rate_interval]))"


def all_rate(name: str, by: str = "") -> str:
    """Return what a counter of the engines grows by a second."""
    return f"sum {by}(rate({name}{{{ENGINE}}}[$__rate_interval]))"


def own(name: str) -> str:
    """Return the rate of a count of a tier's own store."""
    matcher = f'__name__=~"kvtiers_tier_{name}(_total)?", {TIER}'
    return f"sum by (tier) (rate({{{matcher}}}[$__rate_interval]))"


def gauge(name: str, labels: str = TIER) -> str:
    """Return a gauge of each tier."""
    return f"sum by (tier) ({name}{{{labels}}})"


def quantile(share: float, name: str, by: str = "le") -> str:
    """Return a quantile of a histogram."""
    labels = TIER if "tier" in by else ENGINE
    return f"histogram_quantile({share}, sum by ({by}) (rate({name}_bucket{{{labels}}}[$__rate_interval])))"


IN_RANGE = "[$__range]"
LOOKUPS = all_rate("kvtiers_lookups_total")

ROWS: dict[str, tuple[Panel, ...]] = {
    "Does it pay?": (
        Panel(
            "Hit rate", "percentunit", "Chunks found in the primary or a tier, of those that requests looked up.",
            (Query(
                f"(sum(increase(kvtiers_primary_hits_total{{{ENGINE}}}{IN_RANGE}))"
                f" + sum(increase(kvtiers_tier_hits_total{{{ENGINE}}}{IN_RANGE})))"
                f" / sum(increase(kvtiers_lookups_total{{{ENGINE}}}{IN_RANGE}))", ""),),
            6, is_number=True, most=1,
        ),
        Panel(
            "Computing saved", "s", "Seconds of computing that loads have saved, less their own.",
            (Query(f"sum(increase(kvtiers_tier_saved_seconds_total{{{TIER}}}{IN_RANGE}))", ""),), 6, is_number=True,
        ),
        Panel(
            "Tiers not in use", "none", "Not open, with a breaker that is not closed, or put out of use.",
            (Query(
                f"count(kvtiers_tier_breaker_state{{{TIER}}} > 0 or kvtiers_tier_open{{{TIER}}} == 0"
                f" or kvtiers_tier_out_of_use{{{TIER}}} > 0) or vector(0)", ""),), 6, is_number=True,
        ),
        Panel(
            "Damaged values", "none", "Values whose bytes were not those that were stored: misses.",
            (Query(
                f'sum(increase({{__name__=~"kvtiers_tier_seal_failures(_total)?", {TIER}}}{IN_RANGE}))', ""),),
            6, is_number=True,
        ),
        Panel(
            "Hit rate by origin", "percentunit", "Chunks by where they were found, of those looked up.",
            (
                Query(f"{all_rate('kvtiers_primary_hits_total')} / {LOOKUPS}", "primary"),
                Query(f"{rate('kvtiers_tier_hits_total')} / on() group_left() {LOOKUPS}"),
            ), 12, most=1,
        ),
        Panel(
            "Computing saved, a second", "s", "Seconds of computing that each tier's loads save in a second.",
            (Query(rate("kvtiers_tier_saved_seconds_total")),), 12,
        ),
    ),
    "Traffic": (
        Panel("Read from tiers", "Bps", "Bytes loaded, checked.", (Query(rate("kvtiers_tier_loaded_bytes_total")),)),
        Panel("Written to tiers", "Bps", "Bytes stored.", (Query(rate("kvtiers_tier_stored_bytes_total")),)),
        Panel(
            "Written and not read since", "bytes", "Near to all that was written: the tier is written in vain.",
            (Query(gauge("kvtiers_tier_unread_bytes")),),
        ),
        Panel(
            "Time of a load job", "s", "From a load job to its result.",
            (
                Query(quantile(0.5, "kvtiers_tier_promotion_latency_seconds", "le, tier"), "{{tier}} p50"),
                Query(quantile(0.99, "kvtiers_tier_promotion_latency_seconds", "le, tier"), "{{tier}} p99"),
            ),
        ),
        Panel(
            "Time of a store job", "s", "From a store job to its result.",
            (
                Query(quantile(0.5, "kvtiers_tier_cascade_latency_seconds", "le, tier"), "{{tier}} p50"),
                Query(quantile(0.99, "kvtiers_tier_cascade_latency_seconds", "le, tier"), "{{tier}} p99"),
            ),
        ),
        Panel(
            "Time of a lookup's answer", "s", "Mean time from a question about a prefix to the tier's answer.",
            (Query(f"{own('lookup_seconds')} / {own('lookup_questions')}"),),
        ),
    ),
    "Trouble": (
        Panel(
            "Computed instead of loaded", "cps", "Chunks that came too late, or that computing gave sooner.",
            (
                Query(rate("kvtiers_tier_wait_expired_total"), "{{tier}} late"),
                Query(rate("kvtiers_tier_recomputed_cheaper_total"), "{{tier}} computing was sooner"),
            ),
        ),
        Panel(
            "Failures", "cps", "Chunks that were not loaded or stored, and calls of the store that failed.",
            (
                Query(rate("kvtiers_tier_failed_loads_total"), "{{tier}} loads"),
                Query(rate("kvtiers_tier_failed_stores_total"), "{{tier}} stores"),
                Query(own("errors"), "{{tier}} calls"),
            ),
        ),
        Panel(
            "Not stored", "cps", "Chunks that did not go to a tier, by cause.",
            (
                Query(rate("kvtiers_tier_dropped_cascades_total"), "{{tier}} no room among the rows"),
                Query(own("dropped_queue"), "{{tier}} queue full"),
                Query(own("dropped_full"), "{{tier}} store full"),
            ),
        ),
        Panel(
            "State", "none", "1 while it holds; the breaker: 0 in use, 1 out of use, 2 being tried.",
            (
                Query(f"max by (tier) (kvtiers_tier_breaker_state{{{TIER}}})", "{{tier}} breaker"),
                Query(f"max by (tier) (kvtiers_tier_full{{{TIER}}})", "{{tier}} full"),
                Query(f"max by (tier) (kvtiers_tier_refusing{{{TIER}}})", "{{tier}} refusing"),
                Query(f"max by (tier) (kvtiers_tier_too_slow{{{TIER}}})", "{{tier}} too slow"),
            ),
        ),
        Panel(
            "Queue", "none", "Chunks on their way.",
            (
                Query(gauge("kvtiers_tier_loading_chunks"), "{{tier}} loads"),
                Query(gauge("kvtiers_tier_storing_chunks"), "{{tier}} stores"),
            ),
        ),
        Panel(
            "Tier hosts", "none", "Hosts whose store is open, and how often one was started in an hour.",
            (
                Query(gauge("kvtiers_tier_hosts_open"), "{{tier}} open"),
                Query(
                    f'sum by (tier) (increase({{__name__=~"kvtiers_tier_host_starts(_total)?", {TIER}}}[1h]))',
                    "{{tier}} starts in 1 h",
                ),
            ),
        ),
    ),
    "The primary and the engine's thread": (
        Panel(
            "Rows of the primary", "none", "Free ones, those that copies and tiers hold, and those of failed jobs.",
            (
                Query(f"sum(kvtiers_primary_rows{{{ENGINE}}})", "all"),
                Query(f"sum(kvtiers_primary_free_rows{{{ENGINE}}})", "free"),
                Query(f"sum(kvtiers_primary_pinned_rows{{{ENGINE}}})", "pinned"),
                Query(f"sum(kvtiers_primary_quarantined_rows{{{ENGINE}}})", "in quarantine"),
            ), 6,
        ),
        Panel(
            "Not enough rows", "cps", "Chunks for which the primary had no room, by what they were for.",
            (
                Query(all_rate("kvtiers_refused_stores_total"), "stores"),
                Query(rate("kvtiers_tier_dropped_promotions_total"), "{{tier}} loads"),
            ), 6,
        ),
        Panel(
            "Share of the engine's thread", "percentunit", "Seconds that kvtiers takes of it in a second.",
            (Query(all_rate("kvtiers_engine_seconds_total", "by (instance) "), "{{instance}}"),), 6,
        ),
        Panel(
            "End of a step", "s", "Seconds that the end of a step takes of the engine's thread.",
            (
                Query(quantile(0.5, "kvtiers_step_latency_seconds"), "p50"),
                Query(quantile(0.99, "kvtiers_step_latency_seconds"), "p99"),
            ), 6,
        ),
    ),
    "What if (with what_if: true)": (
        Panel(
            "Hit rate by policy and size", "percentunit", "What a primary of so many times the size would hit.",
            (Query(f"avg by (policy, times) (kvtiers_what_if_hit_rate{{{ENGINE}}})", "{{policy}}, {{times}}x"),),
            16, most=1,
        ),
        Panel(
            "What each tier adds", "percentunit", "Hit rate that would be lost without it.",
            (Query(f"avg by (tier) (kvtiers_what_if_adds{{{TIER}}})"),),
        ),
    ),
}  # fmt: skip


def built() -> Any:
    """Return the dashboard, of the SDK's kind."""
    made = (
        dashboard.Dashboard("kvtiers")
        .uid("kvtiers")
        .description("Tiers of the KV cache: whether they pay, what they move, and what is wrong.")
        .tags(["kvtiers", "llm"])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("job", "kvtiers_tier_open"))
        .with_variable(_variable("instance", 'kvtiers_tier_open{job=~"$job"}'))
        .with_variable(_variable("tier", f"kvtiers_tier_open{{{ENGINE}}}"))
    )
    number = 0
    for title, panels in ROWS.items():
        number += 1
        made = made.with_row(dashboard.Row(title).id(number))
        for panel in panels:
            number += 1
            made = made.with_panel(_built(panel).id(number))
    return made.build()


def _variable(name: str, metric: str) -> Any:
    return (
        dashboard.QueryVariable(name)
        .query(f"label_values({metric}, {name})")
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _built(panel: Panel) -> Any:
    found: Any = stat.Panel() if panel.is_number else timeseries.Panel()
    found = found.title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE).min(0)
    found = found.span(panel.span).height(4 if panel.is_number else 8)
    if panel.most is not None:
        found = found.max(panel.most)
    if panel.is_number:
        reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
        found = found.graph_mode(BigValueGraphMode.NONE).reduce_options(reduced)
    else:
        legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        found = found.fill_opacity(8).show_points(VisibilityMode.NEVER).legend(legend.show_legend(True))
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter)
        found = found.with_target(target.instant() if panel.is_number else target.range())
    return found


def text() -> str:
    """Return the file's content."""
    return json.dumps(built(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FILE.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")
