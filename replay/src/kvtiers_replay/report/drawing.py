"""Drawings: matplotlib's figures as SVG in the colours of the page, light and dark.

matplotlib, since its SVG serves both the page and a file of its own, and runs nothing in the browser: the page can
forbid every script and every request, and is printed as it is seen. (Plotly and Bokeh put 1 to 5 MB of JavaScript into
each page, and need a browser to write SVG.) Every mark has its figures in a ``<title>``, which browsers show where the
pointer rests.

Colours are those of ``colours.css``: after the drawing, each of the palette becomes the CSS variable of its place, so
that the browser chooses between light and dark. Text stays text, set in the page's own font, which is no wider than the
one that matplotlib measures with.
"""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple, TypeAlias

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from kvtiers_replay.report.units import seconds

__all__ = [
    "COLOURS", "GREY", "HALF", "SOFT", "WIDE", "Drawing", "Marks", "Paint", "counts", "draw", "level", "log_seconds",
    "shares", "since_start", "style",
]  # fmt: skip

WIDE, HALF = 1040, 510
_INK, SOFT, _FAINT, _PAPER = "#1d2430", "#5b6675", "#dfe4ea", "#fefefe"
COLOURS = ("#0072b2", "#e07b00", "#009e73", "#b5518f", "#6a5acd", "#3ba7dd", "#c9a400")
GREY = "#a3adb8"
_VARIABLES = {_INK: "ink", SOFT: "soft", _FAINT: "faint", _PAPER: "paper", GREY: "grey"}
_VARIABLES |= {colour: f"k{index}" for index, colour in enumerate(COLOURS)}
_LETTER = 7.2  # pixels of a letter of the widest font, about
_LEGEND_SAMPLE = 50  # pixels beside a legend's text
_LEGEND_ROW = 20

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name with dollars in it is a name
    "font.size": 12.0,
    "axes.labelcolor": SOFT, "axes.edgecolor": _FAINT, "axes.facecolor": _PAPER, "axes.axisbelow": True,
    "axes.grid": True, "axes.grid.axis": "y", "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "grid.color": _FAINT, "text.color": _INK, "figure.facecolor": _PAPER,
    "xtick.color": SOFT, "xtick.labelcolor": _INK, "ytick.color": SOFT, "ytick.labelcolor": _INK, "ytick.left": False,
    "legend.frameon": False, "lines.linewidth": 2.0,
}  # fmt: skip

Paint: TypeAlias = Callable[[Axes, "Marks"], None]


class Drawing(NamedTuple):
    """An SVG element, and its height in pixels."""

    svg: str
    height: int


class Marks:
    """The marks drawn from data, and the text of each."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, artist: Artist, text: str) -> None:
        """Make a mark of the drawing show this text under the pointer."""
        artist.set_gid(f"mark-{len(self._texts)}")
        self._texts.append(text)

    def line(
        self, axes: Axes, points: Sequence[tuple[float, float, str]], name: str, *, dots: bool = True, **look: Any
    ) -> None:
        """Draw a line, and at each point a dot that says the point's text."""
        (line,) = axes.plot([x for x, _, _ in points], [y for _, y, _ in points], label=name, clip_on=False, **look)
        self.add(line, name)
        for x, y, text in points if dots else ():
            (dot,) = axes.plot([x], [y], marker="o", markersize=6, linestyle="", color=line.get_color(), clip_on=False)
            self.add(dot, text)

    def bars(
        self, axes: Axes, bars: Sequence[tuple[float, float, float, float, str]], name: str = "", **look: Any
    ) -> None:
        """Draw rectangles, each by its left, width, bottom, height and text; those without height are left out."""
        # Without any, the legend still has the name.
        drawn = [bar for bar in bars if bar[1] > 0 and bar[3] > 0] or [(axes.get_xlim()[0], 0.0, 0.0, 0.0, "")]
        lefts, widths, bottoms, heights, texts = zip(*drawn, strict=True)
        look = {"edgecolor": _PAPER, "linewidth": 0.6, **look}
        found = axes.bar(lefts, heights, widths, bottoms, align="edge", label=name, clip_on=False, **look)
        for bar, text in zip(found, texts, strict=True):
            if text:
                self.add(bar, text)

    def named(self, svg: str) -> str:
        """Put each mark's text into the SVG as its title, which browsers show beside the pointer."""

        def name(found: re.Match[str]) -> str:
            return f'<g class="mark"><title>{escape(self._texts[int(found[1])])}</title>'

        return re.sub(r'<g id="mark-(\d+)">', name, svg)


