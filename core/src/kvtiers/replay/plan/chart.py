"""The chart of a plan, as SVG written by hand: no dependency, nothing loaded from anywhere.

Panels below each other, with the size that was swept from left to right: the hit rate, where the hits came from, and
what was written to the tiers. One colour for each policy and choice of the other sizes; one dash for each tier.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from kvtiers.api.units import format_size
from kvtiers.replay.plan.report import Plan
from kvtiers.replay.plan.simulate import PlanCase, PlanPoint

__all__ = ["as_html", "as_svg"]

# Okabe and Ito's palette, which people with any colour vision can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_WIDTH, _LEFT, _RIGHT = 860, 80, 36
_PANEL, _GAP, _LINE = 240, 62, 18
_BOLD = 'font-weight="bold"'
_LABEL = 62  # pixels that a label on the axis needs


class _Line(NamedTuple):
    """A line of a panel: its points as (x, y, tooltip), colour and dash."""

    points: list[tuple[float, float, str]]
    colour: str
    dash: str = ""


@dataclass(frozen=True, slots=True)
class _Axis:
    """The swept size, from left to right; logarithmic where it spans more than a decade."""

    title: str
    size_of: Callable[[PlanCase], int]
    values: list[int]
    text: Callable[[int], str]

    def x(self, value: int) -> float:
        low, high = self.values[0], self.values[-1]
        if low == high:
            return (_LEFT + _WIDTH - _RIGHT) / 2
        logarithmic = high > 10 * low > 0
        scale = math.log if logarithmic else float
        return _LEFT + (_WIDTH - _RIGHT - _LEFT) * (scale(value) - scale(low)) / (scale(high) - scale(low))

    def ticks(self) -> Iterator[tuple[float, str]]:
        last = -math.inf
        for value in self.values:
            if (x := self.x(value)) - last >= _LABEL:
                last = x
                yield x, self.text(value)


def as_html(plan: Plan) -> str:
    """Return one page with the chart and the tables."""
    parts = [_html_table(plan.columns(), plan.rows(plan.points))]
    if verdict := plan.verdict():
        parts.append(f"<p>{escape(verdict)}</p>")
    if plan.smallest:
        parts.append(_html_table(plan.columns(), plan.rows(plan.smallest)))
    style = (
        "body{font:14px sans-serif;max-width:900px;margin:2em auto;color:#222;background:#fff}"
        "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(plan.name)}</title>'
        f"<style>{style}</style></head>\n<body><h1>Plan</h1><p>{escape(plan.heading())}</p>\n{as_svg(plan)}\n"
        f"{''.join(parts)}</body></html>\n"
    )


def as_svg(plan: Plan) -> str:
    """Return the chart of the plan's points; there must be one."""
    axis = _axis(plan)
    series = _series(plan, axis)
    names = plan.tier_names
    top = 34 + _LINE * len(series)
    panels = [_hit_panel(plan, axis, series, top)]
    if names:
        panels.append(_origin_panel(plan, axis, series, top + _PANEL + _GAP))
        panels.append(_written_panel(plan, axis, series, top + 2 * (_PANEL + _GAP)))
    height = top + len(panels) * (_PANEL + _GAP) + (_LINE if names else 0)
    legend = "".join(
        f'<path d="M{_LEFT} {34 + _LINE * i - 4}h26" stroke="{_colour(i)}" stroke-width="3"/>'
        + _text(_LEFT + 34, 34 + _LINE * i, label)
        for i, label in enumerate(series)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="#222"><rect width="100%" height="100%" fill="#fff"/>'
        f"{_text(_LEFT, 16, plan.name, _BOLD)}{legend}{''.join(panels)}</svg>"
    )


# -- what is drawn


def _axis(plan: Plan) -> _Axis:
    """Choose what goes from left to right: the size with the most values, the primary's before any other."""
    unique, sizes = plan.trace.unique, plan.sizes

    def held(name: str) -> Callable[[PlanCase], int]:
        def size(case: PlanCase) -> int:
            tier = next((tier for tier in case.tiers if tier.name == name), None)
            return 0 if tier is None else unique if tier.chunks is None else tier.chunks

        return size

    sources: dict[str, Callable[[PlanCase], int]] = {"primary": lambda case: case.primary}
    sources |= {name: held(name) for name in plan.tier_names}
    values = {name: sorted({size(point.case) for point in plan.points}) for name, size in sources.items()}
    name = max(values, key=lambda each: len(values[each]))
    unit = "share of the trace's chunks" if sizes.value_bytes is None else "size"

    def text(chunks: int) -> str:
        return f"{100 * chunks / unique:.3g} %" if sizes.value_bytes is None else sizes.amount(chunks)

    return _Axis(f"{name}: {unit}", sources[name], values[name], text)


