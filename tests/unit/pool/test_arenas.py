"""Engines of several models in a pool: each has parts of its arena; parts without an engine go to another model's."""

import logging
import os
import sys
from functools import partial

import numpy as np
import pytest
from tests.pool_rig import (
    LAYOUT,
    OTHER,
    PREFIX,
    THIRD,
    KeeperThread,
    PoolEngine,
    ServiceManager,
    chain,
    sleeping,
    wait_until,
    watch,
)

from kvtiers.api import StartError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.pool.arena import Arena, arena_name
from kvtiers.pool.loan import PoolLoan
from kvtiers.pool.memory import Index, Plane, Shape
from kvtiers.pool.messages import Hello

KEYS = chain(1, 30)
SOME = KEYS[:20]  # an engine borrows half as many as it has rows
PARTS = 3
SIZE = (100 * PARTS + 1) * LAYOUT.row_stride
"""No part of it ends where rows of any of these layouts do."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool.sock"


@pytest.fixture
def begin(path):
    """Start the next keeper, after the end of the one before it."""
    running = []

    def begin(**options):
        while running:
            running.pop().stop()
        running.append(KeeperThread(path, SIZE, **{"parts": PARTS, **options}))
        return running[-1]

    return begin


@pytest.fixture
def keeper(begin):
    return begin()


@pytest.fixture
def start(path):
    """Start engines."""

    def start(layout=LAYOUT, *keys, **more):
        engine = PoolEngine(path, layout=layout, **more)
        for prompt in keys:
            engine.store(prompt)
        wait_until(engine.is_published, "it is not published")
        return engine

    return start


def figures_once(keeper, holds):
    """The keeper's figures, once what they say of all parts is this."""
    found = []

    def are_there():
        found.append(keeper.figures())
        return holds(found[-1]["parts"])

    wait_until(are_there, "it does not come to that")
    return found[-1]


def idle(keeper):
    """Wait until no engine has a part; return the arena of each one, and how many chunks there are in it."""
    found = figures_once(keeper, lambda parts: not any(part["lent"] or part["checking"] for part in parts))
    return [(part["arena"], part["chunks"]) for part in found["parts"]]


def pins(engine):
    return int(engine.loan._plane._pins.sum())


def sees(engine, keys):
    """Wait until an engine knows of these chunks of others, and they are checked."""
    wait_until(lambda: not engine.tier.lacks_all(keys[-1:]), "it is not followed")
    engine.await_checks(keys)


def come_back(engine):
    """Have an engine that looks for its keeper no more do so once."""
    engine.loan._lose("it comes late")
    engine.loan._find_keeper()


@pytest.mark.parametrize("parts", range(1, 17))
def test_rows_of_two_parts_share_no_byte_whatever_their_sizes_are(parts):
    for nbytes in range(4096 * parts * 8, 4096 * parts * 8 + 20 * 4096, 4096):
        ends = [0]
        shapes = [Shape(nbytes, stride, parts) for stride in (4096, 8192, 12288, 20480)]
        for part in range(parts):
            rows = [(shape.rows_of(part), shape.row_stride) for shape in shapes]
            assert min(rows.start * stride for rows, stride in rows) >= max(ends)
            ends = [rows.stop * stride for rows, stride in rows]
        assert max(ends) <= nbytes


def test_engines_of_chunks_of_other_sizes_have_parts_beside_each_other(keeper, start):
    one, other, third = (start(layout, chain(prompt, 20)) for prompt, layout in enumerate((LAYOUT, OTHER, THIRD)))
    for prompt in range(3, 9):
        for engine in (one, other, third):
            engine.store(chain(prompt, 20))
    for engine in (one, other, third):
        wait_until(engine.is_published, "it is not published")
        assert engine.check() >= 30
    parts = keeper.figures()["parts"]
    assert [part["row_bytes"] for part in parts] == [each.row_stride for each in (LAYOUT, OTHER, THIRD)]
    assert len({part["arena"] for part in parts}) == 3
    for engine in (one, other, third):
        engine.close()
    idle(keeper)
    assert keeper.figures()["damaged"] == 0


