"""The page of a replay: whether the tiers pay, the charts, and everything needed to repeat the run."""

import os
import platform
from datetime import UTC, datetime
from typing import NamedTuple

import yaml

from kvtiers import __version__
from kvtiers.api.units import format_size
from kvtiers_replay.report.charts import (
    depths_over_time,
    first_tokens,
    histogram,
    hits_over_time,
    links,
    where_blocks_came_from,
)
from kvtiers_replay.report.frame import Figure, render
from kvtiers_replay.report.text import own_figures, troubles
from kvtiers_replay.report.units import at_most, percent, seconds
from kvtiers_replay.results import Latencies, ReplayResults

__all__ = ["as_page"]


class _Tile(NamedTuple):
    """One figure at the top of the page, and its label."""

    value: str
    text: str
    bad: bool = False


def as_page(results: ReplayResults) -> str:
    """Return the results as one HTML file that loads nothing."""
    return render(
        "replay.html",
        title=f"What tiers do for {results.workload}",
        about=(
            f"A replay of {results.requests:,} requests, {results.references:,} full blocks, in "
            f"{results.seconds:,.1f} s; {_made_on()}"
        ),
        mood="bad" if results.wrong_bytes else "warn" if results.interrupted or results.errors else "",
        verdict=_verdict(results),
        tiles=_tiles(results),
        hits=_hit_figures(results),
        costs=_cost_figures(results),
        troubles=troubles(results),
        last_troubles=list(results.last_troubles.items()),
        own=own_figures(results),
        settings=list(results.settings.items()),
        figures=_figures(results),
        config=yaml.safe_dump(results.config, sort_keys=False, allow_unicode=True),
    )


def _made_on() -> str:
    """Return when, by which release and on what the page was made."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{now}, kvtiers {__version__}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def _verdict(results: ReplayResults) -> list[str]:
    lines = list(results.verdict)
    if results.first_token:
        lines.insert(1 if results.wrong_bytes else 0, _pays(results))
    return lines


def _pays(results: ReplayResults) -> str:
    """Return whether it pays, in one sentence: what the estimate says of the mean time to the first token."""
    first = results.first_token
    assert first is not None
    before, after = _mean(first.without), _mean(first.with_tiers)
    if not before:
        return "No prompt was served, so there are no times."
    change = (after - before) / before
    what = "sooner" if change < 0 else "later"
    hits = f"{percent(results.tokens_saved / max(1, results.tokens))} of all prompt tokens were not computed again"
    return (
        f"{hits}: the first token comes {percent(abs(change))} {what} on average, {seconds(after)} instead of "
        f"{seconds(before)}, estimated at {first.prefill_speed:,.0f} tokens/s of prefill."
    )


def _tiles(results: ReplayResults) -> list[_Tile]:
    whole = max(1, results.references)
    infinite = f"an infinite cache: {percent(results.infinite_hits, whole)}"
    tiles = [
        _Tile(
            percent(results.prefix_hits, whole),
            f"prefix hits; {'the store was warm' if results.warm else infinite}",
        ),
        _Tile(percent(results.tokens_saved / max(1, results.tokens)), "of prompt tokens not computed again"),
    ]
    if first := results.first_token:
        tiles.append(
            _Tile(
                f"{seconds(first.without.p50)} → {seconds(first.with_tiers.p50)}",
                f"median time to first token, estimated at {first.prefill_speed:,.0f} tokens/s",
            )
        )
    tiles.append(_Tile(seconds(results.stalls.p99), "of a step on the engine's thread, p99"))
    tiles.append(_Tile(f"{results.wrong_bytes:,}", "wrong bytes", bad=bool(results.wrong_bytes)))
    return tiles


def _hit_figures(results: ReplayResults) -> list[Figure]:
    note = "share of all full blocks asked for"
    found = [Figure("Where blocks came from", note, where_blocks_came_from(results), wide=True)]
    if results.over_time.seconds:
        note = "prefix hits by origin, as a share of the full blocks asked for in each interval"
        found.append(Figure("Hit rate over time", note, hits_over_time(results), wide=True))
    if results.first_token and results.first_token.without.count:
        note = "estimated: the prompt's computed part at the stated speed, and the waits that were measured"
        found.append(Figure("Time to first token", note, first_tokens(results.first_token), wide=True))
    return found


def _cost_figures(results: ReplayResults) -> list[Figure]:
    found = []
    if results.links:
        note = "and how fast while moving"
        found.append(Figure("Bytes by link", note, links(results.links, list(results.hits)), wide=True))
    if results.stalls.count:
        note = f"what kvtiers took of each step; {_quantiles(results.stalls)}"
        found.append(Figure("Time on the engine's thread", note, histogram(results.stalls, "steps", 1)))
    found += [
        Figure(f"Latency: {name}", _quantiles(times), histogram(times, "times", 0))
        for name, times in results.latencies.items()
        if times.count
    ]
    if any(any(depths) for depths in results.over_time.queue_depths.values()):
        found.append(Figure("Queues", "what was waiting", depths_over_time(results.over_time), wide=True))
    return found


def _figures(results: ReplayResults) -> list[tuple[str, str, str]]:
    return [
        ("full blocks asked for", f"{results.references:,}", ""),
        *((f"from {name}", f"{n:,}", percent(n / max(1, results.references))) for name, n in results.hits.items()),
        *((name, format_size(link.nbytes), f"{link.seconds:.3g} s") for name, link in results.links.items()),
        ("preemptions", f"{results.preemptions:,}", ""),
    ]


def _quantiles(times: Latencies) -> str:
    shown = ", ".join(
        f"{name} {at_most(times, value)}"
        for name, value in (("p50", times.p50), ("p99", times.p99), ("worst", times.worst))
    )
    return f"{times.count:,} times: {shown}"


def _mean(times: Latencies) -> float:
    return times.total / times.count if times.count else 0.0
