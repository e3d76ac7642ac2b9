"""A picture of the dashboard's panels, drawn by matplotlib from a real Prometheus under a replay: not Grafana's own.

``python tools/dashboard_picture.py OUT.png [--seconds 150] [REPLAY'S OPTIONS]``: what each panel's queries give, in the
places that the panels have in Grafana. By default the replay serves the trace of the test of the same dashboard.
"""

import argparse
import io
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from dashboard import ROWS, Panel
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from observed_replay import Server, observed, range_queries
from PIL import Image

from kvtiers_replay.report.drawing import COLOURS, SOFT

STEP = 1.0
WIDTH, NUMBER, CHART, TITLE = 18.0, 1.3, 3.0, 0.45  # inches: the picture's width, and heights of its rows
TIERS = """\
version: 1
primary: {capacity: 128MiB}
secondary:
  - {type: fs, path: FOLDER, capacity: 2GiB}
  - {type: memory, capacity: 1GiB}
what_if: true
"""
UNITS: dict[str, Callable[[float], str]] = {
    "percentunit": lambda value: f"{100 * value:.3g} %",
    "s": lambda value: f"{1000 * value:.3g} ms" if 0 < abs(value) < 1 else f"{_plain(value)} s",
    "bytes": lambda value: _scaled(value, "B"),
    "Bps": lambda value: _scaled(value, "B/s"),
    "cps": lambda value: f"{_plain(value)}/s",
    "none": lambda value: _plain(value),  # noqa: PLW0108 -- it is defined below
}


def _plain(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _scaled(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} T{unit}"


def draw(server: Server, start: float, end: float) -> Figure:
    """Return the picture of all panels between two times."""
    left = height = sum(TITLE + sum(line_height for line_height, _ in _lines(panels)) for panels in ROWS.values())
    figure = Figure(figsize=(WIDTH, height), dpi=80, facecolor="#f4f5f7")

    def axes_at(column: int, span: int, bottom: float, top: float, side: float) -> Axes:
        x, width = column * WIDTH / 24 + side, span * WIDTH / 24 - side - 0.15
        return figure.add_axes((x / WIDTH, bottom / height, width / WIDTH, (top - bottom) / height))

    for title, panels in ROWS.items():
        figure.text(0.15 / WIDTH, (left - 0.3) / height, title, fontsize=14, fontweight="bold")
        left -= TITLE
        for line_height, line in _lines(panels):
            column = 0
            for panel in line:
                found = range_queries(server, panel, start, end, STEP)
                if panel.is_number:
                    _number(axes_at(column, panel.span, left - line_height + 0.1, left - 0.3, 0.15), panel, found)
                else:
                    axes = axes_at(column, panel.span, left - line_height + 0.75, left - 0.3, 0.75)
                    _chart(axes, panel, found, start)
                column += panel.span
            left -= line_height
    return figure


def _lines(panels: tuple[Panel, ...]) -> list[tuple[float, list[Panel]]]:
    """Return panels by lines of 24 columns, with the height of each."""
    lines: list[list[Panel]] = [[]]
    for panel in panels:
        if sum(each.span for each in lines[-1]) + panel.span > 24:
            lines.append([])
        lines[-1].append(panel)
    return [(NUMBER if line[0].is_number else CHART, line) for line in lines]


def _number(axes: Axes, panel: Panel, found: list[list[dict[str, Any]]]) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set(xticks=[], yticks=[])
    value = float(found[0][0]["values"][-1][1]) if found[0] else math.nan
    axes.text(0.5, 0.45, UNITS[panel.unit](value), ha="center", va="center", fontsize=22, transform=axes.transAxes)


def _chart(axes: Axes, panel: Panel, found: list[list[dict[str, Any]]], start: float) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    number = 0
    for query, series in zip(panel.queries, found, strict=True):
        for one in series:
            times = [float(at) - start for at, _ in one["values"]]
            values = [float(value) for _, value in one["values"]]
            label = _legend(query.legend, one["metric"])
            style = "-" if number < len(COLOURS) else "--"
            axes.plot(times, values, style, color=COLOURS[number % len(COLOURS)], linewidth=1.4, label=label)
            number += 1
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: UNITS[panel.unit](value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.tick_params(labelsize=8, colors=SOFT)
    axes.grid(visible=True, color="#e3e6ea", linewidth=0.7)
    if number:
        axes.legend(
            fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4 if panel.span < 16 else 8, frameon=False
        )


def _legend(text: str, labels: Mapping[str, str]) -> str:
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def main() -> None:
    """Serve, scrape, wait, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    arguments, replay = parser.parse_known_args()
    mpl.rcParams["text.parse_math"] = False
    with (
        tempfile.TemporaryDirectory(prefix="kvtiers-dashboard-") as folder,
        observed(Path(folder), TIERS if replay else None, replay, interval="1s") as (server, engine),
    ):
        start = time.time()
        time.sleep(arguments.seconds)
        if engine.poll() is not None:
            raise SystemExit(f"the replay has ended before {arguments.seconds:g} s were over: a longer trace")
        drawn = io.BytesIO()
        draw(server, start, time.time()).savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(96).save(arguments.out, optimize=True)


if __name__ == "__main__":
    main()