def _series(plan: Plan, axis: _Axis) -> dict[str, list[PlanPoint]]:
    """Return the points that differ in nothing but the swept size, by what tells them from the others."""
    found: dict[str, list[PlanPoint]] = {}
    swept = axis.title.partition(":")[0]
    for point in sorted(plan.points, key=lambda each: axis.size_of(each.case)):
        case = point.case
        parts = [case.policy] + [f"primary {plan.sizes.shown(case.primary)}"] * (swept != "primary")
        held = {tier.name: tier.chunks for tier in case.tiers}
        parts += [f"{name} {plan.sizes.shown(held.get(name, 0))}" for name in plan.tier_names if name != swept]
        found.setdefault(", ".join(parts), []).append(point)
    return found


def _hit_panel(plan: Plan, axis: _Axis, series: dict[str, list[PlanPoint]], top: int) -> str:
    lines = [
        _Line(
            [
                (axis.x(axis.size_of(p.case)), p.rate, f"{axis.text(axis.size_of(p.case))}: {_share(p.rate)}")
                for p in points
            ],
            _colour(index),
        )
        for index, points in enumerate(series.values())
    ]
    marks = [(plan.infinite_rate, f"infinite cache {_share(plan.infinite_rate)}")]
    if plan.wish is not None:
        marks.append((plan.wish, f"wish {_share(plan.wish)}"))
    return _panel("prefix hits, share of full blocks asked for", axis, lines, top, _share, marks)


def _origin_panel(plan: Plan, axis: _Axis, series: dict[str, list[PlanPoint]], top: int) -> str:
    origins = ["primary", *plan.tier_names]
    lines = [
        _Line(
            [
                (axis.x(axis.size_of(p.case)), share, f"{origin}: {_share(share)}")
                for p in points
                if origin in p.hits
                for share in [p.hits[origin] / p.references]
            ],
            _colour(index),
            _DASHES[number % len(_DASHES)],
        )
        for index, points in enumerate(series.values())
        for number, origin in enumerate(origins)
    ]
    key = "".join(
        f'<path d="M{_LEFT + 150 * i} {top + _PANEL + 44}h30" stroke="#555" stroke-width="2" '
        f'stroke-dasharray="{_DASHES[i % len(_DASHES)]}"/>' + _text(_LEFT + 150 * i + 36, top + _PANEL + 48, origin)
        for i, origin in enumerate(origins)
    )
    return _panel("where the hits came from", axis, lines, top, _share) + key


def _written_panel(plan: Plan, axis: _Axis, series: dict[str, list[PlanPoint]], top: int) -> str:
    top += _LINE
    each = plan.sizes.value_bytes or 1
    lines = [
        _Line(
            [
                (axis.x(axis.size_of(p.case)), float(written * each), plan.sizes.amount(written))
                for p in points
                if p.written
                for written in [sum(p.written.values())]
            ],
            _colour(index),
        )
        for index, points in enumerate(series.values())
    ]
    if plan.sizes.value_bytes is None:
        return _panel("chunks written to the tiers", axis, lines, top, lambda value: f"{value:,.0f}")
    highest = max((y for line in lines for _, y, _ in line.points), default=0.0)
    unit = 1024.0 ** math.floor(math.log(max(1.0, highest), 1024))
    return _panel("written to the tiers", axis, lines, top, format_size, base=unit)


# -- how it is drawn


def _panel(
    title: str,
    axis: _Axis,
    lines: Sequence[_Line],
    top: int,
    text: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
    base: float = 1.0,
) -> str:
    highest = max([y for line in lines for _, y, _ in line.points] + [y for y, _ in marks]) or 1.0
    step = _nice_step(highest / 5, base)
    high = step * math.ceil(highest / step + 0.25)
    bottom, right = top + _PANEL, _WIDTH - _RIGHT

    def at(value: float) -> float:
        return bottom - (_PANEL - 24) * value / high

    parts = [_text(_LEFT, top + 12, title, _BOLD)]
    for number in range(math.floor(high / step + 1e-9) + 1):
        y = at(number * step)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, text(number * step), 'text-anchor="end"'))
    for x, label in axis.ticks():
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#555"/>')
        parts.append(_text(x, bottom + 18, label, 'text-anchor="middle"'))
    parts.append(_text(right, bottom + 34, axis.title, 'text-anchor="end"'))
    for value, label in marks:
        # The lower one's label hangs below its line, so that two that are close do not overlap.
        beside = 14 if value < max(marks)[0] else -5
        parts.append(f'<path d="M{_LEFT} {at(value):.1f}H{right}" stroke="#777" stroke-dasharray="4 4"/>')
        parts.append(_text(right, at(value) + beside, label, 'text-anchor="end"'))
    parts += [_drawn(line, at) for line in lines]
    return "".join(parts)


def _drawn(line: _Line, at: Callable[[float], float]) -> str:
    if not line.points:
        return ""
    places = [(x, at(y), tip) for x, y, tip in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"><title>{escape(tip)}</title></circle>'
        for x, y, tip in places
    )
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>{dots}'


def _nice_step(rough: float, base: float) -> float:
    """Return 1, 2 or 5 times a power of ten of ``base``, at least ``rough``."""
    power: float = base * 10.0 ** math.floor(math.log10(rough / base))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(name)}</th>" for name in columns)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
