"""What README and the pages say to install can be installed, and runs the README's configuration."""

import json
import re
import shlex
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "docs/*.ipynb",
        "*/*/README.md",
        "integrations/**/README.md",
        "core/*.md",
        "replay/*.md",
    )
    for path in ROOT.glob(pattern)
    if ".venv" not in path.parts
]


def text_of(page):
    """Return what a reader sees of a page, or of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def test_the_readme_s_first_installation_works_from_a_clone_and_reads_its_configuration(tmp_path, command):
    (line,) = [line for line in README.splitlines() if line.startswith("pip install ./")]
    folders = shlex.split(line, comments=True)[2:]
    venv.create(tmp_path / "venv", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv/bin/python"), "install", "--quiet"]
    command(*pip, *(ROOT / folder for folder in folders), cwd=tmp_path)
    config = tmp_path / "tiers.yaml"
    config.write_text(re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1], encoding="utf-8")
    kvtiers = tmp_path / "venv/bin/kvtiers"
    assert "no errors" in command(kvtiers, "check", "--offline", config, cwd=tmp_path)
    assert "KvtiersConnector" in command(kvtiers, "vllm-config", config, "--whole-stack", "--json", cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_of_a_page_that_installs_kvtiers_finds_it_before_there_is_a_release(page, wheels):
    for line in re.findall(r"^(?:RUN )?(pip install .+)|`(pip install [^`\n]+)`", text_of(page), re.MULTILINE):
        words = shlex.split("".join(line), comments=True)
        named = {re.split(r"[\[<>=]", word)[0] for word in words[2:]}
        if ours := {name for name in named if name.startswith("kvtiers")}:
            assert re.search(r" --find-links /?wheels ", " ".join(words)), line
            assert ours <= set(wheels), line
