"""Tests of a store's optional abilities: batches of values in several views, pieces, listing, diagnosis, figures."""

import math
import re
import time
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from kvtiers.api import (
    Finding,
    StoreEntry,
    SupportsBatch,
    SupportsDiagnosis,
    SupportsListing,
    SupportsPieces,
    SupportsStats,
)
from kvtiers.testing.applies import supports
from kvtiers.testing.chunk_store.base import LARGE, Names, StoreTestBase, length, read, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, Row, pattern, same_bytes
from kvtiers.testing.running import frequent_switches, run_together

__all__ = ["BatchTests", "DiagnosisTests", "ListingTests", "PiecesTests", "StatsTests"]


def _cuts() -> list[list[int]]:
    """Return lengths of the views of values: pages, a seal, odd lengths at odd addresses, as many as there may be."""
    cuts = [[3 * PAGE], [2 * PAGE, PAGE], [PAGE - 64, 64], [1, 2 * PAGE - 8, 7], [PAGE // 16] * 64]
    random = Random(1)  # noqa: S311 -- the same cuts each time
    for count in (2, 5, 17, 64):
        at = sorted(random.sample(range(1, 5 * PAGE), count - 1))
        cuts.append([end - start for start, end in zip([0, *at], [*at, 5 * PAGE], strict=True)])
    return cuts


def _rows(memory: GuardedMemory, content: bytes, lengths: Sequence[int]) -> list[Row]:
    """Return a row for each part of the content."""
    rows, at = [], 0
    for nbytes in lengths:
        rows.append(memory.row(content[at : at + nbytes]))
        at += nbytes
    return rows


class BatchTests(StoreTestBase):
    """``read_many_into`` and ``write_many``. ``store: Any``: it has the methods of a store and the ability's."""

    @supports(SupportsBatch)
    def test_batch_values_says_how_many_values_a_call_takes(self, store: Any) -> None:
        assert isinstance(store.batch_values, int)
        assert store.batch_values >= 1

    @supports(SupportsBatch)
    def test_a_batch_comes_back_as_it_was_written(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        count = min(33, store.batch_values)
        wanted = names(count)
        contents = [pattern(seed, (1 + seed % 7) * PAGE) for seed in range(count)]
        written = store.write_many(wanted, [[memory.row(content).source()] for content in contents])
        assert list(written) == [None] * count, f"write_many answered {written!r}; expected None for each value kept"
        rows = [memory.row(len(content)) for content in contents]
        found = store.read_many_into(wanted[::-1], [[row.destination()] for row in rows[::-1]])
        assert list(map(length, found)) == list(map(len, contents[::-1]))
        for row, content in zip(rows, contents, strict=True):
            same_bytes(row.content(), content, "a value of a batch")
            assert row.is_guarded(), "a batch wrote past one of its destinations: that is another value's memory"

    @supports(SupportsBatch)
    def test_a_batch_answers_each_name_in_order(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        wanted = names(6)
        for i in (0, 2, 3):
            store.write_many([wanted[i]], [[memory.row(pattern(i, 2 * PAGE)).source()]])
        rooms = [2, 2, 2, 3, 2, 1]  # the fourth is there, but shorter; the third is there
        rows, found = [memory.row(n * PAGE) for n in rooms], list[int]()
        for start in range(0, 6, store.batch_values):
            some = slice(start, start + store.batch_values)
            found += store.read_many_into(wanted[some], [[row.destination()] for row in rows[some]])
        assert found == [2 * PAGE, 0, 2 * PAGE, 2 * PAGE, 0, 0]
        for i in (0, 2, 3):
            same_bytes(rows[i].content()[: 2 * PAGE], pattern(i, 2 * PAGE), "a value beside absent ones")

    @supports(SupportsBatch)
    def test_an_empty_batch_is_no_error(self, store: Any) -> None:
        assert list(store.read_many_into([], [])) == []
        assert list(store.write_many([], [])) == []

    @supports(SupportsBatch)
    def test_batches_and_single_calls_see_the_same_values(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        one, other = names(2)
        write(memory, store, one, pattern(1, 2 * PAGE))
        store.write_many([other], [[memory.row(pattern(2, 2 * PAGE)).source()]])
        same_bytes(read(memory, store, other, 2 * PAGE) or b"", pattern(2, 2 * PAGE), "a batch's value, read alone")
        row = memory.row(2 * PAGE)
        assert list(store.read_many_into([one], [[row.destination()]])) == [2 * PAGE]
        same_bytes(row.content(), pattern(1, 2 * PAGE), "a value written alone, read in a batch")
        assert list(store.exists([one, other])) == [True, True]

    @supports(SupportsBatch)
    def test_a_value_written_out_of_several_views_is_all_of_them_in_order(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        for seed, lengths in enumerate(_cuts()):
            [name] = names(1)
            content = pattern(seed, sum(lengths))
            write(memory, store, name, pattern(99, PAGE))  # it replaces what is there, of another length too
            rows = _rows(memory, content, lengths)
            assert list(store.write_many([name], [[row.source() for row in rows]])) == [None]
            back = read(memory, store, name, len(content)) or b""
            same_bytes(back, content, f"a value written out of {len(lengths)} views")

    @supports(SupportsBatch)
    def test_a_value_read_into_several_views_fills_all_of_them_in_order(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        for seed, lengths in enumerate(_cuts()):
            [name] = names(1)
            content = pattern(seed, sum(lengths))
            write(memory, store, name, content)
            for _ in range(2):
                rows = [memory.row(nbytes) for nbytes in lengths]
                assert list(store.read_many_into([name], [[row.destination() for row in rows]])) == [len(content)]
                same_bytes(b"".join(row.content() for row in rows), content, f"a value in {len(lengths)} views")
                assert all(row.is_guarded() for row in rows), "a view was written past its end: that is other memory"

    @supports(SupportsBatch)
    def test_of_several_views_a_shorter_value_fills_the_first_and_a_longer_one_is_absent(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        [name] = names(1)
        write(memory, store, name, pattern(1, 3 * PAGE))
        for lengths, expected in (
            ([PAGE, PAGE], 0),
            ([3 * PAGE - 1], 0),
            ([PAGE, 3 * PAGE], 3 * PAGE),
            ([3 * PAGE, 64], 3 * PAGE),
            ([7, PAGE, 2 * PAGE, PAGE, PAGE], 3 * PAGE),
        ):
            rows = [memory.row(nbytes) for nbytes in lengths]
            found = store.read_many_into([name], [[row.destination() for row in rows]])
            assert list(map(length, found)) == [expected], f"read_many_into answered {found!r} for views of {lengths}"
            back = b"".join(row.content() for row in rows)[:expected]
            same_bytes(back, pattern(1, 3 * PAGE)[:expected], "a value that is shorter than its views")
            assert all(row.is_guarded() for row in rows), "a view was written past its end: that is other memory"

    @supports(SupportsBatch)
    def test_no_buffer_of_a_batch_is_kept(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        written, absent = names(2)
        sources = [memory.row(pattern(seed, PAGE)) for seed in range(3)]
        store.write_many([written], [[row.source() for row in sources]])
        assert not any(row.is_kept() for row in sources), f"{type(store).__name__}.write_many kept a buffer"
        for name, count in ((written, 3), (written, 2), (written, 4), (absent, 2)):
            rows = [memory.row(PAGE) for _ in range(count)]
            store.read_many_into([name], [[row.destination() for row in rows]])
            assert not any(row.is_kept() for row in rows), f"{type(store).__name__}.read_many_into kept a buffer"


class PiecesTests(StoreTestBase):
    """``reads_in_pieces`` and ``read_pieces``. ``store: Any``: it has the methods of a store and the ability's."""

    @supports(SupportsPieces)
    def test_the_pieces_of_a_value_are_all_of_it_in_order(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        for seed, nbytes in enumerate((PAGE, 33 * PAGE, LARGE)):
            [name] = names(1)
            write(memory, store, name, pattern(seed, nbytes))
            if not store.reads_in_pieces(nbytes):
                continue
            for _ in range(2):
                pieces = store.read_pieces(name, nbytes)
                assert pieces is not None, f"read_pieces gave None for a value of {nbytes} bytes that was written"
                same_bytes(b"".join(map(bytes, pieces)), pattern(seed, nbytes), "a value in pieces")

    @supports(SupportsPieces)
    def test_what_is_absent_or_of_another_length_has_no_pieces(
        self, store: Any, names: Names, memory: GuardedMemory
    ) -> None:
        one, absent = names(2)
        write(memory, store, one, pattern(1, 3 * PAGE))
        for name, nbytes in ((absent, 3 * PAGE), (one, 2 * PAGE), (one, 4 * PAGE)):
            if store.reads_in_pieces(nbytes):
                pieces = store.read_pieces(name, nbytes)
                assert pieces is None, f"read_pieces gave pieces of what is not a value of {nbytes} bytes"


def _listed(store: SupportsListing, prefix: str) -> list[str]:
    return sorted(entry.name for entry in store.list(prefix))


class ListingTests(StoreTestBase):
    """``SupportsListing``. ``store: Any``: it has the methods of a store and the ability's."""

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
            f"modified is {entry.modified!r}; expected Unix seconds, or None where the store has none"
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
