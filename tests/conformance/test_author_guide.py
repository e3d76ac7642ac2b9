"""The guides for authors of tiers are run as they stand: written, packed, installed, tested with the kit.

What a guide shows of ``kvtiers new-tier``'s output is that output; a file that it gives otherwise, or a second time,
replaces what was written.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtiers.cli.main import cli

DOCS = Path(__file__).parents[2] / "docs"
FILE = re.compile(r"^`([^`\n]+)`\n\n```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^kvtiers (new-tier ([\w-]+)(?: --\S+(?: manager)?)*)$|`kvtiers (new-tier (\w+) --kind manager)`",
    re.MULTILINE,
)
STORE, TESTS = "src/kvtiers_sqlite/store.py", "tests/test_conformance.py"


@dataclass(frozen=True)
class Guide:
    """A guide, and the package of one of its tiers, as its reader has it in the end."""

    page: str
    name: str
    written: tuple[str, ...]
    """What it shows of the generator's output."""
    replaced: tuple[str, ...]
    """What it gives instead of that."""
    left_out: tuple[str, ...] = ()

    @property
    def text(self):
        return (DOCS / self.page).read_text(encoding="utf-8")

    @property
    def files(self):
        """Each file of the guide in order: its place, and its text."""
        own = f"kvtiers_{self.name}"
        found = FILE.findall(self.text)
        if self.page == "write-a-tier.md":
            return found
        # Two tiers are on the page, and what belongs to both by its place is the second one's.
        return [
            (place, text) for place, text in found if own in place or (own == "kvtiers_slab" and "src/" not in place)
        ]


SQLITE = Guide(
    "write-a-tier.md",
    "sqlite",
    ("pyproject.toml", "src/kvtiers_sqlite/config.py", "src/kvtiers_sqlite/plugin.py", STORE, TESTS, "tiers.yaml"),
    (STORE,),
)
SHELF = Guide("write-a-manager-tier.md", "shelf", ("src/kvtiers_shelf/backend.py", "src/kvtiers_shelf/tier.py"), ())
SLAB = Guide(
    "write-a-manager-tier.md",
    "slab",
    (),
    ("src/kvtiers_slab/config.py", "src/kvtiers_slab/plugin.py", "src/kvtiers_slab/tier.py", TESTS),
    ("src/kvtiers_slab/backend.py",),
)
GUIDES = {guide.name: guide for guide in (SQLITE, SHELF, SLAB)}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The three packages: as the generator writes them, and then as the guide's reader changes them."""
    root = tmp_path_factory.mktemp("packages")
    for guide in GUIDES.values():
        (command,) = {a or b for a, name, b, other in COMMAND.findall(guide.text) if guide.name in {name, other}}
        done = CliRunner().invoke(cli, [*command.split(), "--into", str(root / guide.name)])
        assert done.exit_code == 0, done.output
        shutil.copytree(root / guide.name, root / f"{guide.name}-as-written")
        for place, text in guide.files:
            (root / guide.name / place).write_text(text, encoding="utf-8")
        for place in guide.left_out:
            (root / guide.name / place).unlink()
    return root


@pytest.fixture(scope="module")
def installed(packages):
    """Return a folder that the packages are installed into, each from its own pyproject.toml."""
    site = packages / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", str(site), *[str(packages / name) for name in GUIDES]]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def report(run_kit, packages, installed):
    files = [packages / name / TESTS for name in GUIDES]
    return run_kit(*files, options=["--import-mode=importlib", "-W", "error"], path=[installed])


@pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES)
def test_what_a_guide_shows_as_written_is_what_the_generator_writes(packages, guide):
    places = [place for place, _ in guide.files]
    assert sorted(places) == sorted(guide.written + guide.replaced)
    for place in guide.written:
        first = next(text for at, text in guide.files if at == place)
        assert first == (packages / f"{guide.name}-as-written" / place).read_text(encoding="utf-8"), place


@pytest.mark.parametrize("page", ["write-a-tier.md", "write-a-manager-tier.md"])
def test_every_block_of_a_guide_is_a_file_or_no_code(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n", text, re.MULTILINE)[:]
    languages = [language for language in fences if language in {"python", "toml", "yaml"}]
    assert len(languages) == len(FILE.findall(text)) > 5


def test_the_guide_s_store_is_under_60_lines(packages):
    assert len((packages / "sqlite" / STORE).read_text().splitlines()) < 60


def test_the_guide_s_store_passes_the_kit(report):
    store, plugin = report.tests["TestSqliteStore"], report.tests["TestSqlitePlugin"]
    assert store["passed"], report.output[-3000:]
    assert plugin["passed"]
    assert not store["skipped"] | plugin["skipped"] | store["failed"] | plugin["failed"], report.output[-3000:]
    assert any("listing" in test for test in store["passed"])  # it has the method, so it has the tests
    assert not any("batch" in test for test in store["passed"])


@pytest.mark.parametrize("name", ["Shelf", "Slab"])
def test_the_guide_s_tiers_that_move_rows_pass_the_kit(report, name):
    tier, plugin = report.tests[f"Test{name}Tier"], report.tests[f"Test{name}Plugin"]
    assert {
        "test_submit_returns_while_the_backend_is_held",
        "test_no_call_on_the_engine_s_thread_sleeps_or_waits",
    } <= tier["passed"], report.output[-3000:]
    assert ("test_a_store_never_pushes_out_chunks_of_its_own" in tier["passed"]) == (name == "Slab")
    assert plugin["passed"]
    assert not tier["skipped"] | plugin["skipped"] | tier["failed"] | plugin["failed"], report.output[-3000:]


def test_what_a_reader_has_in_the_end_is_clean_by_its_own_settings(packages):
    folders = [packages / name for name in GUIDES]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", *map(str, folders)],
            check=False, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
    sources = [str(folder / "src" / f"kvtiers_{folder.name}") for folder in folders]
    options = ["--config-file", str(folders[0] / "pyproject.toml"), "--cache-dir", str(packages / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *sources],
        check=False, capture_output=True, text=True, timeout=300,
        env=os.environ | {"MYPYPATH": os.pathsep.join(str(folder / "src") for folder in folders)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("options", [["--offline"], []], ids=["offline", "opened"])
def test_the_guide_s_config_passes_the_check(packages, installed, tmp_path, options):
    text = (packages / "sqlite" / "tiers.yaml").read_text()
    config = tmp_path / "tiers.yaml"
    config.write_text(text.replace("/tmp/kvtiers-sqlite", str(tmp_path / "kvtiers.db")))
    assert str(tmp_path) in config.read_text()
    environment = os.environ | {"PYTHONPATH": str(installed)}
    run_main = "from kvtiers.cli.main import main; main()"
    command = [sys.executable, "-c", run_main, "check", *options, str(config)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sqlite" in done.stdout
    assert (tmp_path / "kvtiers.db").exists() == (not options)
