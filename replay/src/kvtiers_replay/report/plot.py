"""One plot as SVG, written by hand: no dependency, and nothing is loaded from anywhere.

Colours are the classes ``k0`` to ``k7`` of ``plot.css``, which knows light, dark and paper. Every mark has class
``mark`` and tells its figures in a ``<title>``, which browsers show where the pointer rests.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from kvtiers_replay.report.axes import Axis

__all__ = ["HALF", "WIDE", "Interval", "Place", "Plot"]

WIDE, HALF = 1040, 510
_LEFT, _RIGHT, _BOTTOM, _ROW = 62, 18, 44, 20
_LETTER = 6.7  # pixels of a letter, about
_COLOURS = 8


class Place(NamedTuple):
    """A point of a line, and what it tells."""

    x: float
    y: float
    tip: str = ""


class Interval(NamedTuple):
    """A part of the x axis, the y values between which it is filled, and what it tells."""

    start: float
    end: float
    low: float
    high: float
    tip: str = ""


class Plot:
    """A frame with two axes, to which marks are added; ``svg`` draws it. The order of the calls is that of the layers.

    ``key``: a legend, one entry for each name that a mark was given.
    """

    def __init__(self, label: str, x: Axis, y: Axis, *, width: int = HALF, height: int = 230) -> None:
        self._label = label
        self._x = x
        self._y = y
        self._width = width
        self._frame_height = height
        self._marks: list[str] = []
        self._key: dict[str, str] = {}

    def line(self, name: str, places: Sequence[Place], colour: int, dash: str = "", *, dots: bool = True) -> None:
        """Add a line through these points."""
        at = [(self._at_x(place.x), self._at_y(place.y), place.tip) for place in places]
        shape = f'stroke-dasharray="{dash}"' if dash else ""
        self._enter(name, f'<path class="line k{colour % _COLOURS}" {shape} d="M0 -4h26"/>')
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in at)
        self._marks.append(f'<polyline class="mark line k{colour % _COLOURS}" {shape} points="{points}"/>')
        if dots:
            self._marks += [
                f'<circle class="dot k{colour % _COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3">{_tip(tip)}</circle>'
                for x, y, tip in at
            ]

    def bars(self, name: str, intervals: Sequence[Interval], colour: int, *, gap: float = 1.0) -> None:
        """Add a filled rectangle for each interval; one without height is left out."""
        self._enter(name, f'<rect class="bar k{colour % _COLOURS}" y="-11" width="26" height="12" rx="2"/>')
        for start, end, low, high, tip in intervals:
            left, top = self._at_x(start), self._at_y(high)
            width, height = max(1.0, self._at_x(end) - left - gap), self._at_y(low) - top
            if high > low:
                self._marks.append(
                    f'<rect class="mark bar k{colour % _COLOURS}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{max(1.0, height):.1f}">{_tip(tip)}</rect>'
                )

    def level(self, y: float, label: str, *, below: bool = False) -> None:
        """Add a dashed line across the plot, with its name at the right end."""
        at = self._at_y(y)
        end = self._width - _RIGHT
        self._marks.append(f'<path class="rule" d="M{_LEFT} {at:.1f}H{end}"/>')
        self._marks.append(_text(end - 4, at + (14 if below else -5), label, "end", "halo"))

    def upright(self, x: float, label: str, row: int = 0) -> None:
        """Add a dashed line from bottom to top, with its name beside it, in the ``row``-th row from the top."""
        at = self._at_x(x)
        right = at + 8 + len(label) * _LETTER > self._width - _RIGHT
        y = self._top - 6 + 14 * row
        self._marks.append(f'<path class="rule" d="M{at:.1f} {self._bottom}V{y - 8}"/>')
        self._marks.append(_text(at - 5 if right else at + 5, y, label, "end" if right else "start", "halo"))

    def note(self, x: float, y: float, text: str) -> None:
        """Write beside this point."""
        self._marks.append(_text(self._at_x(x) + 8, self._at_y(y) + 4, text))

    def svg(self) -> str:
        """Return the drawing."""
        frame = [self._gridlines(), self._ticks(), _text(_LEFT - 50, 14, self._y.title, "start", "axis")]
        frame.append(_text(self._width - _RIGHT, self._frame_height - 6, self._x.title, "end", "axis"))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" aria-label="{escape(self._label)}" '
            f'viewBox="0 0 {self._width} {self.height}" width="{self._width}" height="{self.height}">'
            f"{''.join(frame)}{''.join(self._marks)}{self._legend()}</svg>"
        )

    @property
    def height(self) -> int:
        """Its height in pixels, with the legend."""
        return self._frame_height + (_ROW * (self._places()[-1][1] + 1) + 6 if self._key else 0)

    # -- inside

    @property
    def _top(self) -> int:
        return 48 if self._y.title else 8

    @property
    def _bottom(self) -> int:
        return self._frame_height - _BOTTOM

    def _at_x(self, value: float) -> float:
        return _LEFT + (self._width - _LEFT - _RIGHT) * self._x.at(value)

    def _at_y(self, value: float) -> float:
        return self._bottom - (self._bottom - self._top) * self._y.at(value)

    def _enter(self, name: str, sample: str) -> None:
        if name:
            self._key.setdefault(name, sample)

    def _gridlines(self) -> str:
        end = self._width - _RIGHT
        return "".join(
            f'<path class="grid" d="M{_LEFT} {self._at_y(value):.1f}H{end}"/>'
            + _text(_LEFT - 8, self._at_y(value) + 4, text, "end")
            for value, text in self._y.ticks
        )

    def _ticks(self) -> str:
        parts, free = [], 0.0
        for value, text in self._x.ticks:
            at, half = self._at_x(value), len(text) * _LETTER / 2
            parts.append(f'<path class="tick" d="M{at:.1f} {self._bottom}v5"/>')
            if at - half >= free:
                free = at + half + 8
                parts.append(_text(at, self._bottom + 18, text, "middle"))
        return "".join(parts)

    def _places(self) -> list[tuple[float, int]]:
        """Return where the entries of the key stand: x and row."""
        found, x, row = [], float(_LEFT), 0
        for name in self._key:
            needed = 34 + len(name) * _LETTER + 22
            if x > _LEFT and x + needed > self._width:
                x, row = float(_LEFT), row + 1
            found.append((x, row))
            x += needed
        return found

    def _legend(self) -> str:
        places = zip(self._key.items(), self._places(), strict=True)
        return "".join(
            f'<g transform="translate({x:.1f} {self._frame_height + 14 + _ROW * row})">{sample}{_text(32, 0, name)}</g>'
            for (name, sample), (x, row) in places
        )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{shown}>{escape(text)}</text>'


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
