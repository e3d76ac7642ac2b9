"""``examples/observability`` under a real Prometheus that scrapes a busy engine: panels have data, alerts work."""

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tools"))

import dashboard  # noqa: E402 -- beside the repository's own tools
import yaml  # noqa: E402
from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: E402
from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: E402
from observed_replay import EXAMPLES, observed, panels, range_queries, substituted, wait_until  # noqa: E402

ALERTS = [rule for group in yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
ON_VLLMS_PAGE_ALONE = {"kvtiers_tier_off", "kvtiers_tier_shared"}  # whose own tests ask that page for all others
UNIT_TESTS = yaml.safe_load((EXAMPLES / "alerts_test.yaml").read_text())["tests"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with observed(tmp_path_factory.mktemp("observed")) as (server, engine):
        yield server, engine


def values(series):
    return [float(value) for one in series for _, value in one["values"] if not math.isnan(float(value))]


def test_the_file_is_what_the_tool_builds_and_fits_grafanas_schema():
    text = dashboard.FILE.read_text(encoding="utf-8")
    assert text == dashboard.text(), "run: python tools/dashboard.py --write"
    read = Dashboard.from_json(json.loads(text))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == json.loads(text)


def test_the_dashboard_has_no_two_panels_in_one_place():
    taken = {}
    for panel in json.loads(dashboard.FILE.read_text(encoding="utf-8"))["panels"]:
        place = panel["gridPos"]
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert taken.setdefault(cell, panel["title"]) == panel["title"]
            assert cell[0] < 24


def test_every_query_of_every_panel_gives_data_of_a_busy_engine(watched):
    server, engine = watched
    began = time.time()

    def empty():
        now = time.time()
        return {
            (panel.title, query.expr)
            for panel in panels()
            for query, series in zip(panel.queries, range_queries(server, panel, began - 5, now, 1), strict=True)
            if not values(series)
        }

    try:
        wait_until(lambda: not empty(), "data in every panel", [engine])
    except RuntimeError as error:
        raise AssertionError(f"{error}: {empty()}, {server.get('targets')['activeTargets']}") from None
    (hits,) = server.query(substituted(panels()[0].queries[0].expr, "2s", "60s"))
    assert 0 < float(hits["value"][1]) <= 1


def test_the_variables_have_something_to_choose_from(watched):
    server, _ = watched
    names = {
        name for variable in json.loads(dashboard.FILE.read_text())["templating"]["list"] for name in [variable["name"]]
    }
    assert names == {"datasource", "job", "instance", "tier"}
    assert {one["metric"]["tier"] for one in server.query("kvtiers_tier_open")} == {"fs", "memory"}
    assert {one["metric"]["job"] for one in server.query("kvtiers_tier_open")} == {"kvtiers"}


def test_prometheus_takes_each_alert_evaluates_it_and_raises_none_for_a_healthy_engine(watched):
    server, engine = watched

    def rules():
        return [rule for group in server.get("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "the first evaluation", [engine])
    assert {rule["name"]: rule["health"] for rule in rules()} == {rule["alert"]: "ok" for rule in ALERTS}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []
    for rule in ALERTS:
        server.query(rule["expr"])


def test_every_alert_asks_for_metrics_that_the_engine_has(watched):
    server, _ = watched
    there = set(server.get("label/__name__/values"))
    for rule in ALERTS:
        for name in set(re.findall(r"kvtiers_\w+", rule["expr"])) - ON_VLLMS_PAGE_ALONE:
            assert {name, f"{name}_total"} & there, f"{rule['alert']}: {name}"


def test_the_documents_name_each_alert_with_its_severity():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(Kvtiers\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS]


@pytest.mark.parametrize("check", ["check rules alerts.yaml", "test rules alerts_test.yaml"])
def test_promtool_passes_the_rules_and_their_own_tests(check):
    done = subprocess.run(["promtool", *check.split()], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not(alert):
    cases = [case for test in UNIT_TESTS for case in test["alert_rule_test"] if case["alertname"] == alert]
    assert any("exp_alerts" in case for case in cases)
    assert sum("exp_alerts" not in case for case in cases) >= 2, "a healthy engine, and before its time or after"


def test_a_rule_that_is_changed_fails_its_test(tmp_path):
    text = (EXAMPLES / "alerts.yaml").read_text(encoding="utf-8")
    (tmp_path / "alerts.yaml").write_text(text.replace("kvtiers_tier_full > 0", "kvtiers_tier_full > 1"))
    tests = [test for test in UNIT_TESTS if test["name"].startswith("KvtiersTierFull:")]
    (tmp_path / "alerts_test.yaml").write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "KvtiersTierFull" in done.stdout + done.stderr
