"""A shared store that is down at the start, hangs or dies costs hits: right tokens come in time, and hits resume."""

import os
import signal
import time

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import PATIENCE, wait_until
from .test_releases import in_every_release
from .ways import DEFAULT, tiers

DEADLINE, GRACE, BUSY = 3.0, 1.0, 30.0
BOUND = 2 * DEADLINE + GRACE + BUSY
"""Seconds: a job may wait for its start and for its end as long as the deadline, and be killed after the grace.

The machine may be busy with something else for ``BUSY`` of them.
"""
SLOW_DEADLINE = 10.0
"""Seconds, of a tier whose loads take two."""
RESUME_SECONDS = 300.0
"""The breaker tries a store again after a second; the machine may be busy with something else for the rest."""
AWHILE = 2.0
"""Seconds: far more than the waits that an engine has by itself, far less than anything that hangs would take."""
WAITS = {"lookup_wait": f"{DEADLINE}s"}
EXPIRED = "kvtiers_tier_wait_expired{redis}"
BREAKER = {"delay": "200ms", "max_delay": "1s"}


@pytest.fixture(params=["redis", *in_every_release("gateway")])
def server(request):
    """The store; what a client of each kind does with a server that is gone is tested where the tier is."""
    server = request.getfixturevalue(request.param)
    yield server
    server.resume()
    server.start()


def hits_resume(engine, right, kind):
    """Ask, with right tokens each time, until the tier alone brings everything; what was lost is stored again."""
    until = time.monotonic() + RESUME_SECONDS
    cached = []
    while cached != WHOLE:
        assert time.monotonic() < until, f"hits do not resume: {cached} of {WHOLE}; {engine.metrics()}"
        engine.wait_for(lambda now: now.get(f"kvtiers_tier_open{{{kind}}}"))
        engine.wait_for(lambda now: not now[f"kvtiers_tier_breaker_state{{{kind}}}"])
        engine.forget()
        cached = right(engine, *PROMPTS)


def computed_in_time(engine, right):
    begun = time.monotonic()
    assert right(engine, *PROMPTS) == [0, 0]
    assert time.monotonic() - begun < BOUND


def test_a_store_that_is_down_at_the_start_hangs_or_dies_costs_hits_and_nothing_else(start, model, right, way, server):
    quick = {"deadline": f"{DEADLINE}s", "grace": f"{GRACE}s", "breaker": BREAKER}
    config = way(server.tier(timeout="2s", **quick), options=WAITS)
    server.kill()
    engine = start(model, config)
    computed_in_time(engine, right)
    server.start()
    hits_resume(engine, right, server.kind)

    engine.forget()
    server.hang()
    computed_in_time(engine, right)
    server.resume()
    hits_resume(engine, right, server.kind)

    engine.forget()
    server.kill()
    computed_in_time(engine, right)
    server.start()
    hits_resume(engine, right, server.kind)
    engine.shutdown()


def test_a_store_that_hangs_or_dies_in_the_middle_of_loads_costs_what_it_had_not_brought(
    start, model, right, truth, way, server
):
    slow = {"rate_limit": {"bytes_per_second": "1MiB"}, "deadline": f"{SLOW_DEADLINE}s", "timeout": "2s"}
    engine = start(model, way(server.tier(**slow, grace=f"{GRACE}s", breaker=BREAKER), options=WAITS))
    hits_resume(engine, right, server.kind)
    for trouble in (server.hang, server.kill):
        engine.forget()
        before = server.reads()
        engine.begin(*PROMPTS)
        wait_until(lambda before=before: server.reads() >= before + 3, "nothing is loaded")
        trouble()
        begun = time.monotonic()
        tokens, cached = engine.end()
        assert time.monotonic() - begun < 2 * SLOW_DEADLINE + GRACE + BUSY
        assert tokens == [truth[tuple(prompt)] for prompt in PROMPTS]
        assert cached != WHOLE, "it was in the middle of loads"
        server.resume()
        server.start()
        hits_resume(engine, right, server.kind)
    engine.shutdown()


@pytest.mark.parametrize("hung", ["store", "host"])
def test_with_the_default_waits_no_request_waits_for_a_tier_that_hangs(start, model, right, way, redis, hung):
    # Under vLLM's own tiering a tier host that hangs cannot release vLLM's rows, and is waited for until it is killed.
    is_killed = (way, hung) == (tiers, "host")
    never = f"{2 * PATIENCE}s"
    ends = {"deadline": f"{DEADLINE}s", "grace": f"{GRACE}s"} if is_killed else {"deadline": never}
    engine = start(model, way(redis.tier(processes=1, timeout=never, **ends), waits=DEFAULT))
    engine.wait_for(lambda now: now.get("kvtiers_tier_open{redis}"))
    begun = time.monotonic()
    assert right(engine, *PROMPTS) == [0, 0]
    most = 2 * (time.monotonic() - begun) + (BOUND if is_killed else AWHILE)
    engine.forget()
    (host,) = engine.hosts()
    try:
        if hung == "store":
            redis.hang()
        else:
            os.kill(host, signal.SIGSTOP)
        expired = engine.metrics().get(EXPIRED, 0)
        for what, more in (("an answer", {"salt": "new"}), ("loads of what the tier has", {})):
            begun = time.monotonic()
            assert right(engine, *PROMPTS, **more) == [0, 0]
            assert time.monotonic() - begun < most, "it takes more than computing without a tier"
            before, expired = expired, engine.metrics().get(EXPIRED, 0)
            assert expired > before, f"no request has waited for {what}"
    finally:
        redis.resume()


def test_an_idle_engine_has_its_store_back_without_a_request(start, model, right, way, redis):
    engine = start(model, way(redis.tier(timeout="2s", breaker={"failures": 1, **BREAKER}), options=WAITS))
    engine.wait_for(lambda now: now.get("kvtiers_tier_open{redis}"))
    redis.kill()
    try:
        computed_in_time(engine, right)
        wait_until(lambda: engine.lines("redis: taken out of use"), "it is not taken out of use")
        assert not engine.lines("redis: answers again")
    finally:
        redis.start()
    wait_until(lambda: engine.lines("redis: answers again; back in use"), "an idle engine does not have it back")
    engine.shutdown()
