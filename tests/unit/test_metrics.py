"""Figures: how they are counted, and how they look in Prometheus."""

import importlib.util
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtiers import metrics
from kvtiers.metrics import EngineMetrics, Histogram, TierMetrics
from kvtiers.primary.tier import CPUPrimaryTier

ROOT = Path(__file__).parents[2]


def test_a_histogram_counts_by_powers_of_two_seconds():
    histogram = Histogram()
    for seconds in (0.0, Histogram.bounds[0], Histogram.bounds[0] * 1.01, 1.0, 1.001, 1e9):
        histogram.observe(seconds)
    data = histogram.as_data()
    assert data["count"] == 6
    assert data["sum"] == pytest.approx(1e9 + 2.001, rel=1e-6)
    counted = {bound: count for bound, count in zip((*Histogram.bounds, None), data["buckets"], strict=True) if count}
    assert counted == {Histogram.bounds[0]: 2, Histogram.bounds[1]: 1, 1.0: 1, 2.0: 1, None: 1}


@pytest.mark.parametrize("bound", Histogram.bounds)
def test_a_bound_belongs_to_its_own_bucket(bound):
    histogram = Histogram()
    histogram.observe(bound)
    assert histogram.counts.index(1) == Histogram.bounds.index(bound)
    histogram.observe(bound * 1.0001)
    assert histogram.counts[Histogram.bounds.index(bound) + 1] == 1


def test_plain_data_does_not_change_any_more():
    tier = TierMetrics()
    before = tier.as_data()
    tier.promotion_latency.observe(1.0)
    assert sum(before["promotion_latency"]["buckets"]) == before["promotion_latency"]["count"] == 0
    assert sum(tier.as_data()["promotion_latency"]["buckets"]) == 1


def test_quantiles_are_upper_edges():
    histogram = Histogram()
    assert histogram.quantile(0.99) == 0.0
    for _ in range(99):
        histogram.observe(0.9)
    histogram.observe(100.0)
    assert histogram.quantile(0.5) == histogram.quantile(0.99) == 1.0
    assert histogram.quantile(1.0) == Histogram.bounds[-1]


def figures(own=None, **engine):
    tier = TierMetrics(hits=3, loaded_bytes=4096, pinned_rows=5, wait_expired=2, recomputed_cheaper=6)
    tier.promotion_latency.observe(0.5)
    return {
        "engine": EngineMetrics(**engine).as_data(),
        "primary": {"rows": 16, "free_rows": 7},
        "tiers": {"fs": tier.as_data() | {"own": own or {}}, "redis": TierMetrics(hits=1).as_data() | {"own": {}}},
    }


def scraped(stats):
    registry = CollectorRegistry()
    metrics.export(lambda: stats, registry)
    text = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return families, {
        (sample.name, sample.labels.get("tier"), sample.labels.get("le")): sample.value
        for family in families.values()
        for sample in family.samples
    }


def test_every_figure_of_core_is_exported_with_its_help():
    tier, engine = TierMetrics().as_data(), EngineMetrics().as_data()
    tier["own"] = dict.fromkeys(set(metrics.TIER_HELP).difference(tier), 1)
    primary = CPUPrimaryTier(4, 64, memoryview(bytearray(256))).figures()
    families, _ = scraped({"engine": engine, "primary": primary, "tiers": {"fs": tier}})
    assert len(families) > 60
    for name, family in families.items():
        assert family.documentation, name
        assert "own store" not in family.documentation, name


def test_a_figure_that_only_its_store_has_is_said_to_be_the_stores():
    families, _ = scraped(figures(own={"requests": 3}))
    assert families["kvtiers_tier_requests"].documentation == "A figure of the tier's own store."


def test_one_line_exports_everything():
    families, values = scraped(figures(steps=7, engine_seconds=1.5))
    assert values["kvtiers_steps_total", None, None] == 7
    assert values["kvtiers_engine_seconds_total", None, None] == 1.5
    assert values["kvtiers_primary_free_rows", None, None] == 7
    assert values["kvtiers_tier_hits_total", "fs", None] == 3
    assert values["kvtiers_tier_hits_total", "redis", None] == 1
    assert values["kvtiers_tier_pinned_rows", "fs", None] == 5
    assert values["kvtiers_tier_wait_expired_total", "fs", None] == 2
    assert values["kvtiers_tier_recomputed_cheaper_total", "fs", None] == 6
    assert values["kvtiers_wait_expired_total", None, None] == 0
    assert values["kvtiers_tier_promotion_latency_seconds_count", "fs", None] == 1
    assert values["kvtiers_tier_promotion_latency_seconds_sum", "fs", None] == 0.5
    assert values["kvtiers_tier_promotion_latency_seconds_bucket", "fs", "0.25"] == 0
    assert values["kvtiers_tier_promotion_latency_seconds_bucket", "fs", "0.5"] == 1
    assert values["kvtiers_tier_promotion_latency_seconds_bucket", "fs", "+Inf"] == 1
    assert families["kvtiers_tier_hits"].type == "counter"
    assert families["kvtiers_tier_pinned_rows"].type == "gauge"
    exported = {name.removeprefix("kvtiers_tier_").removeprefix("kvtiers_") for name in families}
    for name in (*EngineMetrics.__slots__, *TierMetrics.__slots__):
        assert name in exported or f"{name}_seconds" in exported


