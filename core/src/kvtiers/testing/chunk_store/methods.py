"""Tests of the four methods: a store returns exactly the bytes that were written under a name, or none.

Also of whose the buffers are, and of calls from several threads.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pytest

from kvtiers.api import ChunkStore
from kvtiers.api.declared import class_problems
from kvtiers.testing.chunk_store.base import LARGE, Names, StoreTestBase, length, read, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, is_one_version, pattern, same_bytes, version
from kvtiers.testing.running import frequent_switches, run_together

__all__ = ["BufferTests", "ConcurrencyTests", "NameTests", "ValueTests"]

_SIZES = {"one_page": PAGE, "three_pages": 3 * PAGE, "257_pages": 257 * PAGE, "large": LARGE}
_CONTENTS = {
    "zeros": bytes(2 * PAGE),
    "ones": b"\xff" * (2 * PAGE),
    "line_breaks": b"\r\n\x00\x1a" * (PAGE // 2),
    "quotes": b"\"'\\%s{}" + b"$" * (2 * PAGE - 7),
}
_KEPT = (
    "{store} kept the buffer that {call} was given, or something made from it (a memoryview, a slice, numpy.frombuffer)"
    " after the call; the row behind it is soon another value's. Copy what is kept."
)


def _bools(answers: Sequence[bool]) -> list[bool]:
    assert all(isinstance(answer, bool) for answer in answers), f"expected True or False only, got {answers!r}"
    return list(answers)


class ValueTests(StoreTestBase):
    """Values: what is written, read, replaced."""

    def test_open_store_opens_the_class_under_test(self, store: ChunkStore) -> None:
        assert isinstance(store, self.store_class), f"open_store opened a {type(store).__name__}, not the store_class"

    def test_the_class_says_what_core_asks_of_it(self, store: ChunkStore) -> None:
        transient = store.transient_errors
        assert isinstance(transient, tuple)
        assert all(isinstance(error, type) and issubclass(error, Exception) for error in transient)
        assert isinstance(store.asks_one_by_one, bool)

    def test_every_public_method_is_the_contract_s_and_every_ability_is_whole(self) -> None:
        problems = class_problems(self.store_class)
        assert not problems, "; ".join(problems)

    @pytest.mark.parametrize("nbytes", _SIZES.values(), ids=_SIZES.keys())
    def test_a_value_comes_back_as_it_was_written(
        self, store: ChunkStore, names: Names, memory: GuardedMemory, nbytes: int
    ) -> None:
        [name] = names(1)
        content = pattern(nbytes, nbytes)
        write(memory, store, name, content)
        back = read(memory, store, name, nbytes)
        assert back is not None, "read_into does not find a value that was just written"
        same_bytes(back, content, "the value that came back")

    @pytest.mark.parametrize("content", _CONTENTS.values(), ids=_CONTENTS.keys())
    def test_any_bytes_are_a_value(
        self, store: ChunkStore, names: Names, memory: GuardedMemory, content: bytes
    ) -> None:
        [name] = names(1)
        write(memory, store, name, content)
        back = read(memory, store, name, len(content))
        assert back is not None, "read_into does not find a value that was just written"
        same_bytes(back, content, "the value that came back")

    def test_an_absent_value_is_a_return_value(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        absent, present = names(2)
        assert read(memory, store, absent, PAGE) is None
        write(memory, store, present, pattern(1, PAGE))
        assert read(memory, store, absent, PAGE) is None, "a name that was never written has a value"

    @pytest.mark.parametrize("pages", [4, 6, 300, 2049], ids=lambda pages: f"{pages}_for_3")
    def test_a_shorter_value_is_read_with_its_length(
        self, store: ChunkStore, names: Names, memory: GuardedMemory, pages: int
    ) -> None:
        [name] = names(1)
        write(memory, store, name, pattern(1, 3 * PAGE))
        row = memory.row(pages * PAGE)
        found = length(store.read_into(name, row.destination()))
        assert found == 3 * PAGE, f"read_into says {found} of a value of {3 * PAGE} bytes, into {pages * PAGE} bytes"
        same_bytes(row.content()[:found], pattern(1, 3 * PAGE), "a value that is shorter than its destination")
        assert row.is_guarded(), "a read wrote past its destination: that is another value's memory"

    @pytest.mark.parametrize("pages", [1, 2], ids=lambda pages: f"{pages}_for_3")
    def test_a_longer_value_is_absent(self, store: ChunkStore, names: Names, memory: GuardedMemory, pages: int) -> None:
        [name] = names(1)
        write(memory, store, name, pattern(1, 3 * PAGE))
        row = memory.row(pages * PAGE)
        found = length(store.read_into(name, row.destination()))
        assert found == 0, f"read_into says {found} of a value of {3 * PAGE} bytes, into {pages * PAGE} bytes"
        assert row.is_guarded(), "a read wrote past its destination: that is another value's memory"
        assert read(memory, store, name, 3 * PAGE) is not None, "the value itself is gone after that"

    def test_a_large_value_that_is_longer_or_shorter_is_not_taken_for_one_of_that_length(
        self, store: ChunkStore, names: Names, memory: GuardedMemory
    ) -> None:
        [name] = names(1)
        write(memory, store, name, pattern(1, LARGE))
        assert length(store.read_into(name, memory.row(LARGE - PAGE).destination())) == 0
        row = memory.row(LARGE + PAGE)
        assert length(store.read_into(name, row.destination())) == LARGE
        same_bytes(row.content()[:LARGE], pattern(1, LARGE), "a value that is shorter than its destination")

    def test_an_empty_value_is_absent(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        [name] = names(1)
        with suppress(Exception):  # core writes none; a store may hold one of another program's, or refuse it
            store.write(name, memory.row(PAGE).source()[:0])
        assert length(store.read_into(name, memory.row(PAGE).destination())) == 0

    @pytest.mark.parametrize("pages", [2, 1, 5], ids=["same_length", "shorter", "longer"])
    def test_a_later_write_replaces_the_value(
        self, store: ChunkStore, names: Names, memory: GuardedMemory, pages: int
    ) -> None:
        [name] = names(1)
        write(memory, store, name, pattern(1, 2 * PAGE))
        later = pattern(2, pages * PAGE)
        write(memory, store, name, later)
        back = read(memory, store, name, len(later))
        assert back is not None, "the later value is not found"
        same_bytes(back, later, "the later value")
        if pages != 2:
            assert read(memory, store, name, 2 * PAGE) is None, "the older value, of another length, is still there"


class NameTests(StoreTestBase):
    """Names: which are there, which are not, which are removed."""

    def test_names_that_look_alike_are_kept_apart(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        endings = ["a/b", "a_b", "a-b", "a.b", "ab", "a/b0", "0a/b", "_a/b", "a/0000", "a/000", "a/1e3", "a/1000"]
        alike = [names.named(ending) for ending in endings]
        for seed, name in enumerate(alike):
            write(memory, store, name, pattern(seed, PAGE))
        for seed, name in enumerate(alike):
            same_bytes(read(memory, store, name, PAGE) or b"", pattern(seed, PAGE), f"the value of ...{name[-8:]!r}")

    def test_the_longest_name_is_a_name(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        room = 250 - len(names.prefix)
        parts = "/".join("0123456789abcdef" * 8 for _ in range(room // 129 + 1))
        name = names.named(parts[:room])
        write(memory, store, name, pattern(1, PAGE))
        same_bytes(read(memory, store, name, PAGE) or b"", pattern(1, PAGE), "the value of a name of 250 characters")
        store.delete([name])
        assert read(memory, store, name, PAGE) is None

    def test_exists_answers_each_name_in_order(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        asked = names(8)
        expected = [True, False, True, True, False, False, False, True]
        for name, present in zip(asked, expected, strict=True):
            if present:
                write(memory, store, name, pattern(1, PAGE))
        assert _bools(store.exists(asked)) == expected
        assert _bools(store.exists(asked[::-1])) == expected[::-1]
        assert [_bools(store.exists([name])) for name in asked] == [[present] for present in expected]

    def test_exists_answers_many_names_at_once(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        asked = names(300)
        for name in (asked[0], asked[255], asked[-1]):
            write(memory, store, name, pattern(1, PAGE))
        assert [i for i, found in enumerate(_bools(store.exists(asked))) if found] == [0, 255, 299]

    def test_delete_removes_these_values_and_no_others(
        self, store: ChunkStore, names: Names, memory: GuardedMemory
    ) -> None:
        held = [names.named(ending) for ending in ("a/1", "a/10", "a/100", "b/1", "b/10")]
        for seed, name in enumerate(held):
            write(memory, store, name, pattern(seed, PAGE))
        store.delete([held[0], held[3]])
        expected = [False, True, True, False, True]
        assert [read(memory, store, name, PAGE) is not None for name in held] == expected
        assert _bools(store.exists(held)) == expected

    def test_deleting_an_absent_value_is_no_error(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        present, absent, other = names(3)
        write(memory, store, present, pattern(1, PAGE))
        write(memory, store, other, pattern(2, PAGE))
        store.delete([absent])
        store.delete([present, absent])
        store.delete([present])
        store.delete([absent, other, absent])
        assert _bools(store.exists([present, absent, other])) == [False, False, False]

    def test_a_deleted_name_can_be_written_again(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        [name] = names(1)
        for seed in (1, 2):
            write(memory, store, name, pattern(seed, PAGE))
            same_bytes(read(memory, store, name, PAGE) or b"", pattern(seed, PAGE), "the value")
            store.delete([name])

    def test_no_names_are_no_error(self, store: ChunkStore) -> None:
        assert list(store.exists([])) == []
        store.delete([])


class BufferTests(StoreTestBase):
    """Whose memory it is."""

    def test_a_write_copies_what_it_keeps(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        [name] = names(1)
        content = pattern(1, 3 * PAGE)
        row = memory.row(content)
        store.write(name, row.source())
        row.poison()
        same_bytes(
            read(memory, store, name, 3 * PAGE) or b"", content, "the value, after its row was given to another one"
        )

    def test_a_read_gives_bytes_of_its_own(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        [name] = names(1)
        content = pattern(1, 3 * PAGE)
        write(memory, store, name, content)
        row = memory.row(3 * PAGE)
        assert store.read_into(name, row.destination()) == 3 * PAGE
        row.poison()
        same_bytes(read(memory, store, name, 3 * PAGE) or b"", content, "the value, after a reader changed its copy")

    def test_no_buffer_is_kept_after_a_write(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        [name] = names(1)
        for seed in (1, 2):  # the second write replaces a value
            row = memory.row(pattern(seed, 2 * PAGE))
            store.write(name, row.source())
            assert not row.is_kept(), _KEPT.format(store=type(store).__name__, call="write")

    def test_no_buffer_is_kept_after_a_read(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        name, absent = names(2)
        write(memory, store, name, pattern(1, 2 * PAGE))
        for asked, pages in ((name, 2), (name, 2), (name, 1), (name, 3), (absent, 2)):
            row = memory.row(pages * PAGE)
            store.read_into(asked, row.destination())
            assert not row.is_kept(), _KEPT.format(store=type(store).__name__, call="read_into")

    def test_a_read_writes_nothing_outside_its_destination(
        self, store: ChunkStore, names: Names, memory: GuardedMemory
    ) -> None:
        [name] = names(1)
        write(memory, store, name, pattern(1, 3 * PAGE))
        for pages in (1, 2, 3, 4):
            row = memory.row(pages * PAGE)
            store.read_into(name, row.destination())
            assert row.is_guarded(), f"a read into {pages * PAGE} bytes wrote past them: that is another value's memory"

    def test_a_write_changes_nothing_in_memory(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        [name] = names(1)
        content = pattern(1, 3 * PAGE)
        row = memory.row(content)
        store.write(name, row.source())
        same_bytes(row.content(), content, "the source of a write")
        assert row.is_guarded(), "a write changed the memory around its source: that is another value's"


class ConcurrencyTests(StoreTestBase):
    """Several threads, one store."""

    def test_64_threads_each_get_their_own_bytes(self, store: ChunkStore, names: Names, memory: GuardedMemory) -> None:
        def use(seed: int, mine: str, absent: str) -> None:
            nbytes = (1 + seed % 5) * 2 * PAGE
            source, target = memory.row(nbytes), memory.row(nbytes)
            for turn in range(3):
                content = pattern(64 * turn + seed, nbytes)
                source.fill(content)
                store.write(mine, source.source())
                target.poison()
                assert store.read_into(mine, target.destination()) == nbytes, f"thread {seed} does not find its value"
                same_bytes(target.content(), content, f"thread {seed}'s value")
                assert list(store.exists([absent, mine])) == [False, True], "another thread's answer"
                assert not store.read_into(absent, target.destination()), "a value under a name never written"
            if seed % 2:
                store.delete([mine])

        mine, absent = names(64), names(64)
        with frequent_switches():
            run_together([partial(use, i, mine[i], absent[i]) for i in range(64)], patience=self.patience)
        assert list(store.exists(mine)) == [not i % 2 for i in range(64)]

    def test_a_reader_never_sees_a_mix_of_two_writes(
        self, store: ChunkStore, names: Names, memory: GuardedMemory
    ) -> None:
        [name] = names(1)
        write(memory, store, name, version(1, 64 * PAGE))
        self._race(store, name, memory, writers=4, deleters=0)
        last = read(memory, store, name, 64 * PAGE)
        assert last is not None, "after the race of its writers the value is gone"
        assert is_one_version(last), "after the race of its writers the value is a mix"

    def test_a_reader_beside_a_delete_sees_all_or_nothing(
        self, store: ChunkStore, names: Names, memory: GuardedMemory
    ) -> None:
        [name] = names(1)
        self._race(store, name, memory, writers=2, deleters=1)
        write(memory, store, name, version(7, 64 * PAGE))
        same_bytes(read(memory, store, name, 64 * PAGE) or b"", version(7, 64 * PAGE), "a value written after the race")

    def _race(self, store: ChunkStore, name: str, memory: GuardedMemory, *, writers: int, deleters: int) -> None:
        """Write one name from several threads, while two others read it and some delete it."""
        turns = 15
        rows = [memory.row(64 * PAGE) for _ in range(2)]

        def write_versions(writer: int) -> None:
            for turn in range(turns):
                write(memory, store, name, version(2 + writer * turns + turn, 64 * PAGE))

        def read_one() -> None:
            row = rows.pop()
            found = store.read_into(name, row.destination())
            mixed = "a reader got a mix of two writes of the same name"
            assert found != 64 * PAGE or is_one_version(row.content()), mixed
            rows.append(row)

        with frequent_switches():
            run_together(
                [partial(write_versions, writer) for writer in range(writers)],
                meanwhile=[read_one, read_one, *[partial(store.delete, [name])] * deleters],
                patience=self.patience,
            )