def test_engines_of_one_layout_share_their_parts_beside_another_layouts(keeper, start):
    start(LAYOUT, KEYS)
    start(OTHER, KEYS)
    two = start()
    sees(two, KEYS)
    assert two.load(KEYS) == 30
    assert two.store(KEYS) == []


def test_an_engine_shares_also_a_part_that_came_to_its_arena_after_its_own_start(keeper, start):
    third, one = start(THIRD, KEYS[:10]), start()
    third.close()
    figures_once(keeper, lambda parts: not any(part["checking"] or (part["lent"] and part["chunks"]) for part in parts))
    start(OTHER)
    two = start(LAYOUT, KEYS)
    assert two.loan.own == Shape(SIZE, LAYOUT.row_stride, PARTS).rows_of(0), "the one that was the third model's"
    sees(one, KEYS)
    assert one.load(KEYS) == 30


def test_an_engine_of_other_sizes_gets_one_part_and_the_rest_stays(keeper, start):
    for engine in [start(LAYOUT, chain(prompt, count)) for prompt, count in ((1, 30), (2, 20), (3, 25))]:
        engine.close()
    name, other = arena_name(LAYOUT), arena_name(OTHER)
    assert idle(keeper) == [(name, 30), (name, 20), (name, 25)]
    engine = start(OTHER, KEYS)
    assert engine.loan.own == Shape(SIZE, OTHER.row_stride, PARTS).rows_of(1), "the part with the fewest chunks"
    engine.close()
    assert idle(keeper) == [(name, 30), (other, 30), (name, 25)]
    one, two = start(), start()
    assert (one.check(), two.check()) == (30, 25)
    one.close()
    two.close()
    engine = start(OTHER)
    assert engine.check() == 30


def test_memory_goes_first_from_the_model_whose_last_engine_ended_the_longest_ago(keeper, start):
    one, other = start(LAYOUT, KEYS), start(OTHER, KEYS)
    other.close()
    figures_once(keeper, lambda parts: not parts[1]["lent"] and not parts[1]["checking"])
    one.close()
    idle(keeper)
    for number in range(2):
        start(THIRD, chain(number, 10))
    third = arena_name(THIRD)
    assert [part["arena"] for part in keeper.figures()["parts"]] == [arena_name(LAYOUT), third, third]


def test_a_model_with_an_engine_at_work_keeps_its_parts(keeper, start, path):
    one, two, _ = start(LAYOUT, KEYS), start(LAYOUT, chain(2, 20)), start(OTHER)
    two.close()
    sees(one, chain(2, 20))
    rows = one.tier.prepare_load(chain(2, 20), "reads")
    with pytest.raises(StartError, match="have its memory; what is free is of models at work"):
        start(THIRD, in_use_seconds=0.2)
    one.compare(chain(2, 20), rows)
    one.tier.complete_load(rows)
    two = start()
    assert two.check() == 20, "which wrote none of its own"
    two.close()
    one.close()
    start(THIRD)


def test_a_part_goes_to_another_model_only_after_its_last_rank_has_ended(keeper, start):
    one, _, two = start(LAYOUT, KEYS), start(THIRD), start(LAYOUT)
    with sleeping() as rank:
        watch(one, 0, rank)
        wait_until(lambda: keeper.figures()["watched"] == 2, "the rank is not watched")
        one.close()
        two.close()
        wait_until(lambda: not keeper.figures()["parts"][2]["lent"], "it is not taken back")
        with pytest.raises(StartError, match="has its memory, for longer than this start can wait"):
            start(OTHER, deadline=0.3)
        assert keeper.figures()["chunks"] == 30, "the rank may read what is in either part"
    start(OTHER)
    assert [part["arena"] for part in keeper.figures()["parts"]].count(arena_name(OTHER)) == 1


def test_an_engine_waits_for_a_part_of_another_model_that_is_being_checked(begin, start, monkeypatch, over):
    begin(parts=1)
    damaged_of = Arena.damaged_of

    def wait_first(*check):
        over.wait(60)
        return damaged_of(*check)

    monkeypatch.setattr(Arena, "damaged_of", wait_first)
    start(LAYOUT, KEYS).close()
    with pytest.raises(StartError, match=r"its rows are being checked|has its memory"):
        start(OTHER, deadline=0.3)
    over.set()
    assert start(OTHER).check() == 0


