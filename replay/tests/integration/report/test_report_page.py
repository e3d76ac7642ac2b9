"""``kvtiers replay --report``: the page in a real browser, made by a real replay."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """\
version: 1
primary: {capacity: 8MiB}
secondary:
  - {type: memory, name: fast, io: thread, capacity: 64MiB}
lookup_wait: 30s
load_wait: 30s
"""
PLOTS = """\
[...document.querySelectorAll('figure')].map(figure => {
  const marks = [...figure.querySelectorAll('.mark')].map(mark => mark.getBoundingClientRect());
  const frame = figure.querySelector('svg').getBoundingClientRect();
  return {
    title: figure.querySelector('figcaption b').textContent,
    visible: marks.filter(box => box.width > 0.5 || box.height > 0.5).length,
    outside: marks.filter(box => box.left < frame.left - 1 || box.right > frame.right + 1
                                 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1).length,
    cut: [...figure.querySelectorAll('svg text')].filter(text => {
      const box = text.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1
             || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
    }).map(text => text.textContent),
    texts: [...figure.querySelectorAll('svg text')].map(text => text.textContent),
  };
})"""


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("report")
    (folder / "tiers.yaml").write_text(CONFIG, encoding="utf-8")
    page = folder / "out.html"
    options = ("--requests", 120, "--bytes-per-chunk", "16KiB", "--gpu-blocks", 300, "--concurrency", 4)
    done = replay("--config", folder / "tiers.yaml", "--workload", "code", *options, "--report", page, "--json")
    assert done.returncode == 0, done.stderr
    return page, json.loads(done.stdout)


def test_no_console_error_no_request_and_every_plot_has_data(chromium, made) -> None:
    page, results = made
    chromium.open(page.as_uri())
    plots = {plot["title"]: plot for plot in chromium.evaluate(PLOTS)}
    assert chromium.complaints() == []
    assert chromium.requests() == []
    assert {
        "Where blocks came from", "Hit rate over time", "Time to first token", "Bytes by link",
        "Time on the engine's thread", "Latency: lookup", "Latency: promotion from fast",
    } <= set(plots)  # fmt: skip
    for plot in plots.values():
        assert plot["visible"] > 0, plot
        assert plot["outside"] == 0, plot
        assert plot["cut"] == [], plot
    assert plots["Hit rate over time"]["visible"] >= 10
    shown = " ".join(plots["Where blocks came from"]["texts"])
    for origin in ("gpu", "primary", "fast"):
        assert f"{origin} {100 * results['hits'][origin] / results['references']:.1f} %" in shown
    links = " ".join(plots["Bytes by link"]["texts"])
    for name in results["bytes"]:
        assert name.replace("->", "→") in links
    assert any(text == "duration" for text in plots["Latency: lookup"]["texts"])


def test_it_says_at_the_top_whether_it_pays_and_at_the_end_how_it_was_run(chromium, made) -> None:
    page, results = made
    chromium.open(page.as_uri())
    verdict = chromium.evaluate("document.querySelector('.verdict').textContent")
    saved = 100 * results["tokens_saved"] / results["tokens"]
    assert f"{saved:.1f} % of all prompt tokens were not computed again" in verdict
    assert "all bytes are right" in verdict
    text = chromium.evaluate("document.body.textContent")
    assert "capacity: 8388608" in text
    assert "requests in flight" in text


@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 22, 28)")])
def test_it_follows_the_readers_light_or_dark_and_prints_on_white(chromium, made, scheme, paper) -> None:
    chromium.open(made[0].as_uri())
    colour = "getComputedStyle(document.body).backgroundColor"
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chromium.call("Emulation.setEmulatedMedia", media="screen", features=features)
    assert chromium.evaluate(colour) == paper
    chromium.call("Emulation.setEmulatedMedia", media="print", features=features)
    assert chromium.evaluate(colour) == "rgb(255, 255, 255)"
    chromium.call("Emulation.setEmulatedMedia", media="", features=[])


def test_the_browser_would_have_noticed_an_error_and_a_request(chromium, tmp_path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<script>nothing.at.all()</script><img src='http://127.0.0.1:9/x.png'>", encoding="utf-8")
    chromium.open(bad.as_uri())
    assert any("Uncaught" in line for line in chromium.complaints())
    assert chromium.requests() == ["http://127.0.0.1:9/x.png"]


def test_a_page_that_wanted_to_load_something_would_be_stopped_by_itself(chromium, made, tmp_path) -> None:
    bad = tmp_path / "bad.html"
    text = made[0].read_text(encoding="utf-8")
    bad.write_text(text.replace("</body>", "<img src='http://127.0.0.1:9/x.png'></body>"), encoding="utf-8")
    chromium.open(bad.as_uri())
    assert any("Content Security Policy" in line for line in chromium.complaints())


@pytest.mark.parametrize(
    ("name", "text"), [("out.pdf", "expected a name that ends in .html"), ("no/such/folder/o.html", "no such folder")]
)
def test_a_report_that_cannot_be_written_fails_before_the_work(tmp_path, name, text) -> None:
    done = replay("--workload", "code", "--report", tmp_path / name)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split())
