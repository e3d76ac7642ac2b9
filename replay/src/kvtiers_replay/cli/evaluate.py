"""``kvtiers evaluate``: what tiers would save on a request log, without a GPU, as one page."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvtiers.api.units import parse_size
from kvtiers.cli.output import file_to_write, print_heading, print_table, with_unit, write_file
from kvtiers.cli.progress import show_progress, stop_on_interrupt
from kvtiers_replay.cli.size import (
    DEFAULT_MODEL,
    link_options,
    links_of,
    model_options,
    read_shape,
    tokens_per_block_option,
)
from kvtiers_replay.evaluate.evaluation import Evaluation, Question, evaluate
from kvtiers_replay.evaluate.offers import GIB_MONTH
from kvtiers_replay.logs import LogKind, Reading, ReadLog, read_log
from kvtiers_replay.sizing import ModelShape, suggest

__all__ = ["evaluate_command"]

_DEFAULT_PAGE = "kvtiers-evaluation.html"
_LEAST_TOKENS = 64
_GPU_CACHE = 40 << 30


class _StoppedError(Exception):
    """The user has stopped the evaluation."""


def _prices(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in values:
        name, _, price = text.partition("=")
        try:
            found[name] = float(price)
        except ValueError:
            found[name] = -1.0
        if name not in GIB_MONTH or not 0 <= found[name] < 1e9:
            raise click.BadParameter(
                f"expected one of {', '.join(GIB_MONTH)}, '=' and a price, got {text!r}", ctx, param
            )
    return found


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int]:
    convert = with_unit(parse_size)
    return [] if value is None else [int(convert(ctx, param, part.strip())) for part in value.split(",")]


@click.command(
    name="evaluate",
    epilog="""\b
Examples:
  kvtiers evaluate --log requests.jsonl
  kvtiers evaluate --vllm-log server.log --model config.json --tp 4 --prefill-speed 20000
  kvtiers evaluate --openai-log batch.jsonl.gz --hours 24 --gpu-price 4 --output page.html

\b
--log         JSON lines, each with 'prompt_token_ids', 'prompt', 'messages' or 'input'; or a trace in
              Mooncake's format, as 'record' in a config writes it. With 'timestamp' (seconds,
              milliseconds or ISO 8601), savings are by the day.
--vllm-log    the log of 'vllm serve --enable-log-requests' with VLLM_LOGGING_LEVEL=DEBUG: the level at
              which vLLM logs prompts.
--openai-log  an input file of OpenAI's batches, or logged requests: the body itself, or in 'body' or
              'request'.

Prompts are hashed as they are read, under a random key, and not kept. A line that cannot be used is counted by what
is wrong with it, and the rest is read. Texts have no token ids: --chars-per-token says how long a token is.

The plan serves the log with the real manager over keys alone: memory of several sizes, alone and with tiers behind it.
What the GPU's own prefix cache hits is not counted as saved. Then the first requests go through the whole stack.

