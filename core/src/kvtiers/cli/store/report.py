"""The output of ``kvtiers store``: values and totals, as tables and as JSON."""

from collections.abc import Iterable
from typing import Any

import click

from kvtiers.api.units import format_size
from kvtiers.cli.output import print_table
from kvtiers.cli.store.inventory import Inventory, StoredValue, Totals

__all__ = ["count", "inventory_json", "print_inventory", "print_value", "sum_of", "value_json"]

_AGE_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))


def count(values: Iterable[StoredValue], now: float) -> Inventory:
    """Count the values, by everything that a report has."""
    inventory = Inventory(now)
    for value in values:
        inventory.add(value)
    return inventory


def value_json(value: StoredValue) -> dict[str, Any]:
    """Return one value as it stands in a JSON report."""
    return {"name": value.entry.name, "bytes": value.entry.nbytes, "modified": value.entry.modified}


def print_value(value: StoredValue, now: float) -> None:
    """Print one line: size, age, name."""
    click.echo(f"{format_size(value.entry.nbytes):>9}  {_age(value.entry.modified, now):>5}  {value.entry.name}")


def _age(modified: float | None, now: float) -> str:
    if modified is None:
        return "-"
    age = max(0, int(now - modified))
    return next((f"{age // seconds}{unit}" for seconds, unit in _AGE_UNITS if age >= 2 * seconds), f"{age}s")


def sum_of(totals: Totals) -> str:
    """Return the number of these values and their bytes."""
    return f"{totals.values} {'value' if totals.values == 1 else 'values'}, {format_size(totals.nbytes)}"


def print_inventory(inventory: Inventory) -> None:
    """Print a table by origin, and one by age."""
    now = inventory.now
    rows = [
        [
            origin.namespace or "-",
            origin.model or "-",
            inventory.releases.get(origin) or "-",
            origin.fingerprint or "-",
            str(totals.values),
            format_size(totals.nbytes),
            _age(totals.oldest, now),
            _age(totals.newest, now),
        ]
        for origin, totals in inventory.origins()
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
        ages = [[label, str(totals.values), format_size(totals.nbytes)] for label, totals in inventory.ages()]
        print_table(["age", "values", "bytes"], ages)


def inventory_json(inventory: Inventory) -> dict[str, Any]:
    """Return the same as JSON values; times are Unix seconds."""

    def totals_json(totals: Totals) -> dict[str, Any]:
        return {"values": totals.values, "bytes": totals.nbytes, "oldest": totals.oldest, "newest": totals.newest}

    return {
        "total": totals_json(inventory.total),
        "models": [
            {**origin._asdict(), "release": inventory.releases.get(origin, ""), **totals_json(totals)}
            for origin, totals in inventory.origins()
        ],
        "ages": {label: {"values": totals.values, "bytes": totals.nbytes} for label, totals in inventory.ages()},
    }
