import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from kvtiers import __version__

ROOT = Path(__file__).resolve().parents[2]

# By distribution, one tier of each of its types; no backend is needed, `check --offline` only validates.
TIERS = {
    "kvtiers": {},
    "kvtiers-example": {"memory": "capacity: 64MiB", "memory-async": "max_blocks: 16"},
    "kvtiers-fs": {"fs": "path: /nowhere, capacity: 1GiB"},
    "kvtiers-mooncake": {"mooncake": "master: nowhere"},
    "kvtiers-redis": {"redis": "url: 'redis://nowhere:6379/0'"},
    "kvtiers-s3": {"s3": "bucket: somewhere"},
    "kvtiers-lmcache": {},
    "kvtiers-gcs": {"gcs": "bucket: somewhere"},
    "kvtiers-azure": {"azure": "account: somewhere, container: kv-cache"},
    "kvtiers-objectstore": {},
    "kvtiers-policies": {},
    "kvtiers-replay": {},
    "kvtiers-sglang": {},
    "kvtiers-transformers": {},
    "kvtiers-vllm": {},
}
COMMANDS = {"kvtiers-replay": {"bench", "evaluate", "plan", "replay", "size"}, "kvtiers-vllm": {"vllm-config"}}


def only(*folders: str) -> pytest.MarkDecorator:
    """Run a test for these distributions alone: beside the others, core would do the same once more."""
    found = sorted(path for folder in folders for path in ROOT.glob(f"{folder}/"))
    return pytest.mark.parametrize("distribution", found, ids=lambda path: path.name, indirect=True)


def config_with(folder: Path, tiers: dict[str, str]) -> Path:
    file = folder / "tiers.yaml"
    secondary = "".join(f"\n  - {{type: {name}, {options}}}" for name, options in tiers.items())
    file.write_text(f"version: 1\nprimary: {{capacity: 64MiB}}\nsecondary:{secondary or ' []'}\n")
    return file


def test_a_wheel_holds_the_package_its_types_and_the_licence_and_no_tests(distribution, wheels):
    package = distribution.name.replace("-", "_")
    with zipfile.ZipFile(wheels[distribution.name]) as wheel:
        files = wheel.namelist()
        (licence,) = [file for file in files if file.endswith(".dist-info/licenses/LICENSE")]
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert f"{package}/py.typed" in files
    source = distribution.folder / "src"
    # Not modules alone: core compiles gpu/cuda/copy_kernel.cu when a worker starts.
    assert {file for file in files if file.startswith(f"{package}/")} == {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {file.partition("/")[0] for file in files} == {package, licence.partition("/")[0]}
    assert not [file for file in files if re.search(r"(^|/)(tests?/|test_|conftest|\.)", file)]


def test_a_distribution_runs_alone_in_a_clean_environment(distribution, alone):
    assert not alone.packages & {"torch", "pytest", "prometheus-client", "prometheus_client"}
    listed = alone.run("kvtiers", "--version").splitlines()
    assert listed[0] == f"kvtiers {__version__}"
    assert any(line.startswith(distribution.name) for line in listed)
    installed = json.loads(alone.run("kvtiers", "tiers", "--json"))
    assert installed["broken"] == []
    assert {tier["name"] for tier in installed["tiers"]} == distribution.tier_types
    assert {tier["distribution"] for tier in installed["tiers"]} <= {distribution.name}


@only("core", "replay", "integrations/vllm")
def test_its_commands_are_there_and_those_of_an_absent_companion_say_what_to_install(distribution, alone):
    listed = alone.run("kvtiers", "--help")
    for name, commands in COMMANDS.items():
        extra = name.removeprefix("kvtiers-")
        for command in sorted(commands):
            if distribution.name == name:
                assert f"  {command} " in listed
                assert f"kvtiers {command}" in alone.run("kvtiers", command, "--help")
            else:
                assert f"  {command} " not in listed
                (line,) = alone.run("kvtiers", command, "--help", status=2).splitlines()
                assert f"'{command}'" in line
                assert f"pip install --find-links wheels 'kvtiers[{extra}]'" in line


@only("replay")
def test_a_replay_of_code_needs_nothing_but_core_and_replay(alone):
    page = alone.folder / "page.html"
    log = alone.folder / "requests.jsonl"
    log.write_text("".join(f'{{"prompt_token_ids": {[n % 3] * 400}}}\n' for n in range(9)))
    assert "GPU" in alone.run("kvtiers", "evaluate", "--log", log, "--output", log.with_name("evaluation.html"))
    said = alone.run("kvtiers", "replay", "--workload", "code", "--requests", "5", "--report", page)
    assert "all bytes are right" in said
    assert page.read_text().count("<svg") > 3


def test_a_config_with_its_tiers_is_valid_where_it_alone_is_installed(distribution, alone):
    tiers = TIERS[distribution.name]
    assert set(tiers) == distribution.tier_types
    if tiers or distribution.name == "kvtiers":
        alone.run("kvtiers", "check", "--offline", config_with(alone.folder, tiers))


@only("core")
def test_a_tier_type_that_is_not_installed_is_one_line_that_names_it(alone):
    config = config_with(alone.folder, {"nowhere": "a: 1"})
    (line,) = alone.run("kvtiers", "check", "--offline", config, status=2).splitlines()
    assert "'nowhere'" in line


@only("plugins/*_tier")
def test_the_kit_of_the_testing_extra_runs_on_an_installed_plugin(distribution, every_tier, tmp_path):
    shutil.copytree(distribution.folder / "tests", tmp_path / "tests")
    kit = ("-q", "-k", "Plugin", f"--rootdir={tmp_path}", tmp_path / "tests" / "test_conformance.py")
    said = every_tier.run("python", "-m", "pytest", *kit)
    assert re.search(r"^[1-9]\d* passed", said, re.MULTILINE), said
