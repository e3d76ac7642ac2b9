"""A shared store that is down at the start, hangs or dies costs hits: right tokens come in time, and hits resume."""

import time

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import PATIENCE

DEADLINE, GRACE = 3.0, 1.0
BOUND = 2 * DEADLINE + GRACE + 10.0
"""Seconds: a job may wait for its start and for its end as long as the deadline, and be killed after the grace."""


@pytest.fixture(params=["redis", "gateway"])
def server(request):
    server = request.getfixturevalue(request.param)
    yield server
    server.resume()
    server.start()


def hits_resume(engine, right, kind):
    """Ask, with right tokens each time, until the tier alone brings everything; what was lost is stored anew."""
    until = time.monotonic() + PATIENCE
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
    quick = {"deadline": f"{DEADLINE}s", "grace": f"{GRACE}s", "breaker": {"delay": "200ms", "max_delay": "1s"}}
    config = way(server.tier(timeout="2s", **quick))
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
