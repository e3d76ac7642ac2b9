"""Tiers of the third rung under core's protection: what they hear of requests."""

import threading

import pytest
from tests.unit.secondary.async_tier import AsyncTier, job

from kvtiers.types import RequestContext


def held_sealing(kit, tier):
    """Keep the sealing thread busy until the event that this returns is set."""
    gate = threading.Event()
    tier._sealer._work.put(lambda: gate.wait(kit.PATIENCE))
    return gate


def step_until_heard(kit, tier, inner, call, context):
    kit.wait_until(lambda: tier.on_schedule_end() or (call, context) in inner.heard, f"{call} of a request")


def test_a_request_ends_for_the_tier_after_its_last_store(kit, sealed, keys):
    tier, inner = sealed()
    mine, other = RequestContext("r"), RequestContext("s")
    assert tier.on_new_request(mine)
    tier.on_new_request(other)
    gate = held_sealing(kit, tier)
    for key in keys[:2]:
        tier.submit_store(job([key], context=mine))
    tier.on_request_finished(mine)
    tier.on_request_finished(other)
    tier.on_schedule_end()
    assert inner.heard == [("new", mine), ("new", other)]
    gate.set()
    step_until_heard(kit, tier, inner, "finished", other)
    assert inner.heard[2:] == [("store", mine), ("store", mine), ("finished", mine), ("finished", other)]
    assert len(inner.waiting) == 2, "its transfers may still run"


@pytest.mark.parametrize("fate", ["given up", "refused", "not to be sealed"])
def test_a_store_that_comes_to_nothing_does_not_keep_its_requests_end_back(kit, sealed, keys, fate):
    tier, inner = sealed()
    mine = RequestContext("r")
    tier.on_new_request(mine)
    gate = held_sealing(kit, tier)
    storing = job(keys, context=mine)
    if fate == "not to be sealed":
        storing = job(keys[:1], rows=[10_000], context=mine)
    tier.submit_store(storing)
    if fate == "given up":
        tier.abandon_job(storing.job_id)
    inner.refuse = fate == "refused"
    tier.on_request_finished(mine)
    gate.set()
    step_until_heard(kit, tier, inner, "finished", mine)
    assert [call for call, _ in inner.heard] == ["new", *["store"] * inner.refuse, "finished"]


def test_an_end_that_is_kept_back_is_notified_within_a_drain(kit, sealed, keys):
    tier, inner = sealed()
    mine = RequestContext("r")
    tier.on_new_request(mine)
    tier.submit_store(job(keys, context=mine))
    tier.on_request_finished(mine)
    assert tier.drain(kit.PATIENCE)
    assert inner.heard == [("new", mine), ("store", mine), ("finished", mine)]


def test_requests_that_came_while_the_tier_opened_are_notified_before_anything_else(kit, sealed, keys):
    gate, inner = threading.Event(), AsyncTier(kit.rows, kit.VALUE)
    tier, _ = sealed(lambda: gate.wait(kit.PATIENCE) and inner)
    first, gone, last, later = (RequestContext(name) for name in ("first", "gone", "last", "later"))
    for context in (first, gone, last):
        assert tier.on_new_request(context) is False
    tier.on_request_finished(gone)
    tier.on_schedule_end()
    assert not tier.stats()["open"]
    gate.set()
    assert tier.wait_open(kit.PATIENCE) == ""
    assert tier.is_available()
    tier.lookup_many(keys[:1], first)
    tier.on_new_request(later)
    tier.on_request_finished(gone)
    for context in (last, later, first):
        tier.on_request_finished(context)
    notified = [("new", first), ("new", last), ("lookup", first), ("new", later)]
    assert inner.heard == [*notified, ("finished", last), ("finished", later), ("finished", first)]


def test_a_tier_that_raises_over_a_request_without_a_waiter_stops_nothing(kit, sealed, caplog):
    gate, inner = threading.Event(), AsyncTier(kit.rows, kit.VALUE)
    inner.on_new_request = lambda context: 1 / 0
    tier, _ = sealed(lambda: gate.wait(kit.PATIENCE) and inner)
    contexts = [RequestContext(str(number)) for number in range(5)]
    for context in contexts:
        tier.on_new_request(context)
    gate.set()
    kit.wait_until(tier.is_available, "its opening")
    for context in contexts:
        tier.on_request_finished(context)
    assert inner.heard == [("finished", context) for context in contexts]
    tier._sealer.settle(kit.PATIENCE)
    assert caplog.text.count("its on_new_request() failed") == 3, "the 1st, the 2nd, the 4th"