Exit status: 0, 1 if bytes came back wrong, 2 if the log, the model or the command line is wrong, 130 stopped.""",
)
@click.option("--log", "log", metavar="FILE", type=click.Path(), help="JSON lines with prompts, token ids or hashes.")
@click.option("--vllm-log", metavar="FILE", type=click.Path(), help="The log of a vLLM server.")
@click.option("--openai-log", metavar="FILE", type=click.Path(), help="Requests in OpenAI's format, or a batch.")
@click.option("--requests", metavar="N", type=click.IntRange(min=1), help="Only this many requests, from the first on.")
@click.option("--hours", metavar="H", type=click.FloatRange(min=0, min_open=True),
              help="How long the log's traffic took.  [default: by its times]")  # fmt: skip
@click.option("--chars-per-token", metavar="X", type=click.FloatRange(0.25, 64), default=4.0, show_default=True,
              help="Letters of a token, where a prompt is a text.")  # fmt: skip
@click.option("--media-tokens", metavar="N", type=click.IntRange(1, 1 << 20),
              help="Tokens of an image or another part of a message that is no text.  [default: what the request's "
              "'usage' leaves for it, or 1024]")  # fmt: skip
@click.option("--only-model", metavar="NAME", help="Only the requests of this model or adapter.")
@tokens_per_block_option
@click.option("--tokens-per-chunk", metavar="N", type=click.IntRange(1, 65536),
              help="Tokens of a chunk, the unit of hits.  [default: what suits the model and all tiers]")  # fmt: skip
@click.option("--model", metavar="FILE", type=click.Path(),
              help="The model's config.json, as for kvtiers size.  [default: Llama 3.1 8B]")  # fmt: skip
@model_options
@link_options
@click.option("--prefill-speed", metavar="TOKENS", type=click.FloatRange(min=1), default=10_000.0, show_default=True,
              help="Tokens that an engine computes per second.")  # fmt: skip
@click.option("--engines", metavar="N", type=click.IntRange(1, 100_000),
              help="Engines that served the log.  [default: as many as its prompts keep busy]")  # fmt: skip
@click.option("--gpu-price", metavar="PRICE", type=click.FloatRange(min=0), default=2.5, show_default=True,
              help="Price of a GPU for an hour.")  # fmt: skip
@click.option("--currency", metavar="TEXT", default="$", show_default=True, help="Sign before an amount of money.")
@click.option("--tier-price", metavar="TIER=PRICE", multiple=True, callback=_prices,
              help="Price of a GiB for a month; may be given for each."
              f"  [default: {', '.join(f'{name}={price:.2g}' for name, price in GIB_MONTH.items())}]")  # fmt: skip
@click.option("--gpu-cache", metavar="SIZE", callback=with_unit(parse_size),
              help="KV that the GPUs of an engine hold.  [default: 40GiB for each of --tp]")  # fmt: skip
@click.option("--most-memory", metavar="SIZE", callback=with_unit(parse_size), default="128GiB", show_default=True,
              help="Largest primary of an engine.")  # fmt: skip
@click.option("--memory", metavar="SIZES", callback=_sizes,
              help="Sizes of all primaries together to try, with commas between them.")  # fmt: skip
@click.option("--processes", metavar="N", type=click.IntRange(1, 256), default=min(2, os.cpu_count() or 1),
              show_default=True, help="Simulations at the same time.")  # fmt: skip
@click.option("--no-replay", is_flag=True, help="Leave out the replay of the first requests.")
@click.option("--output", metavar="FILE.html", default=_DEFAULT_PAGE, show_default=True,
              callback=file_to_write(".html"), help="The page to write.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def evaluate_command(
    ctx: click.Context,
    /,
    log: str | None,
    vllm_log: str | None,
    openai_log: str | None,
    requests: int | None,
    hours: float | None,
    chars_per_token: float,
    media_tokens: int | None,
    only_model: str | None,
    tokens_per_block: int | None,
    tokens_per_chunk: int | None,
    model: str | None,
    tp: int,
    kv_dtype: str,
    no_replay: bool,
    output: Path,
    as_json: bool,
    **machine: Any,
) -> None:
    """Find out what tiers would save on a request log, without a GPU, as one page."""
    logs: dict[LogKind, str | None] = {"log": log, "vllm": vllm_log, "openai": openai_log}
    given = [(kind, path) for kind, path in logs.items() if path]
    if len(given) != 1:
        raise click.UsageError("give one of --log, --vllm-log and --openai-log")
    if only_model is not None and vllm_log:
        raise click.UsageError("--only-model needs a log that names models: that of a vLLM server is of one")
    shape = DEFAULT_MODEL
    if model:
        shape = read_shape(model, kv_dtype=kv_dtype, ranks=tp)
    elif tp > 1 or kv_dtype != "auto":
        raise click.UsageError("--tp and --kv-dtype need a --model")
    question = _question(shape, tp, hours, **machine)
    reading = Reading(
        given[0][0], tokens_per_chunk or _good_chunk(question), chars_per_token, requests, tokens_per_block,
        media_tokens, only_model,
    )  # fmt: skip
    found = _run(given[0][1], reading, question, replays=not no_replay)
    if found is None:
        click.echo("stopped; nothing was written", err=True)
        ctx.exit(130)
    from kvtiers_replay.evaluate.page import as_page  # slow, and only wanted here

    write_file(output, as_page(found))
    if as_json:
        click.echo(json.dumps(found.as_data(), indent=2))
    else:
        _print(found, output)
    ctx.exit(1 if found.trial and found.trial.wrong_bytes else 0)


def _question(
    shape: ModelShape,
    tp: int,
    hours: float | None,
    *,
    gbps: dict[str, float],
    rtt: dict[str, float],
    prefill_speed: float,
    engines: int | None,
    gpu_price: float,
    currency: str,
    tier_price: dict[str, float],
    gpu_cache: int | None,
    most_memory: int,
    memory: Sequence[int],
    processes: int,
) -> Question:
    return Question(
        shape, prefill_speed=prefill_speed, gpus=tp, gpu_hour=gpu_price, currency=currency,
        gpu_cache=gpu_cache or tp * _GPU_CACHE,
        most_memory=most_memory, memory=memory, links=links_of(gbps, rtt), prices=tier_price, hours=hours,
        engines=engines or 0, processes=processes,
    )  # fmt: skip


def _good_chunk(question: Question) -> int:
    """Return the tokens of a chunk that is large enough for every type of tier, as an engine's chunks must be."""
    found = suggest(question.shape, question.tokens_per_block, question.links, question.prefill_speed)
    return max(_LEAST_TOKENS, *(each.tokens for each in found))


def _run(path: str, reading: Reading, question: Question, *, replays: bool) -> Evaluation | None:
    """Return the evaluation; None: it was stopped."""
    with stop_on_interrupt() as stop, show_progress() as report:

        def progress(doing: str, share: float) -> None:
            if stop.is_set():
                raise _StoppedError
            report(lambda: f"{doing}: {100 * min(1.0, share):.0f} %")

        try:
            log = read_log(path, reading, lambda count, share: progress(f"reading, {count:,} requests", share))
            _print_problems(path, log)
            found = evaluate(dataclasses.replace(log), question, progress)
            if replays:
                from kvtiers_replay.evaluate.first_requests import try_it  # slow, and only wanted here

                found.trial = try_it(found, lambda doing, share: report(lambda: f"{doing}: {100 * share:.0f} %"), stop)
        except _StoppedError:
            return None
    return None if stop.is_set() else found


def _print_problems(path: str, log: ReadLog) -> None:
    for line in [*log.problem_lines(), *log.notes]:
        click.echo(f"{Path(path).name}: {line}", err=True)


def _print(found: Evaluation, output: Path) -> None:
    from kvtiers_replay.evaluate import text
    from kvtiers_replay.evaluate.starter import starter_yaml

    print_heading(text.about(found))
    print_table(text.MEMORY_COLUMNS, text.memory_rows(found))
    click.echo(text.CHOSEN)
    click.echo()
    print_table(text.TIER_COLUMNS, text.tier_rows(found))
    click.echo()
    for line in [*text.verdict(found), *text.assumed(found)]:
        click.echo(line)
    click.echo(f"\n{starter_yaml(found)}")
    click.echo(f"All of it, with what it stands on: {output}")
