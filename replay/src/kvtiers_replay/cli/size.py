"""``kvtiers size``: the bytes of a model's KV cache, good chunk sizes, and when a load pays."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from kvtiers.api.units import format_duration, format_size, parse_duration
from kvtiers.cli.output import print_heading, print_table
from kvtiers.plugins import did_you_mean
from kvtiers_replay.sizing import DTYPE_BYTES, LINKS, LayerGroup, Link, ModelShape, TierSuggestion, read_model, suggest

__all__ = [
    "DEFAULT_MODEL",
    "link_options",
    "links_of",
    "model_options",
    "read_shape",
    "size",
    "tokens_per_block_option",
]

DEFAULT_MODEL = ModelShape("Llama 3.1 8B (no --model given)", "GQA", "bfloat16", 1, (LayerGroup(32, 4096),))
"""What the commands take whose figures need a model, where none is given. They say so."""
_GIB = 1 << 30


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how a model is served: ``--tp`` and ``--kv-dtype``."""
    tp = click.option(
        "--tp", metavar="N", type=click.IntRange(1, 1024), default=1, show_default=True,
        help="Tensor parallelism: ranks that divide the KV heads among them.",
    )  # fmt: skip
    dtype = click.option(
        "--kv-dtype", type=click.Choice(["auto", *DTYPE_BYTES]), default="auto", show_default=True, metavar="TYPE",
        help=f"Type of a number in the KV cache: auto (the model's), {', '.join(DTYPE_BYTES)}.",
    )  # fmt: skip
    return tp(dtype(command))


tokens_per_block_option = click.option(
    "--tokens-per-block", metavar="N", type=click.IntRange(1, 1 << 20),
    help="Tokens of a block of the trace.  [default: what its lines say, or 512]",
)  # fmt: skip


def read_shape(model: str, *, kv_dtype: str, ranks: int) -> ModelShape:
    """Read a model's shape for a command that prints no notes of its own: they go to standard error."""
    shape = read_model(model, kv_dtype=kv_dtype, ranks=ranks)
    for note in shape.notes:
        click.echo(f"{model}: {note}", err=True)
    return shape


def _by_tier(parse: Callable[[str], float], expected: str) -> Callable[..., dict[str, float]]:
    """Return a callback for a repeatable option with the form ``TIER=VALUE``."""

    def convert(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, float]:
        found = {}
        names = [link.name for link in LINKS]
        for text in values:
            name, separator, value = text.partition("=")
            if not separator:
                raise click.BadParameter(f"expected TIER={expected}, got {text!r}", ctx, param)
            if name not in names:
                hint = did_you_mean(name, names)
                known = f"Types of tiers: {', '.join(names)}."
                raise click.BadParameter(f"unknown type of tier {name!r}.{hint} {known}", ctx, param)
            try:
                found[name] = parse(value)
            except ValueError as error:
                raise click.BadParameter(f"{name}: {error}", ctx, param) from None
        return found

    return convert


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1e6:
        raise ValueError(f"expected GB/s, a number above 0, got {text!r}")
    return rate * 1e9


def link_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how fast each type of tier is: ``--gbps`` and ``--rtt``."""
    gbps = click.option(
        "--gbps", metavar="TIER=N", multiple=True, callback=_by_tier(_rate, "GB/s"),
        help="Speed of a type of tier in GB/s (10^9 bytes); may be given for each.",
    )  # fmt: skip
    rtt = click.option(
        "--rtt", metavar="TIER=DURATION", multiple=True, callback=_by_tier(parse_duration, "DURATION"),
        help="Round trip of a type of tier, such as network=500us; may be given for each.",
    )  # fmt: skip
    return gbps(rtt(command))


def links_of(gbps: dict[str, float], rtt: dict[str, float]) -> list[Link]:
    """Return the links with these speeds (bytes per second) and round trips (seconds) in place of the usual ones."""
    return [
        dataclasses.replace(
            link,
            bytes_per_second=gbps.get(link.name, link.bytes_per_second),
            round_trip=rtt.get(link.name, link.round_trip),
        )
        for link in LINKS
    ]


@click.command(
    epilog="""\b
Examples:
  kvtiers size --model config.json
  kvtiers size --model config.json --tp 4 --kv-dtype fp8
  kvtiers size --model config.json --gbps network=1.2 --rtt network=2ms --prefill 6000
  kvtiers size --model config.json --json | jq .bytes_per_token

The model's config.json is the one that lies beside its weights on Hugging Face. Supported are multi-head, multi-query
and grouped-query attention, DeepSeek's latent attention (MLA), and hybrids with sliding windows. Model types are known
by name; one that is not is taken as plain attention with a note, or refused where its config speaks of other layers.

\b
blocks_per_chunk  the fewest blocks whose value is as large as what the tier moves during a
                  round trip, within 256 KiB to 2 MiB (primary, memory, disk) or 2 to 8 MiB
                  (network, object). An engine has one blocks_per_chunk: take the largest of
                  the tiers that you use.
break-even        the shortest prefix that is loaded faster than it is computed:
                  R / (1 / prefill - b), with R the round trips to the tier and to the GPU,
                  and b the seconds that a token takes on both ways.

