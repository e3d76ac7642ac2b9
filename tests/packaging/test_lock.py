"""constraints.txt has what the distributions want, with hashes and without a place, and is what make installs."""

import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").replace("\\\n", "").splitlines()
LOCK = {line: Requirement(line.partition(" --hash=")[0]) for line in LINES if not line.startswith("#")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MEMBERS = {
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]: path
    for pattern in ("core", "replay", "integrations/*", "libraries/*", "plugins/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
}
PYTHONS = ["3.11.0", "3.12.0", "3.13.0", "3.14.0"]


def applying(requirements, python):
    """Those of the requirements that this Python has, on Linux."""
    environment = {**default_environment(), "python_full_version": python, "python_version": python.rpartition(".")[0]}
    return [it for it in requirements if it.marker is None or it.marker.evaluate(environment)]


def missing(texts, python):
    """The requirements, but for the workspace's own and torch, for which the lock has no version that they take."""
    locked = {it.name: Version(str(it.specifier).removeprefix("==")) for it in applying(LOCK.values(), python)}
    wanted = [it for it in applying(map(Requirement, texts), python) if it.name not in {*MEMBERS, "torch"}]
    assert all(canonicalize_name(it.name) == it.name for it in LOCK.values())
    return [str(it) for it in wanted if locked.get(canonicalize_name(it.name)) not in it.specifier]


def made(*arguments, tmp_path):
    """What make would run, in an environment that is not there yet."""
    command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", MEMBERS)
def test_the_lock_has_what_a_distribution_wants_today(name, python):
    project = tomllib.loads(MEMBERS[name].read_text(encoding="utf-8"))["project"]
    texts = [*project.get("dependencies", ()), *chain.from_iterable(project.get("optional-dependencies", {}).values())]
    assert missing(texts, python) == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_the_tools_that_the_workspace_wants_today(python):
    assert missing(PROJECT["dependency-groups"]["dev"], python) == []


@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_has_one_version_of_every_package(python):
    names = [it.name for it in applying(LOCK.values(), python)]
    assert len(names) == len(set(names)) > 100
    assert not set(names) & set(MEMBERS)


def test_every_line_has_one_version_and_the_hashes_of_its_files():
    for line in LOCK:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.!+]+( ; [^#\\]+?)?( +--hash=sha256:[0-9a-f]{64})+ *", line)


# Its builds, for the CPU and with CUDA, are one version with different hashes.
def test_the_build_of_torch_is_the_machines_choice_and_its_version_is_not():
    assert "torch" not in {it.name for it in LOCK.values()}
    (torch,) = [text for text in PROJECT["dependency-groups"]["dev"] if Requirement(text).name == "torch"]
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", torch)


def test_no_file_names_a_place_that_packages_come_from():
    places = f"-e{PyPI.netloc}", f"-e{PyPI.file_storage_domain}"
    command = ["git", "grep", "--fixed-strings", "--files-with-matches", *places]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("", "")


def test_make_installs_by_the_lock_unless_it_is_asked_for_what_is_newest(tmp_path):
    by_the_lock = r"pip .*install .*--constraint constraints\.txt .*--group dev"
    assert re.search(by_the_lock, made("environment", tmp_path=tmp_path))
    newest = made("environment", "NEWEST=1", tmp_path=tmp_path)
    assert "--group dev" in newest
    assert "--constraint" not in newest
