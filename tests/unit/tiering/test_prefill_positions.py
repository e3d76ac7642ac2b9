"""The cost of prefill is fitted to the engine's own steps, by their position, and is never a wild guess."""

import random

import pytest

from kvtiers.tiering.estimates import PrefillCost


def observed(steps):
    price = PrefillCost()
    for tokens, seconds, position in steps:
        price.observe(tokens, seconds, position)
    return price


def test_nothing_is_priced_before_anything_was_computed():
    assert PrefillCost().seconds(100, 0) is None


def test_a_token_is_dearer_the_further_into_its_prompt_it_is():
    price = observed((2000, 2000 * (1e-4 + 1e-8 * position), position) for position in range(1000, 33000, 2000))
    assert price.seconds(1600, 0) == pytest.approx(1600 * 1e-4)
    assert price.seconds(1600, 30_000) == pytest.approx(1600 * 4e-4)


def test_disturbed_steps_do_not_bend_the_line():
    disturb = random.Random(5)
    steps = [(2000, 2000 * (1e-4 + 1e-8 * position), position) for position in range(1000, 33000, 2000)]
    for at in disturb.sample(range(len(steps)), 5):
        tokens, seconds, position = steps[at]
        steps[at] = tokens, seconds * disturb.uniform(2, 10), position
    price = observed(steps)
    for position in (0, 8_000, 30_000):
        assert price.seconds(1000, position) == pytest.approx(1000 * (1e-4 + 1e-8 * position), rel=0.35)


def test_without_positions_or_with_one_alone_a_token_costs_the_same_everywhere():
    price = observed((1000, seconds, 0.0) for seconds in (0.5, 0.5, 0.5, 3.0))
    assert price.seconds(10, 0) == price.seconds(10, 100_000) == pytest.approx(10 * 0.0005)
    price = observed((1000, 0.5, 700.0) for _ in range(9))
    assert price.seconds(10, 0) == price.seconds(10, 100_000) == pytest.approx(10 * 0.0005)


def test_no_token_is_priced_beyond_what_was_computed():
    price = observed((1000, 1000 * (1e-3 + 1e-6 * position), position) for position in range(500, 8500, 1000))
    assert price.seconds(10, 1_000_000) == price.seconds(10, 7_500)


def test_short_steps_after_hits_do_not_make_a_token_dear():
    """Few tokens, far into their prompts, and each step's fixed cost: as after every hit."""
    steps = [(1000, 0.1, 500.0)] * 3 + [(20, 0.05, 8000.0)] * 30
    assert observed(steps).seconds(1000, 8000) == pytest.approx(0.1)


def test_times_that_fall_with_the_position_are_noise():
    price = observed(
        (1000, seconds, position) for seconds, position in ((0.5, 100), (0.4, 1000), (0.3, 5000), (0.3, 9000))
    )
    assert price.seconds(1000, 9000) == price.seconds(1000, 0) > 0
