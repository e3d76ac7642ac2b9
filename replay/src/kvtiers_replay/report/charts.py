"""The charts of a replay, each from plain data to one drawing."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from matplotlib.axes import Axes

from kvtiers.api.units import format_size
from kvtiers_replay.report.drawing import (
    COLOURS,
    GREY,
    HALF,
    SOFT,
    Drawing,
    Marks,
    counts,
    draw,
    level,
    log_seconds,
    shares,
    since_start,
)
from kvtiers_replay.report.units import at_most, percent, seconds
from kvtiers_replay.results import Latencies, Link, OverTime, ReplayResults, TimeToFirstToken

__all__ = ["depths_over_time", "first_tokens", "histogram", "hits_over_time", "links", "where_blocks_came_from"]


def where_blocks_came_from(results: ReplayResults) -> Drawing:
    """Draw one bar for all full blocks: those from each origin, and those that were computed."""
    whole = max(1, results.references)
    parts = [*results.hits.items(), ("computed", max(0, results.references - results.prefix_hits))]
    ends = list(accumulate((count for _, count in parts), initial=0))

    def paint(axes: Axes, marks: Marks) -> None:
        axes.grid(visible=False)
        for index, ((name, count), start) in enumerate(zip(parts, ends, strict=False)):
            text = f"{name} {percent(count, whole)}"
            colour = GREY if name == "computed" else _colour(index)
            bar = (start / whole, count / whole, 0.0, 1.0, f"{text}: {count:,} blocks")
            marks.bars(axes, [bar], text, color=colour)
        axes.set(ylim=(0.0, 1.0), yticks=[], xlabel="share of full blocks")
        axes.set_xlim(shares(axes.xaxis, 1.0))

    return draw("where blocks came from", paint, height=90)


def hits_over_time(results: ReplayResults) -> Drawing:
    """Draw, for each interval, the origins' shares on top of each other."""
    over, whole = results.over_time, max(1, results.references)
    overall, infinite = results.prefix_hits / whole, results.infinite_hits / whole
    rates = {name: [value or 0.0 for value in values] for name, values in over.hit_rates.items()}
    tops = [list(accumulate(column, initial=0.0)) for column in zip(*rates.values(), strict=True)]
    highest = max([overall if results.warm else infinite, *(column[-1] for column in tops)], default=0.0)
    spans = list(pairwise([0.0, *over.seconds]))

    def paint(axes: Axes, marks: Marks) -> None:
        unit = since_start(axes, over.seconds[-1])
        for index, (name, values) in enumerate(rates.items()):
            bars = [
                (start / unit, (end - start) / unit, below[index], value, f"{name} {percent(value)}, until {end:.1f} s")
                for (start, end), below, value in zip(spans, tops, values, strict=True)
            ]
            marks.bars(axes, bars, name, color=_colour(index))
        axes.set_ylim(shares(axes.yaxis, highest))
        axes.set_ylabel("prefix hits")
        if not results.warm:
            level(axes, infinite, f"infinite cache, whole run {percent(infinite)}")
        if results.warm or infinite - overall > 0.02:
            level(axes, overall, f"whole run {percent(overall)}", dotted=True)

    return draw("hit rate over time", paint, height=270)


def first_tokens(first: TimeToFirstToken) -> Drawing:
    """Draw the share of requests that have their first token within a time, with the tiers and without."""
    both = {"with tiers": first.with_tiers, "without": first.without}
    ends = [_filled(times) for times in both.values()]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)

    def paint(axes: Axes, marks: Marks) -> None:
        log_seconds(axes, low, high)
        for (name, times), colour, dash in zip(both.items(), (_colour(2), _colour(1)), ("-", "--"), strict=True):
            edges = [*times.bounds, times.bounds[-1] * 1.5]
            points = [
                (edge, seen / times.count, f"{name}: {percent(seen, times.count)} within {seconds(edge)}")
                for edge, seen in zip(edges, accumulate(times.counts), strict=True)
                if low * 0.999 <= edge <= high * 1.001
            ]
            marks.line(axes, points, f"{name}, median {at_most(times, times.p50)}", color=colour, linestyle=dash)
        axes.set_ylim(shares(axes.yaxis, 1.0))
        axes.set(xlabel="time to first token, estimated", ylabel="share of requests")
        level(axes, 0.5, "half of all requests", dotted=True)

    return draw("time to first token", paint, height=260)


