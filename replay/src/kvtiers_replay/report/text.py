"""A replay as text for a terminal: its progress while it runs, then a heading, a few tables, a verdict."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TextIO

from kvtiers.api.units import format_size
from kvtiers.cli import progress
from kvtiers_replay.engine.measures import Progress
from kvtiers_replay.report.units import at_most, percent
from kvtiers_replay.results import Latencies, Link, ReplayResults

__all__ = ["Table", "heading", "progress_line", "show_progress", "tables"]

_COLUMNS = 10  # of what happened over time


class Table(NamedTuple):
    """One table; all columns but the first are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def progress_line(progress: Progress) -> str:
    """Return the replay's progress, in one line."""
    # The most important comes first: a narrow terminal cuts off the end.
    parts = ", ".join(f"{name} {percent(count, progress.references)}" for name, count in progress.hits.items())
    hits = f"hits {percent(sum(progress.hits.values()), progress.references)} ({parts})"
    requests = f"{progress.requests:,}/{progress.requests_in_all:,} requests"
    return f"{requests}, {progress.wrong_bytes:,} wrong bytes, {hits}"


def heading(results: ReplayResults) -> str:
    """Return what this is the report of."""
    return f"Replay of {results.workload}: {results.requests:,} requests in {results.seconds:.1f} s"


def tables(results: ReplayResults) -> list[Table]:
    """Return all tables, those without a row left out."""
    found = [
        _hits(results),
        _by_tenant(results),
        _over_time(results),
        _links(results),
        _times(results),
        *_own_tables(results),
        Table(("what did not go well", "number"), troubles(results)),
        Table(("tier", "its last warning"), list(results.last_troubles.items())),
    ]
    return [Table(table.columns, _right_aligned([table.columns, *table.rows])[1:]) for table in found if table.rows]


def _hits(results: ReplayResults) -> Table:
    whole = results.references
    per_second = whole / results.seconds if results.seconds else 0.0
    rows = [
        ("full blocks asked for", f"{whole:,}", f"{per_second:,.0f} /s"),
        ("prefix hits", f"{results.prefix_hits:,}", percent(results.prefix_hits, whole)),
        ("  an infinite cache's", *_infinite(results)),
        *((f"  from {name}", f"{count:,}", percent(count, whole)) for name, count in results.hits.items()),
        ("tokens not recomputed", f"{results.tokens_saved:,}", percent(results.tokens_saved, results.tokens)),
    ]
    if results.preemptions:
        rows.append(("preemptions", f"{results.preemptions:,}", ""))
    rows.append(("wrong bytes", f"{results.wrong_bytes:,}", ""))
    return Table(("", "number", "rate"), rows)


def _by_tenant(results: ReplayResults) -> Table:
    rows = [
        (tenant, f"{of['requests']:,}", f"{of['references']:,}", percent(of["hits"], of["references"]))
        for tenant, of in results.tenants.items()
    ]
    return Table(("tenant", "requests", "full blocks", "prefix hits"), rows)


def _infinite(results: ReplayResults) -> tuple[str, str]:
    """Return what a cache without bounds would have hit that began as empty as the trace; a warm store did not."""
    if results.warm:
        return ("-", "the store was warm")
    return (f"{results.infinite_hits:,}", percent(results.infinite_hits, results.references))


def _over_time(results: ReplayResults) -> Table:
    over_time = results.over_time
    step = -(-len(over_time.seconds) // _COLUMNS) or 1
    last = range(step - 1, len(over_time.seconds), step)
    if len(last) < 2:  # one moment is no course of time
        return Table((), ())
    rows = []
    for name, rates in over_time.hit_rates.items():
        parts = [[rate for rate in rates[end - step + 1 : end + 1] if rate is not None] for end in last]
        rows.append((f"hits from {name}", *(f"{100 * sum(part) / len(part):.0f} %" if part else "-" for part in parts)))
    for name, depths in over_time.queue_depths.items():
        if any(depths):
            rows.append((name, *(f"{max(depths[end - step + 1 : end + 1]):,.0f}" for end in last)))
    return Table(("until", *(f"{over_time.seconds[end]:.1f} s" for end in last)), rows)


def _links(results: ReplayResults) -> Table:
    rows = [(name, format_size(link.nbytes), _rate(link)) for name, link in results.links.items()]
    return Table(("link", "moved", "while moving"), rows)


def _rate(link: Link) -> str:
    return f"{link.nbytes / link.seconds / 1e9:.3g} GB/s" if link.nbytes and link.seconds else ""


def _times(results: ReplayResults) -> Table:
    found = [*results.latencies.items(), ("engine's thread, a step", results.stalls)]
    if results.first_token is not None:
        speed = f"first token at {results.first_token.prefill_speed:,.0f} tokens/s"
        found += [
            (f"{speed}, with tiers", results.first_token.with_tiers),
            (f"{speed}, without", results.first_token.without),
        ]
    return Table(("time", "p50", "p99", "worst"), [_times_row(name, times) for name, times in found if times.count])


def _times_row(name: str, times: Latencies) -> tuple[str, ...]:
    return (name, *(at_most(times, value) for value in (times.p50, times.p99, times.worst)))


def troubles(results: ReplayResults) -> list[tuple[str, str]]:
    """Return the problems, and how often each happened."""
    return [(name, f"{count:,}") for name, count in results.errors.items()]


def own_figures(results: ReplayResults) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return what each tier counts itself, by tier: a figure's name, and its number in each engine, if any is not 0."""
    found = []
    for tier, engines in results.own_figures.items():
        names = sorted({name for figures in engines for name in figures})
        rows = [(name, *(_number(figures.get(name, 0)) for figures in engines)) for name in names]
        if shown := [row for row in rows if any(number != "0" for number in row[1:])]:
            found.append((tier, shown))
    return found


def _own_tables(results: ReplayResults) -> Iterator[Table]:
    """Yield a table for each tier."""
    for tier, rows in own_figures(results):
        engines = len(results.own_figures[tier])
        columns = ["number"] if engines == 1 else [f"engine {number}" for number in range(engines)]
        yield Table((f"{tier}, its own figures", *columns), rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.3g}"


def _right_aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [[row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows]


@contextlib.contextmanager
def show_progress(
    stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Progress], None]]:
    """Yield a function to call with the progress: a bar on a terminal, a plain line every few seconds elsewhere.

    It is printed on stderr, since stdout may be data.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        with _bar(stream) as update:
            yield update
    else:
        with progress.show_progress(stream, clock) as report:
            yield lambda replayed: report(lambda: progress_line(replayed))


@contextlib.contextmanager
def _bar(stream: TextIO) -> Iterator[Callable[[Progress], None]]:
    # Imported here: it is slow, and pipes do not need it.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(10), TimeRemainingColumn(compact=True), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("starting")

        def update(replayed: Progress) -> None:
            bar.update(
                task,
                completed=replayed.requests,
                total=replayed.requests_in_all,
                description=progress_line(replayed),
            )

        yield update
