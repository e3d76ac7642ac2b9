"""``kvtiers store bump``: retires a namespace, so that engines that start later find none of its values."""

import contextlib
import json
from typing import Any

import click

from kvtiers._failures import plugin_boundary
from kvtiers.api import ConfigError, KvtiersError, TierConfig
from kvtiers.cli.store.inventory import Selection, Totals, open_listable, unavailable
from kvtiers.cli.store.report import sum_of
from kvtiers.config import load_config
from kvtiers.layout.namespace_epoch import new_epoch, write_epoch
from kvtiers.layout.storage_name import check_namespace
from kvtiers.plugins import load_tier

__all__ = ["bump"]

_VALUE_BYTES = 4096  # of a record, the one value that is written
_DELETED_AT_ONCE = 256


@click.command(
    epilog="""\b
Examples:
  kvtiers store bump --config tiers.yaml                     after the weights have changed under the same name
  kvtiers store bump --config tiers.yaml --namespace prod --json

Engines that run go on with what they had, and share nothing with those that start later: end them first, or what they
write meanwhile stays in the store until 'kvtiers store prune' deletes it. A directory that each machine has for itself
is bumped on each machine.
Exit status: 0, 1 if a tier was not bumped, 2 if the config or the command line is wrong."""
)
@click.option("--config", "file", metavar="FILE", required=True, type=click.Path(), help="The tiers, as YAML.")
@click.option("--namespace", metavar="NAME", help="The namespace to bump. [default: that of the config]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def bump(ctx: click.Context, file: str, namespace: str | None, as_json: bool) -> None:
    """Retire all values of a namespace, in every tier of the config, and delete them.

    Each store gets a record, which every engine reads when it opens the store: older names are never used again.
    """
    config = load_config(file)
    wanted = check_namespace(namespace or config.namespace)
    if unwritable := [tier.tier_name for tier in config.secondary if tier.read_only]:
        raise ConfigError(f"{file}: read-only, so nothing can be retired in it: {', '.join(unwritable)}")
    outcomes: dict[str, dict[str, Any]] = {}
    for tier in config.secondary:
        try:
            deleted = _bump(tier, wanted)
        except KvtiersError as error:
            outcomes[tier.tier_name] = {"error": str(error)}
            click.echo(f"error: {error}", err=True)
            continue
        outcomes[tier.tier_name] = {"values": deleted.values, "bytes": deleted.nbytes}
        if not as_json:
            click.echo(f"{tier.tier_name}: namespace {wanted!r} bumped; deleted: {sum_of(deleted)}")
    if as_json:
        click.echo(json.dumps({"namespace": wanted, "tiers": outcomes}))
    ctx.exit(1 if any("error" in outcome for outcome in outcomes.values()) else 0)


def _bump(tier: TierConfig, namespace: str) -> Totals:
    """Write the record of a bump first, then delete the retired values: an engine that starts in between finds none."""
    name = tier.tier_name
    if load_tier(tier.type).kind != "store":
        raise ConfigError(f"tier {name!r} is a tier manager (type {tier.type!r}), whose values cannot be retired")
    store, listing, _ = open_listable(tier, namespace, _VALUE_BYTES, 1)
    deleted = Totals()
    with contextlib.closing(store):
        with plugin_boundary(KvtiersError) as bumping:
            write_epoch(store, namespace, new_epoch())
            batch: list[str] = []
            for value in Selection(namespace=namespace).of(listing, name):
                batch.append(value.entry.name)
                deleted.add(value.entry)
                if len(batch) == _DELETED_AT_ONCE:
                    store.delete(batch)
                    batch = []
            store.delete(batch)
        if bumping.error:
            raise unavailable(name, "was not bumped to the end", bumping.error)
    return deleted
