"""The page of a plan and its chart: hit rate, where the hits came from, and what was written, by the swept size.

One colour for each policy and choice of the other sizes; one dash for each tier.
"""

import math
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from kvtiers.api.units import format_size
from kvtiers_replay.plan.results import Plan
from kvtiers_replay.plan.series import Swept, series_of, swept_size
from kvtiers_replay.plan.simulate import PlanPoint
from kvtiers_replay.report.drawing import COLOURS, WIDE, Drawing, Marks, counts, draw, level, shares, style
from kvtiers_replay.report.frame import Figure, render
from kvtiers_replay.report.units import percent

__all__ = ["as_html", "as_svg"]

_DASHES = ("-", "--", ":", "-.")
_TICK_LETTER = 7.5  # pixels


def as_html(plan: Plan) -> str:
    """Return one page with the charts and the tables; it loads nothing."""
    return render(
        "plan.html", title=f"Plan for {plan.name}", about=plan.heading(), plan=plan, panels=_panels(plan, titled=False)
    )


def as_svg(plan: Plan) -> str:
    """Return the charts of the plan's points as one drawing; there must be a point."""
    parts, top = [], 0
    for panel in _panels(plan, titled=True):
        parts.append(panel.drawing.svg.replace("<svg ", f'<svg y="{top}" ', 1))
        top += panel.drawing.height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {top}" width="{WIDE}" height="{top}">'
        f"<style>{style()}</style>{''.join(parts)}</svg>\n"
    )


def _panels(plan: Plan, *, titled: bool) -> list[Figure]:
    """Return each chart with its title, which is in the drawing too if that stands alone, and a note."""
    swept = swept_size(plan)
    found = [("Hit rate", "prefix hits, share of full blocks asked for", _hits)]
    if plan.tier_names:
        found.append(("Where the hits came from", "share of full blocks asked for", _origins))
        found.append(("Written to the tiers", "what wears a disk and fills a network", _written))
    return [Figure(title, note, chart(plan, swept, title if titled else ""), wide=True) for title, note, chart in found]


def _lines(plan: Plan, swept: Swept) -> Iterator[tuple[str, str, list[PlanPoint]]]:
    """Yield each line's name, colour and points."""
    for index, (name, points) in enumerate(series_of(plan, swept).items()):
        yield name, COLOURS[index % len(COLOURS)], points


def _hits(plan: Plan, swept: Swept, title: str) -> Drawing:
    levels = [(plan.infinite_rate, f"infinite cache {100 * plan.infinite_rate:.3g} %")]
    if plan.wish is not None:
        levels.append((plan.wish, f"wish {100 * plan.wish:.3g} %"))
    highest = max([*(point.rate for point in plan.points), *(value for value, _ in levels)])

    def paint(axes: Axes, marks: Marks) -> None:
        _size_axis(axes, swept)
        for name, colour, points in _lines(plan, swept):
            sizes = [swept.size_of(point.case) for point in points]
            places = [
                (size, point.rate, f"{name}, {swept.name} {swept.text(size)}: {percent(point.rate)}")
                for size, point in zip(sizes, points, strict=True)
            ]
            marks.line(axes, places, name, color=colour)
        axes.set_ylim(shares(axes.yaxis, highest))
        axes.set_ylabel("prefix hits")
        for value, label in levels:
            level(axes, value, label, dotted=label.startswith("wish"))

    return draw("hit rate by size", paint, height=300, title=title)


def _origins(plan: Plan, swept: Swept, title: str) -> Drawing:
    origins = ["primary", *plan.tier_names]
    highest = max(count / point.references for point in plan.points for count in point.hits.values())

    def paint(axes: Axes, marks: Marks) -> None:
        _size_axis(axes, swept)
        for name, colour, points in _lines(plan, swept):
            for number, origin in enumerate(origins):
                places = [
                    (swept.size_of(point.case), share, f"{name}: {origin} {percent(share)}")
                    for point in points
                    if origin in point.hits
                    for share in [point.hits[origin] / point.references]
                ]
                if places:
                    dash = _DASHES[number % len(_DASHES)]
                    marks.line(axes, places, f"{name}: from {origin}", color=colour, linestyle=dash)
        axes.set_ylim(shares(axes.yaxis, highest))
        axes.set_ylabel("prefix hits")

    return draw("origins by size", paint, height=300, title=title)


def _written(plan: Plan, swept: Swept, title: str) -> Drawing:
    sizes, each = plan.sizes, plan.sizes.value_bytes or 1
    highest = max(sum(point.written.values()) for point in plan.points) * each
    unit = 1 if sizes.value_bytes is None else 1024 ** int(math.log(max(1, highest), 1024))

    def paint(axes: Axes, marks: Marks) -> None:
        _size_axis(axes, swept)
        for name, colour, points in _lines(plan, swept):
            places = [
                (swept.size_of(point.case), written * each / unit, f"{name}: {sizes.amount(written)}")
                for point in points
                if point.written
                for written in [sum(point.written.values())]
            ]
            if places:
                marks.line(axes, places, name, color=colour)
        axes.set_ylim(counts(axes.yaxis, highest / unit))
        axes.set_ylabel("chunks" if sizes.value_bytes is None else format_size(unit)[1:])

    return draw("written by size", paint, height=260, title=title)


def _size_axis(axes: Axes, swept: Swept) -> None:
    """Let the x axis show the sizes that were simulated; where two are too close to be read, one of them."""
    low, high = swept.values[0], swept.values[-1]
    logarithmic = high > 10 * low > 0
    if logarithmic:
        axes.set_xscale("log")
    if low < high:
        axes.set_xlim(low, high)
    at = math.log if logarithmic else float
    labels, free = [], -math.inf
    for value in swept.values:
        place = (at(value) - at(low)) / ((at(high) - at(low)) or 1) * WIDE
        half = len(swept.text(value)) * _TICK_LETTER / 2
        labels.append(swept.text(value) if place - half >= free else "")
        free = place + half if labels[-1] else free
    axes.set_xticks(swept.values, labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{swept.name}: {swept.unit}")
