"""Tests of buffer ownership: a store stays within core's memory, and keeps no view of it after a call."""

from kvtiers.api import ChunkStore
from kvtiers.testing.chunk_store.base import Names, StoreTestBase, read, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, pattern, same_bytes

__all__ = ["BufferTests"]

_KEPT = (
    "{store} kept the buffer that {call} was given, or something made from it (a memoryview, a slice, numpy.frombuffer)"
    " after the call; the row behind it is soon another value's. Copy what is kept."
)


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
        assert store.read_into(name, row.destination())
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
