"""``kvtiers replay``: drives the whole stack from a trace or a generated workload, and checks every byte."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtiers.api import ConfigError
from kvtiers.api.units import parse_size
from kvtiers.cli.output import file_to_write, print_heading, print_table, with_unit, write_file
from kvtiers.cli.progress import stop_on_interrupt
from kvtiers.config import OffloadConfig, load_config
from kvtiers_replay.cli.size import model_options, read_shape, tokens_per_block_option
from kvtiers_replay.sizing import ModelShape
from kvtiers_replay.workload import Workload

if TYPE_CHECKING:
    from kvtiers_replay.options import ReplayOptions
    from kvtiers_replay.results import ReplayResults

__all__ = ["MADE_UP", "default_config", "options_of", "read_workload", "replay"]

MADE_UP = ("code", "agent", "rag")
"""Workloads that need no trace."""
_MADE_UP_REQUESTS = 400
_SETTLE_SECONDS = 1.2  # the tiers' own figures come each second

DEFAULT_CONFIG: dict[str, Any] = {
    "version": 1,
    "namespace": "replay",
    "primary": {"capacity": "256MiB"},
    # A replay has time: what a tier has is loaded, however long it takes, so that two runs have the same hits.
    "lookup_wait": "30s",
    "load_wait": "30s",
}
# It evicts behind its users' backs: what is believed of it must be young.
MEMORY_TIER = {"type": "memory", "capacity": "1GiB", "exists_ttl": "200ms"}


@click.command(
    epilog="""\b
Examples:
  kvtiers replay --workload code                        small, needs nothing else
  kvtiers replay --config tiers.yaml --workload code    your tiers
  kvtiers replay --config tiers.yaml --trace conversation_trace.jsonl.gz --requests 3000
  kvtiers replay --config tiers.yaml --trace FILE --concurrency 16 --gpu-blocks 4000 --workers 2
  kvtiers replay --config tiers.yaml --trace FILE --engines 4 --speed 60
  kvtiers replay --config tiers.yaml --trace FILE --model config.json --kv-dtype fp8

With --concurrency 1, each request begins when everything before it has ended, so that two runs have the same hits.
Without --config: a primary of 256 MiB, and below it a memory tier of 1 GiB in this process where kvtiers-example is
installed.

A chunk has real bytes, so it takes what a model's KV takes: of --model, of --bytes-per-chunk, or else of a small model,
12 KiB a token (Qwen2.5-0.5B in bfloat16). Larger models take more memory and time: a trace's block of 512 tokens is
6 MiB of that one, and 64 MiB of Llama 3.1 8B.