def style() -> str:
    """Return the CSS that drawings need, wherever they stand."""
    return (files(__package__) / "templates" / "colours.css").read_text(encoding="utf-8")


def draw(
    label: str, paint: Paint, *, width: int = WIDE, height: int = 230, title: str = "", legend_columns: int = 99
) -> Drawing:
    """Return what ``paint`` fills the axes with. ``label``: what it shows, for those who cannot see it.

    ``height``: without the legend, whose rows come below. ``legend_columns``: the most of it, of those with room.
    """
    marks, out = Marks(), io.StringIO()
    with matplotlib.style.context(["default", _STYLE | {"svg.hashsalt": label}]):
        figure = Figure(layout=ConstrainedLayoutEngine(w_pad=6 / 72, h_pad=6 / 72), dpi=72)
        axes = figure.subplots()
        paint(axes, marks)
        if title:
            axes.set_title(title, pad=12)
        height += _legend(figure, axes, width, legend_columns)
        figure.set_size_inches(width / 72, height / 72)
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = marks.named(_in_variables(out.getvalue()))
    start = (
        f'<svg class="plot" role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    )
    return Drawing(
        re.sub(r"^.*?<svg[^>]*( viewBox=\"[^\"]*\")[^>]*>", rf"{start}\1>", svg, count=1, flags=re.DOTALL), height
    )


def _legend(figure: Figure, axes: Axes, width: int, most_columns: int) -> int:
    """Put a legend below the axes, in as many columns as there is room for; return its height in pixels."""
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return 0
    # Marks drawn from data come first.
    ordered = sorted(zip(handles, names, strict=True), key=lambda entry: entry[1] in _levels(axes))
    longest = max(len(name) for name in names) * _LETTER + _LEGEND_SAMPLE
    columns = min(len(names), most_columns, max(1, int(width / longest)))
    # matplotlib fills columns one by one; people read rows.
    by_column = [entry for column in range(columns) for entry in ordered[column::columns]]
    handles, names = [handle for handle, _ in by_column], [name for _, name in by_column]
    figure.legend(handles, names, loc="outside lower left", ncols=columns)
    return _LEGEND_ROW * -(-len(names) // columns) + 10


def _levels(axes: Axes) -> set[str]:
    return {str(line.get_label()) for line in axes.get_lines() if line.get_color() == _INK}


def _in_variables(svg: str) -> str:
    """Return the drawing with the CSS variables of its colours, and without the rules for text that the page has."""
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"(font: [^;\"]*?)'[^;\"]*", r"\1system-ui, 'DejaVu Sans', sans-serif", svg)
    return re.sub("|".join(_VARIABLES), lambda found: f"var(--{_VARIABLES[found[0]]})", svg)


# -- axes


def shares(axis: Axis, highest: float) -> tuple[float, float]:
    """Make an axis show shares in percent; return its limits, which do not exaggerate small shares."""
    axis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))
    return 0.0, min(1.0, max(highest, 0.1) * 1.12)


def counts(axis: Axis, highest: float) -> tuple[float, float]:
    """Make an axis show whole numbers from 0; return its limits."""
    axis.set_major_locator(MaxNLocator("auto", integer=True))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return 0.0, max(highest, 1.0) * 1.12


def log_seconds(axes: Axes, shortest: float, longest: float) -> None:
    """Make the x axis show durations, with a tick at each power of ten, or closer where there are few."""
    low, high = shortest, max(longest, shortest * 10)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(10.0, (1, 2, 5) if high / low <= 100 else (1,), numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))


def since_start(axes: Axes, longest: float) -> float:
    """Label the x axis as time since the first request, in h, min or s; return how many seconds that unit has."""
    units = (("h", 3600.0), ("min", 60.0))
    unit, size = next(((unit, size) for unit, size in units if longest >= 3 * size), ("s", 1.0))
    axes.set_xlim(0.0, longest / size or 1.0)
    axes.set_xlabel(f"time since the first request ({unit})")
    return size


def level(axes: Axes, value: float, text: str, *, dotted: bool = False) -> None:
    """Draw a dashed or dotted line across; the legend has its name."""
    axes.axhline(value, label=text, color=_INK, linestyle=":" if dotted else "--", linewidth=1.2)
