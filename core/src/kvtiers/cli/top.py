"""``kvtiers top``: a live screen of the running engines' tiers: hits, GB/s, queues, waits, breakers, seconds saved."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvtiers.cli.engines import engines
from kvtiers.cli.status import state_of
from kvtiers.status import ANSWER_SECONDS

__all__ = ["measured", "screen", "top"]

_LIVE_SECONDS = 2.0  # for an engine's answer: one that hangs must not hold up the screen of the others
_BREAKER = {0: "closed", 1: "open", 2: "probing"}
_COLUMNS = ("tier", "state", "hits/s", "read GB/s", "write GB/s", "queue", "late/s", "breaker", "saved")
_WIDTHS = (12, 10, 6, 9, 10, 5, 6, 7, 7)
_WIDTH = sum(_WIDTHS) + len(_WIDTHS) - 1
_LEGEND = (
    "hits, queue, late: chunks (late: computed, since they did not come in time)",
    "saved: seconds of computing, less those of loading",
)
_FLOWS = {"hits": "hits", "loaded_bytes": "read_bytes", "stored_bytes": "written_bytes", "wait_expired": "late_chunks"}
"""What a tier counts, and its name in a second's figures."""


@click.command(
    epilog="""\b
Examples:
  kvtiers top
  kvtiers top --once --json | jq '.[].tiers'

Columns: hits/s are chunks; read and write, between a tier and the primary; queue, chunks on their way; late/s, chunks
that were computed since they did not come in time; saved, seconds of computing, less those of loading. Ctrl-C ends it.
Exit status: 0, or 1 if there is no engine that answers."""
)
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--once", is_flag=True, help="Look twice, one interval apart, print that and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print a JSON list, one object an engine.")
@click.pass_context
def top(ctx: click.Context, interval: float, once: bool, as_json: bool) -> None:
    """Show the tiers of running engines live."""
    if as_json and not once:
        raise click.UsageError("--json goes with --once")
    if once or not sys.stdout.isatty():
        before = _look()
        time.sleep(interval)
        found = measured(_look(), before)
        click.echo(json.dumps(found) if as_json else "\n".join(screen(found)))
        ctx.exit(0 if found else 1)
    _show_live(interval)


