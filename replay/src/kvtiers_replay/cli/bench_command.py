"""``kvtiers bench``: how fast tiers are on this machine, beside its limits, and what suits them."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from click.shell_completion import CompletionItem

from kvtiers.api import ConfigError
from kvtiers.api.plugin import ENTRY_POINT_GROUP
from kvtiers.api.units import format_size, parse_size
from kvtiers.cli.output import file_to_write, print_heading, print_table, with_unit, write_file
from kvtiers.cli.progress import show_progress, stop_on_interrupt
from kvtiers.config import load_config
from kvtiers.plugins import installed_names, load_tier
from kvtiers_replay.bench import Bench, BenchOptions, BenchTier, run_bench
from kvtiers_replay.cli.size import model_options, read_shape
from kvtiers_replay.sizing import ModelShape

__all__ = ["bench"]

_SIZES = "64KiB,512KiB,2MiB,8MiB"
_LEAST, _MOST = 64 << 10, 16 << 20
_MODEL_SIZES = 5
_ROOM = 16  # times what a case moves, where a type needs a capacity that is not given


class _StoppedError(Exception):
    """The user has stopped the benchmark."""


def _options(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"expected NAME=VALUE, got {text!r}", ctx, param)
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise click.BadParameter(f"{name}: {value!r} is no YAML", ctx, param) from None
    return found


def _list(convert: Callable[..., Any]) -> Callable[..., list[int]]:
    def split(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
        return [int(convert(ctx, param, part.strip())) for part in value.split(",")]

    return split


def _whole(ctx: click.Context, param: click.Parameter, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise click.BadParameter(f"expected numbers from 1 to 256 with commas between them, got {text!r}", ctx, param)
    return int(text)


def _types_and_files(_ctx: click.Context, _param: click.Parameter, begin: str) -> list[CompletionItem]:
    found = [CompletionItem(name) for name in installed_names(ENTRY_POINT_GROUP) if name.startswith(begin)]
    return [CompletionItem(begin, type="file"), *found]  # click's script for bash drops what comes before a file


@click.command(
    epilog="""\b
Examples:
  kvtiers bench memory
  kvtiers bench fs --set path=/mnt/nvme/kvtiers --model config.json
  kvtiers bench redis --set url=redis://host:6379/0 --plot bench.html
  kvtiers bench tiers.yaml                                every tier of a config, one by one
  kvtiers bench --compare nvme.yaml network.yaml --plot both.html

Values go through the client: tier hosts, seals and checks as an engine has them. Sizes first; then, at the size that
suits, batches (values of one call), threads and processes of the tier. With --model, sizes are those of chunks of 1, 2,
4 ... blocks. Tiers that are compared take turns.

\b
hot    read again by the client that wrote them
cold   read by a client that was just opened, from a disk after its files were dropped from the page
       cache; '-' for a tier whose values end with its host

Values lie in the namespace 'kvtiers-bench' and are deleted in the end; what stays is a record of a few hundred bytes
for each size of value, and of a slab its segments: give it a folder of its own. A tier that moves rows by itself (the
third rung) keeps values until it needs the room. Values that a tier does not take are said, and the others measured.

A TYPE without a path gets a folder that is deleted. On a machine that does something else, single figures mean little:
compare.

