"""The command ``kvtiers pool``: a keeper in a process of its own, and what it says of itself."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.pool_rig import LAYOUT, PoolEngine, ServiceManager, chain, wait_until

from kvtiers.api import StartError
from kvtiers.cli.main import cli
from kvtiers.cli.pool import status_lines
from kvtiers.pool.listening import listen
from kvtiers.pool.loan import is_served, pool_figures


@pytest.fixture
def manager(tmp_path):
    return ServiceManager(tmp_path / "notify")


@pytest.fixture
def serving(tmp_path):
    """Start a keeper of one MiB, or another size, at the given path, or as a service; all end with the test."""
    running = []

    def start(path, size="1MiB", manager=None, more=()):
        words = ["pool", "serve", "--size", size, "--socket", str(path), *more]
        command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", *words]
        running.append(
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) if manager is None else manager.start(*words)
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def run(*words):
    return CliRunner().invoke(cli, ["pool", *map(str, words)])


def test_a_keeper_serves_until_sigterm_and_leaves_nothing(serving, tmp_path):
    path = tmp_path / "pool.sock"
    keeper = serving(path)
    wait_until(lambda: is_served(str(path)), "it does not serve")
    wait_until(lambda: "populated in" in run("status", "--socket", path).output, "it is not populated")
    engine = PoolEngine(path)
    engine.store(chain(1, 3))
    wait_until(engine.is_published, "it is not published")
    lines = run("status", "--socket", path).output.splitlines()
    assert re.fullmatch(r"1MiB of memory, populated in \d+\.\d s", lines[0])
    assert lines[1].startswith(f"3 chunks in {(1 << 20) // LAYOUT.row_stride} rows of 4KiB, of default/m-")
    assert lines[2:] == [
        f"process {os.getpid()} has it",
        "3 chunks published, 0 too late: their rows were taken again",
        "1 engines so far; 0 rows checked at their ends, 0 damaged",
    ]
    assert json.loads(run("status", "--socket", path, "--json").output)["chunks"] == 3
    engine.close()
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(60) == 0
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_is_restarted_without_an_engine_loses_nothing(serving, manager, tmp_path, by):
    path = tmp_path / "pool.sock"
    keeper = serving(path, manager=manager)
    wait_until(lambda: is_served(str(path)), "it does not serve")
    engine = PoolEngine(path)
    engine.store(chain(1, 100))
    wait_until(engine.is_published, "it is not published")
    rows = engine.rows_of(chain(1, 100))
    engine.close()
    for times in (2, 3):
        wait_until(lambda: "no engine has it" in run("status", "--socket", path).output, "it is not taken back")
        keeper.send_signal(by)
        keeper.wait(60)
        keeper = serving(path, manager=manager)
        wait_until(lambda: is_served(str(path)), "it does not serve")
        engine = PoolEngine(path)
        assert engine.rows_of(chain(1, 100)) == rows
        assert engine.check() == 100
        engine.close()
        assert manager.kept()
        assert manager.ready == times


def test_a_second_keeper_at_the_same_place_is_refused_in_a_line(serving, tmp_path):
    path = tmp_path / "pool.sock"
    serving(path)
    wait_until(lambda: is_served(str(path)), "it does not serve")
    second = serving(path)
    assert second.wait(60) == 2
    why = "another keeper serves there; give another --socket"
    assert second.stderr.read() == f"error: pool: cannot serve at {path}: {why}\n"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (
            "none/pool.sock",
            "No such file or directory; make {root}/none for the engines' user, or give another --socket",
        ),
        (".", "it is no socket; remove it, or give another --socket"),
    ],
)
def test_a_place_that_cannot_be_the_keepers_is_a_line_that_says_what_to_do(tmp_path, path, why):
    with pytest.raises(StartError) as found:
        listen(tmp_path / path)
    assert str(found.value) == f"pool: cannot serve at {tmp_path / path}: {why.format(root=tmp_path)}"


def test_a_folder_that_somebody_else_locks_holds_no_start_up_for_ever(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(StartError, match=f"another process has locked {tmp_path}"):
        listen(tmp_path / "pool.sock", locked=0.05)
    os.close(folder)


def test_more_memory_than_there_is_names_the_option(serving, tmp_path):
    keeper = serving(tmp_path / "pool.sock", "9999TiB")
    assert keeper.wait(60) == 2
    assert "lower --size below" in keeper.stderr.read()


def test_clear_forgets_what_no_engine_has_and_says_of_the_rest_who_has_it(serving, tmp_path):
    path = tmp_path / "pool.sock"
    serving(path)
    wait_until(lambda: is_served(str(path)), "it does not serve")
    engine = PoolEngine(path)
    engine.store(chain(1, 3))
    wait_until(engine.is_published, "it is not published")
    refused = run("clear", "--socket", path)
    why = f"an engine has its memory (process {os.getpid()}); end it, or clear it there ('kvtiers ctl clear')"
    assert (refused.exit_code, refused.output) == (2, f"error: pool: {why}\n")
    assert engine.check() == 3
    engine.close()
    wait_until(lambda: "no engine has it" in run("status", "--socket", path).output, "it is not taken back")
    cleared = run("clear", "--socket", path)
    assert (cleared.exit_code, cleared.output) == (0, "3 chunks forgotten\n")
    engine = PoolEngine(path)
    assert engine.tier.chunks == 0


def test_memory_is_taken_from_the_numa_node_that_is_named(serving, tmp_path):
    """By the process that populates it, which inherits from the keeper whose this is, too."""
    path = tmp_path / "pool.sock"
    keeper = serving(path, more=["--numa-node", "0"])
    wait_until(lambda: is_served(str(path)) and pool_figures(str(path))["populated"], "it is not populated")
    maps = Path(f"/proc/{keeper.pid}/numa_maps").read_text().splitlines()
    (rows,) = [line for line in maps if "memfd:kvtiers-pool\\040" in line]
    assert "prefer:0" in rows or "prefer (many):0" in rows


def test_a_numa_node_that_there_is_not_is_a_line_and_no_error(serving, tmp_path):
    path = tmp_path / "pool.sock"
    keeper = serving(path, more=["--numa-node", "900"])
    wait_until(lambda: is_served(str(path)) and pool_figures(str(path))["populated"], "it is not populated")
    keeper.terminate()
    assert "pool: NUMA node 900: Invalid argument; the memory lies anywhere" in keeper.communicate(timeout=60)[1]


@pytest.mark.parametrize("size", ["much", "0", "-1GiB"])
def test_a_size_that_is_none_is_refused(size):
    found = run("serve", "--size", size)
    assert found.exit_code == 2
    assert "--size" in found.output


def test_without_a_keeper_the_status_is_one_line(tmp_path):
    for command in ("status", "clear"):
        found = run(command, "--socket", tmp_path / "nobody.sock")
        assert found.exit_code == 2
        assert "error: pool: no keeper serves at" in found.output


def test_a_status_says_what_is_waited_for():
    part = {
        "arena": "", "checking": False, "chunks": 5, "holds": "", "lent": True, "engine": 7, "engine_connected": False,
        "watched": 2,
        "processes": [{"pid": 20, "rank": -3}, {"pid": 21, "rank": 0}],
    }  # fmt: skip
    whole = {
        "bytes": 1 << 30, "populated": True, "populate_seconds": 0.25, "chunks": 5,
        "waiting": [8, 9], "published": 0, "published_late": 0, "checked": 0, "engines": 1, "damaged": 0,
    }  # fmt: skip

    def lines(*parts, **more):
        return status_lines({**whole, **more, "parts": [{**part, **each} for each in parts]})

    assert lines({})[1:7] == [
        "process 7 had it; not all of its processes have ended yet",
        "process 20 has it, a tier host",
        "process 21 has it, rank 0",
        "process 8 waits for it",
        "process 9 waits for it",
        "0 chunks published, 0 too late: their rows were taken again",
    ]
    assert "lsof" in lines({"processes": []})[2]
    hidden = {"engine": 0, "processes": [{"pid": 0, "rank": -3}, {"pid": 0, "rank": 0}]}
    assert lines({**hidden, "engine_connected": True}, waiting=[0])[1:5] == [
        "a process of another PID namespace has it",
        "a process of another PID namespace has it, a tier host",
        "a process of another PID namespace has it, rank 0",
        "a process of another PID namespace waits for it",
    ]
    assert lines({"lent": False})[1] == "no engine has it"
    assert lines({"checking": True})[1] == "its rows are being checked"
    of, more = {"arena": "a", "row_bytes": 2 << 20, "rows": 50, "lent": False}, {"arena": "b", "row_bytes": 4096}
    assert lines({}, {**of, "holds": "d/m/"}, {**of, **more, "holds": "d/n/"}, {**of, "holds": "d/l/"})[1:-2] == [
        "10 chunks in 100 rows of 2MiB, of d/l, d/m",
        "part 2, 5 chunks: no engine has it",
        "part 4, 5 chunks: no engine has it",
        "5 chunks in 50 rows of 4KiB, of d/n",
        "part 3, 5 chunks: no engine has it",
        "part 1, 5 chunks: process 7 had it; not all of its processes have ended yet",
        "part 1, 5 chunks: process 20 has it, a tier host",
        "part 1, 5 chunks: process 21 has it, rank 0",
        "process 8 waits for it",
        "process 9 waits for it",
    ]
    assert lines({}, populated=False) == ["1GiB, not populated yet"]
    assert lines({"lent": False}, {"engine_connected": True, "processes": []})[1:3] == [
        "part 1, 5 chunks: no engine has it",
        "part 2, 5 chunks: process 7 has it",
    ]
