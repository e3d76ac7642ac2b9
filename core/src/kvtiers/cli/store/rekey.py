"""``kvtiers store rekey``: carries encrypted values from the previous key over to the current one, while engines run.

What is done and what is left stands in the store: each value's name has the id of its key. A value is read, decrypted,
encrypted, written under its new name, and only then deleted under the old one, so the command may be killed at any
moment, and run again.
"""

import json
from collections import defaultdict
from collections.abc import Container, Iterator

import click

from kvtiers.api import ChunkStore, ConfigError
from kvtiers.api.units import format_size
from kvtiers.cli.output import print_table
from kvtiers.cli.store.inventory import Origin, Selection, StoredValue, Totals
from kvtiers.cli.store.report import sum_of
from kvtiers.cli.store.selecting import exit_status, selecting
from kvtiers.cli.store.session import StoreSession, open_session
from kvtiers.cli.store.verify import Verdict, check_seal
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.seal import encrypt_value, read_encrypted_seal
from kvtiers.layout.storage_name import StorageNames

__all__ = ["rekey"]

_LEFT = "previous"  # of the previous key, and to be carried over
_REKEYED = "rekeyed"
_MEANINGS = {
    _REKEYED: "carried over to the current key",
    _LEFT: "of the previous key",
    "current": "of the current key before",
    "plain": "not encrypted: engines do not use them; 'prune --other-formats' deletes them",
    "locked": "of other keys than these two: left as they are",
    "other": "under names of another format: left as they are",
    "older": "of a format of an older release: left as they are; 'prune --older-format' deletes them",
    "damaged": "not what was stored: left as they are; 'verify --delete-damaged' deletes them",
    "gone": "evicted or deleted before they were read",
    "unreadable": "the store failed: left as they are",
}


@click.command(
    epilog="""\b
Examples:
  kvtiers store rekey disk --config tiers.yaml --dry-run     how much is of the previous key? (only lists)
  kvtiers store rekey disk --config tiers.yaml               carry it over; killed or stopped, it can be run again
  kvtiers store rekey disk --config tiers.yaml --model llama-3

The config has both keys: 'encryption: {key: ..., previous: ...}', as that of the engines, which may run meanwhile. A
tenant that is under 'encryption.tenants' has both there; --tenant carries over the values of one tenant alone. When
nothing is left of the previous key, take it out of their configs.

"""
    + exit_status("a value is damaged, or the store failed")
)
@click.option("--dry-run", is_flag=True, help="Only list: print how many values are of which key, and change nothing.")
@selecting
def rekey(
    ctx: click.Context, tier: str, file: str, selection: Selection, dry_run: bool, value_bytes: int, as_json: bool
) -> None:
    """Carry the values in TIER over from the previous key of 'encryption' to the current one, names included."""
    with open_session(file, tier, value_bytes, writes=not dry_run) as session:
        if session.encryption is None or not session.encryption.has_two_keys:
            raise ConfigError(
                f"{file}: tier {tier!r} has no two live keys; expected 'encryption: {{key: ..., previous: ...}}' in "
                "the config, and no 'encrypt: false' in the tier"
            )
        totals: dict[str, Totals] = defaultdict(Totals)
        written, origins = set[str](), set[Origin]()
        wanted = _of_previous_key(session, selection, totals, written)
        for value in wanted if dry_run else session.delete(_rekeyed(session, wanted, totals, written)):
            totals[_LEFT if dry_run else _REKEYED].add(value.entry)
            if value.parsed is not None and not session.keys.are_own(value.parsed.tenant):
                origins.add(value.origin)  # their record states the namespace's key
        if not (dry_run or session.is_over):
            session.change_records(origins)
        failed = totals.keys() & {"damaged", "unreadable"}
        _print(tier, totals, session, dry_run=dry_run, as_json=as_json)
        session.finish(ctx, 1 if failed else 0)


def _of_previous_key(
    session: StoreSession, selection: Selection, totals: dict[str, Totals], written: Container[str]
) -> Iterator[StoredValue]:
    """Yield the values of the previous key, and count all others but those that are written meanwhile."""
    for value in session.values(selection):
        if value.entry.name in written:
            continue  # a listing may or may not come by what was written after it had begun
        parsed = value.parsed
        ring = session.keys.of(parsed) if parsed is not None and parsed.key_id else None
        if parsed is None or not parsed.key_id:
            totals["other" if parsed is None else "plain"].add(value.entry)
        elif ring is None or ring.find(parsed.key_id) is None:
            totals["locked"].add(value.entry)
        elif parsed.key_id == ring.current.id:
            totals["current"].add(value.entry)
        else:
            yield value


def _rekeyed(
    session: StoreSession, values: Iterator[StoredValue], totals: dict[str, Totals], written: set[str]
) -> Iterator[StoredValue]:
    """Write each value under its new name, and yield it then, to be deleted under the old one; count the others."""

    def carry_over(store: ChunkStore, read: memoryview, value: StoredValue) -> Verdict:
        return _carry_over(session, store, read, value, written)

    for value, verdict in session.check(values, carry_over, done="carried over"):
        if verdict is Verdict.OK:
            yield value
        else:
            totals["damaged" if verdict is Verdict.FOREIGN else verdict.value].add(value.entry)


def _carry_over(
    session: StoreSession, store: ChunkStore, value: memoryview, stored: StoredValue, written: set[str]
) -> Verdict:
    name, parsed = stored.entry.name, stored.parsed
    assert parsed is not None, "only such are chosen"
    seal, ring = read_encrypted_seal(value), session.keys.of(parsed)
    assert ring is not None, "rekey needs two"
    verdict = check_seal(value, name, parsed, session.keys)  # decrypts it
    if verdict is not Verdict.OK or seal is None or ring.previous is None:
        return verdict
    prefix = name.rpartition("/")[0] + "/"
    token = ring.previous.reveal(parsed.key, prefix)
    if token is None:
        return Verdict.DAMAGED
    names = KeyedNames.of(StorageNames(prefix, parsed.layout_id), ring.current)
    fresh = names.of_token(token, prefix)
    encrypt_value([value[: seal.payload_bytes]], value, fresh, names.layout_id, names.key)
    written.add(fresh)
    store.write(fresh, value.toreadonly())
    return Verdict.OK


def _print(tier: str, totals: dict[str, Totals], session: StoreSession, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        counts = {what: {"values": totals[what].values, "bytes": totals[what].nbytes} for what in _MEANINGS}
        report = {"tier": tier, "dry_run": dry_run, **counts, "complete": not session.is_over}
        click.echo(json.dumps(report, indent=2))
        return
    rows = [
        [what, str(totals[what].values), format_size(totals[what].nbytes), meaning]
        for what, meaning in _MEANINGS.items()
        if what in totals
    ]
    print_table(["key", "values", "bytes", "meaning"], rows)
    what = ("would be carried over", _LEFT) if dry_run else ("carried over", _REKEYED)
    click.echo(f"{what[0]}: {sum_of(totals[what[1]])}")
