"""The inventory of a store: values selected, parsed and counted."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtiers._failures import plugin_boundary
from kvtiers.api import (
    ChunkStore,
    ConfigError,
    KvtiersError,
    StoreEntry,
    SupportsListing,
    TierConfig,
    TierUnavailable,
    group_of,
)
from kvtiers.cli.open_tier import anonymous_region, open_tier
from kvtiers.config import OffloadConfig
from kvtiers.layout.fingerprint_record import is_layout_record
from kvtiers.layout.namespace_epoch import is_record
from kvtiers.layout.storage_name import ParsedName, model_slug, parse_name
from kvtiers.plugins import did_you_mean, load_tier

__all__ = ["Inventory", "Origin", "Selection", "StoredValue", "Totals", "find_tier", "open_listable"]

_AGES = ((3600.0, "1h"), (86400.0, "1d"), (7 * 86400.0, "7d"), (30 * 86400.0, "30d"))


def find_tier(config: OffloadConfig, name: str, file: str) -> TierConfig:
    """Return the tier of this name; ConfigError, with the existing names, if there is none."""
    known = {tier.tier_name: tier for tier in config.secondary}
    if name not in known:
        there = ", ".join(known) or "none"
        raise ConfigError(f"{file}: no tier is named {name!r}.{did_you_mean(name, known)} Tiers: {there}")
    return known[name]


def open_listable(
    config: TierConfig, namespace: str, value_bytes: int, rows: int
) -> tuple[ChunkStore, SupportsListing, memoryview]:
    """Open a tier's store over a region of its own; return it in both its roles, and the region.

    One line if it cannot be opened, or cannot list.
    """
    name = config.tier_name
    if load_tier(config.type).kind != "store":
        raise ConfigError(f"tier {name!r} is a tier manager (type {config.type!r}), which cannot list what it holds")
    region = anonymous_region(rows, value_bytes)
    with plugin_boundary(KvtiersError) as opening:
        try:
            store = open_tier(config, namespace=namespace, value_bytes=value_bytes, region=region)
        except ConfigError as error:
            raise ConfigError([f"tier {name!r}: {problem}" for problem in error.problems]) from None
        except KvtiersError as error:
            raise type(error)(f"tier {name!r}: {error}") from None
    if opening.error:
        raise unavailable(name, "cannot be opened", opening.error)
    assert isinstance(store, ChunkStore)  # its plugin says so, and open_tier has seen to it
    if not isinstance(store, SupportsListing):
        store.close()
        raise ConfigError(
            f"tier {name!r} cannot list what it holds: its store, {type(store).__name__}, has no method list()"
        )
    return store, store, region


def unavailable(tier: str, what: str, error: str) -> TierUnavailable:
    """Return the line that reports a tier that raised. ``error``: the text that its ``plugin_boundary`` has kept."""
    return TierUnavailable(f"tier {tier!r} {what}: {error}")


class StoredValue(NamedTuple):
    """One value; ``parsed`` is its name taken apart, None if the name is not of our format."""

    entry: StoreEntry
    parsed: ParsedName | None

    @property
    def origin(self) -> "Origin":
        """Return the namespace, model and fingerprint of the value."""
        if self.parsed is None:
            return Origin(self.entry.name.partition("/")[0], "", "")
        return Origin(self.parsed.namespace, self.parsed.model, self.parsed.fingerprint)


class Origin(NamedTuple):
    """The origin of a value; model and fingerprint are empty where its name does not have them."""

    namespace: str
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected values: those that fit every given criterion. ``older_than``: seconds; ``now``: Unix time."""

    prefix: str = ""
    namespace: str = ""
    model: str = ""
    older_than: float | None = None
    larger_than: int | None = None
    fingerprint: str = ""
    tenant: str = ""
    now: float = field(default_factory=time.time)

    @property
    def is_all(self) -> bool:
        """Return whether no criterion is given, so that every value is selected."""
        ages_and_sizes = self.older_than is None and self.larger_than is None
        return ages_and_sizes and not (self.prefix or self.namespace or self.model or self.fingerprint or self.tenant)

    def of(self, store: SupportsListing, tier: str) -> Iterator[StoredValue]:
        """Yield the selected values in the store."""
        prefix = self.prefix or (f"{self.namespace}/" if self.namespace else "")
        if self.tenant and not self.prefix and self.namespace:
            prefix += f"t-{self.tenant}/"
        entries = iter(store.list(prefix))
        while True:
            with plugin_boundary() as listing:
                entry = next(entries, None)
            if listing.error:
                raise unavailable(tier, "cannot be listed", listing.error)
            if entry is None:
                return
            if is_record(entry.name) or is_layout_record(entry.name):
                continue  # no value, and never to be deleted by its age or its format
            value = StoredValue(entry, parse_name(entry.name))
            if self._fits(value, tier):
                yield value

    def _fits(self, value: StoredValue, tier: str) -> bool:
        entry, parsed = value
        if self.namespace and entry.name.partition("/")[0] != self.namespace:
            return False
        if self.tenant and not (parsed and parsed.tenant == self.tenant):
            return False
        if self.model and not (parsed and self._is_model(parsed)):
            return False
        if self.fingerprint and not (parsed and parsed.fingerprint.startswith(self.fingerprint)):
            return False
        if self.larger_than is not None and entry.nbytes <= self.larger_than:
            return False
        return self.older_than is None or self.now - modified(entry, tier) > self.older_than

    def _is_model(self, parsed: ParsedName) -> bool:
        wanted = self.model.lower()
        full = f"{parsed.model}-{parsed.fingerprint}"
        return parsed.model in {wanted, model_slug(self.model)} or (
            full.startswith(wanted) and len(wanted) > len(parsed.model)
        )


