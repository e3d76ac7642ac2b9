"""Rules of the whole suite: what `make test` leaves out, what one process runs, and tests without recorded traces."""

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtiers._log_queue import QueuedLogs

TRACES = "KVTIERS_TRACES"
QUICK = tuple(Path(__file__).with_name("quick.txt").read_text(encoding="utf-8").split())
"""Folders, files and tests of which `make test` runs what is not marked `slow`. All others are marked here."""

SHARED_FIXTURES = (
    "plugins/azure_tier/", "plugins/gcs_tier/", "plugins/redis_tier/", "plugins/s3_tier/", "tests/packaging/",
)  # fmt: skip
"""Folders whose files share what a process makes once: servers, wheels."""

SECONDS = {
    "tests/packaging/": 300, "replay/tests/integration/replay/test_replay_command.py": 90,
    "tests/compat/test_older_commits.py": 60, "replay/tests/integration/replay/test_engines.py": 70,
    "tests/compat/test_stores.py": 40, "tests/integration/hosts/test_client.py": 50, "tests/unit/test_docs_site.py": 30,
    "replay/tests/integration/replay/test_replay_truth.py": 30, "plugins/mooncake_tier/tests/test_conformance.py": 50,
    "tests/integration/hosts/test_kit.py": 25, "replay/tests/integration/replay/test_ranks.py": 30,
    "replay/tests/integration/replay/test_record.py": 30, "plugins/mooncake_tier/tests/test_hosts.py": 30,
    "tests/conformance/test_broken_stores.py": 120, "tests/conformance/test_broken_tiers.py": 30,
    "replay/tests/unit/test_evaluate.py": 50, "plugins/policies/tests/test_shadows.py": 80,
    "tests/integration/demo/test_acts.py": 70, "tests/conformance/test_kit.py": 60,
    "plugins/fs_tier/tests/test_processes.py": 50, "tests/corruptions/test_corruptions.py": 50,
    "tests/conformance/test_new_tier.py": 40, "tests/integration/hosts/test_engine_gone.py": 40,
    "tests/unit/primary/test_leaf_first_lru.py": 40, "replay/tests/unit/test_plan_drawing.py": 30,
    "tests/integration/hosts/test_bump.py": 25, "plugins/mooncake_tier/tests/test_faults.py": 20,
    "plugins/mooncake_tier/tests/test_example.py": 20, "tests/integration/test_found.py": 100,
}  # fmt: skip
"""About how long the units take whose tests are few and long. Any other unit is taken for .3 s a test."""


def work_unit(nodeid: str) -> str:
    """Return what one of several processes runs at a stretch: a file, or a folder whose files share fixtures."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in SHARED_FIXTURES if file.startswith(folder)), file)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out by `make test`")  # also where other settings are in force
    # What an engine has logged is in ``caplog`` when it has been closed, and the thread that writes it has ended, also
    # on a machine so busy that this takes more than the second for which an engine's end waits.
    QueuedLogs.seconds = 60.0


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers that -m names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.nodeid.startswith(QUICK):
            item.add_marker(pytest.mark.slow)
    # One that takes a minute and comes last is a minute with one process at work.
    tests = Counter(work_unit(item.nodeid) for item in items)
    seconds = {unit: SECONDS.get(unit, 0.3 * count) for unit, count in tests.items()}
    items.sort(key=lambda item: -seconds[work_unit(item.nodeid)])


def pytest_collection_finish() -> None:
    # Thousands of tests and what they import stay to the end: to look through these half a million objects takes each
    # garbage collection .3 s, and the kit makes one wherever it looks for a buffer that was kept.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute work units in the order of their tests; xdist would begin with those of most tests."""
    from xdist.scheduler import LoadFileScheduling  # not in every environment that runs some of the tests

    class WorkUnits(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid)

    config.option.loadscopereorder = False
    return WorkUnits(config, log)


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
