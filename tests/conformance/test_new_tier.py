"""What ``kvtiers new-tier`` writes, in every variant: clean for ruff and mypy, and the kit passes as it stands.

``tests/packaging/test_third_party.py`` builds and installs one.
"""

import itertools
import os
import shutil
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvtiers.cli.main import cli

VARIANTS = {
    f"{kind}{'-batch' * batch}{'-listing' * listing}": (kind, batch, listing)
    for kind, batch, listing in itertools.product(("store", "manager"), (False, True), (False, True))
}
# With names that are as long as one may be, lines and imports are longest.
LONG = {
    "a-store-of-two-and-thirty-letter": ("store", True, True),
    "a-tier-of-two-and-thirty-letters": ("manager", False, False),
}
KILLS = "kill"  # in names of tests that start processes: what they test is the same in all stores, so one has them


def class_of(name):
    return "Test" + "".join(part.capitalize() for part in name.split("-"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with a distribution of each variant, and one that has all of them installed."""
    root, site = tmp_path_factory.mktemp("tiers"), tmp_path_factory.mktemp("site")
    for name, (kind, batch, listing) in (VARIANTS | LONG).items():
        options = ["--kind", kind, *["--batch"] * batch, *["--listing"] * listing, "--into", str(root / name)]
        done = CliRunner().invoke(cli, ["new-tier", name, *options])
        assert done.exit_code == 0, done.output
        project = tomllib.loads((root / name / "pyproject.toml").read_text())["project"]
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1\n")
        (entries,) = project["entry-points"].items()
        lines = [f"{key} = {value}" for key, value in entries[1].items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{entries[0]}]", *lines, ""]))
        shutil.copytree(root / name / "src", site, dirs_exist_ok=True)
    return SimpleNamespace(root=root, site=site)


@pytest.fixture(scope="module")
def report(run_kit, written):
    files = [written.root / name / "tests/test_conformance.py" for name in VARIANTS]
    whole = class_of("store-batch-listing")
    options = ["--import-mode=importlib", "-W", "error", "-k", f"{whole} or not {KILLS}"]
    return run_kit(*files, options=options, path=[written.site])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_passes_the_kit_as_it_stands(report, name):
    kind, batch, listing = VARIANTS[name]
    mover = report.tests[f"{class_of(name)}{'Store' if kind == 'store' else 'Tier'}"]
    plugin = report.tests[f"{class_of(name)}Plugin"]
    for outcomes in (mover, plugin):
        assert outcomes["passed"], report.output[-3000:]
        assert not outcomes["failed"] | outcomes["skipped"], report.output[-3000:]
    if kind == "store":
        assert any(KILLS in test for test in mover["passed"]) == (batch and listing)
        assert any("batch" in test for test in mover["passed"]) == batch
        assert any("listing" in test for test in mover["passed"]) == listing
    else:
        assert "test_submit_returns_while_the_backend_is_held" in mover["passed"]


def test_ruff_has_nothing_to_say_by_the_settings_that_come_with_it(written):
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", str(written.root)],
            check=False, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


def test_its_types_are_strict(written, tmp_path):
    """All variants in one run: the settings are the same, and so are nine tenths of the time."""
    for name in VARIANTS | LONG:
        source = written.root / name
        shutil.copyfile(source / "tests/test_conformance.py", tmp_path / f"test_{name.replace('-', '_')}.py")
    shutil.copyfile(source / "pyproject.toml", tmp_path / "pyproject.toml")
    packages = [str(path) for path in written.site.glob("kvtiers_*") if path.suffix != ".dist-info"]
    files = [*packages, *map(str, tmp_path.glob("*.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), *files],
        check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(written.site)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    modules = sum(len([*(written.root / name).rglob("*.py")]) for name in VARIANTS | LONG)
    assert f"no issues found in {modules} source files" in done.stdout
