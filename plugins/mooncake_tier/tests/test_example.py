"""The example of three machines, as a user runs it."""

import subprocess
import sys
from pathlib import Path

from mooncake_hosted import children

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mooncake" / "three_machines.py"
SECONDS = 240.0  # only a hang takes that long


def test_three_machines_share_their_memory_and_one_is_lost(client_library):
    before = children()
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "bert reads what anna has written: 24 of 24 values, 0 wrong" in lines[2]
    assert "cleo reads what anna has written: 24 of 24 values, 0 wrong" in lines[3]
    assert lines[4] == "cleo is killed"
    assert "24 of 24 values, 0 wrong" not in lines[5]
    assert "24 of 24 values, 0 wrong" in lines[-2]
    assert lines[-1] == "bert and anna leave"
    assert children() <= before
