"""The demo's modules, and a look at what a run of it leaves behind."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.append(str(EXAMPLES))  # behind everything: nothing of the demo's stands in for another module


@pytest.fixture
def command(monkeypatch):
    """Run the command in a process of its own, with a folder for temporary files that is its own."""
    # Not below tmp_path: one of the files is a socket, whose path may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="demo-") as temp:
        monkeypatch.setenv("TMPDIR", temp)

        def run(*arguments):
            done = subprocess.run(
                [sys.executable, "-m", "demo", *arguments],
                cwd=EXAMPLES, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
            )  # fmt: skip
            assert list(Path(temp).iterdir()) == [], "the demo leaves temporary files behind"
            return done

        yield run


@pytest.fixture
def setting(tmp_path):
    from demo.setting import Setting

    return Setting.quick(tmp_path)
