"""A Redis that goes and comes back beside an idle engine: what is said of it is true without a request."""

import itertools
import time

import pytest
from redis_servers import Server, wait_until
from tests.integration.hosts.harness import Engine, keys

from kvtiers.control import ControlSocket

BREAKER = {"failures": 2, "delay": "200ms", "max_delay": "1s"}


@pytest.fixture
def engine():
    """Return a function that opens an engine with a tier at this URL; its control socket looks after the tiers."""
    opened = []

    def open_engine(url):
        tier = {"type": "redis", "url": url, "processes": 1, "deadline": "60s", "breaker": BREAKER}
        engine = Engine(tier, lookup_wait="20ms")
        opened.append((engine, ControlSocket({}, tend=engine.manager.tend)))
        return engine

    yield open_engine
    for engine, control in opened:
        control.close()
        engine.close()


@pytest.fixture
def ask():
    """Have an engine look up prompts that it has not seen, for as long as this is so."""
    numbers = itertools.count(1_000, 4)

    def ask_while(engine, holds, what):
        def step():
            engine.lookup(keys(next(numbers), 4), engine.request())
            return not holds()

        engine.until(step, what)

    return ask_while


def own(engine):
    return engine.manager.stats()["tiers"]["redis"]["own"]


def test_an_idle_engine_has_its_killed_redis_back_without_a_request(start, engine, ask, caplog):
    server = start()
    idle = engine(server.url)
    idle.until_available()
    server.kill()
    ask(idle, lambda: own(idle)["breaker_state"] != 1, "its being taken out of use")
    steps = idle.manager.steps
    time.sleep(2.0)
    assert own(idle)["breaker_state"] != 0, "it is probed, and does not answer"
    assert own(idle)["breaker_seconds"] > 1.9
    server.start()
    wait_until(lambda: own(idle)["breaker_state"] == 0, "its being back in use")
    assert idle.manager.steps == steps, "no step was made"
    wait_until(lambda: "redis: answers again; back in use" in caplog.messages, "the line that says so")


def test_an_idle_engine_opens_a_redis_that_comes_after_it(start, engine, tmp_path):
    server = Server(tmp_path / "late")
    idle = engine(server.url)
    idle.until(lambda: own(idle)["breaker_state"] == 1, "its being out of use")
    steps = idle.manager.steps
    server.start()
    try:
        wait_until(lambda: (own(idle)["open"], own(idle)["breaker_state"]) == (1, 0), "its being in use")
        assert idle.manager.steps == steps
        idle.until_available()
    finally:
        server.kill()


def test_a_redis_that_hangs_is_silent_and_not_slow_and_is_well_again_when_it_goes_on(start, engine, ask):
    server = start()
    idle = engine(server.url)
    idle.until_available()
    ask(idle, lambda: own(idle)["lookup_questions"] < 3, "some answers")
    server.pause()
    ask(idle, lambda: own(idle)["silent_seconds"] < 4.0, "its silence")
    assert own(idle)["waiting_calls"] >= 1
    before = own(idle)["silent_seconds"]
    time.sleep(1.0)
    assert own(idle)["silent_seconds"] > before + 0.9, "of the moment, also in an idle engine"
    assert own(idle)["breaker_state"] == 0
    server.resume()
    wait_until(lambda: (own(idle)["silent_seconds"], own(idle)["waiting_calls"]) == (0.0, 0), "its answers")
