"""``make test-changed``: which tests a changed file has, and that what has none runs no others."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def changed_tests():
    spec = importlib.util.spec_from_file_location("changed_tests", ROOT / "tools/changed_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "page", ["README.md", "docs/pool.md", "docs/reference/testing.md", "replay/README.md", "plugins/fs_tier/README.md"]
)
def test_a_page_has_the_tests_that_run_what_it_prints(changed_tests, page):
    assert {
        "tests/integration/test_documents.py",
        "tests/integration/test_printed_commands.py",
    } <= changed_tests.tests_of(page)


@pytest.mark.parametrize(
    "file",
    ["conftest.py", "tests/conftest.py", "tests/quick.txt", "tests/stores.py", "tests/pool_rig.py", "pyproject.toml"],
)
def test_what_the_tests_share_has_the_unit_tests(changed_tests, file):
    assert "tests/unit" in changed_tests.tests_of(file)


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("tests/pool_rig.py", "tests/integration/pool"),
        ("tests/tenant_scenes.py", "plugins/redis_tier/tests/test_tenants.py"),
        ("Makefile", "tests/packaging/test_project_files.py"),
        (".github/workflows/ci.yml", "tests/packaging/test_project_files.py"),
        ("constraints.txt", "tests/packaging/test_lock.py"),
        ("benchmarks/client.py", "tests/unit/test_benchmarks.py"),
        ("integrations/vllm/benchmarks/clients/compare.py", "tests/unit/test_benchmarks.py"),
        ("integrations/vllm/tests/real_vllm/test_some.py", "integrations/vllm/tests/unit"),
        ("tools/docs_site.py", "tests/unit/test_docs_site.py"),
        ("core/src/kvtiers/status.py", "tests/unit/test_status.py"),
        ("core/src/kvtiers/pool/keeper.py", "tests/unit/pool"),
    ],
)
def test_a_file_has_the_tests_of_what_it_is_part_of(changed_tests, file, test):
    assert test in changed_tests.tests_of(file)


def test_the_tests_of_an_engine_are_left_to_its_own_environment(changed_tests):
    assert not changed_tests.tests_of("integrations/sglang/tests/test_two_servers.py")


def test_every_test_that_the_table_names_is_there(changed_tests):
    named = {test for _, tests in changed_tests.TESTS for test in tests.split() if "\\" not in test}
    assert [test for test in sorted(named) if not (ROOT / test).exists()] == []


@pytest.mark.parametrize("found", ["tests/unit", ""])
def test_where_nothing_that_has_tests_differs_none_are_run(tmp_path, found):
    python = tmp_path / "python"  # notes how it is called; of what changed it says what this test says
    script = f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ "$1" = -m ] || echo "{found}" | grep .\n'
    python.write_text(script, encoding="utf-8")
    python.chmod(0o755)
    make = ["make", "--silent", "--old-file=environment", "test-changed", f"PYTHON={python}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=False)
    _, *runs = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert [run.partition("--failed-first")[2].strip() for run in runs] == [found][: len(found)]
    assert (done.returncode == 0) is bool(found)
