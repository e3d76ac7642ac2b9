"""The page of a benchmark: speed and latency by size of value, beside what limits them, and all cases."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from kvtiers.api.units import format_size
from kvtiers_replay.bench import text
from kvtiers_replay.bench.cases import Figures
from kvtiers_replay.bench.run import Bench
from kvtiers_replay.report.drawing import COLOURS, Drawing, Marks, draw, level
from kvtiers_replay.report.frame import Figure, render
from kvtiers_replay.report.units import seconds

__all__ = ["as_page"]

_DASHES = (("hot", "-"), ("cold", "--"), ("write", ":"))


def as_page(bench: Bench) -> str:
    """Return a benchmark as one HTML file that loads nothing."""
    columns, compared = text.comparison_rows(bench)
    return render(
        "bench.html",
        title=f"Benchmark of {', '.join(tier.label for tier in bench.tiers)}",
        about="values through the client, its tier hosts, seals and checks; every value compared",
        advice=[*text.advice_lines(bench), *text.notes(bench)],
        figures=[
            Figure("Speed by size of value", "solid: read hot, dashed: cold, dotted: write", _speed(bench), wide=True),
            Figure(
                "One value alone", "median; solid: read hot, dashed: cold, dotted: write", _latency(bench), wide=True
            ),
        ],
        limits=text.limit_rows(bench),
        compared_columns=columns,
        compared=compared if len(bench.tiers) > 1 else [],
        columns=text.COLUMNS,
        rows=text.rows(bench),
        legend=text.LEGEND,
    )


def _speed(bench: Bench) -> Drawing:
    limits = bench.limits
    highest = max(max(each.write, each.hot, each.cold or 0.0) for found in bench.sizes.values() for each in found)

    def paint(axes: Axes, marks: Marks) -> None:
        rates = {"hot": lambda each: each.hot, "cold": lambda each: each.cold, "write": lambda each: each.write}
        _lines(bench, axes, marks, rates, lambda value: f"{value / 1e9:.2f} GB/s", 1e9)
        for value, name in ((limits.memory_copy, "memory copy"), (limits.disk_read, "disk, reading")):
            # A limit far above would flatten all that was measured.
            if value and value <= 2.5 * highest:
                level(axes, value / 1e9, f"{name} {value / 1e9:.2f} GB/s", dotted=name != "memory copy")
        axes.set_ylim(0.0, axes.get_ylim()[1] * 1.05)
        axes.set(ylabel="GB/s")

    return draw("speed by size", paint, height=300, legend_columns=len(_DASHES))


def _latency(bench: Bench) -> Drawing:
    def paint(axes: Axes, marks: Marks) -> None:
        times = {
            "hot": lambda each: each.hot_seconds[0],
            "cold": lambda each: each.cold_seconds,
            "write": lambda each: each.write_seconds[0],
        }
        axes.set_yscale("log")
        _lines(bench, axes, marks, times, seconds, 1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
        axes.yaxis.set_major_locator(LogLocator(10.0, (1, 3), numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set(ylabel="one value")

    return draw("latency by size", paint, height=260, legend_columns=len(_DASHES))


def _lines(
    bench: Bench,
    axes: Axes,
    marks: Marks,
    ways: dict[str, Callable[[Figures], float | None]],
    shown: Callable[[float], str],
    unit: float,
) -> None:
    """Draw one line for each tier and way, over the size of the value."""
    axes.set_xscale("log", base=2)
    for index, tier in enumerate(bench.tiers):
        for name, dash in _DASHES:
            points = [
                (each.case.value_bytes, value / unit, f"{tier.label}, {name}: {shown(value)}")
                for each in bench.sizes[tier.label]
                if (value := ways[name](each)) is not None
            ]
            if points:
                colour = COLOURS[index % len(COLOURS)]
                marks.line(axes, points, f"{tier.label} {name}", color=colour, linestyle=dash)
    sizes = sorted({each.case.value_bytes for found in bench.sizes.values() for each in found})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(round(value))))
    axes.set_xlim(sizes[0] / 1.1, sizes[-1] * 1.1)
    axes.set_xlabel("size of a value")
