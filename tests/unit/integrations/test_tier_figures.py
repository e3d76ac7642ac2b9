"""What a tier under vLLM's own tiering says of itself."""

import pytest

from kvtiers.integrations.vllm.driver import TierDriver
from kvtiers.integrations.vllm.metrics import EVERY_SECONDS, TierFigures
from kvtiers.integrations.vllm.off_tier import OffTier
from kvtiers.integrations.vllm.opening import OpenedTier
from kvtiers.tiering.tiers import TierOptions, TierSlot

from .test_stack_figures import Clock, Collection


@pytest.fixture
def driver():
    return TierDriver(TierSlot(0, OffTier(), TierOptions("near")), 0.02, lambda _: None)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def report(driver, clock):
    return TierFigures(OpenedTier(driver, "near", "model", shared=True), Collection, clock)


def test_counters_are_what_was_added_and_a_moment_later_all_of_it(driver, report, clock):
    driver.metrics.wait_expired = 3
    first = report()
    assert first.counters["kvtiers_tier_wait_expired", ("near",)] == 3
    assert first.gauges["kvtiers_tier_shared", ("near",)] == 1
    driver.metrics.wait_expired = 5
    driver.left_out_requests = 2
    assert report() is None, "vLLM asks in every step"
    clock.now += EVERY_SECONDS
    later = report()
    assert dict(later.counters) == {
        ("kvtiers_tier_wait_expired", ("near",)): 2,
        ("kvtiers_tier_left_out_requests", ("near",)): 2,
    }
    assert later.gauges == {}