def test_a_row_that_no_part_has_room_for_is_refused_in_a_line_and_costs_no_chunk(keeper, start):
    start(LAYOUT, KEYS).close()
    assert idle(keeper)[0] == (arena_name(LAYOUT), 30)
    huge = CacheLayout(ModelIdentity("h"), (KVGroup("g", 16),), (KVTensor("t", 0, SIZE // PARTS),))
    with pytest.raises(StartError, match=r"it has no room for a row of .*; raise the keeper's --size"):
        start(huge)
    assert start().check() == 30


@pytest.mark.parametrize("prefix", ["", "x" * 2000])
def test_an_engine_whose_chunks_can_have_no_names_is_refused_and_costs_no_chunk(keeper, path, start, prefix):
    for engine in [start(LAYOUT, chain(prompt, 30)) for prompt in range(PARTS)]:
        engine.close()
    with pytest.raises(StartError, match=r"a prefix of \d+ bytes"):
        PoolLoan.take(str(path), prefix, OTHER, 60)
    assert idle(keeper) == [(arena_name(LAYOUT), 30)] * PARTS


# -- keepers end


def test_the_next_keeper_gets_all_arenas_back_from_their_engines(begin, start):
    begin()
    engines = [start(layout, chain(prompt, 20)) for prompt, layout in enumerate((LAYOUT, OTHER, THIRD))]
    keeper = begin(handover=60, parts=1)
    figures_once(keeper, lambda parts: [part["engine_connected"] for part in parts] == [True] * PARTS)
    assert [part["row_bytes"] for part in keeper.figures()["parts"]] == [
        each.row_stride for each in (LAYOUT, OTHER, THIRD)
    ]
    for engine in engines:
        engine.store(chain(9, 5))
        wait_until(engine.is_published, "it is not published")
        engine.close()
    arenas = [arena_name(layout) for layout in (LAYOUT, OTHER, THIRD)]
    assert [arena for arena, _ in idle(keeper)] == arenas
    for layout in (THIRD, OTHER, LAYOUT):
        assert start(layout).check() == 25


def test_what_an_arena_that_the_next_keeper_does_not_know_yet_has_is_not_written_to(begin, start):
    """One of its engines reads what another one has left, and comes late."""
    keeper = begin()
    one, reader, left = start(), start(OTHER, chain(2, 1), look_seconds=1000), start(OTHER, SOME)
    sees(reader, SOME)
    rows = reader.tier.prepare_load(SOME, "reads")
    left.close()
    wait_until(lambda: not keeper.figures()["parts"][2]["lent"], "it is not taken back")
    keeper = begin(handover=60)
    figures_once(keeper, lambda parts: parts[0]["engine_connected"])
    for layout in (LAYOUT, THIRD):
        with pytest.raises(StartError, match="the engine of another keeper has its memory"):
            start(layout, deadline=0.3, in_use_seconds=0.1)
    reader.compare(SOME, rows)
    come_back(reader)
    for layout in (LAYOUT, THIRD):
        with pytest.raises(StartError, match="have its memory"):
            start(layout, in_use_seconds=0.1)
    reader.compare(SOME, rows)
    reader.tier.complete_load(rows)
    assert start(OTHER).check() == 20
    assert one.check() == 0


def test_a_part_of_an_arena_whose_engines_have_all_ended_without_a_keeper_is_anybodys(begin, start):
    begin()
    one, other = start(LAYOUT, KEYS), start(OTHER, KEYS, look_seconds=1000)
    keeper = begin(handover=60)
    figures_once(keeper, lambda parts: parts[0]["engine_connected"] and parts[1]["lent"])
    other.loan._find_keeper = lambda: None
    other.close()
    two = start(LAYOUT, chain(2, 20))
    third = start(THIRD, KEYS)
    assert (one.check(), two.check(), third.check()) == (30, 20, 30)


@pytest.fixture
def manager(tmp_path):
    return ServiceManager(tmp_path / "notify")


def test_the_service_manager_has_all_arenas_over_a_restart(begin, start, manager):
    keeper = begin(manager=manager)
    layouts = (LAYOUT, OTHER, THIRD)
    for engine in [start(layout, chain(prompt, 20)) for prompt, layout in enumerate(layouts)]:
        engine.close()
    before = idle(keeper)
    keeper = begin(manager=manager)
    assert idle(keeper) == before == [(arena_name(layout), 20) for layout in layouts]
    for layout in layouts:
        assert start(layout).check() == 20


def test_an_arena_that_has_lost_its_last_part_is_kept_no_longer(begin, start, manager):
    keeper = begin(manager=manager, parts=1)
    for layout in (LAYOUT, OTHER, LAYOUT):
        start(layout, KEYS).close()
        idle(keeper)
        names = [f"kvtiers-{of}-{arena_name(layout)}" for of in ("hello", "index", "plane")]
        assert manager.names() == [*names, "kvtiers-rows"]
    assert len(keeper.keeper._memory.arenas) == 1


@pytest.mark.parametrize("name", ["hello", "index", "plane"])
def test_an_arena_of_which_a_part_was_kept_is_not_used_and_the_others_are(begin, start, manager, name):
    keeper = begin(manager=manager)
    for engine in (start(LAYOUT, KEYS), start(OTHER, KEYS)):
        engine.close()
    idle(keeper)
    begin(manager=manager).stop()
    manager.remove(f"kvtiers-{name}-{arena_name(OTHER)}")
    keeper = begin(manager=manager)
    assert idle(keeper) == [(arena_name(LAYOUT), 30), ("", 0), ("", 0)]
    assert not [each for each in manager.names() if arena_name(OTHER) in each]
    assert start(OTHER).check() == 0
    assert start().check() == 30


def test_memory_of_which_a_part_is_in_two_arenas_is_let_go_in_a_line(begin, start, manager, caplog):
    keeper = begin(manager=manager)
    for engine in (start(LAYOUT, KEYS), start(OTHER, KEYS)):
        engine.close()
    idle(keeper)
    begin(manager=manager).stop()
    fd = dict(manager.kept())[f"kvtiers-index-{arena_name(OTHER)}"]
    index = Index(os.dup(fd), Shape(SIZE, OTHER.row_stride, PARTS), writable=True)
    index.rename(0, "default/n/")
    index.close()
    with caplog.at_level(logging.WARNING):
        keeper = begin(manager=manager)
        assert idle(keeper) == [("", 0)] * PARTS
    assert "is let go: a part of it is in two arenas" in caplog.text


def test_pins_of_an_engine_that_ended_while_its_arena_was_not_known_are_ended(begin, start):
    begin()
    _, reader, owner = start(), start(OTHER, chain(2, 1), look_seconds=1000), start(OTHER, SOME, look_seconds=1000)
    sees(reader, SOME)
    assert pins(owner) == 20
    keeper = begin(handover=60)
    figures_once(keeper, lambda parts: parts[0]["engine_connected"] and parts[1]["lent"])
    reader.loan._find_keeper = lambda: None
    reader.close()
    wait_until(lambda: not keeper.figures()["parts"][1]["lent"], "it is not taken back")
    come_back(owner)
    wait_until(lambda: not pins(owner), "its rows are nobody's")
    assert np.flatnonzero(owner.loan._plane._pins).tolist() == []
    wait_until(partial(lambda keeper: keeper.figures()["parts"][2]["chunks"] == 20, keeper), "it is not known")


def test_an_engine_that_brings_an_arena_with_parts_of_another_ones_is_refused(begin, start, caplog):
    keeper = begin()
    one, other = start(LAYOUT, KEYS), start(OTHER, KEYS, look_seconds=1000)
    keeper.keeper._memory.arena_for(OTHER).index.rename(0, "default/n/")
    keeper = begin(handover=60)
    figures_once(keeper, lambda parts: parts[0]["engine_connected"])
    come_back(other)
    assert "the next keeper does not take the memory" in caplog.text
    assert "another arena has a part of its" in caplog.text
    one.store(chain(2, 20))
    wait_until(one.is_published, "it is not published")
    assert keeper.figures()["parts"][0]["arena"] == arena_name(LAYOUT)


def test_while_an_engine_at_work_is_to_bring_its_arena_no_part_changes_arenas(begin, start):
    """It may read what is in any of them, and another engine of its layout would take its place."""
    keeper = begin()
    late, others = start(LAYOUT, KEYS, look_seconds=1000), [start(OTHER, chain(2, 5)), start(OTHER)]
    keeper = begin(handover=60)
    figures_once(keeper, lambda parts: [part["engine_connected"] for part in parts[1:]] == [True, True])
    for other in others:
        other.close()
    figures_once(keeper, lambda parts: not any(part["lent"] or part["checking"] for part in parts[1:]))
    for layout in (LAYOUT, THIRD):
        with pytest.raises(StartError, match="has its memory"):
            start(layout, deadline=0.3, in_use_seconds=0.1)
    assert start(OTHER).check() == 5
    come_back(late)
    assert late.loan.has_keeper
    late.check()


def test_a_part_that_gets_another_name_is_in_its_arena_all_the_while():
    """A keeper that is killed between two lines leaves it there, and its engine's arena is known to be at work."""
    shape = Shape(SIZE, LAYOUT.row_stride, PARTS)
    index, names = Index.create(shape), []
    index.rename(1, PREFIX)

    def look(_frame, _event, _argument):
        names.append(index.prefix(1)[1])
        return look

    sys.settrace(lambda frame, *_: look if frame.f_code is Index._name.__code__ else None)
    try:
        index.rename(1, "another/name/that/is/longer/than/the/first/")
        index.rename(1, "short/")
    finally:
        sys.settrace(None)
    assert len(names) > 10
    assert all(names)
    assert index.prefix(1)[1] == "short/"
    index.close()


@pytest.mark.parametrize(("part", "prefix"), [(0, PREFIX), (7, PREFIX), (1, "")])
def test_an_engine_that_brings_what_it_cannot_have_had_is_refused_and_the_keeper_goes_on(begin, start, part, prefix):
    keeper = begin()
    one, other = start(LAYOUT, KEYS), start(OTHER, KEYS, look_seconds=1000)
    keeper.keeper._memory.arena_for(OTHER).release(1)
    keeper = begin(handover=60)
    figures_once(keeper, lambda parts: parts[0]["engine_connected"])
    hello = other.loan._hello
    other.loan._part, other.loan._hello = part, Hello(hello.format, prefix, hello.layout)
    come_back(other)
    assert not other.loan.has_keeper
    one.store(chain(2, 20))
    wait_until(lambda: one.loan.has_keeper and one.is_published(), "its keeper does not go on")


def test_an_engine_whose_part_the_next_keeper_would_not_have_keeps_its_memory_from_others(begin, start, manager):
    """Nothing says how many parts there are, but for the engine, which comes late."""
    begin(manager=manager)
    for engine in (start(LAYOUT, KEYS), start(LAYOUT, chain(2, 20))):
        engine.close()
    one = start(LAYOUT, chain(3, 20), prefix="default/another/", look_seconds=1000)
    assert one.loan.own == Shape(SIZE, LAYOUT.row_stride, PARTS).rows_of(2)
    begin(manager=manager).stop()
    for name in (f"hello-{arena_name(LAYOUT)}", "process-2--1"):
        manager.remove(f"kvtiers-{name}")
    keeper = begin(manager=manager, parts=1)
    with pytest.raises(StartError, match="has its memory"):
        start(LAYOUT, deadline=0.3, in_use_seconds=0.1)
    come_back(one)
    wait_until(lambda: len(keeper.figures()["parts"]) == PARTS, "its parts are not known")
    assert start().check() == 30
    one.check()


def test_an_engine_that_brings_other_memory_for_the_chunks_of_one_that_has_come_is_refused(begin, start, caplog):
    """Else the first one would publish what nobody looks at."""
    begin()
    one, other = start(LAYOUT, KEYS), start(LAYOUT, chain(2, 20), look_seconds=1000)
    keeper = begin(handover=60)
    figures_once(keeper, lambda parts: parts[0]["engine_connected"])
    shape = Shape(SIZE, LAYOUT.row_stride, PARTS)
    own = other.loan._index, other.loan._plane
    other.loan._index, other.loan._plane = Index.create(shape), Plane.create(shape)
    come_back(other)
    assert "another arena has a part of its" in caplog.text
    for each in (other.loan._index, other.loan._plane):
        each.close()
    other.loan._index, other.loan._plane = own
    one.store(chain(3, 20))
    wait_until(one.is_published, "it is not published")
