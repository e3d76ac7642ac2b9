"""Engines and keepers of a pool are killed, at random and before each line: every chunk that is found is compared."""

import contextlib
import os
import random

import pytest
from tests.pool_rig import LAYOUT, Forks, PoolEngine, ServiceManager, chain, pool_figures, wait_until

from kvtiers.api import StartError

ROWS = 1500
KILLS = int(os.environ.get("KVTIERS_POOL_KILLS", "40"))
EVERY_LINE = int(os.environ.get("KVTIERS_POOL_LINES", "40"))
"""Before every so many-th line a keeper is killed."""


@pytest.fixture(scope="module")
def forks():
    running = Forks()
    yield running
    running.close()


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("parts", [1, 3])
def test_engines_and_keepers_killed_at_random_leave_no_wrong_chunk_and_lose_none(forks, tmp_path, policy, parts):
    _kill_at_random(forks, tmp_path / "pool.sock", policy, parts)


def _kill_at_random(forks, path, policy, parts=1):
    """Each engine compares all that it finds, at its start and before each use. Every tenth time a keeper is killed."""
    size = parts * ROWS * LAYOUT.row_stride
    chance = random.Random(policy)
    keeper = forks.start("keep", path, size, 0.0, 0, parts)
    keeper.wait_for(1)
    engines = [forks.start("live", path, policy, part) for part in range(parts)]
    found = 0
    for kill in range(1, KILLS + 1):
        engine = engines.pop(0)
        engine.wait_for(chance.randrange(1, 60))
        if kill % 10 == 0:
            keeper.kill()
            engine.wait_for(chance.randrange(1, 40))  # it goes on alone
            keeper = forks.start("keep", path, size, 60.0, 0, parts)
            keeper.wait_for(1)
            assert all(each.publish() for each in [engine, *engines]), "what it has is lost"
        engine.kill()
        figures = pool_figures(path)
        assert figures["damaged"] == 0, "an entry counted for bytes that changed"
        engines.append(forks.start("live", path, policy, parts * kill))
        engines[-1].wait_for(1)
        found = max(found, pool_figures(path)["checked"])
    for engine in engines:
        engine.kill()
    auditors = [PoolEngine(path, policy=policy) for _ in range(parts)]
    assert all(auditor.check() for auditor in auditors)
    assert not auditors[0].loan._plane._pins.any(), "a row is kept for an engine that has ended"
    assert found > 1000, "the engines found next to nothing"
    for auditor in auditors:
        auditor.close()
    keeper.kill()


def test_a_keeper_killed_before_any_line_leaves_memory_that_the_next_one_can_use(forks, tmp_path):
    killed = _kill_by_line(forks, tmp_path / "pool.sock", range(1, 1_000_000, EVERY_LINE))
    assert killed > 400 // EVERY_LINE, "the keeper has executed fewer lines than it has"


def _kill_by_line(forks, path, numbers):
    """Kill a keeper before each of these lines, up to the last one that it executes; return how many there were."""
    size = 80 * LAYOUT.row_stride
    for killed, number in enumerate(numbers):
        keeper = forks.start("keep", path, size, 0.0, number, 1)
        engine = _engine_of(path, keeper)
        if engine is not None:
            _live(engine, keeper)
        if not keeper.has_ended:
            engine.close()
            keeper.kill()
            return killed
        keeper.kill()
        if engine is not None:
            keeper = forks.start("keep", path, size, 60.0, 0, 1)
            keeper.wait_for(1)  # what is published may all be there already
            wait_until(engine.is_published, "what was published is lost")
            chunks = engine.tier._row_of.copy().items()
            engine.close()
            engine = PoolEngine(path)
            adopted = engine.tier._row_of.copy().items()
            engine.check()
            engine.close()
            assert chunks <= adopted
            keeper.kill()
    raise AssertionError("the keeper executes lines without an end")


def test_a_service_killed_before_any_line_loses_nothing_with_its_engine_dead_too(forks, tmp_path):
    for number in range(1, 1_000_000, EVERY_LINE):
        with contextlib.closing(ServiceManager(tmp_path / "notify")) as manager:
            if not _kill_service(forks, tmp_path / "pool.sock", number, manager):
                break
    assert number > 400, "the keeper has executed fewer lines than it has"


def _kill_service(forks, path, number, manager):
    """Kill a keeper that takes memory back before this line, and the engine, too; return whether it came so far."""

    def start(kill_at):
        keeper = forks.start("keep", path, 80 * LAYOUT.row_stride, 0.0, kill_at, 1, manager=manager)
        keeper.wait_for(1)
        return keeper

    keeper, engine = start(0), PoolEngine(path)
    _live(engine, keeper)
    sealed = _leave(engine, manager)
    keeper.kill()
    keeper = start(number)
    engine = _engine_of(path, keeper)
    if engine is not None:
        _live(engine, keeper)
        sealed = _leave(engine, manager)
        wait_until(lambda: keeper.has_ended or _is_idle(path), "it is not taken back")
    killed = keeper.has_ended
    keeper.kill()
    manager.remove("kvtiers-process-0--1")
    keeper, engine = start(0), PoolEngine(path)
    assert sealed <= engine.tier._row_of.items()
    engine.check()
    engine.close()
    keeper.kill()
    return killed


def test_the_random_kills_find_an_engine_that_does_not_say_that_it_writes(tmp_path):
    forks = Forks("rows are leased without a word")
    with pytest.raises(AssertionError, match=r"an entry counted for bytes that changed|wrong bytes"):
        _kill_at_random(forks, tmp_path / "pool.sock", "lru")
    forks.close()


def test_the_kills_by_line_find_a_keeper_that_writes_an_edition_before_what_it_is_of(tmp_path):
    forks = Forks("the edition comes first")
    with pytest.raises(AssertionError, match="assert dict_items"):
        _kill_by_line(forks, tmp_path / "pool.sock", range(1, 10_000, 7))
    forks.close()


def _engine_of(path, keeper):
    """Return an engine, or None where the keeper is killed before it has one."""
    while not keeper.has_ended:
        with contextlib.suppress(StartError):
            return PoolEngine(path)
    return None


def _leave(engine, manager):
    """End an engine, and its process, as it were; return its chunks that the index has, with their rows."""
    has, now = engine.loan._index.editions, engine.loan._plane.editions
    sealed = {key: row for key, row in engine.tier._row_of.items() if has[row] == now[row]}
    engine.close()
    manager.remove("kvtiers-process-0--1")
    return sealed.items()


def _is_idle(path):
    with contextlib.suppress(StartError):
        figures = pool_figures(path)
        return not figures["lent"] and not figures["checking"]
    return False


def _live(engine, keeper):
    """Store and load the same each time, until the keeper has ended or all is done and published."""
    for prompt in (1, 2, 3, 1, 4):
        keys = chain(prompt, 30)
        if rest := keys[engine.load(keys) :]:
            engine.store(rest)
        wait_until(lambda: keeper.has_ended or engine.is_published(), "it is not published")
