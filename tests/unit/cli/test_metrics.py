"""``kvtiers metrics``: the page for Prometheus of all engines on this machine, printed and served."""

import os
import socket
import subprocess
import sys
import urllib.request
from subprocess import PIPE

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from kvtiers.cli import metrics
from kvtiers.cli.main import cli
from kvtiers.cli.metrics import figures_of
from kvtiers.metrics import EngineMetrics, TierMetrics
from kvtiers.status import Troubles, answer_status

NAME = "kvtiers-control-7-c0ffee-0"


def stats(**tiers):
    found = {name: figures.as_data() | {"own": {"open": 1, "used bytes": 9}} for name, figures in tiers.items()}
    return {"engine": EngineMetrics(steps=7).as_data(), "primary": {"rows": 16}, "tiers": found}


def about(_, figures):
    return {"off": "", "shared": True, "tokens": 0}


@pytest.fixture
def engine():
    """Answer as engines until the test ends; the names of their sockets, less what all begin with."""
    sockets = []

    def engine(counted):
        sockets.append(answer_status("engine", "some-org/model", Troubles([]), lambda: counted, about))
        return sockets[-1].name.removeprefix("kvtiers-control-")

    yield engine
    for one in sockets:
        one.close()


def samples(text):
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, sample.labels.get("engine"), sample.labels.get("tier")): sample.value for sample in found}


def printed(*arguments):
    done = CliRunner().invoke(cli, ["metrics", *arguments])
    assert done.exit_code == 0, done.output
    return samples(done.stdout)


def test_engines_are_on_one_page_each_with_a_label_of_its_own(engine):
    one, two = engine(stats(fs=TierMetrics(hits=3))), engine(stats(fs=TierMetrics(hits=5), redis=TierMetrics()))
    page = printed()
    assert page["kvtiers_tier_hits_total", one, "fs"] == 3
    assert page["kvtiers_tier_hits_total", two, "fs"] == 5
    assert page["kvtiers_tier_used_bytes", two, "redis"] == 9
    assert page["kvtiers_steps_total", one, None] == page["kvtiers_steps_total", two, None] == 7
    assert page["kvtiers_primary_rows", one, None] == 16
    assert page["kvtiers_engines", None, None] >= 2


def test_an_engine_whose_tiers_have_a_socket_each_is_one_engine(engine):
    """As under vLLM's own tiering."""
    names = [engine(stats(**{tier: TierMetrics(hits=2)}) | {"engine": {}, "primary": {}}) for tier in ("fs", "redis")]
    (process,) = {name.rpartition("-")[0] for name in names}
    page = printed()
    assert page["kvtiers_tier_hits_total", process, "fs"] == page["kvtiers_tier_hits_total", process, "redis"] == 2


def test_one_process_alone_can_be_asked(engine):
    engine(stats(fs=TierMetrics()))
    assert printed("--engine", str(os.getpid()))["kvtiers_engines", None, None] == 1
    assert printed("--engine", str(os.getppid()))["kvtiers_engines", None, None] == 0


def test_an_engine_from_before_says_nothing_and_spoils_nothing(engine):
    old, new = engine({}), engine(stats(fs=TierMetrics()))
    engines = {name for _, name, _ in printed()}
    assert new in engines
    assert old not in engines


def test_an_engine_of_another_user_is_neither_shown_nor_silent(engine, monkeypatch):
    engine(stats(fs=TierMetrics()))
    assert printed("--engine", str(os.getpid()))["kvtiers_silent_engines", None, None] == 0
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    page = printed("--engine", str(os.getpid()))
    assert page["kvtiers_engines", None, None] == page["kvtiers_silent_engines", None, None] == 0


def test_an_engine_that_ends_before_it_is_asked_is_not_silent(engine, monkeypatch):
    name = f"kvtiers-control-{engine(stats(fs=TierMetrics()))}"
    found = iter([[name, f"{name}-ended"]])
    monkeypatch.setattr(metrics, "running", lambda: next(found, [name]))
    page = printed()
    assert (page["kvtiers_engines", None, None], page["kvtiers_silent_engines", None, None]) == (1, 0)


@pytest.mark.parametrize(
    ("part", "figures"),
    [
        ("engine", {"steps": "many", "step_latency": 3, "no such figure": 1, "evil\nname": 1}),
        ("engine", {"step_latency": {"sum": 1.0, "buckets": [1, 2]}}),
        ("engine", {"lookups": float("nan"), "misuse": {"sum": 1.0, "buckets": []}}),
        ("primary", {"rows": None, "mine": 2}),
        ("tiers", {"fs": {"hits": [], "own": "none"}, "redis": 3}),
        ("tiers", {"fs": {"promotion_latency": {"buckets": list(range(21))}}}),
        ("what_if", {"hit_rates": {"lru": 3}, "adds": {}}),
    ],
)
def test_what_is_no_figure_of_cores_or_of_another_kind_is_left_out(part, figures):
    """Any user may have a socket of such a name, and root asks them all."""
    said = {"engine": {"generation": 1}, "primary": {}, "tiers": {}} | {part: figures}
    ((labels, found),) = figures_of(NAME, {"model": "m", "stats": said})
    assert labels["model"] == "m"
    assert found["engine"] in ({}, {"generation": 1})
    assert found["primary"] == {}
    assert all(tier == {"own": {}} for tier in found["tiers"].values())
    assert "what_if" not in found


def test_many_figures_of_a_store_are_bounded():
    tier = {"own": {f"figure {number}": number for number in range(1000)}}
    ((_, found),) = figures_of(NAME, {"model": "m", "stats": {"engine": {}, "primary": {}, "tiers": {"fs": tier}}})
    assert len(found["tiers"]["fs"]["own"]) == 256


def test_it_is_served_until_it_is_ended(engine):
    name = engine(stats(fs=TierMetrics(hits=3)))
    command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "metrics", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=PIPE, text=True) as serving:
        try:
            url = serving.stderr.readline().split()[-1]
            for hits in (3, 4):
                with urllib.request.urlopen(url, timeout=60) as answer:
                    page = answer.read().decode()
                assert samples(page)["kvtiers_tier_hits_total", name, "fs"] == 3, hits
        finally:
            serving.terminate()
        assert serving.wait(60) == -15
    lint = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", ""), "the names are not as Prometheus has them"


@pytest.mark.parametrize("text", ["9464", "localhost", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_one_line(text):
    done = CliRunner().invoke(cli, ["metrics", "--listen", text])
    assert done.exit_code == 2
    assert f"expected [HOST]:PORT, as 127.0.0.1:9464, got '{text}'" in done.stderr


def test_an_address_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = CliRunner().invoke(cli, ["metrics", "--listen", address])
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: --listen {address}: Address already in use; give another address or port\n",
    )


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    done = CliRunner().invoke(cli, ["metrics"])
    assert (done.exit_code, done.stderr) == (
        2,
        "error: kvtiers metrics needs prometheus_client: pip install 'kvtiers[metrics]'\n",
    )


def test_status_does_not_print_all_of_it(engine):
    engine(stats(fs=TierMetrics()))
    assert '"stats"' not in CliRunner().invoke(cli, ["status", "--json"]).stdout
