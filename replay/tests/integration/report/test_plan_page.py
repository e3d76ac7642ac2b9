"""``kvtiers plan --plot``: the page in a real browser."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from .test_report_page import PLOTS


def plan(folder: Path, plot: Path) -> subprocess.CompletedProcess[str]:
    lines = [
        json.dumps(
            {"timestamp": n, "input_length": 512 * 9 + 1, "hash_ids": [n % 7, *range(10 * (n % 7), 10 * (n % 7) + 8)]}
        )
        for n in range(200)
    ]
    (folder / "trace.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "plan"]
    options = ["--primary", "30%,60%,100%", "--secondary", "50%,unlimited", "--wish", "50%", "--plot", str(plot)]
    return subprocess.run(
        [*command, "--trace", str(folder / "trace.jsonl"), *options],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_it_draws_every_panel_asks_for_nothing_and_says_nothing_to_the_console(chromium, tmp_path, ending) -> None:
    page = tmp_path / f"plan.{ending}"
    done = plan(tmp_path, page)
    assert done.returncode == 0, done.stderr
    assert "Hit rate by primary" in done.stdout
    chromium.open(page.as_uri())
    assert chromium.requests() == []
    assert chromium.complaints() == []
    if ending == "html":
        plots = chromium.evaluate(PLOTS)
        assert [plot["title"] for plot in plots] == ["Hit rate", "Where the hits came from", "Written to the tiers"]
        for plot in plots:
            assert plot["visible"] >= 2
            assert plot["outside"] == 0
            assert plot["cut"] == []
    else:
        ET.fromstring(page.read_text(encoding="utf-8"))
        assert chromium.evaluate("document.querySelectorAll('svg svg .mark').length") >= 8
