"""``kvtiers new-tier``: what it writes where, and what it refuses. What it writes is run by ``tests/conformance``."""

import pytest
import yaml
from click.testing import CliRunner

from kvtiers.cli.main import cli


@pytest.fixture
def new_tier(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli, ["new-tier", *arguments])


def test_it_writes_a_distribution_and_says_what_comes_next(new_tier, tmp_path):
    done = new_tier("cold-shelf", "--batch")
    assert done.exit_code == 0, done.output
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {
        f"kvtiers-cold-shelf/{place}"
        for place in (
            ".github/workflows/ci.yml",
            ".gitignore",
            "README.md",
            "pyproject.toml",
            "src/kvtiers_cold_shelf/__init__.py",
            "src/kvtiers_cold_shelf/config.py",
            "src/kvtiers_cold_shelf/plugin.py",
            "src/kvtiers_cold_shelf/py.typed",
            "src/kvtiers_cold_shelf/store.py",
            "tests/test_conformance.py",
            "tiers.yaml",
        )
    }
    for said in ("11 files", "cd kvtiers-cold-shelf", "pip install", "pytest", "src/kvtiers_cold_shelf/store.py"):
        assert said in done.output


def test_its_workflow_runs_the_kit_and_may_only_read(new_tier, tmp_path):
    new_tier("shelf")
    workflow = yaml.safe_load((tmp_path / "kvtiers-shelf/.github/workflows/ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": "pytest"}
    assert job["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"


@pytest.mark.parametrize("name", ["Shelf", "1shelf", "1e3", "my_shelf", "shelf-", "a--b", "x" * 33, "é", "a/b"])
def test_a_name_that_no_tier_can_have_is_refused(new_tier, tmp_path, name):
    done = new_tier(name)
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line.startswith(f"error: {name!r} cannot be a tier's name")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["on", "off", "yes", "no", "true", "false", "null"])
def test_a_name_that_yaml_reads_as_something_else_is_refused(new_tier, tmp_path, name):
    done = new_tier(name)
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line == f"error: {name!r} cannot be a tier's name: YAML reads it as {yaml.safe_load(name)!r}, not as a text"
    assert not list(tmp_path.iterdir())


def test_the_config_names_the_tier_as_it_was_named(new_tier, tmp_path):
    assert new_tier("y").exit_code == 0
    (tier,) = yaml.safe_load((tmp_path / "kvtiers-y/tiers.yaml").read_text())["secondary"]
    assert tier["type"] == "y"


@pytest.mark.parametrize(("name", "owner"), [("memory", "kvtiers-example"), ("replay", "kvtiers-replay")])
def test_a_name_that_is_taken_by_an_installed_package_is_refused(new_tier, tmp_path, name, owner):
    done = new_tier(name)
    assert done.exit_code == 2
    assert owner in done.output
    assert not list(tmp_path.iterdir())


def test_nothing_that_is_there_is_overwritten(new_tier, tmp_path):
    mine = tmp_path / "kvtiers-shelf" / "mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    done = new_tier("shelf")
    assert done.exit_code == 2
    assert "--into" in done.output
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]
    assert new_tier("shelf", "--into", str(tmp_path / "another")).exit_code == 0


def test_a_folder_that_cannot_be_made_is_one_line(new_tier, tmp_path):
    (tmp_path / "file").touch()
    done = new_tier("shelf", "--into", "file/shelf")
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
