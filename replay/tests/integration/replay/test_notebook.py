"""``kvtiers.replay(...)`` and the notebook in the documentation, run as it is shown."""

import importlib.util
import sys
from pathlib import Path

import pytest

import kvtiers
from kvtiers.api import ConfigError

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def replayed():
    small = {"version": 1, "primary": {"capacity": "4MiB"}}
    return kvtiers.replay("code", requests=12, bytes_per_chunk=4032, config=small, gpu_blocks=300)


def test_the_notebook_of_the_documentation_runs_and_shows_a_table_a_drawing_and_frames(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from run_notebook import as_markdown

    page = as_markdown(ROOT / "docs" / "notebook.ipynb")
    assert page.count("```python") == 5
    assert page.count('<div class="kvtiers-replay">') == 1
    assert page.count("<svg") == 2
    assert page.count('class="dataframe"') == 2
    assert "of the blocks came back, 0 bytes were wrong" in page


def test_what_a_notebook_shows_stands_alone_and_what_a_terminal_shows_is_text(replayed):
    html = replayed._repr_html_()
    assert html.startswith('<div class="kvtiers-replay">')
    assert html.endswith("</div>")
    assert ":root" not in html
    assert "all bytes are right" in html
    assert "full blocks asked for" in repr(replayed)
    assert "<" not in repr(replayed).replace("->", "")


def test_frames_have_what_the_results_have(replayed, tmp_path):
    frames, results = replayed.frames(), replayed.results
    assert frames["hits"]["blocks"].to_dict() == results.hits
    assert frames["hits"]["share"].sum() == pytest.approx(replayed.hit_rate)
    assert list(frames["over_time"].columns) == list(results.over_time.hit_rates)
    assert frames["links"].loc["gpu -> primary", "bytes"] == results.links["gpu -> primary"].nbytes
    assert frames["latencies"].loc["engine's thread", "count"] == results.stalls.count
    replayed.write_page(tmp_path / "page.html")
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_frames_without_pandas_say_what_to_install(replayed, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'kvtiers-replay\[frames\]'"):
        replayed.frames()


def test_without_the_companion_the_door_says_what_to_install(monkeypatch):
    monkeypatch.setattr(
        kvtiers, "find_spec", lambda name: None if name == "kvtiers_replay" else importlib.util.find_spec
    )
    with pytest.raises(AttributeError, match=r"pip install --find-links wheels 'kvtiers\[replay\]'"):
        kvtiers.replay  # noqa: B018 -- that it is looked up is what is tested


def test_a_mistake_is_one_line():
    with pytest.raises(ConfigError, match=r"absent\.jsonl: cannot read the trace"):
        kvtiers.replay("absent.jsonl")
