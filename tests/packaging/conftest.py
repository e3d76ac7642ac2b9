"""Every distribution, built once as a release would be, and each in a clean environment of its own."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("core/", "replay/", "integrations/*/", "libraries/*/", "plugins/*/")
PROJECTS = sorted(path.parent for pattern in PATTERNS for path in ROOT.glob(f"{pattern}pyproject.toml"))


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Run a command away from the source tree and return what it prints; another exit status is a failure."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVTIERS_"))}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, "PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == status, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr if status else done.stdout


@dataclass(frozen=True)
class Distribution:
    """One of the project's distributions, in the source tree."""

    folder: Path

    @property
    def name(self) -> str:
        return self.metadata["name"]

    @property
    def metadata(self) -> dict:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]

    @property
    def tier_types(self) -> set[str]:
        return set(self.metadata.get("entry-points", {}).get("kvtiers.tiers", {}))


@dataclass(frozen=True)
class Environment:
    """A virtual environment in an empty folder."""

    folder: Path
    packages: set[str] = field(default_factory=set)  # as they were after the first installation

    @property
    def _pip(self) -> list[str]:
        # The outer environment's pip: one of its own would take seconds to make and is not part of the promise.
        return [sys.executable, "-m", "pip", "--python", str(self.folder / "venv/bin/python")]

    def create(self, *requirements: str | Path) -> None:
        venv.create(self.folder / "venv", symlinks=True)
        self.install(*requirements)
        listed = json.loads(run(*self._pip, "list", "--format=json", cwd=self.folder))
        self.packages.update(package["name"].lower() for package in listed)

    def install(self, *requirements: str | Path) -> None:
        run(*self._pip, "install", "--quiet", *requirements, cwd=self.folder)

    def run(self, program: str, *arguments: str | Path, status: int = 0) -> str:
        return run(self.folder / "venv/bin" / program, *arguments, cwd=self.folder, status=status)


@pytest.fixture(scope="session")
def command() -> Callable[..., str]:
    return run


@pytest.fixture(scope="session")
def environment() -> type[Environment]:
    return Environment


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution by name, built from its source distribution."""
    found = {}
    for folder in PROJECTS:
        out = tmp_path_factory.mktemp("dist")
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder, cwd=out)
        (found[Distribution(folder).name],) = out.glob("*.whl")
    return found


@pytest.fixture(scope="session", params=PROJECTS, ids=lambda folder: folder.name)
def distribution(request: pytest.FixtureRequest) -> Distribution:
    return Distribution(request.param)


@pytest.fixture(scope="session")
def alone(distribution: Distribution, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A clean environment with this distribution and what it needs; what it needs of ours are our wheels."""
    environment = Environment(tmp_path_factory.mktemp(distribution.name))
    needed = {re.match(r"[\w-]+", requirement)[0] for requirement in distribution.metadata.get("dependencies", ())}
    environment.create(
        *{wheels[distribution.name], wheels["kvtiers"], *(wheels[name] for name in needed & wheels.keys())}
    )
    return environment
