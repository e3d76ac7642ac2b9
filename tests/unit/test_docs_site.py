"""The documentation's build: which pages lie where, what a link becomes, and that a broken one fails."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.api import TierConfig
from kvtiers.config.models import OffloadConfig
from kvtiers.config.options import options_of
from kvtiers.plugins import installed_tiers, load_tier

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(tmp_path):
    """Return a function that builds the site of a copy of the project, after one document got these lines."""
    copied = "docs tools core libraries plugins integrations replay examples benchmarks tests"
    for name in copied.split():
        ignored = shutil.ignore_patterns("__pycache__", "baselines")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "LICENSE"]:
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "changelog.d", tmp_path / "changelog.d")

    def run(lines: str) -> tuple[int, str]:
        # Its cells run in `make docs`, before these tests: here they would be half of what a build takes.
        notebook = tmp_path / "docs/notebook.ipynb"
        content = json.loads(notebook.read_text())
        content["cells"] = [cell for cell in content["cells"] if cell["cell_type"] == "markdown"]
        assert content["cells"]
        notebook.write_text(json.dumps(content))
        with (tmp_path / "docs/operate.md").open("a") as document:
            document.write(f"\n{lines}\n")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_every_option_of_the_file_and_of_every_installed_tier_has_a_row():
    page = tool("option_tables").options_page()
    for option in options_of(OffloadConfig):
        assert f"| `{option.name}` |" in page
    common = {option.name for option in options_of(TierConfig)}
    types = [entry.name for entry in installed_tiers()]
    assert {"memory", "fs", "redis", "s3"} <= set(types)
    for name in types:
        section = page.split(f"## Tier type `{name}`\n")[1].split("\n## ")[0]
        own = {option.name for option in options_of(load_tier(name).config)} - common
        assert own
        assert all(f"| `{option}` |" in section for option in own)
    assert "| `lookup_wait` | duration | `20ms` |" in page
    assert "| `primary.capacity` | size | **required** |" in page


def test_a_link_to_a_file_leads_to_its_page(build, tmp_path):
    links = "See [the engine](../examples/engine.py) and [how it is built](../ARCHITECTURE.md#imports)."
    code, said = build(links)
    assert code == 0, said
    page = (tmp_path / "site/operate/index.html").read_text()
    assert 'href="../project/examples/engine.py/"' in page
    assert 'href="../project/ARCHITECTURE/#imports"' in page
    assert "open_manager" in (tmp_path / "site/project/examples/engine.py/index.html").read_text()
    assert 'href="../site.css"' in page
    assert (tmp_path / "site/site.css").is_file()


def test_a_link_that_leads_nowhere_fails_the_build(build):
    code, said = build("[x](nowhere.md) [y](../nowhere.py) [z](../README.md#no-such-heading)")
    assert code == 1, said
    assert "'nowhere.md'" in said
    assert "nowhere.py" in said
    assert "'#no-such-heading'" in said
    assert "Aborted with 3 warnings" in said


def test_a_reference_to_a_name_that_is_not_there_fails_the_build(build):
    code, said = build("::: kvtiers.NoSuchName")
    assert code == 1, said
    assert "kvtiers.NoSuchName could not be found" in said
