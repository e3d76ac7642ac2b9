"""Tests of failures: a backend that fails is an exception, which core counts until the breaker opens."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kvtiers.api import ChunkStore, StoreFull, SupportsBatch, SupportsListing
from kvtiers.testing.applies import applies_to
from kvtiers.testing.chunk_store.base import Names, StoreTestBase, write
from kvtiers.testing.guarded import PAGE, GuardedMemory, pattern
from kvtiers.testing.running import call_within

__all__ = ["FailureTests"]


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
        calls["read_many_into"] = lambda: store.read_many_into([name], [row.destination()])
        calls["write_many"] = lambda: store.write_many([name], [row.source()])
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
            where = call_within(self.patience, lambda: answers.append(call()))
        except StoreFull:
            return "raised StoreFull, which says that all is well but for the room"
        except Exception:  # noqa: BLE001 -- as it has to
            return ""
        return f"did not return within {self.patience:g} s{where}" if where else f"returned {answers[0]!r}"
