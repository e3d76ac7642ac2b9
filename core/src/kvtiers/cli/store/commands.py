"""``kvtiers store``: list, verify and delete the values in a tier's store."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from kvtiers.api.units import format_size, parse_duration, parse_size
from kvtiers.cli.output import print_table, value_bytes_option, with_unit
from kvtiers.cli.store.inventory import Selection, StoredValue, Totals, modified
from kvtiers.cli.store.report import count, inventory_json, print_inventory, print_value, sum_of, value_json
from kvtiers.cli.store.retire import bump
from kvtiers.cli.store.session import StoreSession, open_session
from kvtiers.cli.store.verify import Verdict

__all__ = ["store"]

_EXIT = """
Exit status: 0 all is well, 1 {one}, 2 the config or the command line is wrong, 130 stopped by Ctrl-C (what was done
until then is reported)."""


def _fingerprint(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    if value and not re.fullmatch(r"[0-9a-f]{4,24}", value.lower()):
        raise click.BadParameter(f"expected 4 to 24 hex digits, got {value!r}")
    return value.lower()


def _selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the tier, the config, and the options that say which values are meant, as a ``Selection``."""

    @functools.wraps(command)
    def run(
        *args: Any,
        prefix: str,
        namespace: str,
        model: str,
        older_than: float | None,
        larger_than: int | None,
        fingerprint: str,
        **options: Any,
    ) -> Any:
        selection = Selection(prefix, namespace, model, older_than, larger_than, fingerprint)
        return command(*args, selection=selection, **options)

    options = [
        click.argument("tier"),
        click.option("--config", "file", metavar="FILE", required=True, type=click.Path(), help="The tiers, as YAML."),
        click.option("--namespace", metavar="NAME", default="", help="Only values of this namespace."),
        click.option(
            "--model", metavar="NAME", default="", help="Only values of this model: its name, or as 'du' shows it."
        ),
        click.option(
            "--fingerprint",
            metavar="HEX",
            default="",
            callback=_fingerprint,
            help="Only values whose fingerprint begins so, as 'du', 'kvtiers status' and an engine's start show it.",
        ),
        click.option("--prefix", metavar="TEXT", default="", help="Only values whose names begin so."),
        click.option(
            "--older-than",
            metavar="DURATION",
            callback=with_unit(parse_duration),
            help="Only values not written (or used, where the tier records it) for this long: 12h, 30d.",
        ),
        click.option(
            "--larger-than", metavar="SIZE", callback=with_unit(parse_size), help="Only values larger than this."
        ),
        value_bytes_option("Size of the memory for one value that the tier is opened with; grows where it has to."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ]
    for option in reversed(options):
        run = option(run)
    return click.pass_context(run)


@click.group(
    epilog="""\b
Examples:
  kvtiers store du disk --config tiers.yaml                        how much is there, of which models, how old?
  kvtiers store ls disk --config tiers.yaml --model llama --limit 20
  kvtiers store verify disk --config tiers.yaml                    read everything, check every seal
  kvtiers store prune disk --config tiers.yaml --older-than 30d --dry-run
  kvtiers store bump --config tiers.yaml                           other weights, same name: nothing old is found

TIER is a tier's name in the config. Its store must be able to list its values. Every command may run while engines use
the store: deleted values are misses for them."""
)
def store() -> None:
    """List, count, check, delete and retire the values in a tier's store."""


store.add_command(bump)


@store.command(epilog=_EXIT.format(one="the store failed on the way"))
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="At most so many.")
@_selecting
def ls(
    ctx: click.Context, tier: str, file: str, selection: Selection, limit: int | None, value_bytes: int, as_json: bool
) -> None:
    """List the values in TIER, a line each: size, age, name. In the store's own order."""
    with open_session(file, tier, value_bytes, writes=False) as session:
        found = Totals()
        listed: list[dict[str, Any]] = []
        for value in session.values(selection):
            if limit is not None and found.values == limit:
                break
            found.add(value.entry)
            if as_json:
                listed.append(value_json(value))
            else:
                print_value(value, selection.now)
        if as_json:
            click.echo(json.dumps({"tier": tier, "values": listed, "complete": not session.is_over}, indent=2))
        else:
            click.echo(sum_of(found))
        session.finish(ctx)


@store.command(epilog=_EXIT.format(one="the store failed on the way"))
@_selecting
def du(ctx: click.Context, tier: str, file: str, selection: Selection, value_bytes: int, as_json: bool) -> None:
    """Count the values in TIER and their bytes, by namespace, model, fingerprint and age."""
    with open_session(file, tier, value_bytes, writes=False) as session:
        inventory = count(session.values(selection), selection.now)
        inventory.releases = session.releases(inventory.by_origin)
        if as_json:
            click.echo(
                json.dumps({"tier": tier, **inventory_json(inventory), "complete": not session.is_over}, indent=2)
            )
        else:
            print_inventory(inventory)
        session.finish(ctx)


