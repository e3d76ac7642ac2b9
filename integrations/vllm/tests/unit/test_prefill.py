"""The engine's speed with prompts, from what is reported to a tier of its steps."""

import pytest

from kvtiers.tiering.estimates import PrefillCost
from kvtiers_vllm.own_tiering.prompts import PrefillRate


class Engine:
    """Steps of so many seconds; what is new in one, and what was computed in it, is reported as vLLM does."""

    def __init__(self, ahead=0):
        self.cost = PrefillCost()
        self.rate = PrefillRate(self.cost)
        self.now = 100.0
        self.scheduled = []
        self.ahead = ahead

    def step(self, seconds, *new):
        """Schedule a step; the one that is computed meanwhile is so many before it."""
        self.rate.step_ended(new, self.now)
        self.scheduled.append(seconds)
        if len(self.scheduled) > self.ahead:
            self.now += self.scheduled.pop(0)

    def prompt(self, name, tokens, seconds):
        self.step(seconds, name)
        self.step(0.01)
        self.rate.computed(name, tokens)
        self.step(0.01)
        self.step(0.01)
        self.rate.finished(name)


def test_nothing_is_known_before_a_prompt_was_computed():
    engine = Engine()
    engine.step(0.01)
    assert not engine.cost.is_measured
    engine.step(0.5, "one whose chunks were all there")
    engine.step(0.01)
    engine.rate.finished("one whose chunks were all there")
    engine.step(0.01)
    assert not engine.cost.is_measured


@pytest.mark.parametrize("ahead", [0, 1], ids=["as it comes", "a step ahead"])
def test_a_prompts_step_over_its_tokens_is_the_rate_also_where_steps_are_scheduled_ahead(ahead):
    engine = Engine(ahead)
    for number in range(3):
        engine.prompt(f"r{number}", 1000, 0.5)
    assert engine.cost.seconds_per_token == pytest.approx(0.0005)


def test_prompts_of_one_step_share_its_time():
    engine = Engine()
    engine.step(0.6, "a", "b", "hits alone")
    engine.step(0.01)
    engine.rate.computed("a", 1000)
    engine.rate.computed("b", 200)
    engine.step(0.01)
    assert not engine.cost.is_measured, "not all has been reported"
    engine.rate.finished("hits alone")
    engine.step(0.01)
    assert engine.cost.seconds_per_token == pytest.approx(0.0005)


def test_only_the_first_chunks_of_a_long_prompt_belong_to_its_first_step():
    engine = Engine()
    engine.prompt("long", 1000, 0.5)
    engine.rate.computed("long", 5000)
    engine.step(0.01)
    assert engine.cost.seconds_per_token == pytest.approx(0.0005)


def test_an_idle_hour_after_a_prompt_does_not_count():
    engine = Engine()
    for number in range(5):
        engine.prompt(f"r{number}", 1000, 0.5)
    engine.prompt("the last one", 1000, 3600.0)
    assert engine.cost.seconds_per_token == pytest.approx(0.0005)


def test_what_never_ends_is_forgotten():
    engine = Engine()
    for number in range(1000):
        engine.step(0.01, f"r{number}")
    assert len(engine.rate._open) < 1000


def test_tokens_after_loaded_ones_are_further_into_their_prompt():
    engine = Engine()
    for number in range(8):
        engine.step(1.0 + number, f"r{number}")
        engine.step(0.01)
        engine.rate.computed(f"r{number}", 1000, 1000 * number + 500)
        engine.step(0.01)
        engine.step(0.01)
        engine.rate.finished(f"r{number}")
    assert engine.cost.seconds(1000, 500) == pytest.approx(1.0)
    assert engine.cost.seconds(1000, 4500) == pytest.approx(5.0)
