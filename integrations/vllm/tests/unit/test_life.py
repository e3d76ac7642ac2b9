"""At its start an engine steps until its figures say how the tiers are; at its end no longer than it has to."""

from enum import Enum
from types import SimpleNamespace

import pytest

from kvtiers_vllm.life import FirstReport, is_ending


class State(Enum):
    """vLLM's EngineShutdownState."""

    RUNNING = 0
    REQUESTED = 1
    SHUTTING_DOWN = 2


@pytest.mark.parametrize("state", State)
def test_an_engine_is_ending_from_when_it_was_told_to(state):
    assert is_ending(SimpleNamespace(shutdown_state=state)) is (state is not State.RUNNING)


@pytest.mark.parametrize("core", [None, SimpleNamespace()])
def test_an_engine_that_does_not_say_whether_it_ends_does_not(core):
    assert not is_ending(core)


def test_the_report_that_counts_is_the_first_one_after_all_tiers_have_spoken():
    spoken = []
    first = FirstReport(lambda: bool(spoken), lambda: 0.0)
    assert first.is_owed()
    first.given()
    assert first.is_owed(), "it said nothing of a tier that had not spoken"
    spoken.append(True)
    assert first.is_owed()
    first.given()
    assert not first.is_owed()


def test_a_tier_that_never_speaks_is_not_waited_for_without_end():
    now = [0.0]
    first = FirstReport(lambda: False, lambda: now[0])
    assert first.is_owed()
    now[0] = 31.0
    assert not first.is_owed()
