"""A tier that moves its rows by itself, in a whole engine: what it hears of requests, and an end that it holds up."""

import threading
import time

import pytest

from kvtiers.api.keys import with_tenant
from kvtiers_example.example_tier import ExampleSecondaryTier

ASYNC = {"type": "memory-async", "max_blocks": 256}


@pytest.fixture
def heard(monkeypatch):
    """What a ``memory-async`` tier hears that names a request, in order, as pairs of a call and the request's id."""
    calls = []

    def record(name, request_of):
        method = getattr(ExampleSecondaryTier, name)

        def call(tier, *args):
            calls.append((name, request_of(*args).request_id))
            return method(tier, *args)

        monkeypatch.setattr(ExampleSecondaryTier, name, call)

    for name in ("on_new_request", "on_request_finished"):
        record(name, lambda context: context)
    for name in ("submit_store", "submit_load"):
        record(name, lambda job: job.context)
    record("lookup", lambda key, context: context)
    return calls


def test_a_request_that_stores_and_ends_in_one_step_ends_for_the_tier_after_its_store(start, keys, heard):
    engine = start(ASYNC)
    engine.store(keys(4))
    assert heard == [("on_new_request", "r0"), ("submit_store", "r0"), ("on_request_finished", "r0")]


def test_a_request_that_came_before_the_tier_had_opened_is_notified_first(start, keys, heard, monkeypatch):
    gate, opened = threading.Event(), ExampleSecondaryTier.__init__

    def open_late(tier, *args, **options):
        gate.wait(60)
        opened(tier, *args, **options)

    monkeypatch.setattr(ExampleSecondaryTier, "__init__", open_late)
    engine = start(ASYNC, until_open=False)
    over, early = engine.request(), engine.request()
    engine.manager.on_request_finished(over)
    gate.set()
    engine.until_open()
    plan = engine.manager.prepare_store(keys(4), early)
    engine.write(plan)
    engine.manager.complete_store(plan)
    engine.manager.on_request_finished(early)
    engine.settle()
    assert heard == [("on_new_request", "r1"), ("submit_store", "r1"), ("on_request_finished", "r1")]


def test_a_tier_whose_drain_never_returns_does_not_hold_up_the_end(start, monkeypatch):
    tiers, gate = [], threading.Event()
    monkeypatch.setattr(ExampleSecondaryTier, "drain", lambda tier, timeout: tiers.append(tier) or gate.wait())
    engine = start(ASYNC)
    begin = time.monotonic()
    engine.manager.shutdown(0.5)
    took = time.monotonic() - begin
    gate.set()
    (tier,) = tiers
    tier.close()
    assert took < 30


def test_a_tenant_stays_within_the_quota_that_the_tier_keeps_and_no_other_loses_a_chunk(start, keys):
    quotas = {"blue": "16KiB"}  # four values
    engine = start(ASYNC | {"quotas": quotas}, tenants={})
    blue, red = ([with_tenant(key, tenant) for key in keys(10)] for tenant in ("blue", "red"))
    engine.store(keys(10))
    engine.store(red, "red")
    for key in blue:
        engine.store([key], "blue")
    engine.forget()
    assert [engine.load([key], "blue") for key in blue] == [0] * 6 + [1] * 4, "the oldest are gone"
    assert (engine.load(keys(10)), engine.load(red, "red")) == (10, 10)
    prompt = [with_tenant(key, "blue") for key in keys(6, "p")]
    engine.store(prompt, "blue")
    engine.forget()
    assert engine.load(prompt, "blue") == 4, "its head"
    own = engine.figures("memory-async")["own"]
    assert (own["breaker_opened"], own["seal_failures"]) == (0, 0), "what has no room is no failure of the tier"
