"""What the documents give people to copy is right: examples run, configs are valid."""

import base64
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

import kvtiers
from kvtiers.config import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
# The guide for authors has a config of a tier that it builds first: its own test runs it.
DOCUMENTS = [
    path
    for pattern in ("*.md", "core/*.md", "libraries/*/*.md", "plugins/*/*.md", "docs/*.md")
    for path in sorted(ROOT.glob(pattern))
    if path.name != "write-a-tier.md"
]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)\}")
SECRET_FILE = re.compile(r"/(?:run/secrets|etc/kvtiers)/[\w.-]+/?")
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
        there = tmp_path / Path(path).name
        text = text.replace(path, f"{there}/" if path.endswith("/") else str(there))
        if path.endswith("/"):
            there.mkdir()
        else:
            secret = base64.b64encode(os.urandom(32)).decode() if path.endswith(".key") else "a-secret"
            there.write_text(secret, encoding="utf-8")
    # A part of a config is shown where the rest does not matter.
    head = "" if "version:" in text else "version: 1\n"
    rest = "" if "primary:" in text else "primary: {capacity: 1GiB}\n"
    tiers = "secondary:\n" if text.lstrip().startswith("- ") else ""
    if not tiers and "secondary:" not in text:
        tiers = "secondary: [{type: memory, capacity: 1GiB}]\n"
    file.write_text(head + rest + tiers + text, encoding="utf-8")
    assert load_config(file).secondary


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example, tmp_path):
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    if example.name == "engine.py":
        # Computed, then from the primary, then from the tier.
        assert re.findall(r": +(\d+) blocks were there", done.stdout) == ["0", "20", "20"]


def blocks(name, language):
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Run a block of commands as a reader would; return its exit status and what it printed."""
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"

    def run(commands):
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True,
            text=True, timeout=500, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_tutorial_is_what_happens(shell, tmp_path):
    """All but its first block, the installation, which tests/packaging holds; in a folder of the test's own."""

    def here(text):
        assert "/tmp/kvtiers-cache" in text or "/tmp" not in text
        return text.replace("/tmp/kvtiers-cache", str(tmp_path / "kvtiers-cache"))

    (config,) = BLOCK.findall((ROOT / "docs/tutorial.md").read_text(encoding="utf-8"))
    patience = "lookup_wait: 30s\nload_wait: 30s\n"  # what a busy machine's tier brings late counts, too
    (tmp_path / "tiers.yaml").write_text(here(config) + patience, encoding="utf-8")
    install, check, replay, look, damage, clean = map(here, blocks("docs/tutorial.md", "sh"))
    assert "pip install" in install
    assert shell(check)[0] == 0

    def replayed():
        status, printed = shell(replay)
        assert status == 0, printed
        assert "all bytes are right" in printed
        return int(re.search(r"from fs +([\d,]+)", printed)[1].replace(",", ""))

    assert replayed() < replayed(), "the second engine finds what the first one left"
    assert shell(look)[0] == 0
    status, printed = shell(damage)
    assert status == 1, printed
    (tmp_path / "kvtiers-env").mkdir()
    assert shell(clean)[0] == 0
    assert not list(tmp_path.iterdir())


def test_a_bump_as_operators_are_shown_it(shell, tmp_path):
    tier = f"{{type: fs, path: {tmp_path / 'values'}, capacity: 1GiB}}"
    (tmp_path / "tiers.yaml").write_text(
        f"version: 1\nnamespace: prod\nprimary: {{capacity: 64MiB}}\nsecondary:\n  - {tier}\n", encoding="utf-8"
    )
    (bump,) = blocks("docs/operate.md", "sh")
    status, printed = shell(bump)
    assert status == 0, printed
    assert "prod" in printed


def test_two_calls_open_an_engine_and_the_line_of_the_operators_page_exports_its_figures(tmp_path):
    config = tmp_path / "tiers.yaml"
    config.write_text("version: 1\nprimary: {capacity: 64MiB}\n", encoding="utf-8")
    layout = kvtiers.CacheLayout(
        kvtiers.ModelIdentity("m", weights="w"), (kvtiers.KVGroup("g", 16),), (kvtiers.KVTensor("t", 0, 4096),)
    )
    manager = kvtiers.open_manager(config, layout)
    worker = kvtiers.open_worker(config, layout, [np.zeros((8, 4096), np.uint8)], engine_id=manager.engine_id)
    try:
        manager.wait_ready(30)
        (export,) = blocks("docs/operate.md", "python")
        collector = eval(export, {"kvtiers": kvtiers, "manager": manager})
        try:
            assert REGISTRY.get_sample_value("kvtiers_primary_rows") > 0
        finally:
            REGISTRY.unregister(collector)
    finally:
        worker.shutdown()
        manager.shutdown(10)


def test_the_client_s_page_runs_as_it_is_shown(tmp_path):
    (config,) = blocks("docs/client.md", "yaml")
    code = "\n".join(blocks("docs/client.md", "python"))
    (tmp_path / "tiers.yaml").write_text(config, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
