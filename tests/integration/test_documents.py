"""What the documents give people to copy is right: examples run, configs are valid."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.config import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
# The guide for authors has a config of a tier that it builds first: its own test runs it.
DOCUMENTS = [
    path
    for pattern in ("*.md", "core/*.md", "plugins/*/*.md", "docs/*.md")
    for path in sorted(ROOT.glob(pattern))
    if path.name != "write-a-tier.md"
]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)\}")
SECRET_FILE = re.compile(r"/(?:run/secrets|etc/kvtiers)/[\w.-]+")
CONFIGS = [
    pytest.param(text, id=f"{path.relative_to(ROOT)}-{number}")
    for path in DOCUMENTS
    for number, text in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_in_a_document_is_valid(text, tmp_path, monkeypatch):
    file = tmp_path / "tiers.yaml"
    for variable in VARIABLE.findall(text):
        monkeypatch.setenv(variable, "a-secret")
    for path in set(SECRET_FILE.findall(text)):
        (tmp_path / Path(path).name).write_text("a-secret", encoding="utf-8")
        text = text.replace(path, str(tmp_path / Path(path).name))
    # A part of a config is shown where the rest does not matter.
    head = "" if "version:" in text else "version: 1\n"
    rest = "" if "primary:" in text else "primary: {capacity: 1GiB}\n"
    tiers = "secondary:\n" if text.lstrip().startswith("- ") else ""
    file.write_text(head + rest + tiers + text, encoding="utf-8")
    assert load_config(file).secondary


def test_the_readme_s_config_is_ten_lines_at_most():
    (config,) = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(config.splitlines()) <= 10


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example, tmp_path):
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    if example.name == "engine.py":
        # Computed, then from the primary, then from the tier.
        assert re.findall(r": +(\d+) blocks were there", done.stdout) == ["0", "20", "20"]
