"""Every figure that a tier's README or our documents name is in vLLM's /metrics, under both ways in, by that name."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvtiers.metrics import PRIMARY_HELP, TIER_HELP, EngineMetrics, help_texts
from kvtiers.plugins import load_tier
from kvtiers_vllm.own_tiering.metrics import COUNTERS, GAUGES, tier_definitions
from kvtiers_vllm.plugin_figures import OTHERS, plugin_gauges
from kvtiers_vllm.stack.figures import StackFigures, definitions

from .test_stack_figures import Clock, Collection, clock, facts, stats, steps  # noqa: F401 -- fixtures
from .test_tier_figures import driver, report  # noqa: F401 -- fixtures

ROOT = Path(__file__).parents[4]
READMES = sorted(ROOT.glob("plugins/*_tier/README.md"))
TYPES = {path.parent.name: path.parent.name.removesuffix("_tier").replace("example", "memory") for path in READMES}


def documented(text):
    """Return the full names of the figures in a text: ``kvtiers_tier_bytes``, or ``_values`` after such a one."""
    found, prefix = [], ""
    for name in re.findall(r"`((?:kvtiers)?_[a-z_]+)`", text):
        if name.startswith("kvtiers_"):
            prefix = "kvtiers_tier" if name.startswith("kvtiers_tier_") else "kvtiers"
            found.append(name)
        elif prefix:
            found.append(prefix + name)
    return found


def figures_of(readme):
    (paragraph,) = re.findall(r"^Metrics: .*?(?=\n\n)", readme.read_text(), re.MULTILINE | re.DOTALL)
    return documented(paragraph)


def metric(kind):
    return lambda text, labels=(): (kind, text, tuple(labels))


@pytest.fixture(params=["stack", "own tiering"])
def defined(request):
    if request.param == "stack":
        return definitions(metric(Counter), metric(Gauge))
    return tier_definitions(metric(Counter), metric(Gauge), COUNTERS, GAUGES)


def on_a_page(defined):
    """Return the names of all samples on a page of such metrics, each of which has been set once."""
    registry = CollectorRegistry()
    for name, (kind, text, labels) in defined.items():
        made = kind(name, text, labels, registry=registry)
        (made.labels(*labels) if labels else made)  # as vLLM makes them
    return set(re.findall(r"^(\w+)", generate_latest(registry).decode(), re.MULTILINE))


def test_a_figure_of_cores_is_described_as_core_describes_it(defined):
    core = {f"kvtiers_tier_{name}": text for name, text in TIER_HELP.items()}
    core |= {f"kvtiers_primary_{name}": text for name, text in PRIMARY_HELP.items()}
    core |= {f"kvtiers_{name}": text for name, text in help_texts(EngineMetrics).items()}
    theirs = {name: text for name, (_, text, _) in defined.items() if name in core}
    assert len(theirs) > 40
    assert theirs == {name: core[name] for name in theirs}


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_a_tiers_readme_names_what_its_options_class_names(readme):
    named = load_tier(TYPES[readme.parent.name]).figures
    assert sorted(figures_of(readme)) == sorted(f"kvtiers_tier_{name}" for name in named)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_each_of_them_is_a_sample_of_the_page_by_that_name(readme, defined):
    assert set(figures_of(readme)) <= on_a_page(defined)


def test_what_our_document_for_vllm_names_is_on_the_page():
    text = section("vllm.md", "What to watch")
    page = on_a_page(definitions(metric(Counter), metric(Gauge)))
    names = documented(text)
    assert len(names) > 20
    assert [name for name in names if not _spellings(name) & page] == []


def test_what_operators_are_told_to_watch_is_on_the_page_or_where_they_are_told():
    page = on_a_page(definitions(metric(Counter), metric(Gauge)))
    rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|$", section("operate.md", "What to watch"), re.MULTILINE)
    here, elsewhere = (documented("\n".join(row[column] for row in rows)) for column in (1, 2))
    assert len(here) > 40
    assert len(elsewhere) > 5
    assert [name for name in here if not _spellings(name) & page] == []
    assert [name for name in elsewhere if _spellings(name) & page] == []


def test_the_documents_name_each_counter_as_it_is_asked_for():
    page = on_a_page(definitions(metric(Counter), metric(Gauge)))
    for path in (ROOT / "docs").glob("*.md"):
        if path.name != "metrics.md":  # which tells of both spellings
            names = documented(path.read_text(encoding="utf-8"))
            assert [name for name in names if f"{name}_total" in page] == [], path.name


def section(name, heading):
    return (ROOT / "docs" / name).read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_each_alert_of_the_example_works_on_the_page_of_the_whole_stack():
    page = on_a_page(definitions(metric(Counter), metric(Gauge)))
    groups = yaml.safe_load((ROOT / "examples" / "observability" / "alerts.yaml").read_text())["groups"]
    names = {name for group in groups for rule in group["rules"] for name in re.findall(r"kvtiers_\w+", rule["expr"])}
    assert len(names) > 20
    assert {name for name in names if not {name, f"{name}_total"} & page} == {"kvtiers_silent_engines"}


def _spellings(name):
    """Return how a figure may stand on the page; `_x` after one of the whole stack may be one of a tier."""
    return {name, name.replace("kvtiers_", "kvtiers_tier_", 1)}


def test_a_store_gives_what_its_options_class_names(tmp_path):
    """The others' stores need a server; their own tests hold it."""
    from kvtiers_example.memory_store import MemoryStore

    assert set(MemoryStore(1 << 20).stats()) == set(load_tier("memory").figures)


def test_the_stack_reports_a_stores_own_figures_by_name_and_unknown_ones_by_label(facts, stats, clock):  # noqa: F811
    stats["tiers"]["near"]["own"] |= {"connects": 3, "free_bytes": 7, "of its own": 5, "text": "no figure"}
    first = StackFigures(facts, Collection, clock)()
    assert first.gauges["kvtiers_tier_connects", ("near",)] == 3
    assert first.gauges["kvtiers_tier_free_bytes", ("near",)] == 7
    assert first.gauges[OTHERS, ("near", "of its own")] == 5
    defined = definitions(metric(Counter), metric(Gauge))
    for name, labels in (*first.counters, *first.gauges):
        assert len(defined[name][2]) == len(labels)


def test_a_figure_that_falls_takes_nothing_from_a_counter(facts, stats, clock):  # noqa: F811
    """As where tier hosts that counted it were killed."""
    report = StackFigures(facts, Collection, clock)  # noqa: F811
    stats["tiers"]["near"]["own"] |= {"retries": 5, "connects": 5}
    report()
    clock.now += 1.0
    stats["tiers"]["near"]["own"] |= {"retries": 2, "connects": 2}
    second = report()
    assert ("kvtiers_tier_retries", ("near",)) not in second.counters
    assert second.gauges["kvtiers_tier_connects", ("near",)] == 2


def test_the_names_are_the_same_in_every_process(defined):
    assert set(plugin_gauges()) | {OTHERS} <= set(defined)
