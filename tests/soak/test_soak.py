"""What makes a soak fail: each of its complaints, from what it looks at."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

_spec = importlib.util.spec_from_file_location("kvtiers_soak", Path(__file__).with_name("soak.py"))
soak = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(soak)
_spec = importlib.util.spec_from_file_location("kvtiers_soak_engine", Path(__file__).with_name("engine.py"))
engine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(engine)


def run(**changed):
    ran = {
        "did": Counter(kill_a_host=1),
        "totals": Counter({"compared": 10, "landed fs": 5}),
        "worst": (0.060, "lookup_prefix"),
        "control_worst": 0.020,
        "wrong": [],
        "stuck": [],
        "redis": None,
        "disk": SimpleNamespace(is_mounted=False),
    }
    return SimpleNamespace(**ran | changed)


def test_a_soak_without_a_complaint_says_what_it_did_and_what_it_did_not(capsys):
    assert soak.report(run(), []) == 0
    said = capsys.readouterr().out
    assert "did: {'kill_a_host': 1}" in said
    assert "not done: redis (no redis-server here), a full disk" in said


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({"wrong": [{"row": 1}]}, []),
        ({"worst": (0.0701, "lookup_prefix")}, []),
        ({"stuck": ["an engine did not end"]}, []),
        ({"totals": Counter()}, []),
        ({"totals": Counter(compared=10)}, []),
        ({}, ["process 7"]),
    ],
    ids=["wrong byte", "stall", "stuck", "nothing compared", "no tier loaded from", "leftover"],
)
def test_each_complaint_is_a_failure(changed, left):
    assert soak.report(run(**changed), left) == 1


def test_a_call_in_which_the_engine_was_stopped_is_no_stall():
    before = signal.getsignal(signal.SIGCONT)
    try:
        thread = engine.Thread()
        thread.call(signal.raise_signal, signal.SIGCONT)
        assert thread.worst == 0.0
        thread.call(time.sleep, 0.001)
        assert thread.worst_call == "sleep"
    finally:
        signal.signal(signal.SIGCONT, before)


def test_a_process_that_is_left_is_found_and_one_that_has_ended_is_not():
    looker = SimpleNamespace(mark=f"test-{os.getpid()}", ids={"0123456789abcdef"})
    environment = os.environ | {soak.MARK: looker.mark}
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as left:
        left.stdout.readline()  # it runs, with its environment
        found = soak.Soak._left(looker)
        left.kill()
    assert len(found) == 1
    assert f"process {left.pid}: " in found[0]
    assert soak.Soak._left(looker) == []


def test_a_row_with_another_byte_is_counted_and_reported(capsys):
    run = engine.Soak({"version": 1, "primary": {"capacity": "1MiB", "prefault": False}})
    try:
        wanted = [engine.key(1, chunk) for chunk in range(3)]
        ctx = engine.RequestContext("r")
        while (plan := run.manager.prepare_store(wanted, ctx)) is None:
            run.manager.on_schedule_end()
        run.store(plan)
        run.row(plan.chunk_ids[1])[64_000] ^= 1
        assert run.manager.lookup_prefix(wanted, ctx).ready == 3
        run.check(run.manager.prepare_load(wanted, ctx))
        assert (run.counts["compared"], run.counts["wrong"]) == (3, 1)
        assert f'"wrong": "{wanted[1].hex()}"' in capsys.readouterr().out
    finally:
        run.worker.shutdown()
        run.manager.shutdown(5.0)
