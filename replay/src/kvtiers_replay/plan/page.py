"""The chart of a plan: the swept size from left to right; hit rate, where the hits came from, and what was written.

One colour for each policy and choice of the other sizes; one dash for each tier.
"""

import math
from html import escape

from kvtiers.api.units import format_size
from kvtiers_replay.plan.results import Plan
from kvtiers_replay.plan.series import Swept, series_of, swept_size
from kvtiers_replay.report.axes import Axis, counts, linear, percent, share_axis
from kvtiers_replay.report.document import document, figure, plot_style, section, table
from kvtiers_replay.report.plot import WIDE, Place, Plot

__all__ = ["as_html", "as_svg"]

_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_CAPTION = 26  # pixels above a panel


def as_html(plan: Plan) -> str:
    """Return one page with the chart and the tables; it loads nothing."""
    figures = "".join(figure(title, note, plot.svg(), wide=True) for title, note, plot in _panels(plan))
    body = [f'<h1>{escape(f"Plan for {plan.name}")}</h1>\n<p class="about">{escape(plan.heading())}</p>']
    if verdict := plan.verdict():
        kind = "verdict" if plan.smallest else "verdict warn"
        body.append(f'<div class="{kind}"><p>{escape(verdict)}</p></div>')
    if plan.smallest:
        body.append(table(plan.columns(), plan.rows(plan.smallest)))
    body += [
        section("By size", f'<div class="plots">{figures}</div>'),
        section("All cases", table(plan.columns(), plan.rows(plan.points))),
    ]
    return document(f"Plan for {plan.name}", body)


def as_svg(plan: Plan) -> str:
    """Return the chart of the plan's points as one drawing; there must be one."""
    parts, top = [], 0
    for title, _, plot in _panels(plan):
        parts.append(f'<text class="plot" x="12" y="{top + 18}" font-weight="bold">{escape(title)}</text>')
        parts.append(f'<g transform="translate(0 {top + _CAPTION})">{plot.svg()}</g>')
        top += _CAPTION + plot.height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {top}" width="{WIDE}" height="{top}">'
        f'<style>{escape(plot_style())}</style><rect class="paper" width="100%" height="100%"/>{"".join(parts)}</svg>'
    )


def _panels(plan: Plan) -> list[tuple[str, str, Plot]]:
    """Return each plot with its title and a note."""
    swept = swept_size(plan)
    found = [("Hit rate", "prefix hits, share of full blocks asked for", _hits(plan, swept))]
    if plan.tier_names:
        found.append(("Where the hits came from", "share of full blocks asked for", _origins(plan, swept)))
        found.append(("Written to the tiers", "what wears a disk and fills a network", _written(plan, swept)))
    return found


def _x_axis(swept: Swept) -> Axis:
    low, high = swept.values[0], swept.values[-1]
    ticks = [(value, swept.text(value)) for value in swept.values]
    return Axis(f"{swept.name}: {swept.unit}", low, high, ticks, logarithmic=high > 10 * low > 0)


def _hits(plan: Plan, swept: Swept) -> Plot:
    marks = [(plan.infinite_rate, f"infinite cache {100 * plan.infinite_rate:.3g} %")]
    if plan.wish is not None:
        marks.append((plan.wish, f"wish {100 * plan.wish:.3g} %"))
    highest = max([*(point.rate for point in plan.points), *(value for value, _ in marks)])
    plot = Plot("hit rate by size", _x_axis(swept), share_axis("prefix hits", highest), width=WIDE, height=300)
    for value, label in marks:
        # The lower one's label hangs below its line, so that two that are close do not overlap.
        plot.level(value, label, below=value < max(marks)[0])
    for index, (name, points) in enumerate(series_of(plan, swept).items()):
        sizes = [swept.size_of(point.case) for point in points]
        places = [
            Place(size, point.rate, f"{name}, {swept.name} {swept.text(size)}: {percent(point.rate)}")
            for size, point in zip(sizes, points, strict=True)
        ]
        plot.line(name, places, index)
    return plot


def _origins(plan: Plan, swept: Swept) -> Plot:
    origins = ["primary", *plan.tier_names]
    shares = [count / point.references for point in plan.points for count in point.hits.values()]
    plot = Plot("origins by size", _x_axis(swept), share_axis("prefix hits", max(shares)), width=WIDE, height=300)
    for index, (name, points) in enumerate(series_of(plan, swept).items()):
        for number, origin in enumerate(origins):
            places = [
                Place(swept.size_of(point.case), share, f"{name}: {origin} {percent(share)}")
                for point in points
                if origin in point.hits
                for share in [point.hits[origin] / point.references]
            ]
            if places:
                plot.line(f"{name}: from {origin}", places, index, _DASHES[number % len(_DASHES)])
    return plot


def _written(plan: Plan, swept: Swept) -> Plot:
    sizes, each = plan.sizes, plan.sizes.value_bytes
    highest = max(sum(point.written.values()) for point in plan.points)
    if each is None:
        y = counts("chunks", highest)
    else:
        unit = 1024.0 ** math.floor(math.log(max(1.0, highest * each), 1024))
        y = linear("bytes", highest * each, format_size, unit)
    plot = Plot("written by size", _x_axis(swept), y, width=WIDE, height=260)
    for index, (name, points) in enumerate(series_of(plan, swept).items()):
        places = [
            Place(swept.size_of(point.case), written * (each or 1), f"{name}: {sizes.amount(written)}")
            for point in points
            if point.written
            for written in [sum(point.written.values())]
        ]
        if places:
            plot.line(name, places, index)
    return plot
