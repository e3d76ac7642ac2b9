"""The whole suite in several processes: which of its tests one process runs at a stretch."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("kvtiers_whole_suite", ROOT / "tests" / "conftest.py")
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)


@pytest.mark.parametrize(
    ("test", "unit"),
    [
        ("tests/unit/test_words.py::test_a[README.md]", "tests/unit/test_words.py"),
        ("tests/gpu/test_order.py::TestOrder::test_a[x::y]", "tests/gpu/test_order.py"),
        ("plugins/fs_tier/tests/test_root.py::test_a", "plugins/fs_tier/tests/test_root.py"),
        ("plugins/s3_tier/tests/test_check.py::test_a[obstore]", "plugins/s3_tier/"),
        ("plugins/s3_tier/tests/test_store.py::test_a", "plugins/s3_tier/"),
    ],
)
def test_one_process_runs_a_whole_file_or_all_that_share_fixtures(test, unit):
    assert suite.work_unit(test) == unit


def test_folders_that_share_fixtures_exist():
    for folder in suite.SHARED_FIXTURES:
        assert any((ROOT / folder).glob("**/conftest.py"))


def test_what_takes_long_is_a_unit_and_exists():
    for unit in suite.SECONDS:
        assert (ROOT / unit).exists(), unit
        assert suite.work_unit(f"{unit}::test_a") == unit


def test_what_takes_longest_is_begun_first_and_a_unit_stays_together():
    few, many = "tests/unit/test_docs_site.py", "tests/unit/test_words.py"
    units = ["tests/unit/test_process.py", few, *[many] * 30, few]
    items = [SimpleNamespace(nodeid=f"{unit}::test_{number}") for number, unit in enumerate(units)]
    suite.pytest_collection_modifyitems(items)
    assert [suite.work_unit(item.nodeid) for item in items] == [few, few, *[many] * 30, units[0]]
