"""A plugin that was written for an API works for as long as core has that API's number.

``api_1/`` is a whole distribution, as installed, frozen when API 1 was made: a store and a tier that brings its own
asynchrony. Do not mend it: if a change of core's breaks it, the change breaks other people's tiers (docs/stability.md).
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.api import API_VERSION

HERE = Path(__file__).parent
FROZEN = {
    1: ("api_1", "a20c9083954007f09b9dc4656f5645b6f6502f89cdec738a31f721caa3471749"),
}
CONFIG = """version: 1
primary: {{capacity: 64MiB}}
secondary:
  - {{type: frozen, capacity: 64MiB, required: true}}
  - {{type: frozen-async, max_blocks: 16{more}}}
"""
RUN_KVTIERS = "from kvtiers.cli.main import main; main()"


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with what lies in this folder installed beside kvtiers."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def is_frozen(path: Path) -> bool:
    """Whether a path is a file of the distribution, and not what running it has left."""
    return path.is_file() and "__pycache__" not in path.parts


def digest_of(distribution: Path) -> str:
    """Return a digest over the names and bytes of a distribution's files."""
    found = hashlib.sha256()
    for path in sorted(path for path in distribution.rglob("*") if is_frozen(path)):
        content = path.read_bytes()
        found.update(f"{path.relative_to(distribution).as_posix()} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


@pytest.fixture(params=sorted(FROZEN), ids="api-{}".format)
def frozen(request) -> Path:
    return HERE / FROZEN[request.param][0]


def test_there_is_a_frozen_plugin_for_the_number_that_core_has():
    assert set(FROZEN) == {API_VERSION}


@pytest.mark.parametrize("number", sorted(FROZEN))
def test_a_frozen_plugin_is_as_it_was(number):
    name, digest = FROZEN[number]
    assert digest_of(HERE / name) == digest


def test_the_digest_is_over_every_file_of_the_distribution(frozen, tmp_path):
    """Its kit and its entry points included: a test that was left out, or another name, would be another plugin."""
    before = digest_of(frozen)
    files = [path.relative_to(frozen) for path in frozen.rglob("*") if is_frozen(path)]
    assert {"kit.py", "entry_points.txt", "METADATA", "memory_store.py"} <= {path.name for path in files}
    for number, file in enumerate(files):
        copy = shutil.copytree(frozen, tmp_path / str(number))
        with (copy / file).open("a") as changed:
            changed.write("\n")
        assert digest_of(copy) != before, file


def test_a_plugin_of_this_number_passes_the_kit(frozen, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path)]
    done = run(frozen, "-m", "pytest", *options, str(frozen / "kit.py"))
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"^(\d+) passed in ", done.stdout, re.MULTILINE)  # and none was skipped
    assert passed, done.stdout[-3000:]
    assert int(passed[1]) > 80


def test_core_opens_its_tiers_and_gets_back_what_it_wrote(frozen, tmp_path):
    config = tmp_path / "tiers.yaml"
    config.write_text(CONFIG.format(more=""))
    done = run(frozen, "-c", RUN_KVTIERS, "check", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    compared = re.findall(r"^ +ok +tier (\S+) +(?:wrote, read back|stored, loaded)", done.stdout, re.MULTILINE)
    assert compared == ["frozen", "frozen-async"]


def test_an_option_that_it_does_not_have_is_refused_by_its_own_model(frozen, tmp_path):
    config = tmp_path / "tiers.yaml"
    config.write_text(CONFIG.format(more=", max_blokcs: 3"))
    done = run(frozen, "-c", RUN_KVTIERS, "check", "--offline", str(config))
    assert done.returncode == 2
    assert "Did you mean 'max_blocks'?" in done.stdout + done.stderr
