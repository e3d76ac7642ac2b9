"""``kvtiers pool``: the keeper of a machine's pool, and what it says of itself."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from kvtiers.api import StartError
from kvtiers.api.units import format_size, parse_size
from kvtiers.pool.keeper import serve as serve_pool
from kvtiers.pool.loan import clear_pool, pool_figures
from kvtiers.pool.memory import MOST_PARTS
from kvtiers.region.handshake import process_name
from kvtiers.region.memfd import MOST_NODES, HugePages

__all__ = ["pool"]

_UNKNOWN = "none that the keeper knows; beside the keeper itself, 'lsof | grep memfd:kvtiers-pool' shows who has it"
_SOCKET = "/run/kvtiers/pool.sock"
_at = click.option(
    "--socket", "path", default=_SOCKET, show_default=True, metavar="PATH", help="The keeper's Unix socket."
)


@click.group(
    epilog="""\b
Examples:
  kvtiers pool serve --size 256GiB             as a service, before the engines start
  kvtiers pool serve --size 256GiB --engines 4   for four engines at a time, of one model or of several
  kvtiers pool status                          how full it is, and which processes have it
  kvtiers pool clear                           forget what the last engine left in it

An engine uses it with 'primary: {pool: /run/kvtiers/pool.sock}' in its config."""
)
def pool() -> None:
    """Keep CPU memory that outlives its engine, so that a restart is warm."""


@pool.command(
    epilog="""\b
The memory is populated at the start, and ends with this command, unless systemd has it (FileDescriptorStoreMax=
in the unit) until the next start; an engine that has it then keeps it, and brings it to the next keeper at this
socket, which has the same size from then on, whatever its --size.
Exit status: 0 after SIGTERM or Ctrl-C, 2 if the memory or the socket cannot be had."""
)
@click.option("--size", required=True, metavar="SIZE", help="Memory for chunks, as 256GiB.")
@click.option(
    "--engines",
    type=click.IntRange(1, MOST_PARTS),
    default=1,
    show_default=True,
    help="Engines at a time. Each stores in its part of the memory, and loads from all parts of its model.",
)
@_at
@click.option(
    "--huge-pages",
    type=click.Choice(get_args(HugePages)),
    default="off",
    show_default=True,
    help="Huge pages, which the administrator has to reserve.",
)
@click.option(
    "--numa-node",
    type=click.IntRange(0, MOST_NODES - 1),
    metavar="NODE",
    help="The NUMA node to take the memory from, as far as it has some; best the GPUs' that use this pool.",
)
def serve(size: str, engines: int, path: str, huge_pages: HugePages, numa_node: int | None) -> None:
    """Hold a pool's memory, for one engine or several at a time, until SIGTERM."""
    try:
        nbytes = parse_size(size)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--size'") from None
    if nbytes < 1:
        raise click.BadParameter("expected at least a byte", param_hint="'--size'")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    serve_pool(Path(path), nbytes, engines, huge_pages=huge_pages, numa_node=numa_node)


@pool.command(
    epilog="""\b
Exit status: 0, or 2 if no keeper answers."""
)
@_at
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def status(path: str, as_json: bool) -> None:
    """Show what the pool holds, and which processes have it."""
    try:
        figures = pool_figures(path)
    except StartError as error:
        raise StartError(f"pool: {error}") from None
    click.echo(json.dumps(figures, indent=2) if as_json else "\n".join(status_lines(figures)))


@pool.command(
    epilog="""\b
Chunks are forgotten; their bytes stay in memory until others take their place. While an engine has the pool, or one of
its processes has not ended, nothing is forgotten: 'kvtiers ctl clear' clears a running engine, in the pool, too.
An engine that brings memory to a new keeper afterwards brings its chunks, too.
Exit status: 0, or 2 if an engine has the pool, or no keeper answers."""
)
@_at
def clear(path: str) -> None:
    """Forget all chunks in a pool that no engine has."""
    try:
        chunks = clear_pool(path)
    except StartError as error:
        raise StartError(f"pool: {error}") from None
    click.echo(f"{chunks} chunks forgotten")


def status_lines(figures: dict[str, Any]) -> list[str]:
    """Return a keeper's figures in words."""
    if not figures["populated"]:
        return [f"{format_size(figures['bytes'])}, not populated yet"]
    lines = [f"{format_size(figures['bytes'])} of memory, populated in {figures['populate_seconds']:.1f} s"]
    is_one = len(figures["parts"]) == 1
    arenas: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, part in enumerate(figures["parts"], 1):
        arenas.setdefault(part["arena"], []).append((number, part))
    for arena in sorted(arenas, key=lambda arena: not arena):  # the parts that are in none come last
        if arena:
            lines.append(_arena_line([part for _, part in arenas[arena]]))
        for number, part in arenas[arena]:
            title = "" if is_one else f"part {number}, {part['chunks']} chunks: "
            lines += [f"{title}{line}" for line in _part_lines(part)]
    lines += [f"{process_name(pid)} waits for it" for pid in figures["waiting"]]
    lines.append(
        f"{figures['published']} chunks published, {figures['published_late']} too late: their rows were taken again"
    )
    lines.append(
        f"{figures['engines']} engines so far; {figures['checked']} rows checked at their ends, "
        f"{figures['damaged']} damaged"
    )
    return lines


def _arena_line(parts: Sequence[dict[str, Any]]) -> str:
    """Return a line for the chunks of one size, which are in these parts."""
    chunks, rows = (sum(part[figure] for part in parts) for figure in ("chunks", "rows"))
    names = sorted({part["holds"].rstrip("/") for part in parts})
    return f"{chunks} chunks in {rows} rows of {format_size(parts[0]['row_bytes'])}, of {', '.join(names)}"


def _part_lines(part: dict[str, Any]) -> list[str]:
    """Return lines for the processes that have a part."""
    if part["checking"]:
        return ["its rows are being checked"]
    if not part["lent"]:
        return ["no engine has it"]
    others = _others(part["processes"])
    if part["engine_connected"]:
        return [f"{process_name(part['engine'])} has it", *others]
    ended = f"{process_name(part['engine'])} had it; not all of its processes have ended yet"
    return [ended, *(others or [_UNKNOWN])]


def _others(processes: Sequence[dict[str, int]]) -> list[str]:
    """Return lines for the processes that have the memory beside the engine's own."""
    return [
        f"{process_name(each['pid'])} has it, " + (f"rank {each['rank']}" if each["rank"] >= 0 else "a tier host")
        for each in processes
        if each["rank"] != -1
    ]
