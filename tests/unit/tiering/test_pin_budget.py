"""The rows that tiers may hold: taken and given back by reservations."""

import pytest

from kvtiers.tiering.tier_slot import PinBudget, TierOptions, TierSlot

from .harness import FaultyTier


@pytest.fixture
def slots():
    return [TierSlot(index, FaultyTier(None), TierOptions(name)) for index, name in enumerate("ab")]


@pytest.fixture
def budget():
    return PinBudget(100, all_tiers=0.5, one_tier=0.3)


def test_a_tier_has_room_by_its_own_budget_and_by_that_of_all(budget, slots):
    first, second = slots
    budget.reserve(first, 25)
    assert (budget.room(first), budget.room(second), budget.room_in_all) == (5, 25, 25)
    budget.reserve(second, 25)
    assert (budget.room(first), budget.room(second), budget.room_in_all) == (0, 0, 0)
    assert [slot.metrics.pinned_rows for slot in slots] == [25, 25]


def test_what_is_released_can_be_had_again_and_nothing_twice(budget, slots):
    reserved = budget.reserve(slots[0], 20)
    reserved.release(5)
    assert budget.room_in_all == 35
    reserved.release()
    reserved.release()
    reserved.release(7)
    assert budget.room_in_all == 50
    assert budget.held == slots[0].metrics.pinned_rows == 0


def test_parts_of_a_reservation_are_released_each_by_itself(budget, slots):
    reserved = budget.reserve(slots[0], 20)
    part = reserved.split(8)
    assert budget.held == 20, "they are the same rows"
    other = budget.reserve(slots[0])
    reserved.move(2, other)
    reserved.release()
    assert (budget.held, part.rows, other.rows) == (10, 8, 2)
    part.release()
    other.release()
    assert budget.held == 0


def test_each_tier_gets_one_row_however_few_there_are(slots):
    assert PinBudget(2, all_tiers=0.1, one_tier=0.1).room(slots[0]) == 1
