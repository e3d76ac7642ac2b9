"""Every distribution, built once as a release would be, and each in a clean environment of its own."""

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("core/", "replay/", "integrations/*/", "libraries/*/", "plugins/*/")
PROJECTS = sorted(path.parent for pattern in PATTERNS for path in ROOT.glob(f"{pattern}pyproject.toml"))
CLIENTS = {"kvtiers-mooncake": "client"}
"""The extra with a tier's client library, where that is no dependency."""


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
    def client(self) -> list[str]:
        """The requirement that brings the client library of its tier, where that is no dependency."""
        return [f"{self.name}[{extra}]" for name, extra in CLIENTS.items() if name == self.name]

    @property
    def tier_types(self) -> set[str]:
        return set(self.metadata.get("entry-points", {}).get("kvtiers.tiers", {}))


@dataclass(frozen=True)
class Environment:
    """A virtual environment in an empty folder, which takes what it installs from a folder of wheels alone."""

    folder: Path
    wheelhouse: Path
    packages: set[str] = field(default_factory=set)  # as they were after the first installation

    @property
    def _pip(self) -> list[str]:
        # The outer environment's pip: one of its own would take seconds to make and is not part of the promise.
        return [sys.executable, "-m", "pip", "--python", str(self.folder / "venv/bin/python")]

    def create(self, *requirements: str | Path) -> None:
        venv.create(self.folder / "venv", symlinks=True)
        self.install(*requirements)
        (site_packages,) = (self.folder / "venv").glob("lib/*/site-packages")
        self.packages.update(found.name.lower() for found in metadata.distributions(path=[str(site_packages)]))

    def install(self, *requirements: str | Path) -> None:
        # Without compiling: what a test imports is a small part of it.
        options = ("--quiet", "--no-compile", "--no-index", "--find-links", self.wheelhouse)
        run(*self._pip, "install", *options, *requirements, cwd=self.folder)

    def run(self, program: str, *arguments: str | Path, status: int = 0) -> str:
        return run(self.folder / "venv/bin" / program, *arguments, cwd=self.folder, status=status)


@pytest.fixture(scope="session")
def command() -> Callable[..., str]:
    return run


@pytest.fixture(scope="session")
def environment(wheelhouse: Path) -> Callable[[Path], Environment]:
    """Return a function that gives the environment of an empty folder."""
    return partial(Environment, wheelhouse=wheelhouse)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution by name, built from its source distribution."""
    found = {}
    for folder in PROJECTS:
        out = tmp_path_factory.mktemp("dist")
        options = ("--no-isolation", "--skip-dependency-check", "--outdir", out)
        run(sys.executable, "-m", "build", *options, folder, cwd=out)
        (found[Distribution(folder).name],) = out.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def wheelhouse(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our wheels and those of all that they need: what pip would find, looked for and fetched once."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    extras = {"kvtiers": "testing"} | CLIENTS
    wanted = [f"{wheel}[{extras[name]}]" if name in extras else wheel for name, wheel in wheels.items()]
    run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, *wanted, cwd=folder)
    return folder


@pytest.fixture(scope="session", params=PROJECTS, ids=lambda folder: folder.name)
def distribution(request: pytest.FixtureRequest) -> Distribution:
    return Distribution(request.param)


@pytest.fixture(scope="session")
def alone(
    distribution: Distribution, environment: Callable[[Path], Environment], tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """A clean environment with this distribution, core and what they need."""
    alone = environment(tmp_path_factory.mktemp(distribution.name))
    alone.create("kvtiers", distribution.name)
    return alone


@pytest.fixture(scope="session")
def every_tier(environment: Callable[[Path], Environment], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The kit beside every tier and its client library, installed once: what each needs is tested where it is alone."""
    every_tier = environment(tmp_path_factory.mktemp("every-tier"))
    tiers = [Distribution(folder) for folder in PROJECTS if folder.name.endswith("_tier")]
    every_tier.create("kvtiers[testing]", *(name for tier in tiers for name in (tier.name, *tier.client)))
    return every_tier
