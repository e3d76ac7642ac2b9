"""Engines and keepers of a pool are killed, at random and before each line: every chunk that is found is compared."""

import contextlib
import os
import random

import pytest
from tests import pool_rig
from tests.pool_rig import LAYOUT, OTHER, Forks, PoolEngine, ServiceManager, chain, pool_figures, wait_until

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


def test_engines_of_two_models_killed_at_random_leave_no_wrong_chunk_as_parts_go_from_one_to_the_other(forks, tmp_path):
    moves = _kill_at_random(forks, tmp_path / "pool.sock", "lru", 3, ("LAYOUT", "OTHER", "THIRD"))
    assert moves > KILLS // 10, "next to no memory has moved"


def _kill_at_random(forks, path, policy, parts=1, layouts=("LAYOUT",), seed=""):
    """Each engine compares all that it finds, at its start and before each use. Every tenth time a keeper is killed.

    After an engine that was the last one of its layout, the next is of another one, if there is one. Returns how often.
    """
    size = (parts * ROWS + 4) * LAYOUT.row_stride  # with several layouts rows lie across the ends of parts
    chance = random.Random(policy + seed)
    keeper = forks.start("keep", path, size, 0.0, 0, parts)
    keeper.wait_for(1)
    of = [layouts[part % 2 % len(layouts)] for part in range(parts)]
    engines = [forks.start("live", path, policy, part, layout) for part, layout in enumerate(of)]
    found = moves = 0
    for kill in range(1, KILLS + 1):
        engine, layout = engines.pop(0), of.pop(0)
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
        others = [each for each in layouts if each not in {layout, *of}]
        of.append(layout if layout in of or not others else chance.choice(others))
        moves += of[-1] != layout
        engines.append(forks.start("live", path, policy, parts * kill, of[-1]))
        engines[-1].wait_for(1)
        found = max(found, pool_figures(path)["checked"])
    for engine in engines:  # of which the last one has just begun
        engine.wait_for(20)
        assert engine.publish(), "what it has is lost"
        engine.kill()
    auditors = [PoolEngine(path, policy=policy, layout=getattr(pool_rig, layout)) for layout in of]
    assert all(auditor.check() for auditor in auditors)
    for auditor in auditors:
        assert not auditor.loan._plane._pins.any(), "a row is kept for an engine that has ended"
    assert found > 1000, "the engines found next to nothing"
    for auditor in auditors:
        auditor.close()
    keeper.kill()
    return moves


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
    _kill_services(tmp_path, lambda *where: _kill_service(forks, *where))


def test_a_service_killed_before_any_line_while_a_part_goes_to_another_model_loses_no_other_part(forks, tmp_path):
    _kill_services(tmp_path, lambda *where: _kill_while_a_part_moves(forks, *where), 3 * EVERY_LINE)


def _kill_services(folder, kill, every=EVERY_LINE):
    for number in range(1, 1_000_000, every):
        with contextlib.closing(ServiceManager(folder / "notify")) as manager:
            if not kill(folder / "pool.sock", number, manager):
                break
    assert number > 400, "the keeper has executed fewer lines than it has"


def _serve(forks, path, manager, kill_at=0, parts=1):
    keeper = forks.start("keep", path, (80 * parts + 1) * LAYOUT.row_stride, 0.0, kill_at, parts, manager=manager)
    keeper.wait_for(1)
    return keeper


def _kill_while_a_part_moves(forks, path, number, manager):
    """Kill a keeper whose memory is one model's before this line, when an engine of another model comes; and that, too.

    Return whether it came so far. Of the three parts one may have gone over.
    """
    keeper = _serve(forks, path, manager, parts=3)
    engines = [PoolEngine(path) for _ in range(3)]
    for part, engine in enumerate(engines):
        engine.store(chain(part, 30 + part))
        wait_until(engine.is_published, "it is not published")
    sealed = [_leave(engine, manager, part) for part, engine in enumerate(engines)]
    keeper.kill()
    keeper = _serve(forks, path, manager, number, 3)
    engine, theirs, part = _engine_of(path, keeper, OTHER), set(), 0
    if engine is not None:
        part = engine.loan._part
        _live(engine, keeper)
        theirs = _leave(engine, manager, part)
        wait_until(lambda: keeper.has_ended or _is_idle(path), "it is not taken back")
    killed = keeper.has_ended
    keeper.kill()
    for each in range(3):
        manager.remove(f"kvtiers-process-{each}--1")
    keeper = _serve(forks, path, manager, parts=3)
    wait_until(lambda: not any(each["lent"] or each["checking"] for each in _parts(path)), "it is not checked")
    assert pool_figures(path)["damaged"] == 0
    engines = [PoolEngine(path, layout=OTHER)] if theirs else []
    engines += [PoolEngine(path) for _ in range(3 - len(engines))]
    found = [engine.tier._row_of.items() for engine in engines if engine.check()]
    assert theirs <= (found.pop(0) if theirs else set())
    left = [each for each in sealed if any(each <= rows for rows in found)]
    assert len(left) >= 2
    assert sum(map(len, found)) == sum(map(len, left)), "a part that has gone over was found as it was"
    for engine in engines:
        engine.close()
    keeper.kill()
    return killed


def _parts(path):
    return pool_figures(path)["parts"]


def _kill_service(forks, path, number, manager):
    """Kill a keeper that takes memory back before this line, and the engine, too; return whether it came so far."""

    def start(kill_at):
        return _serve(forks, path, manager, kill_at)

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
    _find(tmp_path, "rows are leased without a word")


def test_the_random_kills_find_rows_that_two_models_write_to(tmp_path):
    _find(tmp_path, "a part of larger rows has some behind its end", 3, ("LAYOUT", "OTHER", "THIRD"))


def _find(folder, bug, *pool):
    """Kill at random until this bug is found: 40 kills find it in most cases."""

    def kill(forks):
        for seed in map(str, range(20)):
            _kill_at_random(forks, folder / f"pool-{seed}.sock", "lru", *pool, seed=seed)

    with (
        contextlib.closing(Forks(bug)) as forks,
        pytest.raises(AssertionError, match=r"an entry counted for bytes that changed|wrong bytes"),
    ):
        kill(forks)


def test_the_kills_by_line_find_a_keeper_that_writes_an_edition_before_what_it_is_of(tmp_path):
    with (
        contextlib.closing(Forks("the edition comes first")) as forks,
        pytest.raises(AssertionError, match="assert dict_items"),
    ):
        _kill_by_line(forks, tmp_path / "pool.sock", range(1, 10_000, 7))


def _engine_of(path, keeper, layout=LAYOUT):
    """Return an engine, or None where the keeper is killed before it has one."""
    while not keeper.has_ended:
        with contextlib.suppress(StartError):
            return PoolEngine(path, layout=layout)
    return None


def _leave(engine, manager, part=0):
    """End an engine, and its process, as it were; return its chunks that the index has, with their rows."""
    has, now = engine.loan._index.editions, engine.loan._plane.editions
    sealed = {key: row for key, row in engine.tier._row_of.items() if has[row] == now[row]}
    engine.close()
    manager.remove(f"kvtiers-process-{part}--1")
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
