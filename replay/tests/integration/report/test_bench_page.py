"""``kvtiers bench --plot``: the page in a real browser."""

import subprocess
import sys

from .test_report_page import PLOTS


def test_it_draws_every_tier_asks_for_nothing_and_says_nothing_to_the_console(chromium, tmp_path) -> None:
    for name in ("<b>one", "two"):
        tier = "{type: memory, io: thread, capacity: 64MiB}"
        (tmp_path / f"{name}.yaml").write_text(f"version: 1\nprimary: {{capacity: 1MiB}}\nsecondary: [{tier}]\n")
    command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "bench"]
    options = [
        "--sizes",
        "64KiB,256KiB,1MiB",
        "--batches",
        "2",
        "--threads",
        "2",
        "--bytes",
        "1MiB",
        "--seconds",
        "0.01",
    ]
    done = subprocess.run(
        [*command, "--compare", "<b>one.yaml", "two.yaml", *options, "--plot", "page.html"],
        capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    chromium.open((tmp_path / "page.html").as_uri())
    assert chromium.requests() == []
    assert chromium.complaints() == []
    plots = chromium.evaluate(PLOTS)
    assert [plot["title"] for plot in plots] == ["Speed by size of value", "One value alone"]
    for plot in plots:
        assert plot["visible"] >= 12, plot  # two tiers, hot and written, of three sizes
        assert plot["outside"] == 0, plot
        assert plot["cut"] == [], plot
    assert "<b>one: memory: what suits is values of" in chromium.evaluate("document.body.innerText")
