"""The whole stack in trouble: a tier that hangs or is gone, an engine that is killed, a release that it is not for."""

import os
import signal
import time
from pathlib import Path

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import BLOCK, EngineError, whole_stack
from .test_backends import Redis
from .test_whole_stack import fs

PATIENCE = 30.0


def in_use(figures):
    return figures.get("kvtiers_tier_open{redis}") and not figures["kvtiers_tier_breaker_state{redis}"]


def hits_resume(engine, right):
    """Ask, with right tokens each time, until the tier has everything again."""
    until = time.monotonic() + 2 * PATIENCE
    while True:
        engine.wait_for(in_use)
        engine.forget()
        if right(engine, *PROMPTS) == WHOLE:
            return
        assert time.monotonic() < until, "hits never resume"


def test_a_redis_that_hangs_or_is_gone_costs_hits_and_nothing_else(start, model, tmp_path, right):
    server = Redis(tmp_path).start()
    quick = {"deadline": "3s", "grace": "1s", "breaker": {"delay": "200ms", "max_delay": "1s"}}
    config = whole_stack({"type": "redis", "url": f"redis://127.0.0.1:{server.port}/0", **quick})
    try:
        engine = start(model, config)
        engine.wait_for(in_use)
        assert right(engine, *PROMPTS) == [0, 0]
        engine.forget()
        server.signal("SIGSTOP")
        assert right(engine, *PROMPTS) == [0, 0], "it hangs"
        server.signal("SIGCONT")
        hits_resume(engine, right)
        engine.forget()
        server.stop()
        assert right(engine, *PROMPTS) == [0, 0], "it is gone"
        server.start()  # empty: what is computed is stored again
        hits_resume(engine, right)
        assert engine.metrics()["kvtiers_tier_hits{redis}"] >= 2 * sum(WHOLE) / BLOCK
        engine.shutdown()
    finally:
        server.stop()


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children(pid):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found += [int(folder.name), *children(int(folder.name))]
    return found


def test_a_killed_engine_leaves_nothing_and_the_next_one_hits_what_it_stored(start, model, tmp_path, right):
    config = whole_stack(fs(tmp_path / "store"))
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = start(model, config, **two)
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    family = children(engine.process.pid)
    assert engine.hosts()
    assert engine.id in Path("/proc/net/unix").read_text()
    os.kill(engine.process.pid, signal.SIGKILL)
    until = time.monotonic() + PATIENCE
    while not all(gone(pid) for pid in family):
        assert time.monotonic() < until, "a process outlives its engine"
        time.sleep(0.05)
    assert engine.id not in Path("/proc/net/unix").read_text()
    assert not [path for path in Path("/dev/shm").iterdir() if "kvtiers" in path.name or engine.id in path.name]
    again = start(model, config, **two)
    assert right(again, *PROMPTS) == WHOLE
    again.shutdown()


@pytest.mark.parametrize(
    ("release", "tier", "expected"),
    [
        ("0.28.0", {"type": "memory", "capacity": "64MiB"}, "runs on vLLM 0.30 and 0.32, not on 0.28"),
        ("", {"type": "memory", "capacty": "64MiB"}, "Did you mean 'capacity'"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start_by_name(start, model, release, tier, expected):
    with pytest.raises(EngineError) as refused:
        start(model, whole_stack(tier), release=release)
    assert expected in str(refused.value)
