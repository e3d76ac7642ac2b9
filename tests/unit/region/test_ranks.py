import contextlib
import threading

import pytest

from kvtiers.api import StartError
from kvtiers.region.ranks import PrefaultEnded, RankGone, RankJoined, RankLost, RankTable
from kvtiers.region.state import SETTLED


@pytest.fixture
def table():
    return RankTable("region of engine 'e'", 2)


def test_all_have_joined_only_when_each_has(table):
    table.join(1, 11)
    assert not table.all_joined
    table.join(0, 10)
    assert table.all_joined
    table.wait_all(0.0)


def test_events_come_in_order_and_once(table):
    table.join(0, 10)
    table.lose(0)
    table.forget(0)
    assert not table.are_quiet()
    table.end_prefault(7, "")
    assert table.take_events(0.0) == [
        RankJoined(0, 10),
        RankLost(0),
        RankGone(0),
        PrefaultEnded(7, ""),
    ]
    assert table.are_quiet()
    assert table.take_events(0.0) == []


def test_a_lost_rank_keeps_its_place_until_it_is_gone(table):
    table.join(0, 10)
    table.join(1, 11)
    table.lose(0)
    assert table.lost == {0}
    assert table.occupant(0) == 10
    assert not table.all_joined
    table.forget(0)
    assert table.lost == set()
    assert table.occupant(0) is None
    table.join(0, 12)
    assert table.all_joined


def test_missing_ranks_are_named(table):
    table.join(0, 10)
    with pytest.raises(StartError, match=r"region of engine 'e': of 2 ranks these did not join within 0 s: 1; are"):
        table.wait_all(0.0)


def test_a_refusal_of_ours_ends_the_wait_at_once(table):
    def wait():
        with contextlib.suppress(StartError):
            table.wait_all(1000.0)

    waiting = threading.Thread(target=wait)
    waiting.start()
    table.refuse(1, "its layout differs")
    waiting.join(60)
    assert not waiting.is_alive()
    with pytest.raises(StartError, match="rank 1 was refused: its layout differs"):
        table.wait_all(1000.0)


def test_a_setback_is_moot_once_all_have_joined(table):
    table.join(0, 10)
    table.lose(0)
    table.forget(0)
    with pytest.raises(StartError, match=r"rank 0 \(process 10\) ended before all ranks had joined"):
        table.wait_all(0.0)
    table.join(0, 12)
    table.join(1, 11)
    table.wait_all(0.0)


def test_memory_that_is_not_there_fails_the_start_even_when_all_have_joined(table):
    table.join(0, 10)
    table.join(1, 11)
    table.end_prefault(3, "Bad address")
    with pytest.raises(StartError, match="its memory cannot be populated: Bad address"):
        table.wait_all(0.0)


def test_the_end_of_the_serving_thread_fails_the_start(table):
    table.break_off("the thread ended")
    with pytest.raises(StartError, match="the thread ended"):
        table.wait_all(1000.0)


def test_memory_is_pinned_when_each_rank_has_pinned_it_or_pins_no_more(table):
    assert not table.wait_pinned(8, 0.0), "no rank has joined"
    table.join(0, 10)
    table.join(1, 11)
    assert not table.wait_pinned(8, 0.0), "no rank has said what it has pinned"
    assert table.pins
    assert table.pinned(0, 8)
    assert table.pinned(1, 7)
    assert not table.pinned(1, 7), "nothing new"
    assert not table.wait_pinned(8, 0.0)
    threading.Timer(0.0, table.pinned, (1, 9)).start()
    assert table.wait_pinned(8, 60.0)
    table.pinned(1, SETTLED)
    assert table.wait_pinned(8, 0.0)
    table.lose(1)
    assert not table.wait_pinned(8, 0.0)
    assert table.least_pinned == 8


def test_no_rank_pins_any_more_once_all_that_have_joined_have_settled(table):
    assert not table.pins
    table.join(0, 10)
    assert table.pins
    table.pinned(0, SETTLED)
    assert not table.pins
    assert table.least_pinned is None
    table.join(1, 11)
    assert table.pins
    table.lose(1)
    assert not table.pins