def histogram(times: Latencies, what: str, colour: int) -> Drawing:
    """Draw how often something took how long; the axis of time is logarithmic, as the buckets are."""
    edges = _edges(times)

    def paint(axes: Axes, marks: Marks) -> None:
        log_seconds(axes, *_filled(times))
        bars = [
            (start, end - start, 0.0, count, f"{count:,} of {times.count:,} took {seconds(start)} to {seconds(end)}")
            for (start, end), count in zip(pairwise(edges), times.counts, strict=True)
        ]
        marks.bars(axes, bars, color=_colour(colour))
        axes.set_ylim(counts(axes.yaxis, max(times.counts)))
        axes.set(xlabel="duration", ylabel=what)
        for row, (name, value) in enumerate((("p50", times.p50), ("p99", times.p99))):
            axes.axvline(value, color=SOFT, linestyle=(0, (4, 4)), linewidth=1.0)
            right = value > edges[0] and value**2 > axes.get_xlim()[0] * axes.get_xlim()[1]
            axes.annotate(
                f"{name} {at_most(times, value)}", (value, 1.0), xycoords=("data", "axes fraction"),
                xytext=(-4 if right else 4, 19 - 17 * row), textcoords="offset points", ha="right" if right else "left",
            )  # fmt: skip

    return draw(f"histogram of {what}", paint, width=HALF)


def links(moved: Mapping[str, Link], origins: Sequence[str]) -> Drawing:
    """Draw one bar for each link and direction, its rate beside it, in the colour of its end that is further down."""
    highest = max(link.nbytes for link in moved.values())
    unit = next((unit for unit in (1 << 40, 1 << 30, 1 << 20, 1 << 10) if highest >= unit), 1)

    def paint(axes: Axes, marks: Marks) -> None:
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        for row, (name, link) in enumerate(moved.items()):
            rate = f", {link.nbytes / link.seconds / 1e9:.2f} GB/s" if link.seconds and link.nbytes else ""
            text = f"{format_size(link.nbytes)}{rate}"
            (bar,) = axes.barh([row], [link.nbytes / unit], 0.7, color=_colour(_lower_end(name, origins)))
            marks.add(bar, f"{_arrow(name)}: {text}")
            axes.annotate(
                text, (link.nbytes / unit, row), xytext=(8, 0), textcoords="offset points", va="center_baseline"
            )
        axes.set(xlim=(0.0, max(1.0, highest / unit) * 1.3), xlabel=f"bytes moved ({format_size(unit)[1:]})")
        axes.set_yticks(range(len(moved)), [_arrow(name) for name in moved])
        axes.invert_yaxis()

    return draw("bytes by link", paint, height=70 + 30 * len(moved))


def depths_over_time(over: OverTime) -> Drawing:
    """Draw how long each queue was."""
    busy = {name: depths for name, depths in over.queue_depths.items() if any(depths)}

    def paint(axes: Axes, marks: Marks) -> None:
        unit = since_start(axes, over.seconds[-1])
        for index, (name, depths) in enumerate(busy.items()):
            points = [(at / unit, depth, "") for at, depth in zip(over.seconds, depths, strict=True)]
            marks.line(axes, points, name, dots=False, color=_colour(index))
        axes.set_ylim(counts(axes.yaxis, max(max(depths) for depths in busy.values())))
        axes.set_ylabel("waiting")

    return draw("queues over time", paint)


def _colour(index: int) -> str:
    return GREY if index < 0 else COLOURS[index % len(COLOURS)]


def _arrow(link: str) -> str:
    return link.replace("->", "→")


def _lower_end(link: str, origins: Sequence[str]) -> int:
    """Return the place of a link's lower end among the origins of hits, and so its colour there; -1: it has none."""
    return max([origins.index(end) for end in link.split(" -> ") if end in origins], default=-1)


def _edges(times: Latencies) -> list[float]:
    return [times.bounds[0] / 2, *times.bounds, max(times.worst, times.bounds[-1] * 1.5)]


def _filled(times: Latencies) -> tuple[float, float]:
    """Return the ends of the part of the axis that has anything in it."""
    edges = _edges(times)
    filled = [index for index, count in enumerate(times.counts) if count]
    return edges[filled[0]], edges[filled[-1] + 1]
