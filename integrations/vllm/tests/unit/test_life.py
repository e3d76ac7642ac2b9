"""At its start an engine steps until its figures say how the tiers are; at its end no longer than it has to."""

from enum import Enum

import pytest

from kvtiers_vllm.engine import CoreLink
from kvtiers_vllm.life import FirstReport


class State(Enum):
    """vLLM's EngineShutdownState."""

    RUNNING = 0
    REQUESTED = 1
    SHUTTING_DOWN = 2


class Core:
    """vLLM's engine core, as far as its end is asked about."""

    def __init__(self, state):
        self.shutdown_state = state


def link_to(core):
    link = CoreLink()
    link.attach(core)
    return link


@pytest.mark.parametrize("state", State)
def test_an_engine_is_ending_from_the_request_to_end(state):
    core = Core(state)
    assert link_to(core).is_ending() is (state is not State.RUNNING)


def test_an_engine_that_does_not_say_whether_it_ends_does_not():
    core = Core(None)
    assert not link_to(core).is_ending()
    assert not CoreLink().is_ending()


def test_the_report_that_counts_is_the_first_one_after_all_tiers_have_spoken():
    spoken = []
    first = FirstReport(lambda: bool(spoken), lambda: 0.0)
    assert first.is_due()
    first.given()
    assert first.is_due(), "it said nothing of a tier that had not spoken"
    spoken.append(True)
    assert first.is_due()
    first.given()
    assert not first.is_due()


def test_a_tier_that_never_speaks_is_not_waited_for_without_end():
    now = [0.0]
    first = FirstReport(lambda: False, lambda: now[0])
    assert first.is_due()
    now[0] = 31.0
    assert not first.is_due()