def _show_live(interval: float) -> None:
    # Imported here: it is the slowest import of the command line.
    from rich.live import Live
    from rich.text import Text

    before = _look(_LIVE_SECONDS)
    with Live(Text("\n".join(screen(measured(before, before)))), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                now = _look(_LIVE_SECONDS)
                lines = screen(measured(now, before), time.strftime("%H:%M:%S"))
                live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
                before = now
        except KeyboardInterrupt:
            return


def _look(seconds: float = ANSWER_SECONDS) -> list[dict[str, Any]]:
    return [{**engine, "at": time.monotonic()} for engine in engines(quiet=True, seconds=seconds)]


def measured(now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what each engine did between two looks, a second, and how it is now."""
    earlier = {(engine["pid"], engine["uid"]): engine for engine in before}
    return [_measured(engine, earlier.get((engine["pid"], engine["uid"]), engine)) for engine in now]


def _measured(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    seconds = now["at"] - before["at"]
    engine: Mapping[str, float] = now["figures"]
    hits = [_all_hits(look) for look in (now, before)]
    asked = [look["figures"].get("lookups", 0) for look in (now, before)]
    return {
        "engine": now["engine"],
        "pid": now["pid"],
        "model": now["model"],
        "hit_rate": (hits[0] - hits[1]) / (asked[0] - asked[1]) if asked[0] > asked[1] else None,
        "hit_rate_so_far": hits[0] / asked[0] if asked[0] else None,
        "step_share": _rate(now, before, seconds, "engine_seconds"),
        "steps_per_second": _rate(now, before, seconds, "steps"),
        "rows": engine.get("rows"),
        "free_rows": engine.get("free_rows"),
        "tiers": {name: _tier(tier, before["tiers"].get(name, tier), seconds) for name, tier in now["tiers"].items()},
    }


def _all_hits(engine: Mapping[str, Any]) -> float:
    figures: Mapping[str, float] = engine["figures"]
    hits: list[float] = [tier["hits"] for tier in engine["tiers"].values()]
    return figures.get("primary_hits", 0) + sum(hits)


def _rate(now: Mapping[str, Any], before: Mapping[str, Any], seconds: float, name: str) -> float | None:
    later, earlier = (look["figures"].get(name) for look in (now, before))
    return None if later is None or earlier is None or not seconds else max(0.0, later - earlier) / seconds


def _tier(now: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    flows = {
        f"{name}_per_second": max(0.0, now[figure] - before[figure]) / seconds if seconds else 0.0
        for figure, name in _FLOWS.items()
    }
    return {
        "state": state_of(now),
        "switch": now["switch"],
        "breaker": _BREAKER.get(int(now["breaker_state"]), "?"),
        "queue": now["queue"],
        "hits": now["hits"],
        "read_bytes": now["loaded_bytes"],
        "written_bytes": now["stored_bytes"],
        "late_chunks": now["wait_expired"],
        "saved_seconds": now["saved_seconds"],
        **flows,
    }


def screen(found: Sequence[Mapping[str, Any]], clock: str = "") -> list[str]:
    """Return the lines of a screen of 80 columns, such as ``measured`` has found."""
    if not found:
        return [_headline("no engine with kvtiers runs here as this user", clock)]
    lines: list[str] = []
    for engine in found:
        lines.append(_headline(f"{engine['engine']}, process {engine['pid']}: {engine['model']}", clock))
        clock = ""
        lines.append(f"  {_summary(engine)}"[:_WIDTH])
        if engine["step_share"] is not None:
            lines.append(f"  kvtiers takes {_percent(engine['step_share'])} of the time of the engine's thread")
        lines.append(_line(_COLUMNS))
        lines += [_line(_cells(name, tier)) for name, tier in engine["tiers"].items()] or ["  no tiers"]
        lines.append("")
    return [*lines, *_LEGEND]


def _headline(text: str, clock: str) -> str:
    return f"{text[: _WIDTH - len(clock) - 1]:<{_WIDTH - len(clock)}}{clock}".rstrip()


def _summary(engine: Mapping[str, Any]) -> str:
    rate, so_far = engine["hit_rate"], engine["hit_rate_so_far"]
    parts = [] if so_far is None else [f"hits {_percent(rate)} now, {_percent(so_far)} in all"]
    if engine["rows"] is not None:
        parts.append(f"{engine['free_rows']:,.0f} of {engine['rows']:,.0f} rows free")
    return ", ".join(parts) or "tiers under the engine's own tiering"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _cells(name: str, tier: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        tier["state"],
        _short(tier["hits_per_second"]),
        f"{tier['read_bytes_per_second'] / 1e9:.3f}",
        f"{tier['written_bytes_per_second'] / 1e9:.3f}",
        _short(tier["queue"]),
        _short(tier["late_chunks_per_second"]),
        tier["breaker"],
        f"{_short(tier['saved_seconds'])} s",
    )


def _short(number: float) -> str:
    """Return a number in at most five characters."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if letter == 'k' else size):.0f}{letter}"
    return f"{number:.1f}" if number < 10 and number != int(number) else f"{number:.0f}"


def _line(cells: Sequence[str]) -> str:
    """Return cells in their columns: texts to the left, numbers to the right; what is too long is cut."""
    cut = [cell if len(cell) <= width else f"{cell[: width - 1]}…" for cell, width in zip(cells, _WIDTHS, strict=True)]
    placed = [
        cell.ljust(width) if number in {0, 1} else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cut, _WIDTHS, strict=True))
    ]
    return " ".join(placed).rstrip()
