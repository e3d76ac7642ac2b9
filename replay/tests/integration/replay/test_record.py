"""``record`` in a config: a replay that is recorded, and its recording replayed, planned, and cut off by a kill."""

import json
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtiers.cli.main import cli
from kvtiers_replay.trace import read_trace

CONFIG = """\
version: 1
primary: {{capacity: 4MiB}}
secondary:
  - {{type: memory, io: thread, capacity: 64MiB, exists_ttl: 200ms}}
lookup_wait: 30s
load_wait: 30s
{record}
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from kvtiers.cli.main import main; main()", *map(str, arguments)]


def figures(*arguments: object) -> dict:
    """Run a command in this process, and return what it prints: to start one takes longer than most replays."""
    done = CliRunner().invoke(cli, [*map(str, arguments), "--json"], prog_name="kvtiers")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def recorded(tmp_path) -> tuple[Path, Path]:
    """A config that records, and the recording."""
    trace = tmp_path / "recorded.jsonl"
    config = tmp_path / "tiers.yaml"
    config.write_text(CONFIG.format(record=f"record: {{path: {trace}, max_bytes: 100MB}}"), encoding="utf-8")
    return config, trace


@pytest.fixture
def plain(tmp_path) -> Path:
    config = tmp_path / "plain.yaml"
    config.write_text(CONFIG.format(record=""), encoding="utf-8")
    return config


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_a_recording_replayed_has_the_hits_of_what_was_recorded(recorded, plain, blocks_per_chunk) -> None:
    config, trace = recorded
    options = ("--bytes-per-chunk", "8KiB", "--gpu-blocks", 700, "--blocks-per-chunk", blocks_per_chunk)
    first = figures("replay", "--config", config, "--workload", "code", "--requests", 150, *options)
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    again = figures("replay", "--config", plain, "--trace", trace, *options)
    assert again["requests"] == 150
    assert again["references"] == first["references"]
    assert again["tokens"] == first["tokens"]
    assert again["hits"] == first["hits"]
    assert again["infinite_hits"] == first["infinite_hits"]


def test_a_plan_of_the_recording_has_the_hit_rate_that_the_replay_measured(recorded, plain) -> None:
    config, trace = recorded
    measured = figures("replay", "--config", config, "--workload", "code", "--requests", 150, "--bytes-per-chunk", 4032)
    per_token = 4032 // 64
    plan = figures("plan", "--trace", trace, "--config", plain, "--bytes-per-token", per_token, "--primary", "4MiB")
    (point,) = plan["points"]
    assert plan["references"] == measured["references"]
    assert point["hit_rate"] == pytest.approx(measured["prefix_hits"] / measured["references"], abs=0.001)
    assert 0.2 < point["hit_rate"] < 0.99


def test_an_engine_that_is_killed_leaves_every_whole_line_readable(recorded) -> None:
    config, trace = recorded
    arguments = ("--config", config, "--workload", "code", "--requests", 5000, "--bytes-per-chunk", "4KiB")
    process = subprocess.Popen(command("replay", *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 100
        while not (trace.exists() and trace.stat().st_size > 20_000):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    whole = trace.read_bytes().count(b"\n")
    assert len(read_trace(trace).requests) == whole > 5
    # The next one neither trips over it nor takes it away.
    figures("replay", "--config", config, "--workload", "code", "--requests", 5)
    assert trace.read_bytes().count(b"\n") == whole
    assert len(read_trace(trace.with_name("recorded-1.jsonl")).requests) == 5


def test_engines_that_share_a_config_record_into_files_of_their_own(recorded, tmp_path) -> None:
    config, trace = recorded
    memory = "type: memory, io: thread, capacity: 64MiB"
    shared = config.read_text(encoding="utf-8").replace(memory, f"type: fs, path: {tmp_path}/fs, capacity: 64MiB")
    config.write_text(shared, encoding="utf-8")
    figures("replay", "--config", config, "--workload", "code", "--requests", 30, "--engines", 2)
    parts = [trace, trace.with_name("recorded-1.jsonl")]
    assert sum(len(read_trace(part).requests) for part in parts) == 30
    assert not trace.with_name("recorded-2.jsonl").exists()
