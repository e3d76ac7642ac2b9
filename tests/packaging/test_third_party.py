"""Tiers of another author's, with kvtiers from wheels: written by ``kvtiers new-tier``, built, installed, used.

One is the guide's tier with threads, typed into what was written. Also what becomes of a tier when the API has
another number.
"""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

TIERS = ("shelf", "lake", "slab")
TODAY = "API_VERSION = 1\n", "OLD_API_VERSIONS: frozenset[int] = frozenset()\n"
TOMORROW = "API_VERSION = 2\n", "OLD_API_VERSIONS: frozenset[int] = frozenset({1})\n"
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "write-a-manager-tier.md"
OF_THE_GUIDE = re.compile(r"^`((?:src/kvtiers_slab|tests)/[\w./]+)`\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_ERRORS = "import subprocess, sys; subprocess.run(sys.argv[1:], stderr=subprocess.STDOUT, check=True)"


@pytest.fixture(scope="module")
def author(environment, command, tmp_path_factory):
    """An environment with kvtiers, its kit, the replay, and the author's wheels; the author's tests beside it."""
    author = environment(tmp_path_factory.mktemp("author"))
    author.create("kvtiers[testing]", "kvtiers-replay")
    author.run("kvtiers", "new-tier", "shelf", "--batch", "--listing")
    author.run("kvtiers", "new-tier", "lake", "--kind", "manager")
    author.run("kvtiers", "new-tier", "slab", "--kind", "manager")
    files = OF_THE_GUIDE.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(files) == 4
    for place, text in files:
        (author.folder / "kvtiers-slab" / place).write_text(text, encoding="utf-8")
    (author.folder / "kvtiers-slab/src/kvtiers_slab/backend.py").unlink()
    with (author.folder / "kvtiers-slab/tiers.yaml").open("a") as config:
        config.write("    capacity: 256MiB\n")
    for name in TIERS:
        source = author.folder / f"kvtiers-{name}"
        command(
            sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", author.folder, source, cwd=source
        )
        (source / "src").rename(author.folder / f"not-imported-{name}")
        config = (source / "tiers.yaml").read_text().replace(f"/tmp/kvtiers-{name}", str(author.folder / f"in-{name}"))
        (author.folder / f"{name}.yaml").write_text(config)
    author.install(*author.folder.glob("kvtiers_*.whl"))
    return author


@contextmanager
def changed(author, place, before, after):
    """Another text in a file of the installed packages, for as long as this lasts."""
    (path,) = (author.folder / "venv").glob(f"lib/*/site-packages/{place}")
    text = path.read_text()
    assert all(part in text for part in before)
    other = text
    for old, new in zip(before, after, strict=True):
        other = other.replace(old, new)
    path.write_text(other)
    try:
        yield
    finally:
        path.write_text(text)


def test_it_comes_from_its_wheel_and_is_listed_with_its_own_options(author):
    listed = author.run("kvtiers", "tiers")
    assert "shelf: a store from kvtiers-shelf 0.1.0, API 1" in listed
    assert "lake: a tier manager from kvtiers-lake 0.1.0, API 1" in listed
    assert "slab: a tier manager from kvtiers-slab 0.1.0, API 1" in listed
    where = author.run("python", "-c", "import kvtiers_shelf; print(kvtiers_shelf.__file__)")
    assert Path(where.strip()).is_relative_to(author.folder / "venv")


def test_the_kit_passes_on_the_installed_tiers(author):
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib")
    said = author.run("python", "-m", "pytest", *options, *(f"kvtiers-{name}" for name in TIERS))
    assert re.search(r"^[1-9]\d* passed in ", said, re.MULTILINE), said


@pytest.mark.parametrize("name", ["shelf", "lake"])
def test_a_replay_gets_back_what_an_earlier_one_stored_in_it(author, name):
    arguments = ("kvtiers", "replay", "--config", f"{name}.yaml", "--workload", "code", "--requests", "6")
    first, second = author.run(*arguments), author.run(*arguments)
    for said in (first, second):
        assert "all bytes are right" in said
    hits = [int(re.search(rf"from {name}\W+([\d,]+)", said)[1].replace(",", "")) for said in (first, second)]
    assert hits[1] > hits[0]


def test_a_tier_for_the_number_before_still_works_and_core_warns_of_it(author):
    """In the core that comes when the number rises: all that it needs for that is here today."""
    with changed(author, "kvtiers/api/plugin.py", TODAY, TOMORROW):
        said = author.run("python", "-c", WITH_ERRORS, author.folder / "venv/bin/kvtiers", "check", "shelf.yaml")
    assert "wrote, read back" in said
    (line,) = {line for line in said.splitlines() if "API 1" in line}
    assert "kvtiers-shelf 0.1.0" in line
    assert "pip install --upgrade kvtiers-shelf" in line


def test_a_tier_for_the_next_number_is_refused_in_one_line(author):
    with changed(author, "kvtiers_shelf/plugin.py", ["api_version=1"], ["api_version=2"]):
        (line,) = author.run("kvtiers", "check", "shelf.yaml", status=2).splitlines()
        listed = author.run("kvtiers", "tiers", status=1)
    assert "was written for tier API 2, this kvtiers has tier API 1" in line
    assert "pip install --upgrade kvtiers" in line
    assert "options of every tier" in listed  # the others are not touched
