"""Engines killed before their tiers have all of their chunks: a neighbour or the next one writes the rest."""

import contextlib
import json
import logging
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.pool.test_engines import config, load, running, step_until, store
from tests.pool_rig import KeeperThread, chain, wait_until

from kvtiers.primary.pooled import PooledPrimaryTier

_ROOT = Path(__file__).parents[3]
PROMPTS = [chain(number, 8) for number in range(16)]
CHUNKS = 8 * len(PROMPTS)
KILLS = 3
HELD = {"rate_limit": {"bytes_per_second": 1}, "deadline": "1h"}
"""Options by which a tier writes a few values, and the others not in the time of a test."""


@pytest.fixture(params=["alone", "shared"])
def keeper(tmp_path, request):
    """A keeper for one engine, or for two, of which one is at work and has no tier."""
    parts = 2 if request.param == "shared" else 1
    keeper = KeeperThread(tmp_path / "pool.sock", parts << 20, parts=parts)
    with running(config(keeper)) if parts > 1 else contextlib.nullcontext():
        yield keeper


@pytest.fixture
def large(tmp_path):
    """A keeper for three engines."""
    return KeeperThread(tmp_path / "pool.sock", 3 << 20, parts=3)


@pytest.fixture
def tier(tmp_path):
    return {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "64MiB", "min_free": 0, "required": True}


