"""The output of ``kvtiers store``: values and totals, as tables and as JSON."""

from collections.abc import Iterable
from typing import Any

import click

from kvtiers.api.units import format_size
from kvtiers.cli.output import print_table
from kvtiers.cli.store.inventory import Inventory, Origin, StoredValue, Totals

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


def print_inventory(inventory: Inventory, *, by_tenant: bool = False) -> None:
    """Print a table by origin, or by tenant, and one by age."""
    if by_tenant:
        columns = ["namespace", "tenant"]
        parts = [([space or "-", who or "-"], sums) for (space, who), sums in sorted(inventory.by_tenant.items())]
    else:
        columns = ["namespace", "model", "release", "fingerprint"]
        parts = [
            (
                [
                    origin.namespace or "-",
                    origin.model or "-",
                    inventory.release(origin) or "-",
                    origin.fingerprint or "-",
                ],
                totals,
            )
            for origin, totals in inventory.origins()
        ]
    if len(parts) > 1:
        parts.append((["total", *[""] * (len(columns) - 1)], inventory.total))
    rows = [[*names, *_counted(totals, inventory.now)] for names, totals in parts]
    print_table([*columns, "values", "bytes", "oldest", "newest"], rows)
    for origin, totals in () if by_tenant else inventory.origins():
        length = inventory.uncompressed(origin)
        if length is not None and length > totals.nbytes:
            model = f"{origin.namespace}/{origin.model}-{origin.fingerprint}"
            ratio = length / totals.nbytes
            click.echo(
                f"{model}: compressed from {format_size(length)} to {format_size(totals.nbytes)}, by {ratio:.2f}"
            )
    if inventory.total.values:
        ages = [[label, str(totals.values), format_size(totals.nbytes)] for label, totals in inventory.ages()]
        print_table(["age", "values", "bytes"], ages)


def _counted(totals: Totals, now: float) -> list[str]:
    return [str(totals.values), format_size(totals.nbytes), _age(totals.oldest, now), _age(totals.newest, now)]


def _recorded_json(inventory: Inventory, origin: Origin) -> dict[str, Any]:
    return {"release": inventory.release(origin), "uncompressed_bytes": inventory.uncompressed(origin)}


def inventory_json(inventory: Inventory) -> dict[str, Any]:
    """Return the same as JSON values; times are Unix seconds."""

    def totals_json(totals: Totals) -> dict[str, Any]:
        return {"values": totals.values, "bytes": totals.nbytes, "oldest": totals.oldest, "newest": totals.newest}

    return {
        "total": totals_json(inventory.total),
        "models": [
            {**origin._asdict(), **_recorded_json(inventory, origin), **totals_json(totals)}
            for origin, totals in inventory.origins()
        ],
        "tenants": [
            {"namespace": space, "tenant": who, **totals_json(totals)}
            for (space, who), totals in sorted(inventory.by_tenant.items())
            if who
        ],
        "ages": {label: {"values": totals.values, "bytes": totals.nbytes} for label, totals in inventory.ages()},
    }
