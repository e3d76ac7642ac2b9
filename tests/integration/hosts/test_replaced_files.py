"""kvtiers' files are replaced while an engine runs, as by pip, and a host has to start from the new ones."""

import os
import shutil
import signal
from pathlib import Path

import pytest

import kvtiers


@pytest.fixture
def engine(party, faulty, tmp_path):
    """An engine that runs from a copy of kvtiers; and the copy."""
    copy = tmp_path / "installed"
    shutil.copytree(Path(kvtiers.__file__).parent, copy / "kvtiers", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "stderr").open("wb") as stderr:
        engine = party(stuck_stderr=stderr, env={**os.environ, "PYTHONPATH": str(copy)})
    engine.do(
        "import logging, kvtiers\n"
        "lines = []\n"
        "handler = logging.Handler()\n"
        "handler.emit = lambda record: lines.append(record.getMessage())\n"
        "logging.getLogger('kvtiers').addHandler(handler)"
    )
    assert engine.do("kvtiers.__file__").startswith(str(copy))
    engine.engine(faulty())
    return engine, copy / "kvtiers"


def kill_the_host(engine):
    os.kill(engine.do("engine.host()"), signal.SIGKILL)
    engine.do("engine.until(lambda: engine.own()['host_starts'] > 2, 'a host that ends by itself')")


def test_a_host_of_another_release_ends_and_one_line_says_what_to_do(engine):
    engine, files = engine
    (files / "_version.py").write_text('__version__ = "9.9.9"')
    kill_the_host(engine)
    lines = [line for line in engine.do("lines") if "no tier host" in line]
    assert len(lines) == 1
    assert lines[0].startswith("faulty: no tier host: ProtocolError: kvtiers' files are of 9.9.9 now")
    assert lines[0].endswith("restart the engine")
    assert engine.do("engine.lookup(keys(0, 4), engine.request()).ready") == 0


def test_a_host_whose_program_is_gone_ends_with_one_line_and_no_traceback(engine, tmp_path):
    engine, files = engine
    shutil.rmtree(files / "host")
    kill_the_host(engine)
    said = (tmp_path / "stderr").read_text().splitlines()
    assert said
    assert all(line.startswith("kvtiers: faulty cannot be started: No module named") for line in said), said
    assert all(line.endswith("if its files were replaced, restart the engine") for line in said), said