@contextlib.contextmanager
def engine_process(keeper, tier, prompts=0):
    """An engine in a process of its own, which has stored so many prompts; it is killed at the end of the block."""
    command = [sys.executable, "-m", "tests.integration.pool.killed_engine", str(keeper.path), json.dumps(tier)]
    process = subprocess.Popen([*command, str(prompts)], cwd=_ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout.read(1) == b".", "the engine has ended"
        yield process
    finally:
        process.kill()
        process.communicate()


def leave_unwritten(keeper, tier):
    """Have an engine store all chunks, and be killed when its tier has some of them."""
    with engine_process(keeper, {**tier, **HELD}, len(PROMPTS)):
        wait_until(lambda: chunks_of(keeper) == CHUNKS and written(tier), "it is not published, or nothing is written")
    files = written(tier)
    assert len(files) <= 8, "the tier has what it should not have yet"
    return files


def chunks_of(keeper):
    return sum(part["chunks"] for part in keeper.figures()["parts"])


def written(tier):
    """The values in a directory, with what tells one write of a file from another."""
    values = (path for path in Path(tier["path"]).rglob("*00000000") if path.is_file())  # others come and go
    return {path: ((found := path.stat()).st_ino, found.st_mtime_ns) for path in values}


def check_tier(tier):
    """Load all chunks from the tier, without the pool, and compare each byte."""
    with running(config(None, {**tier, "read_only": True})) as engine:
        for keys in PROMPTS:
            load(*engine, keys)
        assert engine[0].stats()["tiers"]["fs"]["loaded_chunks"] == CHUNKS


def test_what_a_killed_engine_had_not_written_the_next_one_writes_and_nothing_else(keeper, tier, caplog):
    caplog.set_level(logging.INFO, "kvtiers.tiering")
    before = leave_unwritten(keeper, tier)
    with running(config(keeper, tier)) as engine:
        step_until(engine[0], lambda: any("of the chunks that ended engines left" in line for line in caplog.messages))
        assert engine[0].stats()["tiers"]["fs"]["stored_chunks"] == CHUNKS - len(before)
        for keys in PROMPTS:
            load(*engine, keys)
        assert engine[0].stats()["tiers"]["fs"]["loaded_chunks"] == 0
        assert engine[0].stats()["engine"]["misuse"] == engine[0].stats()["primary"]["misuse"] == 0
    after = written(tier)
    assert len(after) == CHUNKS
    assert before.items() <= after.items(), "what the tier had was written again"
    check_tier(tier)


def test_engines_killed_while_they_write_leave_no_wrong_value_and_the_last_one_writes_the_rest(keeper, tier):
    leave_unwritten(keeper, tier)
    chance, counts = random.Random(1), [0]
    for _ in range(KILLS):
        with engine_process(keeper, tier) as process:
            process.stdout.read(chance.randrange(1, 60))
        assert chunks_of(keeper) == CHUNKS
        counts.append(len(written(tier)))
    assert counts == sorted(counts)
    with running(config(keeper, tier)) as engine:
        step_until(engine[0], lambda: len(written(tier)) == CHUNKS)
    check_tier(tier)


def test_requests_hit_the_pool_as_before_while_the_tier_takes_nothing(keeper, tier):
    leave_unwritten(keeper, tier)
    with running(config(keeper, {**tier, **HELD})) as engine:
        step_until(engine[0], lambda: engine[0].stats()["tiers"]["fs"]["running_jobs"])
        for keys in PROMPTS:
            load(*engine, keys)
        store(*engine, chain(99, 8), ends=False)
        load(*engine, chain(99, 8))
        assert engine[0].stats()["tiers"]["fs"]["loaded_chunks"] == 0
        assert engine[0].stats()["engine"]["refused_stores"] == 0
        engine[0].shutdown(0.0)


@pytest.mark.parametrize("admission", ["on_eviction", "expected-reuse"])
def test_what_leaves_the_next_engine_is_in_a_tier_that_takes_it_late(keeper, tier, admission):
    leave_unwritten(keeper, tier)
    with running(config(keeper, {**tier, "admission": admission})) as engine:
        for number in range(100, 100 + engine[0].stats()["primary"]["rows"] // 8):
            store(*engine, chain(number, 8))
        assert engine[0].stats()["engine"]["dropped_dirty"] == 0
    check_tier(tier)


def test_what_a_killed_engine_had_not_written_one_of_its_neighbours_writes_without_a_next_engine(large, tier):
    with running(config(large, tier)) as one, running(config(large, tier)) as other:
        before = leave_unwritten(large, tier)
        step_both(one, other, lambda: len(written(tier)) == CHUNKS)
        step_both(one, other, lambda: not any(pinned(engine) for engine in (one, other)))
        stats = [engine[0].stats()["tiers"]["fs"] for engine in (one, other)]
        assert sorted(each["stored_chunks"] for each in stats) == [0, CHUNKS - len(before)]
        assert [each["loaded_chunks"] for each in stats] == [0, 0]
        check_misuse(one, other)
    assert before.items() <= written(tier).items(), "what the tier had was written again"
    check_tier(tier)


@pytest.mark.parametrize("when", [0, 30, 90])
def test_a_neighbour_that_is_killed_while_it_writes_leaves_the_rest_to_another_one(large, tier, monkeypatch, when):
    with running(config(large, tier)) as last:
        with engine_process(large, tier), monkeypatch.context() as patched:
            patched.setattr(PooledPrimaryTier, "take_left", lambda primary: [])
            begun = len(leave_unwritten(large, tier))
            wait_until(lambda: len(written(tier)) > begun + when, "nobody writes")
        assert len(written(tier)) < CHUNKS
        step_until(last[0], lambda: len(written(tier)) == CHUNKS)
        check_misuse(last)
    check_tier(tier)


def test_an_engine_that_gets_the_part_while_a_neighbour_writes_what_is_in_it_does_the_rest(large, tier):
    with running(config(large, tier)) as neighbour:
        begun = len(leave_unwritten(large, tier))
        step_until(neighbour[0], lambda: len(written(tier)) > begun)
        with running(config(large, tier)) as owner:
            assert owner[0].stats()["primary"]["evictable_rows"] == CHUNKS
            step_until(owner[0], lambda: len(written(tier)) == CHUNKS)
            step_until(neighbour[0], lambda: not pinned(neighbour))
            stored = [engine[0].stats()["tiers"]["fs"]["stored_chunks"] for engine in (neighbour, owner)]
            assert min(stored) > 0
            assert sum(stored) <= CHUNKS - begun + 16, "more was written twice than a job that was in flight"
            check_misuse(neighbour, owner)
    check_tier(tier)


def step_both(one, other, done):
    def stepped():
        other[0].on_schedule_end()
        return done()

    step_until(one[0], stepped)


def pinned(engine):
    return engine[0].stats()["primary"]["pinned_rows"]


def check_misuse(*engines):
    for manager, *_ in engines:
        assert manager.stats()["engine"]["misuse"] == manager.stats()["primary"]["misuse"] == 0
