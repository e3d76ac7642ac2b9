"""uv.lock is in step with what the distributions want, names no place but PyPI, and is what make installs."""

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "uv.lock").read_text(encoding="utf-8")
LOCK = tomllib.loads(TEXT)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MEMBERS = {
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]: path
    for pattern in ("core", "replay", "integrations/*", "libraries/*", "plugins/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
}
PACKAGES = {package["name"]: package for package in LOCK["package"]}
PYTHONS = ["3.11.7", "3.12.0", "3.13.0", "3.14.0"]


def wanted(requirements):
    """The names, and of what is not of the workspace the versions; ``pip`` itself sorts out the extras."""
    found = set()
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        found.add((name, frozenset(map(str, requirement.specifier)) if name not in MEMBERS else None))
    return found


def locked(entries):
    found = set()
    for entry in entries:
        versions = frozenset(filter(None, entry.get("specifier", "").split(",")))
        found.add((entry["name"], versions if entry["name"] not in MEMBERS else None))
    return found


def constraints():
    command = [sys.executable, "-I", str(ROOT / "tools/lock_constraints.py")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def made(*arguments, tmp_path):
    """What make would run, in an environment that is not there yet."""
    command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", MEMBERS)
def test_the_lock_is_made_from_what_a_distribution_wants_today(name):
    project = tomllib.loads(MEMBERS[name].read_text(encoding="utf-8"))["project"]
    texts = [*project.get("dependencies", ()), *chain.from_iterable(project.get("optional-dependencies", {}).values())]
    here = {pair for pair in wanted(texts) if pair[0] != name}
    assert {pair for pair in locked(PACKAGES[name]["metadata"]["requires-dist"]) if pair[0] != name} == here


def test_the_lock_is_made_from_the_tools_that_the_workspace_wants_today():
    assert set(LOCK["manifest"]["members"]) == set(MEMBERS)
    assert locked(LOCK["manifest"]["dependency-groups"]["dev"]) == wanted(PROJECT["dependency-groups"]["dev"])


def test_the_lock_names_pypi_and_no_other_place():
    assert set(re.findall(r"\w+://[^/\"\s]+", TEXT)) == {PyPI.url.rstrip("/"), f"https://{PyPI.file_storage_domain}"}
    sources = [package["source"] for package in LOCK["package"] if package["name"] not in MEMBERS]
    assert all(source == {"registry": PyPI.simple_url} for source in sources)


@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_has_one_version_of_every_package(python):
    environment = {**default_environment(), "python_full_version": python, "python_version": python.rpartition(".")[0]}
    requirements = [Requirement(line) for line in constraints()]
    names = [it.name for it in requirements if it.marker is None or it.marker.evaluate(environment)]
    assert len(names) == len(set(names)) > 100
    assert not set(names) & set(MEMBERS)


def test_make_installs_what_the_lock_says_with_pip_and_with_uv(tmp_path):
    with_pip = made("environment", tmp_path=tmp_path)
    assert re.search(r"pip .*install .*--constraint \S+/constraints\.txt .*--group dev", with_pip)
    assert "uv sync" not in with_pip
    assert re.search(r"uv sync --locked --all-packages", made("environment", "WITH_UV=1", tmp_path=tmp_path))
    assert "--constraint" not in made("environment", "NEWEST=1", tmp_path=tmp_path)
