"""The tables and sentences of a benchmark, as the terminal and the page have them."""

from collections.abc import Sequence

from kvtiers.api.units import format_size
from kvtiers_replay.bench.cases import Figures
from kvtiers_replay.bench.run import Bench
from kvtiers_replay.report.units import seconds

__all__ = ["COLUMNS", "LEGEND", "advice_lines", "comparison_rows", "limit_rows", "notes", "rows"]

COLUMNS = (
    "tier", "value", "at a time", "threads", "processes", "write GB/s", "hot GB/s", "cold GB/s",
    "write one", "hot one (p99)", "cold one", "of its limit",
)  # fmt: skip

LEGEND = (
    "GB/s: with as many values in a call as there are at a time; one: of a value alone, the median (99th percentile)"
)


def limit_rows(bench: Bench) -> list[tuple[str, str]]:
    """Return what this machine can do, without a tier."""
    limits = bench.limits
    found = [
        ("memory copy, one thread", limits.memory_copy),
        ("disk, writing past the page cache", limits.disk_write),
        ("disk, reading past the page cache", limits.disk_read),
        ("a TCP connection inside this machine", limits.loopback),
        ("the network interface, as it states", limits.link),
    ]
    return [(name, f"{value / 1e9:.2f} GB/s" if value else "not known here") for name, value in found]


def rows(bench: Bench) -> list[list[str]]:
    """Return one row for each case, by size, then by what was tried at the size that suits."""
    found: list[list[str]] = []
    for part in (bench.sizes, bench.batches, bench.threads, bench.processes):
        for index in range(max((len(figures) for figures in part.values()), default=0)):
            for tier in bench.tiers:
                for figures in part[tier.label][index : index + 1]:
                    row = _row(bench, tier.label, figures)
                    if row not in found:  # a case that belongs to several parts was measured once
                        found.append(row)
    return found


def _row(bench: Bench, label: str, figures: Figures) -> list[str]:
    case = figures.case
    tier = next(tier for tier in bench.tiers if tier.label == label)
    hot, p99 = figures.hot_seconds
    return [
        label,
        format_size(case.value_bytes),
        str(case.batch),
        str(case.threads) if tier.has_hosts else "-",
        str(case.processes) if tier.may_have_hosts else "-",
        _rate(figures.write),
        _rate(figures.hot),
        _rate(figures.cold),
        seconds(figures.write_seconds[0]),
        f"{seconds(hot)} ({seconds(p99)})",
        "-" if figures.cold_seconds is None else seconds(figures.cold_seconds),
        _of_limit(bench, label, figures),
    ]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def _of_limit(bench: Bench, label: str, figures: Figures) -> str:
    """Return reading as a share of what the medium does: of the disk where there is one, else of copying memory."""
    tier = next(tier for tier in bench.tiers if tier.label == label)
    disk = bench.limits.disk_read
    if tier.plugin.writes_locally and disk and figures.cold:
        return f"{figures.cold / disk:.0%} disk"
    return f"{figures.hot / bench.limits.memory_copy:.0%} copy"


def advice_lines(bench: Bench) -> list[str]:
    """Return one sentence for each tier: what suits it on this machine."""
    lines = []
    for tier in bench.tiers:
        advice = bench.advice[tier.label]
        blocks = advice.blocks_per_chunk
        size = f"values of {format_size(advice.value_bytes)}"
        parts = [f"blocks_per_chunk: {blocks} ({size})" if blocks else size]
        parts += [f"threads: {advice.threads}"] if advice.threads is not None else []
        parts += [f"processes: {advice.processes}"] if advice.processes is not None else []
        lines.append(f"{tier.label}: what suits is {', '.join(parts)}: the least within 10 % of the best.")
    return lines


def notes(bench: Bench) -> list[str]:
    """Return what to bear in mind: a machine that did something else, and what was not measured."""
    lines = [f"Not measured: {line}" for of_tier in bench.not_stored.values() for line in of_tier]
    if bench.load > bench.processors / 2:
        lines.append(
            f"This machine was busy before (a load of {bench.load:.1f} on {bench.processors} processors): all is "
            "slower than it could be, and differs from run to run, so that what suits is a guess."
        )
    return lines


def comparison_rows(bench: Bench) -> tuple[Sequence[str], list[list[str]]]:
    """Return the columns and rows that put tiers side by side, by size of value; shares are of the first tier."""
    names = [tier.label for tier in bench.tiers]
    columns = ["value", *(f"{name}: {way} GB/s" for way in ("write", "hot", "cold") for name in names)]
    by_size = [{each.case.value_bytes: each for each in bench.sizes[name]} for name in names]
    found = []
    for size in sorted(set().union(*by_size)):
        figures = [each.get(size) for each in by_size]
        ways = [[getattr(each, way, None) for each in figures] for way in ("write", "hot", "cold")]
        cells = [_beside(value, way[0]) for way in ways for value in way]
        found.append([format_size(size), *cells])
    return columns, found


def _beside(value: float | None, first: float | None) -> str:
    share = f" ({value / first:.2f}x)" if value is not None and first and value is not first else ""
    return f"{_rate(value)}{share}"
