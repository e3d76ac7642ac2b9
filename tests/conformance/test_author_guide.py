"""``docs/write-a-tier.md`` is run as it stands: packed, installed, tested with the kit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "write-a-tier.md"
FILE = re.compile(r"^`([^`\n]+)`\n\n```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
STORE, TESTS = "src/kvtiers_sqlite/store.py", "tests/test_conformance.py"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kvtiers-sqlite")
    for name, text in FILE.findall(GUIDE.read_text()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def installed(package):
    """Return a folder that the guide's package is installed into, from its own pyproject.toml."""
    site = package / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", str(site), str(package)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return site


def test_every_file_of_the_guide_is_found(package):
    found = {str(path.relative_to(package)) for path in package.rglob("*.*") if path.is_file()}
    assert {"pyproject.toml", "tiers.yaml", STORE, TESTS} <= found
    assert len(FILE.findall(GUIDE.read_text())) == GUIDE.read_text().count("```") // 2 - 1  # the shell commands


def test_the_guide_s_store_is_under_60_lines(package):
    assert len((package / STORE).read_text().splitlines()) < 60


def test_the_guide_s_tests_pass(run_kit, package, installed):
    report = run_kit(package / TESTS, path=[installed])
    assert report.code == 0, report.output[-3000:]
    store, plugin = report.tests["TestSqliteStore"], report.tests["TestSqlitePlugin"]
    assert store["passed"]
    assert plugin["passed"]
    assert not store["skipped"] | plugin["skipped"]
    assert any("listing" in test for test in store["passed"])  # it has the method, so it has the tests
    assert not any("batch" in test for test in store["passed"])


@pytest.mark.parametrize("options", [["--offline"], []], ids=["offline", "opened"])
def test_the_guide_s_config_passes_the_check(package, installed, tmp_path, options):
    text = (package / "tiers.yaml").read_text()
    config = tmp_path / "tiers.yaml"
    config.write_text(text.replace("/var/cache", str(tmp_path)).replace("4GiB", "64MiB"))
    assert str(tmp_path) in config.read_text()
    environment = os.environ | {"PYTHONPATH": str(installed)}
    run_main = "from kvtiers.cli.main import main; main()"
    command = [sys.executable, "-c", run_main, "check", *options, str(config)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sqlite" in done.stdout
    assert (tmp_path / "kvtiers.db").exists() == (not options)
