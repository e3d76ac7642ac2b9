"""Running ``kvtiers`` in this process, and small real tiers to run it on."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests import pool_rig, stores

from kvtiers.cli.main import cli

KVTIERS = Path(sys.executable).with_name("kvtiers")
"""The command as it is installed."""

LLAMA = "llama-3.1-8b-" + "5f" * 12
"""A model as storage names name it."""

_numbers = itertools.count()

DICT_STORE = f"""
{Path(stores.__file__).read_text(encoding="utf-8")}
from pathlib import Path
from kvtiers.api import ConfigError, Finding, NotKept, StoreEntry

class Store(DictStore):
    def __init__(self, *values):
        self.values = dict(values)
"""


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """End what a test has started of a pool."""
    yield
    pool_rig.end_all()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs ``kvtiers`` with these arguments; the current directory is the test's own."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, arguments, prog_name="kvtiers")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a config with these tiers and returns its file's name."""

    def write(*tiers: str, capacity: str = "1MiB", more: str = "") -> str:
        lines = "".join(f"  - {tier}\n" for tier in tiers)
        (tmp_path / "tiers.yaml").write_text(
            f"version: 1\nprimary: {{capacity: {capacity}}}\n{more}secondary:\n{lines}"
        )
        return "tiers.yaml"

    return write


@pytest.fixture
def store(distributions) -> Callable[[str], str]:
    """Return a function that installs a tier type: a dict store whose class has this body too; returns its type."""

    def install(body: str = "", opened: str = "return Mine()", options: str = "") -> str:
        name = f"dict{next(_numbers)}"
        lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines()) or "    pass"
        distributions.tier(name, opened=f"{DICT_STORE}\nclass Mine(Store):\n{lines}\n{opened}", options=options)
        return name

    return install


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Return a function that runs the installed command ``kvtiers`` in a process of its own."""

    def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [KVTIERS, *arguments], check=False, capture_output=True, text=True, timeout=500,
            cwd=tmp_path, env={**os.environ, **environment},
        )  # fmt: skip

    return start
