"""What an import loads, who may import whom, and which words core never says."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "kvtiers"
LIBRARY_SOURCES = sorted(ROOT.glob("libraries/*/src/*/"))
PLUGIN_SOURCES = sorted([*ROOT.glob("plugins/*_tier/src/*/"), *LIBRARY_SOURCES])
COMPANION_SOURCES = sorted(
    path for folder in ("replay", "integrations/*", "plugins/policies") for path in ROOT.glob(f"{folder}/src/*/")
)
LIBRARY_PACKAGES = {folder.name for folder in LIBRARY_SOURCES}
PLUGIN_PACKAGES = {folder.name for folder in PLUGIN_SOURCES}
COMPANION_PACKAGES = {folder.name for folder in COMPANION_SOURCES}
CLIENT_LIBRARIES = {"redis", "boto3", "botocore", "obstore", "google"}
HEAVY = {
    "torch",
    "vllm",
    "transformers",
    "rich",
    "click",
    "prometheus_client",
    *CLIENT_LIBRARIES,
    *PLUGIN_PACKAGES,
    *COMPANION_PACKAGES,
}

HOST_CONTRACT = "the helper process imports api, plugins, encryption, layout, region.memfd and its own"
ACYCLIC_CONTRACT = "no import circle, at any depth"
CONFIG_CONTRACT = "a plugin's config imports kvtiers.api and pydantic"
REPLAY_CONTRACT = "the replay imports nothing of the helper process's"
UNDER_TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import %s"
SECONDARY_CONTRACT = "secondary reaches host.messages and host.wire, in_process.py host.transfer_pool"

# None in sys.modules makes an import of that name fail.
IMPORT_EACH = """
import importlib, sys
absent, modules = sys.argv[1].split(","), sys.argv[2:]
sys.modules.update(dict.fromkeys(absent))
for module in modules:
    importlib.import_module(module)
"""


def run_python(code: str, *arguments: str) -> str:
    """Run this code in an interpreter of its own, away from the project's folder; return what it prints."""
    command = [sys.executable, "-I", "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=500, check=False, cwd="/")
    assert done.returncode == 0, done.stdout
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    """Return the modules that this statement adds to those of an empty interpreter."""
    code = "import json, sys; before = set(sys.modules)\n%s\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    return set(json.loads(run_python(code % statement)))


def packages(modules: set[str]) -> set[str]:
    """Return the top-level names of these modules, without the standard library's."""
    return {module.partition(".")[0] for module in modules} - sys.stdlib_module_names


def test_importing_kvtiers_loads_the_standard_library_alone():
    loaded = loaded_by("import kvtiers")
    assert packages(loaded) == {"kvtiers"}
    assert {module for module in loaded if module.startswith("kvtiers")} == {"kvtiers", "kvtiers._version"}


def test_the_contract_loads_no_numpy_no_yaml_and_nothing_else_of_ours():
    loaded = loaded_by("import kvtiers.api")
    assert not packages(loaded) & (HEAVY | {"numpy", "yaml", "xxhash", "pytest"})
    ours = {module for module in loaded if module.startswith("kvtiers")}
    assert {module for module in ours if not module.startswith("kvtiers.api")} == {"kvtiers", "kvtiers._version"}


def test_the_engines_side_loads_no_torch_no_plugin_no_client_library_and_no_terminal():
    loaded = loaded_by("from kvtiers import load_config, open_manager, open_worker")
    assert "kvtiers" in packages(loaded)
    assert not packages(loaded) & HEAVY


def test_a_tier_host_loads_what_its_messages_its_config_and_its_seals_take():
    loaded = packages(loaded_by("import kvtiers.host.process"))
    pydantics = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    assert {name for name in loaded if not name.startswith("_sysconfigdata")} == {
        "kvtiers",
        "msgspec",
        "pluggy",
        "xxhash",
        *pydantics,
    }


def test_every_module_imports_without_torch():
    # Also on its own, whatever was imported before: no import is circular, as the contract below demands.
    modules = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for package in (CORE, ROOT / "replay/src/kvtiers_replay")
        for path in sorted(package.rglob("*.py"))
    ]
    assert "kvtiers.tiering.manager" in modules
    run_python(IMPORT_EACH, "torch,prometheus_client", *modules)


def test_core_never_names_a_backend():
    # "redistribute" and a linter's S311 are not names of a backend.
    names = re.compile(r"redis(?!tribut)|(?<![a-z])s3(?![0-9])", re.IGNORECASE)
    for word in ("Redis", "S3Store", "kvtiers_s3", "to s3."):
        assert names.search(word)
    for path in sorted((ROOT / "core" / "src").rglob("*")):
        where = str(path.relative_to(ROOT))
        assert not names.search(where), where
        if path.suffix == ".py":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                assert not names.search(line), f"{where}:{number}: {line}"