@store.command(epilog=_EXIT.format(one="a value is damaged or cannot be read"))
@click.option("--delete-damaged", is_flag=True, help="Delete the values that are damaged.")
@_selecting
def verify(
    ctx: click.Context,
    tier: str,
    file: str,
    selection: Selection,
    delete_damaged: bool,
    value_bytes: int,
    as_json: bool,
) -> None:
    """Read the values in TIER and check the seal of each.

    ok: the bytes that were stored under this name. foreign: of another format, or another layout than its name says.
    damaged: other bytes. gone: evicted or deleted before it was read. unreadable: the store failed.
    """
    with open_session(file, tier, value_bytes, writes=delete_damaged) as session:
        totals = {verdict: Totals() for verdict in Verdict}
        damaged: list[StoredValue] = []
        for value, verdict in session.check(session.values(selection)):
            totals[verdict].add(value.entry)
            if verdict in {Verdict.DAMAGED, Verdict.UNREADABLE} and not as_json:
                click.echo(f"{verdict.value}: {value.entry.name}")
            if verdict is Verdict.DAMAGED:
                damaged.append(value)
        deleted = sum(1 for _ in session.delete(damaged)) if delete_damaged else 0
        if as_json:
            counts = {verdict.value: {"values": s.values, "bytes": s.nbytes} for verdict, s in totals.items()}
            names = [value.entry.name for value in damaged]
            report = {"tier": tier, **counts, "damaged_names": names, "deleted": deleted}
            click.echo(json.dumps({**report, "complete": not session.is_over}, indent=2))
        else:
            rows = [
                [v.value, str(s.values), format_size(s.nbytes)]
                for v, s in totals.items()
                if s.values or v is Verdict.OK
            ]
            print_table(["verdict", "values", "bytes"], rows)
            if delete_damaged:
                click.echo(f"{deleted} damaged values deleted")
        session.finish(ctx, 1 if totals[Verdict.DAMAGED].values or totals[Verdict.UNREADABLE].values else 0)


@store.command(
    epilog="""\b
Examples:
  kvtiers store prune disk --config tiers.yaml --model llama-2-7b               a model that is not served any more
  kvtiers store prune disk --config tiers.yaml --namespace test --to-size 10GiB  the oldest, until 10 GiB are left
  kvtiers store prune disk --config tiers.yaml --other-formats                   of other versions (reads everything)

"""
    + _EXIT.format(one="the store failed on the way")
)
@click.option(
    "--to-size",
    metavar="SIZE",
    callback=with_unit(parse_size),
    help="Delete the oldest of the selected values until at most this much is left.",
)
@click.option(
    "--other-formats", is_flag=True, help="Only values of another format of names or seals; reads each value."
)
@click.option("--dry-run", is_flag=True, help="Print what would go, and delete nothing.")
@_selecting
def prune(
    ctx: click.Context,
    tier: str,
    file: str,
    selection: Selection,
    to_size: int | None,
    other_formats: bool,
    dry_run: bool,
    value_bytes: int,
    as_json: bool,
) -> None:
    """Delete the values in TIER that match all of the given options; at least one is required."""
    if selection.is_all and to_size is None and not other_formats:
        raise click.UsageError(
            "say which values: --older-than, --larger-than, --to-size, --model, --fingerprint, --namespace, --prefix, "
            "--other-formats"
        )
    with open_session(file, tier, value_bytes, writes=not dry_run) as session:
        chosen = _chosen(session, selection, to_size, other_formats=other_formats)
        gone = _shown(chosen, selection.now, show=not as_json) if dry_run else session.delete(chosen)
        inventory = count(gone, selection.now)
        if as_json:
            report = {"tier": tier, "dry_run": dry_run, **inventory_json(inventory)}
            click.echo(json.dumps({**report, "complete": not session.is_over}, indent=2))
        else:
            print_inventory(inventory)
            click.echo(f"{'would be deleted' if dry_run else 'deleted'}: {sum_of(inventory.total)}")
        session.finish(ctx)


def _chosen(
    session: StoreSession, selection: Selection, to_size: int | None, *, other_formats: bool
) -> Iterator[StoredValue]:
    values: Iterable[StoredValue] = session.values(selection)
    if other_formats:
        values = (value for value, verdict in session.check(values) if verdict is Verdict.FOREIGN)
    if to_size is None:
        yield from values
        return
    everything = sorted(values, key=lambda value: modified(value.entry, session.name))
    excess = sum(value.entry.nbytes for value in everything) - to_size
    for value in everything:
        # An incomplete listing must not decide which values are the oldest.
        if excess <= 0 or session.is_over:
            return
        excess -= value.entry.nbytes
        yield value


def _shown(values: Iterable[StoredValue], now: float, *, show: bool) -> Iterator[StoredValue]:
    for value in values:
        if show:
            print_value(value, now)
        yield value
