"""What a tier under vLLM's own tiering says of itself."""

import logging

import pytest

from kvtiers.status import Troubles, ask
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers_vllm.own_tiering.build import OffTier, OpenedTier
from kvtiers_vllm.own_tiering.metrics import EVERY_SECONDS, TierFigures, open_status
from kvtiers_vllm.own_tiering.tier_driver import TierDriver

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


def test_status_says_what_the_tier_brought_which_requests_it_left_out_and_its_last_trouble(driver):
    driver.metrics.loaded_chunks, driver.metrics.hits = 3, 0
    driver.metrics.loading_chunks = 4
    driver._ledger.loaded_tokens, driver.left_out_requests = 192, 2
    driver.metrics.unread_bytes = 8192
    socket = open_status(OpenedTier(driver, "near", "model", shared=True), Troubles(["near"]), "vLLM 0.32.0")
    logging.getLogger("kvtiers.test_tier_figures").warning("near: the store is gone")
    answer = ask(socket.name)
    socket.close()
    assert (answer["engine"], answer["model"]) == ("vLLM 0.32.0", "model")
    near = answer["tiers"]["near"]
    assert (near["off"], near["shared"], near["open"], near["breaker_state"]) == ("", True, False, 0)
    assert (near["hits"], near["tokens"], near["computing_seconds"]) == (3, 192, 0.0)
    assert (near["unread_bytes"], near["queue"], near["left_out_requests"]) == (8192, 4, 2)
    assert near["trouble"] == "the store is gone"
