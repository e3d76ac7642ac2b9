"""``kvtiers top``: what is shown of two looks at an engine, in 80 columns, on a terminal and for programs."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from click.testing import CliRunner

from kvtiers.cli.main import cli
from kvtiers.cli.top import measured, screen
from kvtiers.metrics import TierMetrics
from kvtiers.status import Troubles, answer_status

TIER = {
    "off": "", "open": True, "breaker_state": 0, "queue": 3, "hits": 100, "loaded_bytes": 10**9, "stored_bytes": 0,
    "wait_expired": 0, "saved_seconds": 12.5, "switch": "on", "full": False, "refusing": False, "too_slow": False,
    "taken_meanwhile": 0, "silent_seconds": 0.0,
}  # fmt: skip
FIGURES = {"steps": 100, "engine_seconds": 1.0, "lookups": 400, "primary_hits": 100, "rows": 1000, "free_rows": 250}


def look(at=10.0, tiers=None, figures=FIGURES, pid=7):
    return {
        "engine": "kvtiers replay 0.1.0", "pid": pid, "uid": 0, "model": "some-org/model", "at": at,
        "figures": figures, "tiers": {"fs": TIER} if tiers is None else tiers,
    }  # fmt: skip


LATER = look(
    12.0,
    {"fs": TIER | {"hits": 300, "loaded_bytes": 5 * 10**9, "wait_expired": 5}},
    FIGURES | {"steps": 300, "engine_seconds": 1.1, "lookups": 800, "primary_hits": 200},
)


def test_what_was_counted_between_two_looks_is_shown_a_second():
    (engine,) = measured([LATER], [look()])
    assert engine["hit_rate"] == (200 + 100) / 400
    assert engine["hit_rate_so_far"] == (300 + 200) / 800
    assert engine["steps_per_second"] == 100
    assert engine["step_share"] == pytest.approx(0.05)
    tier = engine["tiers"]["fs"]
    assert (tier["hits_per_second"], tier["read_bytes_per_second"]) == (100, 2e9)
    assert (tier["written_bytes_per_second"], tier["late_chunks_per_second"]) == (0, 2.5)
    assert (tier["state"], tier["breaker"], tier["queue"], tier["saved_seconds"]) == ("in use", "closed", 3, 12.5)


def test_the_screen_says_it_in_columns():
    assert screen(measured([LATER], [look()]), "12:00:00") == [
        "kvtiers replay 0.1.0, process 7: some-org/model                         12:00:00",
        "  hits 75.0 % now, 62.5 % in all, 250 of 1,000 rows free",
        "  kvtiers takes 5.0 % of the time of the engine's thread",
        "tier         state      hits/s read GB/s write GB/s queue late/s breaker   saved",
        "fs           in use        100     2.000      0.000     3    2.5  closed    12 s",
        "",
        "hits, queue, late: chunks (late: computed, since they did not come in time)",
        "saved: seconds of computing, less those of loading",
    ]


def test_no_line_is_longer_than_80_columns_whatever_there_is():
    long = TIER | {
        "hits": 10**12,
        "queue": 10**8,
        "loaded_bytes": 10**15,
        "saved_seconds": 10.0**9,
        "switch": "read-only",
    }
    looks = [
        look(10.0, {"a" * 63: TIER}, pid=4_000_000) | {"model": "m" * 200},
        look(12.0, {"a" * 63: long}, FIGURES | {"rows": 10**9}, pid=4_000_000) | {"model": "m" * 200},
    ]
    lines = screen(measured(looks[1:], looks[:1]), "12:00:00")
    assert max(map(len, lines)) <= 80
    assert "read-only…" in lines[4] or "read-only" in lines[4]


def test_an_engine_that_has_just_come_a_tier_that_is_gone_and_vllms_own_tiering_are_shown_too():
    (engine,) = measured([LATER], [])
    assert engine["hit_rate"] is None
    assert engine["tiers"]["fs"]["hits_per_second"] == 0
    assert measured([look(12.0, {})], [look()])[0]["tiers"] == {}
    under_vllms = look(figures={})
    assert screen(measured([under_vllms], [under_vllms]))[1] == "  tiers under the engine's own tiering"
    assert "  no tiers" in screen(measured([look(12.0, {})], [look()]))
    assert screen([]) == ["no engine with kvtiers runs here as this user"]


@pytest.fixture
def engine():
    """An engine's answer, with a model of its own name."""
    figures = TierMetrics().as_data() | {"own": {"open": 1}, "off": "", "shared": True, "tokens": 0, "hits": 5}
    counted = {"engine": FIGURES, "primary": {}, "tiers": {"fs": figures}}
    served = answer_status("vLLM 0.32.0", f"top-{os.getpid()}", Troubles(["fs"]), lambda: counted, lambda *_: {})
    yield f"top-{os.getpid()}"
    served.close()


def test_once_prints_a_list_for_programs(engine):
    done = CliRunner().invoke(cli, ["top", "--once", "--json", "--interval", "0.1"])
    assert done.exit_code == 0, done.output
    (mine,) = [one for one in json.loads(done.stdout) if one["model"] == engine]
    assert mine["tiers"]["fs"]["state"] == "in use"
    assert mine["rows"] == 1000
    assert CliRunner().invoke(cli, ["top", "--json"]).exit_code == 2


def test_on_a_terminal_it_goes_on_until_it_is_interrupted(engine):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, 80, 0, 0))
    program = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "top", "--interval", "0.1"]
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "200"}  # room for the engines of other tests

    with subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, env=terminal) as top:
        os.close(theirs)
        shown, until = b"", time.monotonic() + 60
        while shown.count(engine.encode()) < 3 and time.monotonic() < until:
            shown += os.read(ours, 1 << 16)
        top.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 1 << 16):
                shown += more
        except OSError:  # the terminal's end
            pass
        assert top.wait(60) == 0
    os.close(ours)
    text = shown.decode()
    assert re.search(r"fs +in use +\S+ +0\.000 +0\.000 +0 +0 +closed", text)
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1, "the screen of before comes back"
    assert "Traceback" not in text
