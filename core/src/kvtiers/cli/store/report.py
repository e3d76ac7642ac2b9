"""The output of ``kvtiers store``: values and totals, as tables and as JSON."""

from collections.abc import Iterable
from typing import Any

import click

from kvtiers.api.units import format_size
from kvtiers.cli.output import print_table
from kvtiers.cli.store.inventory import Held, Inventory, Share

__all__ = ["count", "inventory_json", "print_inventory", "print_value", "sum_of", "value_json"]

_AGE_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))


def count(values: Iterable[Held], now: float) -> Inventory:
    """Count the values, by everything that a report has."""
    inventory = Inventory(now)
    for held in values:
        inventory.add(held)
    return inventory


def value_json(held: Held) -> dict[str, Any]:
    """Return one value as it stands in a JSON report."""
    return {"name": held.entry.name, "bytes": held.entry.nbytes, "modified": held.entry.modified}


def print_value(held: Held, now: float) -> None:
    """Print one line: size, age, name."""
    click.echo(f"{format_size(held.entry.nbytes):>9}  {_age(held.entry.modified, now):>5}  {held.entry.name}")


def _age(modified: float | None, now: float) -> str:
    if modified is None:
        return "-"
    age = max(0, int(now - modified))
    return next((f"{age // seconds}{unit}" for seconds, unit in _AGE_UNITS if age >= 2 * seconds), f"{age}s")


def sum_of(share: Share) -> str:
    """Return the number of these values and their bytes."""
    return f"{share.values} {'value' if share.values == 1 else 'values'}, {format_size(share.nbytes)}"


def print_inventory(inventory: Inventory) -> None:
    """Print a table by origin, and one by age."""
    now = inventory.now
    rows = [
        [
            origin.namespace or "-",
            origin.model or "-",
            inventory.releases.get(origin) or "-",
            origin.fingerprint or "-",
            str(share.values),
            format_size(share.nbytes),
            _age(share.oldest, now),
            _age(share.newest, now),
        ]
        for origin, share in inventory.origins()
    ]
    if len(rows) > 1:
        total = inventory.total
        rows.append(
            [
                "total",
                "",
                "",
                "",
                str(total.values),
                format_size(total.nbytes),
                _age(total.oldest, now),
                _age(total.newest, now),
            ]
        )
    print_table(["namespace", "model", "release", "fingerprint", "values", "bytes", "oldest", "newest"], rows)
    if inventory.total.values:
        ages = [[label, str(share.values), format_size(share.nbytes)] for label, share in inventory.ages()]
        print_table(["age", "values", "bytes"], ages)


def inventory_json(inventory: Inventory) -> dict[str, Any]:
    """Return the same as JSON values; times are Unix seconds."""

    def share_json(share: Share) -> dict[str, Any]:
        return {"values": share.values, "bytes": share.nbytes, "oldest": share.oldest, "newest": share.newest}

    return {
        "total": share_json(inventory.total),
        "models": [
            {**origin._asdict(), "release": inventory.releases.get(origin, ""), **share_json(share)}
            for origin, share in inventory.origins()
        ],
        "ages": {label: {"values": share.values, "bytes": share.nbytes} for label, share in inventory.ages()},
    }
