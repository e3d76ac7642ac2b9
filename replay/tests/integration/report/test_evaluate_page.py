"""``kvtiers evaluate``: a log from a user's hands to the page in a real browser, and what is said on the way."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from .test_report_page import PLOTS


def conversations(turns: int = 160) -> list[dict]:
    """Return requests of conversations that go on, as a gateway in front of an engine logs them."""
    chance, talks, found = random.Random(5), [], []
    for number in range(turns):
        if len(talks) < 12 or chance.random() < 0.2:
            talks.append([{"role": "system", "content": f"You help with <b>{len(talks) % 3}</b>. " * 120}])
        talk = chance.choice(talks[-12:])
        talk.append({"role": "user", "content": f"Question {number}? " * 60})
        body = {"model": "m", "messages": list(talk)}
        usage = {"prompt_tokens": sum(len(each["content"]) for each in talk) // 3, "completion_tokens": 40}
        found.append({"timestamp": 1_764_000_000 + 20 * number, "request": body, "response": {"usage": usage}})
        talk.append({"role": "assistant", "content": f"Answer {number}. " * 60})
    return found


def evaluate(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "evaluate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict, str]:
    folder = tmp_path_factory.mktemp("evaluate")
    lines = [json.dumps(each) for each in conversations()]
    lines[7:7] = ["<script>alert(1)</script>", "[]"]
    (folder / "<i>log.jsonl").write_text("\n".join(lines) + '\n{"messages": [', encoding="utf-8")
    options = ("--gpu-cache", "64MiB", "--most-memory", "512MiB", "--engines", 1, "--json")
    done = evaluate("--openai-log", "<i>log.jsonl", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "kvtiers-evaluation.html", json.loads(done.stdout), done.stderr


def test_the_page_asks_for_nothing_and_every_plot_has_data(chromium, made) -> None:
    page, _, _ = made
    chromium.open(page.as_uri())
    assert chromium.requests() == []
    assert chromium.complaints() == []
    plots = chromium.evaluate(PLOTS)
    assert [plot["title"] for plot in plots] == ["Hit rate by size", "Where the GPU time for prefill goes"]
    for plot in plots:
        assert plot["visible"] >= 3, plot
        assert plot["outside"] == 0, plot
        assert plot["cut"] == [], plot
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_says_what_the_json_says(chromium, made) -> None:
    page, data, _ = made
    chromium.open(page.as_uri())
    shown = chromium.evaluate("document.body.innerText")
    assert data["requests"] == 160
    assert f"An infinite cache hits {100 * data['hit_rates']['infinite']:.1f} %" in shown
    assert data["gpu_seconds_saved"] > 0
    assert shown.count("It pays: ") == 1
    assert "<i>log.jsonl" in shown
    for tier in data["tiers"]:
        assert tier["why"] in shown
    assert [tier["type"] for tier in data["tiers"] if not tier["pays"]][-1] == "object"
    assert "type: fs, path: /var/cache/kvtiers" in shown
    assert data["replayed"]["wrong_bytes"] == 0
    assert data["replayed"]["rate"] == pytest.approx(data["replayed"]["planned"], abs=0.002)
    for line in ("1 line is no JSON; the first is line 8", "1 line is JSON and no object; the first is line 9",
                 "1 line is cut off at the end of the log; the first is line 163"):  # fmt: skip
        assert line in shown


def test_bad_lines_are_said_once_each_kind_on_stderr_and_nothing_of_a_prompt_is_anywhere(made) -> None:
    page, data, errors = made
    assert errors.count("<i>log.jsonl: 1 line is no JSON; the first is line 8\n") == 1
    assert [each["first_line"] for each in data["problems"]] == [8, 9, 163]
    for text in (page.read_text(encoding="utf-8"), errors, json.dumps(data)):
        assert "Question" not in text
        assert "alert" not in text
    assert sorted(path.name for path in page.parent.iterdir()) == ["<i>log.jsonl", "kvtiers-evaluation.html"]
