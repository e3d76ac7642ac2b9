"""A plugin that was written for an API works for as long as core has that API's number.

``api_1/`` is a whole distribution, as installed, frozen when API 1 was made: a store and a tier that brings its own
asynchrony. Do not mend it: if a change of core's breaks it, the change breaks other people's tiers (docs/stability.md).
"""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.api import API_VERSION

HERE = Path(__file__).parent
FROZEN = {
    1: ("api_1", "d6e352f3a9d3983f4d3502cd972effec462f97d4519cee085b2c5ce26bfa0f64"),
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


@pytest.fixture(params=sorted(FROZEN), ids="api-{}".format)
def frozen(request) -> Path:
    return HERE / FROZEN[request.param][0]


def test_there_is_a_frozen_plugin_for_the_number_that_core_has():
    assert set(FROZEN) == {API_VERSION}


@pytest.mark.parametrize("number", sorted(FROZEN))
def test_a_frozen_plugin_is_as_it_was(number):
    name, digest = FROZEN[number]
    files = sorted(path for path in (HERE / name / "kvtiers_frozen").iterdir() if path.suffix == ".py")
    assert hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() == digest


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
