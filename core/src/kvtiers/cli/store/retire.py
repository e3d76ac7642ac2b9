"""``kvtiers store bump``: retires a namespace, so that engines that start later find none of its values."""

import contextlib
import errno
import json
import os
from typing import Any

import click

from kvtiers._failures import plugin_boundary
from kvtiers.api import ConfigError, KvtiersError, StartError, TierConfig
from kvtiers.cli.store.inventory import Selection, Totals, open_listable, unavailable
from kvtiers.cli.store.report import sum_of
from kvtiers.config import load_config
from kvtiers.layout.namespace_epoch import new_epoch, write_epoch
from kvtiers.layout.storage_name import check_namespace
from kvtiers.plugins import load_tier
from kvtiers.pool.loan import clear_pool

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
is bumped on each machine. A pool is cleared where the config names it ('primary.pool') and this command runs: run
'kvtiers pool clear' for each other pool, on each machine, before an engine starts.
Exit status: 0, 1 if a tier was not bumped or the pool not cleared, 2 if the config or the command line is wrong."""
)
@click.option("--config", "file", metavar="FILE", required=True, type=click.Path(), help="The tiers, as YAML.")
@click.option("--namespace", metavar="NAME", help="The namespace to bump. [default: that of the config]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def bump(ctx: click.Context, file: str, namespace: str | None, as_json: bool) -> None:
    """Retire all values of a namespace, in every tier of the config, delete them, and clear the config's pool.

    Each store gets a record, which every engine reads when it opens the store: older names are never used again. A pool
    has no record: it forgets its chunks, of any namespace.
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
    # The pool last: an engine that has started in between has it by now, which is an error.
    pool = {} if config.primary.pool is None else _clear(config.primary.pool)
    if pool.get("chunks") is not None and not as_json:
        click.echo(f"pool: {pool['chunks']} chunks forgotten; each other pool needs its own 'kvtiers pool clear'")
    if as_json:
        click.echo(json.dumps({"namespace": wanted, "tiers": outcomes} | ({"pool": pool} if pool else {})))
    ctx.exit(1 if any("error" in outcome for outcome in (*outcomes.values(), pool)) else 0)


def _clear(path: str) -> dict[str, Any]:
    """Have the pool at this path forget all chunks; say on standard error why it does not. No pool is no error."""
    clear = f"'kvtiers pool clear --socket {path}'"
    if _is_missing(path):
        click.echo(f"warning: pool: no keeper at {path} here; where there is one, run {clear}", err=True)
        return {"chunks": None}
    try:
        return {"chunks": clear_pool(path)}
    except StartError as error:
        click.echo(f"error: pool: {error}", err=True)
        click.echo(f"The next engine finds in it what was retired: end the engines, then run {clear}", err=True)
        return {"error": str(error)}


def _is_missing(path: str) -> bool:
    """Return whether nothing is at this path. A dead keeper's socket is: the next one may have its chunks."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return False


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