def test_the_shadow_caches_are_exported_by_policy_and_size():
    report = {
        "hit_rates": {"lru": {"0.25": 0.1, "1": 0.3}},
        "adds": {"s3": 0.002},
        "infinite": 0.5,
        "sampled": 0.01,
        "chunks": 7,
        "dropped": 2,
        "seconds": 0.25,
    }
    registry = CollectorRegistry()
    metrics.export(lambda: figures() | {"what_if": report}, registry)
    text = generate_latest(registry).decode()
    assert 'kvtiers_what_if_hit_rate{policy="lru",times="0.25"} 0.1' in text
    assert 'kvtiers_what_if_adds{tier="s3"} 0.002' in text
    assert "kvtiers_what_if_dropped_total 2.0" in text
    registry = CollectorRegistry()
    metrics.export(lambda: figures() | {"what_if": {}}, registry)
    assert "what_if" not in generate_latest(registry).decode()


def test_the_newest_figures_are_exported_each_time():
    current = figures(steps=1)
    registry = CollectorRegistry()
    metrics.export(lambda: current, registry)
    assert b"kvtiers_steps_total 1.0" in generate_latest(registry)
    current = figures(steps=2)
    assert b"kvtiers_steps_total 2.0" in generate_latest(registry)


def test_a_tiers_own_figures_are_gauges_of_their_own_whatever_they_are_called():
    own = {"breaker_state": 1, "hits": 55.0, "used bytes/now": 9.0, "promotion_latency": 4.0}
    families, values = scraped(figures(own))
    assert values["kvtiers_tier_breaker_state", "fs", None] == 1
    assert values["kvtiers_tier_hits_total", "fs", None] == 3
    assert values["kvtiers_tier_own_hits", "fs", None] == 55
    assert values["kvtiers_tier_own_promotion_latency", "fs", None] == 4
    assert values["kvtiers_tier_used_bytes_now", "fs", None] == 9
    assert families["kvtiers_tier_own_hits"].type == "gauge"


@pytest.mark.parametrize(
    "name", ["hits_total", "hits_created", "promotion_latency_seconds", "promotion_latency_seconds_bucket"]
)
def test_an_own_figure_never_has_a_name_that_prometheus_makes_of_one_of_cores(name):
    own = {name: 55.0, "hits_of_mine": 7.0}
    families, values = scraped(figures(own))
    assert values[f"kvtiers_tier_own_{name}", "fs", None] == 55
    assert values["kvtiers_tier_hits_of_mine", "fs", None] == 7
    assert values["kvtiers_tier_hits_total", "fs", None] == 3
    assert families["kvtiers_tier_hits"].type == "counter"
    assert families["kvtiers_tier_promotion_latency_seconds"].type == "histogram"


def test_an_own_figure_that_is_no_number_is_left_out():
    _, values = scraped(figures({"state": "good", "depth": 3}))
    assert values["kvtiers_tier_depth", "fs", None] == 3
    assert not [name for name, _, _ in values if name == "kvtiers_tier_state"]


def test_a_collector_can_be_taken_out_again():
    registry = CollectorRegistry()
    collector = metrics.export(figures, registry)
    registry.unregister(collector)
    metrics.export(figures, registry)
    assert generate_latest(registry)


def test_the_page_of_all_metrics_is_what_the_code_counts():
    spec = importlib.util.spec_from_file_location("metric_tables", ROOT / "tools" / "metric_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = tables.PAGE.read_text(encoding="utf-8")
    assert text == tables.page(), "run: python tools/metric_tables.py --write"
    assert "kvtiers_tier_hits_total" in text


def test_each_name_follows_the_documented_scheme():
    for each in metrics.described():
        assert re.fullmatch(r"kvtiers_(primary_|tier_|client_|what_if_)?[a-z_]+", each.name), each
        assert not re.search(r"_(ms|millis|us|kb|kib|mb|mib|gb|gib|total|count|sum|bucket)$", each.name), each
        assert each.type != "histogram" or each.name.endswith("_seconds"), each
        unit = re.match(r"(?:Processor )?(seconds|bytes) ", each.help, re.IGNORECASE)
        assert (unit[1].lower() if unit else "") == (each.name.rpartition("_")[2] if unit else ""), each
        assert bool(unit) == each.name.endswith(("_seconds", "_bytes")), each


def test_what_is_described_is_what_is_exported_by_name_and_type():
    tier = TierMetrics().as_data() | {"own": dict.fromkeys(set(metrics.TIER_HELP).difference(TierMetrics.__slots__), 1)}
    rates = {
        "hit_rates": {"lru": {"1": 0.1}},
        "adds": {"fs": 0.1},
        "infinite": 1,
        "sampled": 1,
        "chunks": 1,
        "dropped": 1,
    }
    stats = {
        "engine": EngineMetrics().as_data(), "primary": dict.fromkeys(metrics.PRIMARY_HELP, 1), "tiers": {"fs": tier},
        "what_if": rates | {"seconds": 1},
    }  # fmt: skip
    families, _ = scraped(stats)
    kinds = {each.name: (each.type, each.help) for each in metrics.described() if each.part != "client"}
    assert {name: (family.type, family.documentation) for name, family in families.items()} == kinds
