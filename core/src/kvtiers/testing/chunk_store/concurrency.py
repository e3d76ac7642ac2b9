"""Tests of concurrency: core's threads call a store at the same time, also for the same name."""

from functools import partial

from kvtiers.api import ChunkStore
from kvtiers.testing.chunk_store.base import Names, StoreTestBase, read, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, is_one_version, pattern, same_bytes, version
from kvtiers.testing.running import frequent_switches, run_together

__all__ = ["ConcurrencyTests"]


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
                assert store.read_into(mine, target.destination()), f"thread {seed} does not find its value"
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
            assert not found or is_one_version(row.content()), "a reader got a mix of two writes of the same name"
            rows.append(row)

        with frequent_switches():
            run_together(
                [partial(write_versions, writer) for writer in range(writers)],
                meanwhile=[read_one, read_one, *[partial(store.delete, [name])] * deleters],
                patience=self.patience,
            )
