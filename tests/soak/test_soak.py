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


NO_DISK = SimpleNamespace(is_mounted=False)


def run(**changed):
    ran = {
        "did": Counter(kill_a_host=1),
        "totals": Counter({"compared": 10} | {f"landed {kind}": 5 for kind in soak.KINDS}),
        "seconds": 300.0,
        "worst": (0.060, "reach"),
        "control_worst": 0.020,
        "wrong": [],
        "stuck": [],
        "redis": True,
        "sentinel": True,
        "azure": True,
        "disk": SimpleNamespace(is_mounted=True),
    }
    return SimpleNamespace(**ran | changed)


def test_a_soak_without_a_complaint_says_what_it_did_and_what_it_did_not(capsys):
    assert soak.report(run(), []) == 0
    said = capsys.readouterr().out
    assert "did: {'kill_a_host': 1}" in said
    assert "not done: nothing" in said
    assert soak.report(run(redis=None, disk=NO_DISK), [], ["redis", "full-disk"]) == 0, "left out by name"
    assert "not done: redis (no redis-server here), full-disk (no file system may" in capsys.readouterr().out
    assert soak.report(run(seconds=20.0, totals=Counter({"compared": 10, "landed fs": 5})), []) == 0, "a short one"


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({"wrong": [{"row": 1}]}, []),
        ({"worst": (0.0701, "reach")}, []),
        ({"stuck": ["an engine did not end"]}, []),
        ({"totals": Counter()}, []),
        ({"totals": Counter(compared=10)}, []),
        ({"totals": Counter(compared=10), "seconds": 20.0}, []),
        ({"totals": Counter({"compared": 10} | {f"landed {kind}": 5 for kind in soak.KINDS - {"s3"}})}, []),
        ({}, ["process 7"]),
        ({"redis": None}, []),
        ({"sentinel": None}, []),
        ({"disk": NO_DISK}, []),
    ],
    ids=[
        "wrong byte",
        "stall",
        "stuck",
        "nothing compared",
        "no tier loaded from",
        "nor for a short time",
        "a kind not loaded from",
        "leftover",
        "no Redis",
        "no Sentinel",
        "no full disk",
    ],
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


def test_a_wait_for_a_processor_beside_a_call_makes_the_call_no_shorter(monkeypatch):
    before = signal.getsignal(signal.SIGCONT)
    waited = 0.0

    def wait():
        nonlocal waited
        time.sleep(0.005)
        waited += 0.005
        return waited

    try:
        thread = engine.Thread()
        monkeypatch.setattr(thread, "_wait_seconds", wait)
        thread.call(time.sleep, 0.001)
        assert thread.worst >= 0.001
    finally:
        signal.signal(signal.SIGCONT, before)


def test_a_process_that_is_left_is_found_and_one_that_has_ended_is_not():
    looker = SimpleNamespace(mark=f"test-{os.getpid()}", ids={"0123456789abcdef"})
    environment = os.environ | {soak.MARK: looker.mark}
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as left:
        left.stdout.readline()  # it runs, with its environment
        found = soak.Soak.left(looker)
        left.kill()
    assert len(found) == 1
    assert f"process {left.pid}: " in found[0]
    assert soak.Soak.left(looker) == []


def test_a_row_with_another_byte_is_counted_and_reported(capsys):
    run = engine.Soak({"version": 1, "primary": {"capacity": "1MiB", "prefault": False}})
    try:
        wanted = [engine.key(1, chunk) for chunk in range(3)]
        ctx = engine.RequestContext("r")
        while (plan := run.manager.prepare_store(wanted, ctx)) is None:
            run.manager.on_schedule_end()
        run.store(plan)
        run.row(plan.chunk_ids[1])[64_000] ^= 1
        assert (
            run.manager.reach([engine.PromptGroup(wanted)], ctx).in_chunks(run.manager.tokens_per_chunk[0]).ready == 3
        )
        run.check(run.manager.prepare_load(wanted, ctx))
        assert (run.counts["compared"], run.counts["wrong"]) == (3, 1)
        assert f'"wrong": "{wanted[1].hex()}"' in capsys.readouterr().out
    finally:
        run.worker.shutdown()
        run.manager.shutdown(5.0)


def test_a_call_that_never_returns_is_noticed_and_its_stack_is_shown(tmp_path):
    """Also where no Python of the engine's runs any more."""
    program = tmp_path / "engine.py"
    program.write_text(
        "import faulthandler, os, signal\n"
        "faulthandler.enable()\n"
        "def reach():\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print('{}', flush=True)\n"
        "reach()\n"
    )
    hung = soak.Engine({}, 60, os.environ, program)
    looker = SimpleNamespace(stuck=[])
    until = time.monotonic() + 60
    while not hung.lines and time.monotonic() < until:
        time.sleep(0.05)
    hung.silence = 0.5  # from now on: a busy machine starts it slowly
    while not looker.stuck and time.monotonic() < until:
        time.sleep(0.05)
        soak.Soak.look_at(looker, hung)
    assert looker.stuck == ["a call of the engine's thread has not returned for 0.5 s; its stack is below"]
    hung.process.wait(60)
    hung.end()
    assert "in reach" in hung.said


def test_a_mutated_load_of_a_tier_of_the_third_rung_is_a_miss_and_counted(tmp_path):
    chaos = soak.Soak.__new__(soak.Soak)
    chaos.folder = tmp_path
    environment = os.environ | {"PYTHONPATH": chaos.install_liar()}
    tier = {"type": "managed-liar", "max_blocks": 200, **soak.MANAGED}
    config = {"version": 1, "primary": soak.PRIMARY, **soak.WAITS, "secondary": [tier]}
    for seconds in (8, 60):  # a busy machine may load too little in the first
        ran = soak.Engine(config, seconds, environment)
        assert ran.process.wait(seconds + 60) == 0
        ran.end()
        assert not ran.wrong
        if ran.last["damaged"]["managed-liar"]:
            break
    assert ran.last["landed"]["managed-liar"] > 0
    assert ran.last["damaged"]["managed-liar"] > 0


def test_a_node_of_the_cluster_is_killed_and_comes_back_and_the_end_leaves_none(tmp_path):
    chaos = soak.Cluster(tmp_path)
    nodes = chaos.servers.nodes
    try:
        assert chaos.tier()["name"] in soak.KINDS
        assert chaos.process in {node.process for node in nodes}
        chaos.end()
        assert [node.process for node in nodes].count(None) == 1
        chaos.start()
        assert all(node.answers() for node in nodes)
    finally:
        chaos.close()
    assert not any(node.process for node in nodes)
