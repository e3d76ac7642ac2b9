"""``kvtiers plan``: the hit rates of sizes and policies on a trace, found without moving a byte."""

import bisect
import contextlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import click

from kvtiers.api.config import EACH_OTHER_TENANT
from kvtiers.api.units import format_size, parse_size
from kvtiers.cli.output import file_to_write, print_heading, print_table, with_unit, write_file
from kvtiers.cli.progress import show_progress, stop_on_interrupt
from kvtiers.config import OffloadConfig, load_config
from kvtiers.layout.tenants import Tenants
from kvtiers_replay.cli.size import DEFAULT_MODEL, model_options, read_shape, tokens_per_block_option
from kvtiers_replay.plan import (
    Plan,
    PlanCase,
    PlanPoint,
    PlanSizes,
    PlanTrace,
    Task,
    Wanted,
    cases_of_interest,
    changes,
    plan_cases,
    searches,
    sweep,
)
from kvtiers_replay.plan.other_policy import DEFAULT_PREFILL_SPEED
from kvtiers_replay.plan.series import series_of, swept_size
from kvtiers_replay.plan.simulate import tenant_in
from kvtiers_replay.plan.sizes import DEFAULT_PRIMARY, BytesUnknownError
from kvtiers_replay.trace import read_trace
from kvtiers_replay.workload import Workload

__all__ = ["plan"]

_BAR_LETTERS = 48
_MOST_BARS = 100
_PIPE_WIDTH = 240  # letters, so that no line is broken where a program reads them


