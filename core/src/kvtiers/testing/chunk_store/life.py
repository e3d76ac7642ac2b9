"""Tests of a store's life: what it holds when it is opened again, after a close or a kill, and what a close leaves.

Also of the time in which its backend fails: then it raises, which core counts until the breaker opens.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import pytest

from kvtiers._child_watch import ChildWatch, end_children
from kvtiers._failures import plugin_boundary
from kvtiers.api import ChunkStore, NotKept, SupportsBatch, SupportsListing
from kvtiers.testing.applies import applies_to
from kvtiers.testing.chunk_store.base import Names, OpenStore, Stores, StoreTestBase, length, read, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, is_one_version, pattern, same_bytes
from kvtiers.testing.killed_writer import kill_while_writing
from kvtiers.testing.running import (
    call_within,
    descriptors_left_since,
    open_descriptors,
    run_together,
    threads_left_since,
)

__all__ = ["FailureTests", "LifeTests"]

_BYTES = 1024 * PAGE  # long enough that a kill at any moment is most likely within a write


def _is_persistent(tests: type[StoreTestBase]) -> bool:
    return tests.persistent


def _is_volatile(tests: type[StoreTestBase]) -> bool:
    return not tests.persistent


class LifeTests(StoreTestBase):
    """Tests of a store from its opening to its close, or to a kill."""

    settling: ClassVar[float] = 8.0
    """Seconds in which a server may still finish what a killed writer had sent."""

    @applies_to(_is_persistent)
    def test_values_survive_a_reopen(self, stores: Stores, names: Names, memory: GuardedMemory) -> None:
        kept, deleted, replaced = names(3)
        store = stores.open()
        for name in (kept, deleted, replaced):
            write(memory, store, name, pattern(1, 5 * PAGE))
        store.delete([deleted])
        write(memory, store, replaced, pattern(2, 2 * PAGE))
        stores.close(store)
        store = stores.open()
        assert list(store.exists([kept, deleted, replaced])) == [True, False, True]
        same_bytes(read(memory, store, kept, 5 * PAGE) or b"", pattern(1, 5 * PAGE), "a value of an earlier run")
        same_bytes(read(memory, store, replaced, 2 * PAGE) or b"", pattern(2, 2 * PAGE), "a value of an earlier run")

    @applies_to(_is_volatile)
    def test_a_reopened_store_starts_empty(self, stores: Stores, names: Names, memory: GuardedMemory) -> None:
        [name] = names(1)
        store = stores.open()
        write(memory, store, name, pattern(1, PAGE))
        stores.close(store)
        store = stores.open()
        assert list(store.exists([name])) == [False], "a value survived: set persistent = True"
        assert read(memory, store, name, PAGE) is None

    @applies_to(_is_persistent)
    @pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
    def test_a_writer_killed_in_the_middle_leaves_no_half_value(
        self, open_store: OpenStore, stores: Stores, names: Names, memory: GuardedMemory, part: float
    ) -> None:
        written = names(3)
        kill_while_writing(open_store, written, _BYTES, part=part, patience=self.patience)
        store, row = stores.open(), memory.row(_BYTES)
        for name in written:
            until, agree = time.monotonic() + self.settling, False
            while not agree and time.monotonic() < until:  # a server may still finish what a killed writer had sent
                (is_there,) = store.exists([name])
                row.poison()
                found = row.content() if length(store.read_into(name, row.destination())) == _BYTES else None
                agree = is_there == (found is not None)
            assert found is None or is_one_version(found), "a killed writer left a value that is neither old nor new"
            assert agree, "a killed writer left a half value: exists says that it is there, read_into does not find it"

    @applies_to(_is_persistent)
    def test_a_killed_writer_does_not_hinder_the_next_one(
        self, open_store: OpenStore, stores: Stores, names: Names, memory: GuardedMemory
    ) -> None:
        written = names(3)
        kill_while_writing(open_store, written, _BYTES, part=0.5, patience=self.patience)

        def use() -> None:
            # A server may still finish what the killed writer had sent, of each name one value at most: what has come
            # in between so is written over, or deleted, once more.
            store = stores.open()
            for seed, name in enumerate(written):
                content = pattern(seed, _BYTES)
                write(memory, store, name, content)
                found = read(memory, store, name, _BYTES) or b""
                if found and is_one_version(found):
                    write(memory, store, name, content)
                    found = read(memory, store, name, _BYTES) or b""
                same_bytes(found, content, "the next writer's value")
            store.delete(written)
            if any(store.exists(written)):
                store.delete(written)
            assert not any(store.exists(written))

        where = call_within(self.patience, use)
        assert not where, (
            f"after a writer was killed the store could not be used within {self.patience:g} s: is a lock left "
            f"behind?{where}"
        )

    def test_close_ends_all_threads(self, stores: Stores, names: Names, memory: GuardedMemory) -> None:
        self._open_use_close(stores, names, memory)  # what a library starts once, and shares, is there after this
        before = set(threading.enumerate())
        store = self._open_use_close(stores, names, memory)
        left = threads_left_since(before)
        assert not left, f"after close, {type(store).__name__} still runs the threads {left}"

    def test_close_ends_all_child_processes(self, stores: Stores, names: Names, memory: GuardedMemory) -> None:
        self._open_use_close(stores, names, memory)
        watch = ChildWatch()
        store = self._open_use_close(stores, names, memory)
        left = watch.left(store, 5.0)
        end_children(left)
        lines = [f"{starter} left a child process ({pid})" for pid, starter in left.items()]
        assert not left, f"after close: {'; '.join(lines)}"

    def test_close_closes_all_descriptors(self, stores: Stores, names: Names, memory: GuardedMemory) -> None:
        self._open_use_close(stores, names, memory)
        before = open_descriptors()
        store = self._open_use_close(stores, names, memory)
        left = descriptors_left_since(before)
        assert not left, f"after close, {type(store).__name__} still has the descriptors {left}"

    def _open_use_close(self, stores: Stores, names: Names, memory: GuardedMemory) -> ChunkStore:
        # The store is returned, so that it is close that ends things and not its reference count.
        store = stores.open()

        def use(name: str) -> None:
            write(memory, store, name, pattern(1, PAGE))
            read(memory, store, name, PAGE)
            store.exists([name])
            store.delete([name])

        run_together([partial(use, name) for name in names(4)], patience=self.patience)
        stores.close(store)
        return store


def _can_be_broken(tests: Any) -> bool:
    return hasattr(tests, "break_backend")


def _calls(store: Any, name: str, memory: GuardedMemory) -> dict[str, Callable[[], object]]:
    """Return every call that has to reach the backend."""
    row = memory.row(pattern(1, PAGE))
    calls = {
        "read_into": lambda: store.read_into(name, row.destination()),
        "write": lambda: store.write(name, row.source()),
        "exists": lambda: store.exists([name]),
        "delete": lambda: store.delete([name]),
    }
    if isinstance(store, SupportsBatch):
        calls["read_many_into"] = lambda: store.read_many_into([name], [[row.destination()]])
        calls["write_many"] = lambda: store.write_many([name], [[row.source()]])
    if isinstance(store, SupportsListing):
        calls["list"] = lambda: list(store.list(name))
    return calls


class FailureTests(StoreTestBase):
    """There if the class has a fixture ``break_backend``."""

    @applies_to(_can_be_broken)
    def test_a_backend_that_fails_is_an_exception_and_never_an_answer(
        self,
        store: ChunkStore,
        names: Names,
        memory: GuardedMemory,
        break_backend: Callable[[ChunkStore], AbstractContextManager[object]],
    ) -> None:
        [name] = names(1)
        write(memory, store, name, pattern(1, PAGE))
        swallowed = []
        with break_backend(store):
            for method, call in _calls(store, name, memory).items():
                outcome = self._outcome(call)
                swallowed += [f"{method} {outcome}"] if outcome else []
        assert not swallowed, (
            f"while the backend failed, {type(store).__name__}: {'; '.join(swallowed)}. An error that is swallowed "
            "looks like a miss, or like a value that was kept; let the exception out"
        )

    def _outcome(self, call: Callable[[], object]) -> str:
        """Return what a call did that should have raised; "" if it raised."""
        answers: list[object] = []
        try:
            with plugin_boundary(NotKept) as calling:
                where = call_within(self.patience, lambda: answers.append(call()))
        except NotKept:
            return "raised NotKept, which says that all is well but for this value"
        if calling.error:
            return ""  # it raised, as it has to
        return f"did not return within {self.patience:g} s{where}" if where else f"returned {answers[0]!r}"
