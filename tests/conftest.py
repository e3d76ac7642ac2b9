"""One promise of the whole suite: a test that is skipped for want of the recorded traces is told in the last line."""

from collections.abc import Iterator
from typing import Any

import pytest

TRACES = "KVTIERS_TRACES"


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_unconfigure(config: pytest.Config) -> Iterator[None]:
    # Behind pytest's own last line, which the terminal reporter prints while the session finishes.
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    result = yield
    skipped = reporter.stats.get("skipped", []) if reporter else []
    missed = [report.nodeid for report in skipped if f"{TRACES} is not set" in str(report.longrepr)]
    if missed:
        reporter.write_line(f"{TRACES} is not set, so this was not tested: {', '.join(missed)}")
    return result
