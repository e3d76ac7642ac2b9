"""The check of the backend before the first test of a class: one that is down is one error, not one a test."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvtiers._child_watch import came_back, children
from kvtiers._failures import plugin_boundary
from kvtiers.testing.running import call_within

__all__ = ["Step", "require_backend"]

Step = tuple[str, Callable[[], object], bool]
"""A call to try, by name; whether an error of it says that the backend cannot be used, as a hang always does."""

_FOUND = "_kvtiers_backend_trouble"


def require_backend(tests: type[Any], steps: Iterable[Step]) -> None:
    """Try the backend of a class of tests once. If it cannot be used, fail this test, and skip those that follow."""
    trouble = vars(tests).get(_FOUND)
    if trouble is None:
        trouble = _trouble(steps, tests.patience)
        setattr(tests, _FOUND, trouble)
        if trouble:
            pytest.fail(f"{tests.__name__}: {trouble}\n(its other tests are skipped)", pytrace=False)
    elif trouble:
        pytest.skip("the backend cannot be used: see the first error of this class")


def _trouble(steps: Iterable[Step], patience: float) -> str:
    before = children()
    starters: dict[int, str] = {}  # a child may come back in a later step, on a busy machine
    for name, call, is_reported in steps:
        where = ""
        with plugin_boundary(KeyboardInterrupt, exits=True) as trying:
            where = call_within(patience, call)
        if trying.error and is_reported:
            return f"{name} raised {trying.error}; is the backend there, and are its options right?"
        if where:
            return f"{name} did not return within {patience:g} s (the tests' 'patience'){where}"
        starters |= dict.fromkeys(children() - before - starters.keys(), name)
        if forked := came_back(starters):
            # Each test would go on twice, in two processes on one store.
            return (
                f"{starters[forked]} forked, and its child ({forked}) came back from the call; a store must not fork "
                "without exec"
            )
    return ""