Exit status: 0, 2 if a config or the command line is wrong or a tier did not give back what it took, 130 stopped."""
)
@click.argument("targets", metavar="TYPE|tiers.yaml...", nargs=-1, required=True, shell_complete=_types_and_files)
@click.option("--compare", is_flag=True, help="Put the tiers of several configs side by side, in turns.")
@click.option("--set", "given", metavar="NAME=VALUE", multiple=True, callback=_options, help="An option of a TYPE.")
@click.option("--sizes", metavar="SIZES", callback=_list(with_unit(parse_size)), default=_SIZES, show_default=True,
              help="Sizes of values, without --model.")  # fmt: skip
@click.option("--batches", metavar="N,N", callback=_list(_whole), default="1,4,16", show_default=True,
              help="Values of one call.")  # fmt: skip
@click.option("--threads", metavar="N,N", callback=_list(_whole), default="1,4,16", show_default=True,
              help="Transfers at the same time, in each tier host.")  # fmt: skip
@click.option("--processes", metavar="N,N", callback=_list(_whole), default="1,2", show_default=True,
              help="Tier hosts.")  # fmt: skip
@click.option("--bytes", "most_bytes", metavar="SIZE", callback=with_unit(parse_size), default="64MiB",
              show_default=True, help="Most bytes of one case; a batch that is more gets fewer values.")  # fmt: skip
@click.option("--seconds", metavar="S", type=click.FloatRange(0.01, 600), default=0.5, show_default=True,
              help="Longest time of one case, each way.")  # fmt: skip
@click.option("--model", metavar="FILE", type=click.Path(), help="The model's config.json, as for kvtiers size.")
@model_options
@click.option("--tokens-per-block", metavar="N", type=click.IntRange(1, 4096), default=16, show_default=True,
              help="Tokens of one block of the engine.")  # fmt: skip
@click.option("--plot", metavar="FILE.html", callback=file_to_write(".html"), help="Write a page with plots, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    targets: Sequence[str],
    compare: bool,
    given: dict[str, Any],
    sizes: list[int],
    batches: list[int],
    threads: list[int],
    processes: list[int],
    most_bytes: int,
    seconds: float,
    model: str | None,
    tp: int,
    kv_dtype: str,
    tokens_per_block: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure tiers on this machine: latency and GB/s, beside its limits, and what suits them."""
    if compare != (len(targets) > 1):
        raise click.UsageError("give one TYPE or file, or --compare and several of them")
    blocks = _blocks(read_shape(model, kv_dtype=kv_dtype, ranks=tp), tokens_per_block) if model else {}
    options = BenchOptions(
        sorted(blocks or set(sizes)), blocks, sorted(set(batches)), sorted(set(threads)), sorted(set(processes)),
        most_bytes, seconds,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        tiers = [tier for target in targets for tier in _tiers(target, given, options, stack, named=compare)]
        labels = [tier.label for tier in tiers]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ConfigError(f"{twice!r} is measured twice; give the files or tiers different names")
        found = _run(tiers, options)
    if found is None:
        click.echo("stopped; nothing was written", err=True)
        ctx.exit(130)
    if plot:
        from kvtiers_replay.bench.page import as_page  # slow, and only wanted here

        write_file(plot, as_page(found))
    if as_json:
        click.echo(json.dumps(found.as_data(), indent=2))
    else:
        _print(found)


def _blocks(shape: ModelShape, tokens_per_block: int) -> dict[int, int]:
    """Return the sizes of a model's chunks of 1, 2, 4 ... blocks, and how many blocks each has."""
    found: dict[int, int] = {}
    for blocks in (1, 2, 4, 8, 16, 32, 64):
        layout = shape.layout(tokens_per_block, blocks)
        size = max(layout.payload_bytes(group) for group in range(len(layout.groups)))
        if size >= _LEAST and (size <= _MOST or not found):
            found[size] = blocks
    return dict(list(found.items())[:_MODEL_SIZES]) or {size: 64}


def _tiers(
    target: str, given: dict[str, Any], options: BenchOptions, stack: contextlib.ExitStack, *, named: bool
) -> Iterator[BenchTier]:
    """Yield the tiers of a file, or the one tier of a type."""
    path = Path(target)
    is_file = path.suffix in (".yaml", ".yml", ".json") or path.is_file()
    if is_file and given:
        raise click.UsageError("--set is for a TYPE; a file has the options of its tiers")
    config = load_config(target if is_file else _config_of(target, given, options, stack))
    if not config.secondary:
        raise ConfigError(f"{target}: there is no tier below 'secondary' to measure")
    for tier in config.secondary:
        if tier.read_only:
            raise ConfigError(f"{target}: {tier.tier_name} is read_only, and a benchmark writes")
        plain = tier.model_copy(update={"admission": "all"})
        yield BenchTier(f"{path.stem}: {tier.tier_name}" if named and is_file else tier.tier_name, config, plain)


def _config_of(
    target: str, given: dict[str, Any], options: BenchOptions, stack: contextlib.ExitStack
) -> dict[str, Any]:
    """Return a config with one tier of this type; a required path or capacity that is not given is made up."""
    tier = {"type": target, **given}
    for name, field in load_tier(target).config.model_fields.items():
        if field.is_required() and name not in tier:
            if name == "path":
                tier[name] = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtiers-bench-"))
            elif name == "capacity":
                tier[name] = format_size(_ROOM * max(options.most_bytes, *options.value_bytes, 1))
    return {"version": 1, "primary": {"capacity": "64MiB"}, "secondary": [tier]}


def _run(tiers: Sequence[BenchTier], options: BenchOptions) -> Bench | None:
    """Return the results; None: it was stopped."""
    for tier in tiers:
        if not tier.has_hosts:
            text = f"{tier.label}: it moves rows by itself, so that what is written stays until it needs the room"
            click.echo(text, err=True)
    with stop_on_interrupt() as stop, show_progress() as report:

        def progress(doing: str) -> None:
            if stop.is_set():
                raise _StoppedError
            report(lambda: doing)

        try:
            return run_bench(tiers, options, progress)
        except _StoppedError:
            return None


def _print(found: Bench) -> None:
    from kvtiers_replay.bench import text

    print_heading("What this machine can do")
    print_table(["", ""], text.limit_rows(found), header=False)
    click.echo()
    print_table(text.COLUMNS, text.rows(found))
    click.echo(text.LEGEND)
    if len(found.tiers) > 1:
        click.echo("\nSide by side, in turns; (x): of the first")
        print_table(*text.comparison_rows(found))
    click.echo()
    for line in [*text.advice_lines(found), *text.notes(found)]:
        click.echo(line)