Speeds that are not given are rough: measure yours.

Exit status: 0, or 2 if the model's config or the command line is wrong."""
)
@click.option("--model", metavar="FILE", required=True, type=click.Path(), help="The model's config.json.")
@model_options
@click.option(
    "--tokens-per-block", metavar="N", type=click.IntRange(1, 4096), default=16, show_default=True,
    help="Tokens of one block of the engine.",
)  # fmt: skip
@link_options
@click.option(
    "--prefill", metavar="N", type=click.IntRange(1, 10**9), default=10_000, show_default=True,
    help="Tokens that the engine prefills per second.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def size(
    model: str,
    tp: int,
    kv_dtype: str,
    tokens_per_block: int,
    gbps: dict[str, float],
    rtt: dict[str, float],
    prefill: int,
    as_json: bool,
) -> None:
    """Compute a model's KV cache size, good chunk sizes, and the prefix from which a load pays."""
    shape = read_model(model, kv_dtype=kv_dtype, ranks=tp)
    links = links_of(gbps, rtt)
    suggestions = suggest(shape, tokens_per_block, links, prefill)
    if as_json:
        click.echo(json.dumps(_as_json(shape, tokens_per_block, prefill, suggestions), indent=2))
        return
    print_heading(_heading(shape))
    for note in shape.notes:
        click.echo(f"note: {note}")
    print_table(["", "per rank", "stored, all ranks"], _rows(shape, tokens_per_block))
    click.echo()
    print_heading(f"For each type of tier, at {prefill:,.0f} tokens/s of prefill:")
    print_table(
        ["tier", "GB/s", "round trip", "blocks_per_chunk", "tokens", "chunk per rank", "value", "tokens per GiB",
         "break-even"],
        [_suggestion_row(suggestion) for suggestion in suggestions],
    )  # fmt: skip


def _heading(shape: ModelShape) -> str:
    layers = sum(group.layers for group in shape.groups)
    ranks = f", {shape.ranks} ranks" if shape.ranks > 1 else ""
    return f"{shape.name}: {layers} layers, {shape.attention}, KV in {shape.kv_dtype}{ranks}"


def _rows(shape: ModelShape, tokens_per_block: int) -> list[tuple[str, str, str]]:
    rank, stored = shape.rank_bytes_per_token, shape.bytes_per_token
    rows = [("a token", _exact(rank), _exact(stored))]
    if len(shape.groups) > 1:
        rows += [
            (f"  {group.name}", _exact(group.bytes_per_token), _exact(group.bytes_per_token * shape.stored_ranks))
            for group in shape.groups
        ]
    rows.append((f"a block of {tokens_per_block}", _exact(rank * tokens_per_block), _exact(stored * tokens_per_block)))
    rows.append(("tokens per GiB", f"{_GIB / rank:,.0f}", f"{_GIB / stored:,.0f}"))
    return rows


def _exact(nbytes: int) -> str:
    short = format_size(nbytes)
    return short if nbytes < 1024 else f"{short} ({nbytes:,})"


def _suggestion_row(suggestion: TierSuggestion) -> list[str]:
    link, even = suggestion.link, suggestion.break_even
    return [
        link.name,
        f"{link.bytes_per_second / 1e9:g}",
        format_duration(link.round_trip),
        str(suggestion.layout.blocks_per_chunk),
        f"{suggestion.tokens:,}",
        " + ".join(map(format_size, suggestion.rank_bytes)),
        " + ".join(map(format_size, suggestion.value_bytes)),
        f"{suggestion.tokens_per_gib:,.0f}",
        "never: computing is faster" if even is None else f"{even:,} tokens",
    ]


def _as_json(
    shape: ModelShape, tokens_per_block: int, prefill: float, suggestions: Sequence[TierSuggestion]
) -> dict[str, Any]:
    rank, stored = shape.rank_bytes_per_token, shape.bytes_per_token
    return {
        "model": shape.name,
        "attention": shape.attention,
        "kv_dtype": shape.kv_dtype,
        "ranks": shape.ranks,
        "notes": list(shape.notes),
        "groups": [
            {"layers": g.layers, "window": g.window, "bytes_per_token": g.bytes_per_token} for g in shape.groups
        ],
        "bytes_per_token": {"rank": rank, "stored": stored},
        "tokens_per_block": tokens_per_block,
        "bytes_per_block": {"rank": rank * tokens_per_block, "stored": stored * tokens_per_block},
        "tokens_per_gib": {"rank": _GIB / rank, "stored": _GIB / stored},
        "prefill_tokens_per_second": prefill,
        "tiers": {
            suggestion.link.name: {
                "bytes_per_second": suggestion.link.bytes_per_second,
                "round_trip_seconds": suggestion.link.round_trip,
                "blocks_per_chunk": suggestion.layout.blocks_per_chunk,
                "tokens_per_chunk": suggestion.tokens,
                "rank_chunk_bytes": list(suggestion.rank_bytes),
                "value_bytes": list(suggestion.value_bytes),
                "tokens_per_gib": suggestion.tokens_per_gib,
                "break_even_tokens": suggestion.break_even,
            }
            for suggestion in suggestions
        },
    }
