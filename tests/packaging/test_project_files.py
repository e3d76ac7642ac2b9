"""What stands in several of the project's files stands there alike: versions, targets, extras, kinds."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
DISTRIBUTIONS = sorted(
    path
    for pattern in ("core", "replay", "integrations/*", "libraries/*", "plugins/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
)
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def name_of(pyproject: Path) -> str:
    return tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["name"]


def made(text: str) -> set[str]:
    """Return the targets that this text has made, as `make lint` or `make environment system`."""
    commands = re.findall(r"(?:^|`|- run: |entry: )make ((?:[a-z][a-z-]*[ ]?)+)", text, re.MULTILINE)
    return {target for command in commands for target in command.split()}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_and_no_more_unless_a_job_says_so(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    wider = {job for job, it in workflow["jobs"].items() if "permissions" in it}
    assert wider == ({"build", "publish"} if name == "release.yml" else set())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_job_has_a_time_limit_and_its_actions_a_major_tag(name):
    for job in WORKFLOWS[name]["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1"))


def test_what_workflows_and_guides_have_made_is_a_target():
    files = [*(ROOT / ".github/workflows").glob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    files += [ROOT / "CONTRIBUTING.md", ROOT / "changelog.d/README.md", ROOT / "README.md"]
    found = {path.name: made(path.read_text(encoding="utf-8")) for path in files}
    assert {"lint", "lint-workflows", "docs", "environment", "system"} <= found["ci.yml"]
    assert {"environment", "test", "test-vllm", "test-gpu"} <= found["CONTRIBUTING.md"]
    for name, targets in found.items():
        assert targets <= TARGETS, name


def test_the_tests_that_the_guide_runs_are_there():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    commands = re.findall(r"-m pytest (\S+\.py|-k \"(\w+)\")", guide) + re.findall(r"PYTEST_ARGS=(\"-k (\w+)\")", guide)
    assert commands
    folders = ("tests", "plugins", "replay/tests", "integrations")
    names = " ".join(
        name
        for folder in folders
        for path in (ROOT / folder).rglob("test_*.py")
        for name in (path.stem, *re.findall(r"^ *def (test_\w+)", path.read_text("utf-8"), re.MULTILINE))
    )
    for text, name in commands:
        assert name in names if name else (ROOT / text).is_file(), text


def test_what_the_whole_run_makes_is_a_target():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    steps = re.findall(r'^    "\d+ (?:--jobs=\d )?([\w -]+)"$', script, re.MULTILINE)
    assert steps
    assert {target for targets in steps for target in targets.split()} <= TARGETS


def test_the_workflows_test_the_pythons_and_the_releases_of_vllm_that_the_project_names():
    pythons = WORKFLOWS["ci.yml"]["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert f">={pythons[0]}" == tomllib.loads(DISTRIBUTIONS[0].read_text())["project"]["requires-python"]
    own = re.search(r"^VLLM_VERSION := (\S+)", MAKEFILE, re.MULTILINE)[1]
    others = re.findall(r"==(\S+)", re.search(r"^VLLM_OTHERS := (.+)", MAKEFILE, re.MULTILINE)[1])
    job = WORKFLOWS["vllm.yml"]["jobs"]["tests"]
    assert sorted(job["strategy"]["matrix"]["release"]) == sorted([own, *others])
    assert f"'{own}'" in job["env"]["VLLM_RELEASE"]


def test_pre_commit_and_the_environment_have_the_same_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (rev,) = [repo["rev"] for repo in hooks if repo["repo"].endswith("/ruff-pre-commit")]
    assert f"ruff~={rev.removeprefix('v')}" in PROJECT["dependency-groups"]["dev"]


def test_the_extra_all_has_every_other_but_that_of_authors_and_every_tier_but_the_example():
    extras = tomllib.loads((ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    (everything,) = extras["all"]
    assert everything == f"kvtiers[{','.join(sorted(set(extras) - {'all', 'testing'}))}]"
    tiers = {name_of(path) for path in ROOT.glob("plugins/*_tier/pyproject.toml")}
    assert set(extras["tiers"]) == tiers - {"kvtiers-example"}


def test_every_fragment_of_the_changelog_is_of_a_kind_that_its_guide_names():
    kinds = {kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"]}
    folder = ROOT / PROJECT["tool"]["towncrier"]["directory"]
    guide = folder / "README.md"
    assert set(re.findall(r"^\| `([a-z-]+)` \|", guide.read_text(encoding="utf-8"), re.MULTILINE)) == kinds
    for fragment in set(folder.iterdir()) - {guide}:
        assert re.fullmatch(rf"(\+[\w-]+|\d+)\.({'|'.join(kinds)})\.md", fragment.name), fragment.name
        assert fragment.read_text(encoding="utf-8").strip()
