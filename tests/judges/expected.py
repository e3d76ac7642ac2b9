"""Marks the tests that ``expected.toml`` names: they have to fail, with the reason that stands there."""

import tomllib
from pathlib import Path

import pytest

__all__ = ["mark_expected"]


def mark_expected(items):
    """Mark tests by their names, or by those of their functions; UsageError for a name that is no test's."""
    expected = tomllib.loads((Path(__file__).parent / "expected.toml").read_text())
    for file in {Path(item.nodeid.partition("::")[0]).name for item in items}:
        here = [item for item in items if Path(item.nodeid.partition("::")[0]).name == file]
        for name, reason in expected.get(file, {}).items():
            named = [item for item in here if name in {item.name, item.name.partition("[")[0]}]
            if not named:
                raise pytest.UsageError(f"expected.toml: {file} has no test {name!r}")
            for item in named:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