Exit status: 0 all bytes are right, 1 some are not, or of the chunks that a tier said it has none could be read, 2 the
config, the trace or the command line is wrong or a process of the replay ended early, 130 stopped by Ctrl-C (the
report of what was done is printed)."""
)
@click.option("--config", "config_file", metavar="FILE", type=click.Path(), help="The tiers, as YAML.")
@click.option("--trace", metavar="FILE", type=click.Path(), help="Requests in Mooncake's format, plain or gzip.")
@tokens_per_block_option
@click.option(
    "--workload",
    type=click.Choice(MADE_UP),
    help="A synthetic workload: conversations about source code, coding agents, or questions with retrieved passages.",
)
@click.option(
    "--requests",
    metavar="N",
    type=click.IntRange(min=1),
    help=f"Only this many requests.  [default: all of a trace, {_MADE_UP_REQUESTS} of a workload]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed makes another workload.")
@click.option(
    "--bytes-per-chunk",
    metavar="SIZE",
    callback=with_unit(parse_size),
    help="KV bytes of one chunk, of all ranks.  [default: a small model's, 12 KiB a token]",
)
@click.option("--model", metavar="FILE", type=click.Path(), help="A model's config.json instead, as for kvtiers size.")
@model_options
@click.option(
    "--gpu-blocks",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Blocks of each engine, with a prefix cache of its own; 0: as many as it needs, without one.",
)
@click.option(
    "--primary-chunks",
    metavar="N",
    type=click.IntRange(min=1),
    help="Size of each engine's primary in chunks, instead of the config's primary.capacity.",
)
@click.option(
    "--blocks-per-chunk",
    metavar="N",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Blocks that are stored and loaded as one value.",
)
@click.option(
    "--concurrency",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Requests in flight in each engine.",
)
@click.option(
    "--speed",
    metavar="X",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests arrive as recorded, X times as fast.  [default: as soon as there is room for them]",
)
@click.option(
    "--step-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Tokens that are computed in a step at most; longer prompts are computed in pieces.",
)
@click.option(
    "--store",
    type=click.Choice(["eager", "lazy"]),
    default="eager",
    show_default=True,
    help="Store blocks when they are computed, or when the engine's prefix cache is about to lose them.",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(min=1),
    help="Ranks of each engine, in processes of their own.  [default: one, in the engine's process]",
)
@click.option(
    "--engines",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Engines that share the config's tiers, each a process; requests go to them in turns.",
)
@click.option(
    "--prefill-speed",
    metavar="N",
    type=click.FloatRange(min=0, min_open=True),
    default=10_000.0,
    show_default=True,
    help="Tokens per second, for the estimated time to the first token.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the engine's KV lies: host memory, or a GPU's.",
)
@click.option(
    "--report", metavar="FILE.html", callback=file_to_write(".html"), help="Write a page with plots of all of it, too."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def replay(
    ctx: click.Context,
    /,
    config_file: str | None,
    trace: str | None,
    tokens_per_block: int | None,
    workload: str | None,
    requests: int | None,
    seed: int,
    bytes_per_chunk: int | None,
    model: str | None,
    tp: int,
    kv_dtype: str,
    report: Path | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Drive the whole stack from a trace or a workload, and check every byte.

    A small reference engine computes each request's KV blocks by writing bytes that follow from the prompt, and stores
    and loads them through the real manager, memory and tiers. Loaded blocks are compared byte by byte.
    """
    if bool(trace) == bool(workload):
        raise click.UsageError("give either --trace FILE or --workload NAME")
    if chosen["engines"] > 1 and not config_file:
        raise click.UsageError("--engines needs a --config with tiers that processes share; without one there are none")
    if model and bytes_per_chunk:
        raise click.UsageError("--model and --bytes-per-chunk exclude each other")
    shape = read_shape(model, kv_dtype=kv_dtype, ranks=tp) if model else None
    config = load_config(config_file) if config_file else default_config()
    # Imported here: a wrong command line is reported at once.
    from kvtiers_replay.report.text import show_progress
    from kvtiers_replay.run import replay as run

    load = read_workload(trace, workload, requests, seed, tokens_per_block)
    options = options_of(load, bytes_per_chunk, shape, **chosen)
    with stop_on_interrupt() as stop, show_progress() as progress:
        results = run(config, load, options, stop=stop, progress=progress)
    if as_json:
        click.echo(results.to_json())
    else:
        _print_report(results)
    if report:
        from kvtiers_replay.report.page import as_page

        write_file(report, as_page(results))
    if results.wrong_bytes or results.unreadable_tiers:
        ctx.exit(1)
    if results.interrupted:
        ctx.exit(130)


def options_of(
    load: Workload, bytes_per_chunk: int | None, shape: ModelShape | None, *, workers: int | None, **chosen: Any
) -> "ReplayOptions":
    """Return the options of a replay, with chunks of a model's size where no other is given."""
    from kvtiers_replay.options import SMALL_MODEL, SMALL_MODEL_TOKEN_BYTES, ReplayOptions

    model = "" if bytes_per_chunk else SMALL_MODEL
    per_token = SMALL_MODEL_TOKEN_BYTES
    if shape:
        model, per_token = f"{shape.name}, KV in {shape.kv_dtype}", shape.bytes_per_token
    if not bytes_per_chunk:
        parts = chosen["blocks_per_chunk"] * (workers or 1)
        # Ranks hold equal parts, to the byte.
        bytes_per_chunk = -(-load.tokens_per_block * chosen["blocks_per_chunk"] * per_token // parts) * parts
    return ReplayOptions(bytes_per_chunk, model=model, workers=workers or 0, settle_seconds=_SETTLE_SECONDS, **chosen)


def _print_report(results: "ReplayResults") -> None:
    from kvtiers_replay.report.text import heading, tables

    print_heading(heading(results))
    for table in tables(results):
        click.echo()
        print_table(table.columns, table.rows)
    click.echo()
    for line in results.verdict:
        click.echo(line)


def default_config() -> OffloadConfig:
    """Return a primary alone, or with a memory tier below it where that is installed."""
    with contextlib.suppress(ConfigError):
        return load_config(DEFAULT_CONFIG | {"secondary": [MEMORY_TIER]})
    click.echo(
        "no tier below the primary: give a --config, or pip install --find-links wheels kvtiers-example", err=True
    )
    return load_config(DEFAULT_CONFIG)


def read_workload(
    trace: str | None, workload: str | None, requests: int | None, seed: int, tokens_per_block: int | None = None
) -> Workload:
    """Return a trace's requests, or those of a workload that is made up."""
    if trace:
        from kvtiers_replay.trace import read_trace

        return read_trace(trace, requests, tokens_per_block)
    from kvtiers_replay.agent_workload import agent_workload
    from kvtiers_replay.code_workload import code_workload
    from kvtiers_replay.rag_workload import rag_workload

    made_up = dict(zip(MADE_UP, (code_workload, agent_workload, rag_workload), strict=True))
    return made_up[workload or "code"](requests or _MADE_UP_REQUESTS, seed)
