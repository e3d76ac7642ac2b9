"""How much is pinned at a time, and the rest after it: by a played driver and a clock of ours."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.gpu.pin_pace import IDLE_SHARE, PinPace

MIB = 1 << 20


def run(pace, seconds_a_mib, pieces, **state):
    """Pin so many pieces with a driver of this speed; return (size, seconds, rest) of each."""
    ran = []
    for _ in range(pieces):
        size = pace.piece_bytes
        took = size / MIB * seconds_a_mib
        ran.append((size, took, pace.rest_after(size, took, **state)))
    return ran


@given(seconds_a_mib=st.floats(0.00001, 0.0019), share=st.floats(0.01, 0.9))
def test_after_a_few_pieces_each_is_short_and_they_take_their_share_of_the_time(seconds_a_mib, share):
    ran = run(PinPace(share, 0.002, 64 * MIB), seconds_a_mib, 40, busy=True)[8:]
    assert all(took <= 0.0021 for _, took, _ in ran)
    longest = max(took for _, took, _ in ran)
    assert longest >= 0.0009 or ran[-1][0] == 64 * MIB, "smaller than it has to be"
    pinning = sum(took for _, took, _ in ran)
    assert pinning / (pinning + sum(rest for *_, rest in ran)) == pytest.approx(min(share, IDLE_SHARE))


def test_a_driver_that_becomes_slow_gets_small_pieces_and_large_ones_when_it_is_quick_again():
    pace = PinPace(0.1, 0.002, 64 * MIB)
    assert run(pace, 0.00001, 10, busy=True)[-1][0] == 64 * MIB
    assert run(pace, 0.01, 10, busy=True)[-1][0] == pytest.approx(MIB / 5, rel=0.01)
    assert run(pace, 0.00001, 10, busy=True)[-1][0] == 64 * MIB


def test_calls_that_wait_for_the_driver_do_not_make_the_pieces_small():
    """On an H100 beside a model, pieces of 2 MiB took 0.2 to 9 ms: the engine held the driver meanwhile."""
    pace = PinPace(0.1, 0.002, 64 * MIB)
    waits = itertools.cycle([0.006, 0.0, 0.009, 0.004])
    for _ in range(40):
        pace.rest_after(pace.piece_bytes, pace.piece_bytes / MIB * 0.00003 + next(waits), busy=True)
    assert pace.piece_bytes == 64 * MIB


def test_the_time_that_a_call_waits_for_the_driver_is_not_paid_for_with_rests():
    pace = PinPace(0.1, 0.002, 64 * MIB)
    waits = itertools.cycle([0.006, 0.0, 0.009, 0.004])
    for _ in range(40):
        held = pace.piece_bytes / MIB * 0.00003
        rest = pace.rest_after(pace.piece_bytes, held + next(waits), busy=True)
    assert rest == pytest.approx(9 * held, rel=0.01)


def test_it_is_faster_while_the_engine_rests():
    def share(**state):
        (_, took, rest) = run(PinPace(0.1, 0.002, 4 * MIB), 0.0003, 1, **state)[0]
        return took / (took + rest)

    assert share(busy=True) == pytest.approx(0.1)
    assert share(busy=False) == pytest.approx(IDLE_SHARE)


def test_where_the_start_waits_for_it_it_never_rests():
    assert {rest for *_, rest in run(PinPace(1.0, 0.05, 64 * MIB), 0.0003, 9, busy=True)} == {0.0}
