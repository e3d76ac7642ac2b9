"""Tests of ``SupportsBatch``: a store does for many names what it does for each."""

from collections.abc import Sequence
from typing import Any

from kvtiers.api import SupportsBatch
from kvtiers.testing.applies import supports
from kvtiers.testing.chunk_store.base import Names, StoreTestBase, read, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, pattern, same_bytes

__all__ = ["BatchTests"]


def _write_many(memory: GuardedMemory, store: SupportsBatch, names: Sequence[str], contents: Sequence[bytes]) -> None:
    store.write_many(names, [memory.row(content).source() for content in contents])


class BatchTests(StoreTestBase):
    """``read_many_into`` and ``write_many``. ``store: Any``: the same object in two roles."""

    @supports(SupportsBatch)
    def test_a_batch_comes_back_as_it_was_written(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        wanted = names(33)
        contents = [pattern(seed, (1 + seed % 7) * PAGE) for seed in range(33)]
        written = store.write_many(wanted, [memory.row(content).source() for content in contents])
        assert list(written) == [True] * 33, f"write_many answered {written!r}; one True for each value kept"
        rows = [memory.row(len(content)) for content in contents]
        found = store.read_many_into(wanted[::-1], [row.destination() for row in rows[::-1]])
        assert list(found) == [True] * 33
        for row, content in zip(rows, contents, strict=True):
            same_bytes(row.content(), content, "a value of a batch")
            assert row.is_guarded(), "a batch wrote past one of its destinations: that is another value's memory"

    @supports(SupportsBatch)
    def test_a_batch_answers_each_name_in_order(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        wanted = names(6)
        _write_many(memory, store, [wanted[0], wanted[2], wanted[3]], [pattern(i, 2 * PAGE) for i in (0, 2, 3)])
        pages = [2, 2, 2, 3, 2, 1]  # the fourth is there, but shorter
        rows = [memory.row(n * PAGE) for n in pages]
        found = store.read_many_into(wanted, [row.destination() for row in rows])
        assert list(found) == [True, False, True, False, False, False]
        for i in (0, 2):
            same_bytes(rows[i].content(), pattern(i, 2 * PAGE), "a value beside absent ones")

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
        _write_many(memory, store, [other], [pattern(2, 2 * PAGE)])
        same_bytes(read(memory, store, other, 2 * PAGE) or b"", pattern(2, 2 * PAGE), "a batch's value, read alone")
        row = memory.row(2 * PAGE)
        assert list(store.read_many_into([one], [row.destination()])) == [True]
        same_bytes(row.content(), pattern(1, 2 * PAGE), "a value written alone, read in a batch")
        assert list(store.exists([one, other])) == [True, True]

    @supports(SupportsBatch)
    def test_no_buffer_of_a_batch_is_kept(self, store: Any, names: Names, memory: GuardedMemory) -> None:
        wanted = names(3)
        sources = [memory.row(pattern(seed, PAGE)) for seed in range(3)]
        store.write_many(wanted, [row.source() for row in sources])
        assert not any(row.is_kept() for row in sources), f"{type(store).__name__}.write_many kept a buffer"
        rows = [memory.row(PAGE) for _ in range(4)]
        store.read_many_into([*wanted, *names(1)], [row.destination() for row in rows])
        assert not any(row.is_kept() for row in rows), f"{type(store).__name__}.read_many_into kept a buffer"
