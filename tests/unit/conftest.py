"""Small real distributions, installed for one test: a dist-info folder and modules on a path of their own."""

import importlib
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_numbers = itertools.count()

_TIER = '''
from pydantic import Field
from kvtiers.api import Secret, Size, Duration, Share, StrictModel, TierConfig, TierPlugin, hookimpl


class Config(TierConfig):
    """Options."""

{options}


def open_tier(config, context):
{open}


@hookimpl
def kvtiers_tier():
    return TierPlugin(name="{name}", kind="{kind}", config=Config, open=open_tier, api_version=1{facts})
'''


def _indented(text: str, empty: str) -> str:
    lines = [f"    {line}" for line in text.strip("\n").splitlines()]
    return "\n".join(lines) or f"    {empty}"


@dataclass
class Distributions:
    """Installs distributions into ``folder``, which is on ``sys.path``; their modules are forgotten after the test."""

    folder: Path
    modules: list[str] = field(default_factory=list)

    def install(self, name: str, entry_points: str, *, version: str = "1.0", source: str | None = None) -> str:
        """Install a distribution with one module, whose name replaces MODULE in the entry points."""
        module = f"kvtiers_test_module_{next(_numbers)}"
        if source is not None:
            (self.folder / f"{module}.py").write_text(source, encoding="utf-8")
        self.modules.append(module)
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(entry_points.replace("MODULE", module), encoding="utf-8")
        importlib.invalidate_caches()
        return module

    def install_tier(self, type_name: str, source: str, *, name: str = "", version: str = "1.0") -> str:
        """Install a distribution with this source as the entry module of one tier type."""
        entry_points = f"[kvtiers.tiers]\n{type_name} = MODULE\n"
        return self.install(name or f"kvtiers-{type_name}", entry_points, version=version, source=source)

    def tier(
        self,
        type_name: str,
        *,
        options: str = "",
        opened: str = "raise OSError('no backend')",
        kind: str = "store",
        facts: str = "",
    ):
        """Install a tier type with these options (lines of a class) and this body of ``open(config, context)``.

        ``facts``: further arguments of its TierPlugin.
        """
        source = _TIER.format(
            name=type_name,
            kind=kind,
            options=_indented(options, "pass"),
            open=_indented(opened, "pass"),
            facts=facts and f", {facts}",
        )
        return self.install_tier(type_name, source)


@pytest.fixture
def distributions(tmp_path: Path) -> Iterator[Distributions]:
    installed = Distributions(tmp_path / "site")
    installed.folder.mkdir()
    sys.path.insert(0, str(installed.folder))
    importlib.invalidate_caches()
    yield installed
    sys.path.remove(str(installed.folder))
    for module in installed.modules:
        sys.modules.pop(module, None)
    importlib.invalidate_caches()


@pytest.fixture
def no_switch() -> Iterator[None]:
    """Let no thread ask for the interpreter: the child of C's fork would hand it to one that it has not, and wait."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    time.sleep(0.02)  # a thread that waits already has asked by now, and has had it
    yield
    sys.setswitchinterval(interval)
