"""Many refusals are few lines and few events, and leave the socket alone for moments only."""

import pytest

from kvtiers.region.connection import AcceptRate, Refusals
from kvtiers.region.ranks import RankTable


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_first_refusals_have_a_line_each_and_then_there_is_one_a_second_with_the_count():
    clock = Clock()
    refusals = Refusals(clock)
    assert sum(refusals.should_log() for _ in range(1000)) == 20
    clock.now += 1.0
    assert [refusals.should_log() for _ in range(3)] == [True, False, False]
    assert refusals.take_unlogged() == " (982 more since the last such line)"
    assert refusals.take_unlogged() == ""


def test_after_many_in_a_row_there_is_a_pause_and_then_as_many_again():
    refusals = Refusals(Clock())
    pauses = 0
    for _ in range(500):
        refusals.should_log()
        pauses += refusals.pause() > 0
    assert pauses == 10


def test_refusals_that_are_not_taken_do_not_fill_the_memory_and_the_first_one_of_ours_is_known():
    table = RankTable("region", 2)
    for number in range(5000):
        table.refuse(None, f"reason {number}", ours=number == 4000)
    table.join(0, 1)
    events = table.take_events(0)
    assert len(events) == 1001
    assert events[-1].rank == 0, "what is not a refusal is never left out"
    assert table._setback == "a rank was refused: reason 4000"


@pytest.mark.parametrize(("at_start", "most"), [(False, 100), (True, 400)])
def test_connections_are_accepted_at_a_bounded_rate_from_ranks_and_strangers(at_start, most):
    clock = Clock()
    rate = AcceptRate(clock)
    for _ in range(3):
        assert [rate.accepted(at_start=at_start) for _ in range(most - 1)] == [0.0] * (most - 1)
        clock.now += 0.04
        pause = rate.accepted(at_start=at_start)
        assert pause == pytest.approx(0.06)
        clock.now += pause