def modified(entry: StoreEntry, tier: str) -> float:
    """Return when the value was written or last used, or ConfigError if the store has no times."""
    if entry.modified is None:
        raise ConfigError(f"tier {tier!r} does not report the age of its values, so they cannot be chosen by age")
    return entry.modified


@dataclass
class Totals:
    """Totals of some values: number, bytes, oldest and newest time (Unix; None: not known)."""

    values: int = 0
    nbytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, entry: StoreEntry) -> None:
        """Count one more."""
        self.values += 1
        self.nbytes += entry.nbytes
        if entry.modified is not None:
            self.oldest = entry.modified if self.oldest is None else min(self.oldest, entry.modified)
            self.newest = entry.modified if self.newest is None else max(self.newest, entry.modified)


class Inventory:
    """Counts of values: in all, by origin, by namespace and tenant, by age."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.total = Totals()
        self.by_origin: dict[Origin, Totals] = {}
        self.by_tenant: dict[tuple[str, str], Totals] = {}
        self.by_age: dict[str, Totals] = {}
        self.by_group: dict[Origin, Counter[int]] = {}
        self.records: dict[Origin, dict[str, Any]] = {}
        """What the store has recorded of the values' fingerprints."""

    def add(self, value: StoredValue) -> None:
        """Count one value."""
        self.total.add(value.entry)
        self.by_origin.setdefault(value.origin, Totals()).add(value.entry)
        whose = (value.origin.namespace, value.parsed.tenant if value.parsed else "")
        self.by_tenant.setdefault(whose, Totals()).add(value.entry)
        self.by_age.setdefault(self._age(value.entry), Totals()).add(value.entry)
        if value.parsed is not None and not value.parsed.key_id:  # where its group is hidden
            self.by_group.setdefault(value.origin, Counter())[group_of(value.parsed.key)] += 1

    def release(self, origin: Origin) -> str:
        """Return of which release of which engine the values are; "" where the store has no record of it."""
        return str(self.records.get(origin, {}).get("release", ""))

    def uncompressed(self, origin: Origin) -> int | None:
        """Return how long the values of an origin are without compression; None where no record says it."""
        groups, counts = self.records.get(origin, {}).get("groups"), self.by_group.get(origin, Counter())
        try:
            return sum(count * int(groups[group]["value_bytes"]) for group, count in counts.items()) if groups else None
        except (LookupError, TypeError, ValueError):  # a record is for people only, and any bytes may stand there
            return None

    def _age(self, entry: StoreEntry) -> str:
        if entry.modified is None:
            return "unknown"
        age = self.now - entry.modified
        return next((f"under {label}" for limit, label in _AGES if age < limit), f"{_AGES[-1][1]} and more")

    def origins(self) -> Iterable[tuple[Origin, Totals]]:
        """Return the origins, in order of their names."""
        return sorted(self.by_origin.items())

    def ages(self) -> Iterable[tuple[str, Totals]]:
        """Return the ages, the youngest first."""
        order = [*(f"under {label}" for _, label in _AGES), f"{_AGES[-1][1]} and more", "unknown"]
        return [(label, self.by_age[label]) for label in order if label in self.by_age]
