"""``kvtiers store``: list, verify and delete the values in a tier's store."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import click

from kvtiers.api.units import format_size, parse_size
from kvtiers.cli.output import print_table, with_unit
from kvtiers.cli.store.inventory import Selection, StoredValue, Totals, modified
from kvtiers.cli.store.proof import Proof
from kvtiers.cli.store.rekey import rekey
from kvtiers.cli.store.report import count, inventory_json, print_inventory, print_value, sum_of, value_json
from kvtiers.cli.store.retire import bump
from kvtiers.cli.store.selecting import exit_status, selecting
from kvtiers.cli.store.session import StoreSession, open_session
from kvtiers.cli.store.verify import Verdict

__all__ = ["store"]


@click.group(
    epilog="""\b
Examples:
  kvtiers store du disk --config tiers.yaml                        how much is there, of which models, how old?
  kvtiers store ls disk --config tiers.yaml --model llama --limit 20
  kvtiers store verify disk --config tiers.yaml                    read everything, check every seal
  kvtiers store prune disk --config tiers.yaml --older-than 30d --dry-run
  kvtiers store prune disk --config tiers.yaml --tenant blue --verify
  kvtiers store bump --config tiers.yaml                           other weights, same name: nothing old is found
  kvtiers store rekey disk --config tiers.yaml                     from the previous key to the current one

TIER is a tier's name in the config. Its store must be able to list its values. Every command may run while engines use
the store: deleted values are misses for them."""
)
def store() -> None:
    """List, count, check, delete, retire and rekey the values in a tier's store."""


store.add_command(bump)
store.add_command(rekey)


@store.command(epilog=exit_status(one="the store failed on the way"))
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="At most so many.")
@selecting
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


@store.command(epilog=exit_status(one="the store failed on the way"))
@click.option(
    "--by",
    type=click.Choice(["model", "tenant"]),
    default="model",
    show_default=True,
    help="A line for each model and fingerprint, or for each tenant.",
)
@selecting
def du(
    ctx: click.Context, tier: str, file: str, selection: Selection, by: str, value_bytes: int, as_json: bool
) -> None:
    """Count the values in TIER and their bytes, by namespace, model, fingerprint and age, or by tenant and age."""
    with open_session(file, tier, value_bytes, writes=False) as session:
        inventory = count(session.values(selection), selection.now)
        inventory.records = session.records(inventory.by_origin)
        if as_json:
            click.echo(
                json.dumps({"tier": tier, **inventory_json(inventory), "complete": not session.is_over}, indent=2)
            )
        else:
            print_inventory(inventory, by_tenant=by == "tenant")
        session.finish(ctx)


@store.command(epilog=exit_status(one="a value is damaged or cannot be read"))
@click.option("--delete-damaged", is_flag=True, help="Delete the values that are damaged.")
@selecting
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

    ok: the bytes that were stored under this name. foreign: of another format, or another layout than its name says;
    where the config has 'encryption', also what is not encrypted. locked: encrypted with a key that it does not have.
    older: of a format of an older release, which 'kvtiers store prune --older-format' deletes.
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
  kvtiers store prune disk --config tiers.yaml --older-format                    of older releases (reads everything)
  kvtiers store prune disk --config tiers.yaml --other-formats                   the same, and of newer ones
  kvtiers store prune disk --config tiers.yaml --tenant blue --verify            all of a tenant's, with proof

"""
    + exit_status(one="the store failed on the way, or --verify found what should be gone")
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
@click.option("--older-format", is_flag=True, help="Only values in a format of an older release; reads each value.")
@click.option("--dry-run", is_flag=True, help="Print what would go, and delete nothing.")
@click.option("--verify", is_flag=True, help="Read each deleted value again, and list again: none may be there.")
@selecting
def prune(
    ctx: click.Context,
    tier: str,
    file: str,
    selection: Selection,
    to_size: int | None,
    other_formats: bool,
    older_format: bool,
    dry_run: bool,
    verify: bool,
    value_bytes: int,
    as_json: bool,
) -> None:
    """Delete the values in TIER that match all of the given options; at least one is required."""
    if verify and (dry_run or to_size is not None or other_formats or older_format):
        raise click.UsageError("--verify is for values that all go: leave out --dry-run, --to-size and formats")
    if selection.is_all and to_size is None and not (other_formats or older_format):
        raise click.UsageError(
            "say which values: --older-than, --larger-than, --to-size, --model, --fingerprint, --tenant, --namespace, "
            "--prefix, --other-formats, --older-format"
        )
    with open_session(file, tier, value_bytes, writes=not dry_run) as session:
        verdicts = {Verdict.FOREIGN, Verdict.OLDER} if other_formats else None
        if older_format:  # each option narrows the selection
            verdicts = {Verdict.OLDER}
        chosen = _chosen(session, selection, to_size, verdicts)
        gone = _shown(chosen, selection.now, show=not as_json) if dry_run else session.delete(chosen)
        proof = Proof(session) if verify else None
        inventory = count(gone if proof is None else proof.read_again(gone), selection.now)
        if proof is not None:
            proof.list_again(selection)
        if as_json:
            report = {"tier": tier, "dry_run": dry_run, **inventory_json(inventory)}
            if proof is not None:
                report["proof"] = proof.as_json()
            click.echo(json.dumps({**report, "complete": not session.is_over}, indent=2))
        else:
            print_inventory(inventory)
            click.echo(f"{'would be deleted' if dry_run else 'deleted'}: {sum_of(inventory.total)}")
            if proof is not None:
                click.echo(proof.in_words())
        session.finish(ctx, 0 if proof is None or proof.holds else 1)


def _chosen(
    session: StoreSession, selection: Selection, to_size: int | None, verdicts: set[Verdict] | None
) -> Iterator[StoredValue]:
    """Yield the selected values, of these verdicts alone; None: whatever they are, without reading them."""
    values: Iterable[StoredValue] = session.values(selection)
    if verdicts is not None:
        values = (value for value, verdict in session.check(values) if verdict in verdicts)
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