class Copy:
    """A copy of the sources and of the linter's contracts, to break."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copy(ROOT / "pyproject.toml", folder)
        for source in [CORE.parent, *{package.parent for package in PLUGIN_SOURCES + COMPANION_SOURCES}]:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / "src", ignore=ignored, dirs_exist_ok=True)

    def append(self, path: str, line: str) -> None:
        file = self.folder / "src" / path
        file.write_text(f"{file.read_text() if file.exists() else ''}\n{line}\n")

    def broken_contracts(self) -> set[str]:
        done = subprocess.run(
            [Path(sys.executable).parent / "lint-imports", "--no-cache", "--no-logo"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder / "src"), "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=500,
            check=False,
        )
        broken = set(re.findall(r"^(.+) BROKEN", done.stdout, re.MULTILINE))
        assert done.returncode == (1 if broken else 0), done.stdout
        return broken


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_the_sources_keep_the_contracts(copy: Copy):
    assert copy.broken_contracts() == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        ("kvtiers/layout/seal.py", "from kvtiers.tiering import manager", "layers, top to bottom"),
        ("kvtiers/api/keys.py", "from kvtiers import types", "layers, top to bottom"),
        ("kvtiers/tiering/residency.py", "from kvtiers.gpu import copy_plan", "layers, top to bottom"),
        ("kvtiers/secondary/breaker.py", "from kvtiers.primary import tier", "layers, top to bottom"),
        ("kvtiers/layout/seal.py", "from kvtiers.region import memfd", "layers, top to bottom"),
        ("kvtiers/host/store_calls.py", "from kvtiers.secondary import breaker", "layers, top to bottom"),
        ("kvtiers/host/store_calls.py", "from kvtiers.region import client", HOST_CONTRACT),
        ("kvtiers/secondary/breaker.py", "from kvtiers.host import store_calls", SECONDARY_CONTRACT),
        ("kvtiers/_process.py", "from kvtiers.api import errors", "layers, top to bottom"),
        ("kvtiers_replay/engine/processes.py", "from kvtiers.host import malloc", REPLAY_CONTRACT),
        ("kvtiers/cli/main.py", "import kvtiers_replay", "core imports no companion"),
        ("kvtiers_replay/trace.py", "import kvtiers_fs", "a companion imports no other, and no tier"),
        ("kvtiers/a_new_part.py", "", "layers, top to bottom"),
        ("kvtiers/plugins.py", "from kvtiers import types", "plugins needs api alone"),
        ("kvtiers/api/keys.py", "import numpy", "api imports stdlib, pydantic and pluggy only"),
        ("kvtiers_replay/trace.py", "import torch", "torch only under gpu and integrations"),
        (
            "kvtiers/testing/running.py",
            "from kvtiers import config",
            "testing imports api, types, plugins, layout, region, host, secondary",
        ),
        ("kvtiers/cli/main.py", "from kvtiers.testing import running", "no package imports testing"),
        ("kvtiers_example/memory.py", "from kvtiers.layout import seal", "a tier imports kvtiers.api only"),
        ("kvtiers/layout/seal.py", "from kvtiers.layout import namespace_epoch", ACYCLIC_CONTRACT),
        ("kvtiers/gpu/settings.py", UNDER_TYPE_CHECKING % "kvtiers.gpu.worker", ACYCLIC_CONTRACT),
        ("kvtiers_s3/boto3_errors.py", "def late():\n    from kvtiers_s3 import boto3_client", ACYCLIC_CONTRACT),
        ("kvtiers_objectstore/values.py", "from kvtiers.layout import seal", "a tier imports kvtiers.api only"),
        ("kvtiers_objectstore/values.py", "import kvtiers_s3", "the common part of tiers imports none of them"),
        ("kvtiers_gcs/config.py", "from kvtiers_objectstore import failures", CONFIG_CONTRACT),
        ("kvtiers_vllm/weights.py", "from kvtiers_vllm import identity", ACYCLIC_CONTRACT),
        ("kvtiers_fs/config.py", "from kvtiers_fs import store", CONFIG_CONTRACT),
    ],
)
def test_an_import_that_the_design_forbids_breaks_its_contract(copy: Copy, path: str, line: str, contract: str):
    copy.append(path, line)
    assert contract in copy.broken_contracts()


@pytest.mark.slow
def test_torch_under_gpu_breaks_no_contract(copy: Copy):
    copy.append("kvtiers/gpu/worker.py", "import torch")
    assert copy.broken_contracts() == set()


def test_the_contracts_name_every_plugin_and_every_part_of_core():
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [item for item in linter["contracts"] if item["name"] == "a tier imports kvtiers.api only"]
    assert set(linter["root_packages"]) == {"kvtiers", *PLUGIN_PACKAGES, *COMPANION_PACKAGES}
    assert set(contract["source_modules"]) == PLUGIN_PACKAGES
    (acyclic,) = [item for item in linter["contracts"] if item["name"] == ACYCLIC_CONTRACT]
    assert set(acyclic["ancestors"]) == set(linter["root_packages"])
    (config,) = [item for item in linter["contracts"] if item["name"] == CONFIG_CONTRACT]
    assert set(config["source_modules"]) == {f"{package}.config" for package in PLUGIN_PACKAGES - LIBRARY_PACKAGES}
    parts = {path.stem for path in CORE.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    expected = {f"kvtiers.{part}" for part in parts - {"__init__", "_version", "api"}}
    assert expected <= set(contract["forbidden_modules"])
