"""The page of a replay: first whether it pays, then the plots, then everything else that is needed to repeat it."""

from html import escape

import yaml

from kvtiers.api.units import format_size
from kvtiers_replay.report.axes import percent, seconds_text
from kvtiers_replay.report.charts import (
    depths_over_time,
    first_tokens,
    histogram,
    hits_over_time,
    links,
    where_blocks_came_from,
)
from kvtiers_replay.report.document import document, figure, section, table, tile
from kvtiers_replay.results import Latencies, ReplayResults

__all__ = ["as_page"]


def as_page(results: ReplayResults) -> str:
    """Return the results as one HTML file that loads nothing."""
    title = f"Replay of {results.workload}"
    about = f"{results.requests:,} requests, {results.references:,} full blocks, in {results.seconds:,.1f} s"
    body = [
        f'<h1>{escape(title)}</h1>\n<p class="about">{escape(about)}</p>',
        _verdict(results),
        f'<div class="tiles">{"".join(_tiles(results))}</div>',
        section("What came back", f'<div class="plots">{"".join(_hit_figures(results))}</div>'),
        section("What it took", f'<div class="plots">{"".join(_cost_figures(results))}</div>'),
        _troubles(results),
        _settings(results),
    ]
    return document(title, body)


def _verdict(results: ReplayResults) -> str:
    kind = "bad" if results.wrong_bytes else "warn" if results.interrupted or results.errors else ""
    lines = list(results.verdict)
    if results.first_token:
        lines.insert(1 if results.wrong_bytes else 0, _pays(results))
    return f'<div class="verdict {kind}">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>'


def _pays(results: ReplayResults) -> str:
    """Return whether it pays, in one sentence: what the estimate says of the mean time to the first token."""
    first = results.first_token
    assert first is not None
    before, after = _mean(first.without), _mean(first.with_tiers)
    if not before:
        return "No prompt was served, so nothing can be said of time."
    change = (after - before) / before
    what = "sooner" if change < 0 else "later"
    hits = f"{percent(results.tokens_saved / max(1, results.tokens))} of all prompt tokens were not computed again"
    return (
        f"{hits}: the first token comes {percent(abs(change))} {what} on average, {seconds_text(after)} instead of "
        f"{seconds_text(before)}, estimated at {first.prefill_speed:,.0f} tokens/s of prefill."
    )


def _tiles(results: ReplayResults) -> list[str]:
    whole = max(1, results.references)
    tiles = [
        tile(
            percent(results.prefix_hits / whole),
            f"prefix hits; an infinite cache: {percent(results.infinite_hits / whole)}",
        ),
        tile(percent(results.tokens_saved / max(1, results.tokens)), "of prompt tokens not computed again"),
    ]
    if first := results.first_token:
        tiles.append(
            tile(
                f"{seconds_text(first.without.p50)} → {seconds_text(first.with_tiers.p50)}",
                f"median time to first token, estimated at {first.prefill_speed:,.0f} tokens/s",
            )
        )
    tiles.append(tile(seconds_text(results.stalls.p99), "of a step on the engine's thread, p99"))
    tiles.append(tile(f"{results.wrong_bytes:,}", "wrong bytes", bad=bool(results.wrong_bytes)))
    return tiles


def _hit_figures(results: ReplayResults) -> list[str]:
    found = [
        figure(
            "Where blocks came from", "share of all full blocks asked for", where_blocks_came_from(results), wide=True
        )
    ]
    if results.over_time.seconds:
        note = "prefix hits by origin, as a share of the full blocks asked for in each interval"
        found.append(figure("Hit rate over time", note, hits_over_time(results), wide=True))
    if results.first_token and results.first_token.without.count:
        note = "estimated: the prompt's computed part at the stated speed, and the waits that were measured"
        found.append(figure("Time to first token", note, first_tokens(results.first_token), wide=True))
    return found


def _cost_figures(results: ReplayResults) -> list[str]:
    found = []
    if results.links:
        note = "and how fast while moving"
        found.append(figure("Bytes by link", note, links(results.links, list(results.hits)), wide=True))
    if results.stalls.count:
        note = f"what kvtiers took of each step; {_quantiles(results.stalls)}"
        found.append(figure("Time on the engine's thread", note, histogram(results.stalls, "steps", 1)))
    found += [
        figure(f"Latency: {name}", _quantiles(times), histogram(times, "times", 0))
        for name, times in results.latencies.items()
        if times.count
    ]
    if any(any(depths) for depths in results.over_time.queue_depths.values()):
        found.append(figure("Queues", "what was waiting", depths_over_time(results.over_time), wide=True))
    return found


def _troubles(results: ReplayResults) -> str:
    rows = [(f"{tier}: chunks not sent down", f"{n:,}") for tier, n in results.dropped_cascades.items() if n]
    rows += [(what, f"{count:,}") for what, count in results.errors.items()]
    if not rows:
        return section("What did not go well", "<p>Nothing: no error, and no cascade was dropped.</p>")
    return section("What did not go well", table(["", "number"], rows))


def _settings(results: ReplayResults) -> str:
    config = yaml.safe_dump(results.config, sort_keys=False, allow_unicode=True)
    figures = [
        ("full blocks asked for", f"{results.references:,}", ""),
        *((f"from {name}", f"{n:,}", percent(n / max(1, results.references))) for name, n in results.hits.items()),
        *((name, format_size(link.nbytes), f"{link.seconds:.3g} s") for name, link in results.links.items()),
        ("preemptions", f"{results.preemptions:,}", ""),
    ]
    return section(
        "How it was run",
        f'<div class="sides"><div>{table((), results.settings.items(), "settings")}<br>{table((), figures)}</div>'
        f"<pre>{escape(config)}</pre></div>",
    )


def _quantiles(times: Latencies) -> str:
    shown = ", ".join(
        f"{name} {seconds_text(value)}"
        for name, value in (("p50", times.p50), ("p99", times.p99), ("worst", times.worst))
    )
    return f"{times.count:,} times: {shown}"


def _mean(times: Latencies) -> float:
    return times.total / times.count if times.count else 0.0
