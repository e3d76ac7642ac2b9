"""Tests of a store's optional abilities: listing, diagnosis, figures."""

import math
import re
import time
from functools import partial
from typing import Any

from kvtiers.api import Finding, StoreEntry, SupportsDiagnosis, SupportsListing, SupportsStats
from kvtiers.testing.applies import supports
from kvtiers.testing.chunk_store.base import Names, StoreTestBase, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, pattern
from kvtiers.testing.running import frequent_switches, run_together

__all__ = ["DiagnosisTests", "ListingTests", "StatsTests"]


def _listed(store: SupportsListing, prefix: str) -> list[str]:
    return sorted(entry.name for entry in store.list(prefix))


class ListingTests(StoreTestBase):
    """``SupportsListing``. ``store: Any``: the same object in two roles."""

    @supports(SupportsListing)
    def test_a_listing_has_each_value_once_with_its_length(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        held = names(5)
        for pages, name in enumerate(held, start=1):
            write(memory, store, name, pattern(pages, pages * PAGE))
        write(memory, store, held[0], pattern(9, 9 * PAGE))
        store.delete([held[1]])
        entries = list(store.list(names.prefix))
        assert all(isinstance(entry, StoreEntry) for entry in entries)
        expected = {held[0]: 9 * PAGE, held[2]: 3 * PAGE, held[3]: 4 * PAGE, held[4]: 5 * PAGE}
        assert sorted((entry.name, entry.nbytes) for entry in entries) == sorted(expected.items())

    @supports(SupportsListing)
    def test_a_listing_says_when_values_were_written(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        [name] = names(1)
        write(memory, store, name, pattern(1, PAGE))
        [entry] = store.list(names.prefix)
        day = 86400.0  # a backend's clock may be wrong; a clock of another kind is further off than this
        assert entry.modified is None or abs(entry.modified - time.time()) < day, (
            f"modified is {entry.modified!r}; expected Unix seconds, or None where the store does not know"
        )

    @supports(SupportsListing)
    def test_a_listing_has_every_name_that_starts_with_the_prefix(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        endings = ["a_b/1", "a_b/2", "axb/1", "a_/b", "b/a_b"]
        for ending in endings:
            write(memory, store, names.named(ending), pattern(1, PAGE))
        start = names.prefix
        for prefix in ("", "a", "a_", "a_b", "a_b/", "a_b/1", "b", "c", "_b/1"):
            expected = sorted(start + ending for ending in endings if ending.startswith(prefix))
            assert _listed(store, start + prefix) == expected, f"the listing of prefix ...{prefix!r}"

    @supports(SupportsListing)
    def test_a_listing_may_run_while_values_change(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        held, changing = names(20), names(20)
        row = memory.row(pattern(1, PAGE))
        for name in held:
            write(memory, store, name, pattern(1, PAGE))

        def change() -> None:
            for name in changing:
                store.write(name, row.source())
            store.delete(changing)

        def listing() -> None:
            for _ in range(5):
                assert set(held) <= set(_listed(store, names.prefix)), "a listing lost a value that never changed"

        with frequent_switches():
            run_together([listing, listing], meanwhile=[change], patience=self.patience)


class DiagnosisTests(StoreTestBase):
    """``SupportsDiagnosis``."""

    @supports(SupportsDiagnosis)
    def test_a_diagnosis_is_made_of_findings(self, store: Any) -> None:
        for finding in store.diagnose(2 << 20):
            assert isinstance(finding, Finding)
            assert finding.level in {"ok", "warning", "error"}, f"{finding.level!r} is not a level"
            assert finding.text.strip(), "a finding without a text"
            assert "\n" not in finding.text + finding.fix, "a finding is one line, its fix another"
            assert finding.level == "ok" or finding.fix, f"{finding.text!r} does not say what to do about it"

    @supports(SupportsDiagnosis)
    def test_a_diagnosis_finds_no_error_in_a_healthy_backend(self, store: Any) -> None:
        assert [finding.text for finding in store.diagnose(2 << 20) if finding.level == "error"] == []


class StatsTests(StoreTestBase):
    """``SupportsStats``."""

    @supports(SupportsStats)
    def test_stats_are_numbers_with_metric_names(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        for _ in range(2):
            for name, figure in store.stats().items():
                assert re.fullmatch(r"[a-z][a-z0-9_]*", name), f"{name!r}: expected lower case and underscores"
                assert isinstance(figure, int | float), f"{name} is {figure!r}; expected a number"
                assert math.isfinite(figure), f"{name} is {figure!r}"
            write(memory, store, names(1)[0], pattern(1, PAGE))

    @supports(SupportsStats)
    def test_stats_may_be_read_while_values_move(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        rows = [memory.row(pattern(seed, PAGE)) for seed in range(10)]
        for name in names(20):
            store.write(name, rows[0].source())

        def move(name: str) -> None:
            for row in rows:
                store.write(name, row.source())
                store.delete([name])

        def watch() -> None:
            for _ in range(20):
                dict(store.stats())

        moves = [partial(move, name) for name in names(4)]
        with frequent_switches():
            run_together([watch, watch], meanwhile=moves, patience=self.patience)
