"""The plots of a replay, each from plain data to one drawing."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from kvtiers.api.units import format_size
from kvtiers_replay.report.axes import Axis, counts, linear, log_seconds, percent, seconds_text, share_axis, since_start
from kvtiers_replay.report.plot import WIDE, Interval, Place, Plot
from kvtiers_replay.results import Latencies, Link, OverTime, ReplayResults, TimeToFirstToken

__all__ = ["depths_over_time", "first_tokens", "histogram", "hits_over_time", "links", "where_blocks_came_from"]

_GREY = 7
_BLANK = ""


def where_blocks_came_from(results: ReplayResults) -> str:
    """Draw one bar for all full blocks: those from each origin, and those that were computed."""
    whole = max(1, results.references)
    parts = [*results.hits.items(), ("computed", max(0, results.references - results.prefix_hits))]
    ends = list(accumulate((count for _, count in parts), initial=0))
    x = linear("share of full blocks", 1.0, lambda share: f"{100 * share:.0f} %", head=0.0)
    plot = Plot("where blocks came from", x, Axis(_BLANK, 0.0, 1.0, ()), width=WIDE, height=90)
    for index, ((name, count), (start, end)) in enumerate(zip(parts, pairwise(ends), strict=True)):
        text = f"{name} {percent(count / whole)}"
        colour = _GREY if name == "computed" else index
        bar = Interval(start / whole, end / whole, 0.0, 1.0 if count else 0.0, f"{text}: {count:,} blocks")
        plot.bars(text, [bar], colour, gap=0.0)
    return plot.svg()


def hits_over_time(results: ReplayResults) -> str:
    """Draw, for each interval, the origins' shares on top of each other."""
    over, whole = results.over_time, max(1, results.references)
    overall, infinite = results.prefix_hits / whole, results.infinite_hits / whole
    rates = {name: [value or 0.0 for value in values] for name, values in over.hit_rates.items()}
    tops = [list(accumulate(column, initial=0.0)) for column in zip(*rates.values(), strict=True)]
    highest = max([infinite, *(column[-1] for column in tops)], default=0.0)
    y = share_axis("prefix hits", highest)
    plot = Plot("hit rate over time", since_start(over.seconds[-1]), y, width=WIDE, height=270)
    spans = list(pairwise([0.0, *over.seconds]))
    for index, (name, values) in enumerate(rates.items()):
        intervals = [
            Interval(start, end, column[index], column[index + 1], f"{name} {percent(value)}, until {end:.1f} s")
            for (start, end), column, value in zip(spans, tops, values, strict=True)
        ]
        plot.bars(name, intervals, index, gap=0.5)
    plot.level(infinite, f"infinite cache, whole run {percent(infinite)}")
    if infinite - overall > 0.02 * y.high:
        plot.level(overall, f"whole run {percent(overall)}", below=True)
    return plot.svg()


def first_tokens(first: TimeToFirstToken) -> str:
    """Draw which share of the requests has its first token after how long, with the tiers and without."""
    both = {"with tiers": first.with_tiers, "without": first.without}
    shown = [_filled(times) for times in both.values()]
    x = log_seconds("time to first token, estimated", min(low for low, _ in shown), max(high for _, high in shown))
    y = linear("share of requests", 1.0, lambda share: f"{100 * share:.0f} %", head=0.0)
    plot = Plot("time to first token", x, y, width=WIDE, height=260)
    for (name, times), colour, dash in zip(both.items(), (2, 1), ("", "6 4"), strict=True):
        edges = [*times.bounds, times.bounds[-1] * 1.5]
        places = [
            Place(edge, seen / times.count, f"{name}: {percent(seen / times.count)} within {seconds_text(edge)}")
            for edge, seen in zip(edges, accumulate(times.counts), strict=True)
            if x.low * 0.999 <= edge <= x.high * 1.001
        ]
        plot.line(f"{name}, median {seconds_text(times.p50)}", places, colour, dash)
    plot.level(0.5, "half of all requests", below=True)
    return plot.svg()


def histogram(times: Latencies, what: str, colour: int) -> str:
    """Draw how often something took how long; the axis of time is logarithmic, as the buckets are."""
    low, high = _filled(times)
    edges = [times.bounds[0] / 2, *times.bounds, max(times.worst, times.bounds[-1] * 1.5)]
    x = log_seconds("duration", low, high)
    y = counts(what, max(times.counts))
    plot = Plot(f"histogram of {what}", x, y)
    intervals = [
        Interval(
            start, end, 0.0, count, f"{count:,} of {times.count:,} took {seconds_text(start)} to {seconds_text(end)}"
        )
        for (start, end), count in zip(pairwise(edges), times.counts, strict=True)
    ]
    plot.bars(_BLANK, intervals, colour)
    for row, (name, value) in enumerate((("p50", times.p50), ("p99", times.p99))):
        plot.upright(value, f"{name} {seconds_text(value)}", row)
    return plot.svg()


def links(moved: Mapping[str, Link], origins: Sequence[str]) -> str:
    """Draw one bar for each link and direction, its rate beside it, in the colour of its end that is further down."""
    highest = max(link.nbytes for link in moved.values())
    base = next((unit for unit in (2.0**40, 2.0**30, 2.0**20, 2.0**10) if highest >= unit), 1.0)
    x = linear("bytes moved", highest, format_size, base, head=0.35)
    names = {name: name.replace("->", "→") for name in moved}
    places = {name: len(moved) - 1 - index for index, name in enumerate(moved)}
    y = Axis(_BLANK, 0.0, float(len(moved)), ())
    plot = Plot("bytes by link", x, y, width=WIDE, height=60 + 30 * len(moved))
    for name, link in moved.items():
        rate = f", {link.nbytes / link.seconds / 1e9:.2f} GB/s" if link.seconds and link.nbytes else ""
        text = f"{names[name]}: {format_size(link.nbytes)}{rate}"
        low = places[name] + 0.15
        plot.bars(
            _BLANK,
            [Interval(0.0, link.nbytes, low, low + 0.7 if link.nbytes else low, text)],
            _lower_end(name, origins),
        )
        plot.note(link.nbytes, low + 0.35, text)
    return plot.svg()


def _lower_end(link: str, origins: Sequence[str]) -> int:
    """Return the place of a link's lower end among the origins of hits, and so its colour there."""
    return max([origins.index(end) for end in link.split(" -> ") if end in origins], default=_GREY)


def depths_over_time(over: OverTime) -> str:
    """Draw how long each queue was."""
    busy = {name: depths for name, depths in over.queue_depths.items() if any(depths)}
    y = counts("waiting", max(max(depths) for depths in busy.values()))
    plot = Plot("queues over time", since_start(over.seconds[-1]), y, width=WIDE)
    for index, (name, depths) in enumerate(busy.items()):
        places = [
            Place(at, depth, f"{name}: {depth:,.4g} at {at:.1f} s")
            for at, depth in zip(over.seconds, depths, strict=True)
        ]
        plot.line(name, places, index, dots=False)
    return plot.svg()


def _filled(times: Latencies) -> tuple[float, float]:
    """Return the ends of the part of the axis that has anything in it."""
    edges = [times.bounds[0] / 2, *times.bounds, max(times.worst, times.bounds[-1] * 1.5)]
    filled = [index for index, count in enumerate(times.counts) if count]
    return edges[filled[0]], edges[filled[-1] + 1]
