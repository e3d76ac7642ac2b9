"""The base of all tests of a store: the author's fixture, and stores, names and rows for one test."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar

import pytest

from kvtiers.api import ChunkStore
from kvtiers.testing.backend import Step, require_backend
from kvtiers.testing.guarded import PAGE, GuardedMemory
from kvtiers.testing.running import call_within

__all__ = ["LARGE", "Names", "OpenStore", "StoreTestBase", "Stores", "length", "read", "write"]

LARGE = 2048 * PAGE + PAGE
"""A value larger than what buffers and network messages usually hold, and of no round length."""

OpenStore = Callable[[], ChunkStore]


class Names:
    """Storage names of the usual shape that no other test and no other run has used."""

    def __init__(self) -> None:
        self.prefix = f"kvtiers-kit/model-{uuid.uuid4().hex[:24]}/"
        self.made: list[str] = []

    def __call__(self, count: int) -> list[str]:
        """Return this many new names."""
        return [self.named(f"{uuid.uuid4().hex}00000000") for _ in range(count)]

    def named(self, ending: str) -> str:
        """Return the name with this ending."""
        self.made.append(self.prefix + ending)
        return self.made[-1]


class Stores:
    """Opens stores for one test, and closes at its end those that the test did not close."""

    def __init__(self, open_store: OpenStore, *, persistent: bool) -> None:
        self._open_store, self._persistent = open_store, persistent
        self._open: list[ChunkStore] = []

    def open(self) -> ChunkStore:
        """Open a store on the backing that all stores of this test share."""
        store = self._open_store()
        self._open.append(store)
        return store

    def close(self, store: ChunkStore) -> None:
        """Close a store within the test."""
        self._open.remove(store)
        store.close()

    def end(self, names: list[str], *, patience: float) -> None:
        """Remove what the test wrote, and close what it left open."""
        # Deleting and closing have tests of their own; here a failure, or a hang, would only blame the wrong one.
        with suppress(Exception):
            call_within(patience, lambda: self._clean_up(names))

    def _clean_up(self, names: list[str]) -> None:
        if self._persistent and not self._open:
            self.open()
        try:
            if self._open:
                self._open[0].delete(names)
        finally:
            for store in self._open:
                store.close()


def write(memory: GuardedMemory, store: ChunkStore, name: str, content: bytes) -> None:
    """Write the content from a row of its own."""
    store.write(name, memory.row(content).source())


def read(memory: GuardedMemory, store: ChunkStore, name: str, nbytes: int) -> bytes | None:
    """Read a value of this length into a poisoned row of its own; None: the store says that it has none."""
    row = memory.row(nbytes)
    return row.content() if length(store.read_into(name, row.destination())) == nbytes else None


def length(answer: object) -> int:
    """Return the answer of a read, which is a length."""
    assert type(answer) is int, f"a read returned {answer!r}; the contract says the value's length, or 0"
    return answer


def _first_steps(open_store: OpenStore) -> Iterator[Step]:
    """Yield the calls that show whether the backend is there, each on a value that is gone afterwards.

    What those that move a value raise is left to the tests that name the promise.
    """
    opened: list[ChunkStore] = []
    yield "open_store()", lambda: opened.append(open_store()), True
    [store], [name], row = opened, Names()(1), GuardedMemory(1 << 20).row(bytes(PAGE))
    kind = type(store).__name__
    yield f"{kind}.exists", lambda: store.exists([name]), True
    yield f"{kind}.write", lambda: store.write(name, row.source()), False
    yield f"{kind}.read_into", lambda: store.read_into(name, row.destination()), False
    yield f"{kind}.delete", lambda: store.delete([name]), False
    yield f"{kind}.close", store.close, False


class StoreTestBase:
    """The author's side: ``store_class``, ``persistent``, ``patience`` and the fixture ``open_store``."""

    store_class: ClassVar[type[ChunkStore]]
    persistent: ClassVar[bool] = True
    patience: ClassVar[float] = 30.0

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Return a function that opens a store; the author's subclass overrides this."""
        raise pytest.UsageError(
            f"{type(self).__name__}: define a fixture 'open_store' that returns a function without arguments, "
            "which opens your store"
        )

    @pytest.fixture(autouse=True)
    def _backend(self, open_store: OpenStore) -> None:
        require_backend(type(self), _first_steps(open_store))

    @pytest.fixture
    def names(self) -> Names:
        """Names for this test."""
        return Names()

    @pytest.fixture
    def memory(self) -> GuardedMemory:
        """Rows for this test."""
        return GuardedMemory()

    @pytest.fixture
    def stores(self, open_store: OpenStore, names: Names) -> Iterator[Stores]:
        """Open stores for this test, and close them at its end."""
        stores = Stores(open_store, persistent=self.persistent)
        yield stores
        stores.end(names.made, patience=self.patience)

    @pytest.fixture
    def store(self, stores: Stores) -> ChunkStore:
        """Return the one store that most tests need."""
        return stores.open()