def _list_of(_ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    return [] if value is None else _split(param, value)


def _split(param: click.Parameter, value: str) -> list[str]:
    parts = [part.strip() for part in value.split(",")]
    if not all(parts):
        raise click.BadParameter(f"expected values with commas between them, got {value!r}", param=param)
    return parts


def _by_tier(_ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for value in values:
        name, separator, sizes = value.rpartition("=")
        if name in found:
            raise click.BadParameter(f"the sizes of {name or 'the first tier'!r} are given twice", param=param)
        if separator and not name:
            raise click.BadParameter(f"expected NAME=SIZES or SIZES, got {value!r}", param=param)
        found[name] = _split(param, sizes)
    return found


def _wish(_ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        if 0 < (percent := float(value.strip().removesuffix("%"))) <= 100 and "%" in value:
            return percent / 100
    raise click.BadParameter(f"expected a hit rate such as '35%', got {value!r}", param=param)


@click.command(
    epilog="""\b
Examples:
  kvtiers plan --trace trace.jsonl.gz
  kvtiers plan --trace trace.jsonl.gz --primary 5%,10%,20% --secondary 50%,unlimited
  kvtiers plan --trace trace.jsonl.gz --config tiers.yaml --model config.json --wish 35%
  kvtiers plan --trace trace.jsonl.gz --primary 64GiB,128GiB --bytes-per-token 128KiB \\
      --policy lru,arc --plot plan.html

A size is a share of the trace's different blocks (10%), bytes (64GiB; of --model or --bytes-per-token, or else of
Llama 3.1 8B), 'unlimited', or for a secondary tier 0: without it. Every combination is simulated: the real manager,
eviction and admission serve the requests one after the other, over rows without bytes and tiers that answer at once.
A tier is taken as an LRU; ages, time to live and waiting are not simulated. One chunk is one block of the trace.

Exit status: 0, 1 if no case reaches the --wish, 2 if the config, the trace or the command line is wrong, 130 stopped
by Ctrl-C (what was found so far is printed)."""
)
@click.option("--trace", metavar="FILE", required=True, type=click.Path(), help="Requests in Mooncake's format.")
@click.option(
    "--config", "config_file", metavar="FILE", type=click.Path(),
    help="Tiers, sizes, policy and budgets, as YAML; without it a primary alone.",
)  # fmt: skip
@tokens_per_block_option
@click.option("--requests", metavar="N", type=click.IntRange(min=1), help="Only this many requests, from the first on.")
@click.option(
    "--second-half", is_flag=True, help="Count hits in the second half of the requests: the first fills the caches."
)
@click.option(
    "--primary", metavar="SIZES", callback=_list_of,
    help=f"Sizes of the primary.  [default: {','.join(DEFAULT_PRIMARY)}, and the config's]",
)  # fmt: skip
@click.option(
    "--secondary", metavar="[NAME=]SIZES", multiple=True, callback=_by_tier,
    help="Sizes of a secondary tier, the first without NAME; may be given for each.  [default: the config's]",
)  # fmt: skip
@click.option(
    "--policy", metavar="NAMES", callback=_list_of, help="Eviction policies.  [default: the config's, or lru]"
)
@click.option(
    "--wish", metavar="RATE", callback=_wish, help="Find the smallest primary with this hit rate, such as 35%."
)
@click.option(
    "--bytes-per-token", metavar="SIZE",
    callback=with_unit(parse_size),
    help="KV bytes of one token, all layers and ranks.",
)  # fmt: skip
@click.option("--model", metavar="FILE", type=click.Path(), help="A model's config.json instead, as for kvtiers size.")
@model_options
@click.option(
    "--prefill-speed", metavar="TOKENS", type=click.FloatRange(min=1), default=DEFAULT_PREFILL_SPEED, show_default=True,
    help="Tokens that the engine computes per second, to price what another policy saves.",
)  # fmt: skip
@click.option(
    "--processes", metavar="N", type=click.IntRange(1, 256), default=min(2, os.cpu_count() or 1), show_default=True,
    help="Simulations at the same time.",
)  # fmt: skip
@click.option(
    "--plot", metavar="FILE", callback=file_to_write(".svg", ".html"), help="Draw it as .svg, or as .html with tables."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plan(
    ctx: click.Context,
    trace: str,
    config_file: str | None,
    tokens_per_block: int | None,
    requests: int | None,
    second_half: bool,
    primary: list[str],
    secondary: dict[str, list[str]],
    policy: list[str],
    wish: float | None,
    bytes_per_token: int | None,
    model: str | None,
    tp: int,
    kv_dtype: str,
    prefill_speed: float,
    processes: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Find the sizes and policies that reach a hit rate on a trace, without moving bytes."""
    if model and bytes_per_token:
        raise click.UsageError("--model and --bytes-per-token exclude each other")
    config = load_config(config_file) if config_file else None
    if model:
        bytes_per_token = read_shape(model, kv_dtype=kv_dtype, ranks=tp).bytes_per_token
    workload = read_trace(trace, requests, tokens_per_block)
    chunks = PlanTrace(workload, *_tenants_apart(workload, config), second_half=second_half)
    sizes, cases = _cases(chunks, bytes_per_token, Wanted(primary, secondary, policy), config)
    found = Plan(workload.name, chunks, sizes, wish, prefill_speed=prefill_speed)
    _fill(found, cases, processes, compares=not policy)
    if plot and found.points:
        from kvtiers_replay.plan.page import as_html, as_svg  # slow, and only wanted here

        write_file(plot, as_svg(found) if plot.suffix == ".svg" else as_html(found))
    if as_json:
        click.echo(json.dumps(found.as_data(), indent=2))
    else:
        _print(found)
    if found.interrupted:
        ctx.exit(130)
    ctx.exit(1 if wish is not None and not found.smallest else 0)


def _cases(
    chunks: PlanTrace, bytes_per_token: int | None, wanted: Wanted, config: OffloadConfig | None
) -> tuple[PlanSizes, list[PlanCase]]:
    """Return the sizes and the cases: of a usual model, where sizes in bytes need one and none is given."""
    sizes = PlanSizes(chunks.unique)
    if bytes_per_token:
        sizes = PlanSizes.of_tokens(chunks.unique, chunks.tokens_per_chunk, bytes_per_token)
    try:
        cases = plan_cases(wanted, sizes, config)
    except BytesUnknownError:
        usual = DEFAULT_MODEL.bytes_per_token
        sizes = PlanSizes.of_tokens(chunks.unique, chunks.tokens_per_chunk, usual)
        text = "plan: sizes in bytes are taken as KV of {}, {} a token: give --model config.json or --bytes-per-token"
        click.echo(text.format(DEFAULT_MODEL.name, format_size(usual)), err=True)
        return sizes, plan_cases(wanted, sizes, config)
    if not bytes_per_token and config and (tiers := [tier.tier_name for tier in config.secondary if tier.quotas]):
        text = "plan: the quotas of {} are left out: give --model or --bytes-per-token to have them simulated"
        click.echo(text.format(", ".join(tiers)), err=True)
    return sizes, cases


def _tenants_apart(workload: Workload, config: OffloadConfig | None) -> tuple[Collection[str], Tenants | None]:
    """Return the tenants with a share or a quota, and the engine's rule of who may be one."""
    if config is None or config.tenants is None:
        return (), None
    limited = {*config.tenants.shares(), *(tenant for tier in config.secondary for tenant in tier.quotas)}
    everyone = {tenant_in(request.params) for request in workload.requests}
    return everyone if EACH_OTHER_TENANT in limited else limited, config.tenant_rule()


class _StoppedError(Exception):
    """The user has stopped the plan."""


def _fill(plan: Plan, cases: Sequence[PlanCase], processes: int, *, compares: bool) -> None:
    """Simulate the cases, then those that the wish needs; keep the results so far at Ctrl-C.

    ``compares``: with the learning policy too, where the primary is scarce.
    """
    plan.cases = len(cases)
    with stop_on_interrupt() as stop, show_progress() as report:

        def progress(requests: int) -> None:
            if stop.is_set():
                raise _StoppedError
            plan.requests += requests
            report(plan.progress_line)

        def run(doing: str, tasks: Sequence[Task], into: list[PlanPoint], simulations: int) -> None:
            plan.doing = doing
            plan.requests, plan.requests_in_all = 0, simulations * len(plan.trace.requests)
            places: list[int] = []
            for index, point in sweep(plan.trace, tasks, processes=processes, progress=progress):
                at = bisect.bisect(places, index)  # in the order of the tasks, whichever ends first
                places.insert(at, index)
                into.insert(at, point)

        try:
            run(f"{len(cases)} cases", cases, plan.points, len(cases))
            if plan.wish is not None:
                wanted = searches(plan.points, plan.wish)
                steps = sum(search.steps for search in wanted)
                run("looking for the smallest sizes", wanted, plan.smallest, steps)
            learnt: list[PlanPoint] = []
            if compares and (more := cases_of_interest(plan.trace, cases)):
                run(f"{len(more)} cases with another eviction policy", more, learnt, len(more))
            plan.changes = changes(plan.trace, plan.points, learnt, plan.prefill_speed)
        except _StoppedError:
            plan.interrupted = True


def _print(plan: Plan) -> None:
    print_heading(plan.heading())
    if plan.points:
        print_table(plan.columns(), plan.rows(plan.points))
        for line in plan.budget_lines() + plan.tenant_lines():
            click.echo(line)
        _print_bars(plan)
    if verdict := plan.verdict():
        click.echo(verdict)
    if plan.smallest:
        print_table(plan.columns(), plan.rows(plan.smallest))
    if line := plan.other_policy():
        click.echo(line)


def _print_bars(plan: Plan) -> None:
    """Print a bar for each case, unless there are none or too many. A full bar is the hit rate of an infinite cache."""
    if len(plan.points) > _MOST_BARS or not plan.infinite_rate:
        return
    # Imported here: it is slow, and --json does not need it.
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    swept = swept_size(plan)
    click.echo(f"\nHit rate by {swept.name}; the whole width is an infinite cache, {100 * plan.infinite_rate:.1f} %")
    grid = Table.grid(padding=(0, 1))
    for name, points in series_of(plan, swept).items():
        for place, point in enumerate(points):
            bar = ProgressBar(plan.infinite_rate, point.rate, width=_BAR_LETTERS)
            size = swept.text(swept.size_of(point.case))
            grid.add_row(Text("" if place else name), Text(size, justify="right"), bar, f"{100 * point.rate:.1f} %")
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(grid)
