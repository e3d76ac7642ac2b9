"""A tier that hangs, dies or is not there costs hits: every request ends with right tokens, and hits come back."""

import os
import signal
import time
from pathlib import Path

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import tiers
from .test_tokens import fs

GRACE = 2.0
DEADLINE = 3.0
BOUND = 2 * DEADLINE + GRACE + 10.0
"""Seconds: a job may wait for its start and for its end as long as the deadline, and be killed after the grace."""


def options(path, **more):
    return fs(path, deadline=f"{DEADLINE}s", grace=f"{GRACE}s", breaker={"delay": "200ms", "max_delay": "1s"}, **more)


def hits_again(engine):
    """Wait until the tier is in use and brings what is asked for."""
    engine.wait_for(
        lambda figures: figures.get("kvtiers_tier_open{fs}") and not figures["kvtiers_tier_breaker_state{fs}"]
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("trouble") / "store"


@pytest.fixture(scope="module")
def engine(start_any, model, store, right):
    """An engine that has stored the prompts, and has only the tier to get them from; the last test with it kills it."""
    engine = start_any(model, tiers(options(store)))
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    yield engine
    engine.kill()


def test_a_tier_that_is_killed_or_hangs_in_the_middle_of_requests(engine, right):
    for name in ("SIGKILL", "SIGSTOP"):
        (host,) = engine.hosts()
        os.kill(host, getattr(signal, name))
        begun = time.monotonic()
        right(engine, *PROMPTS)
        assert time.monotonic() - begun < BOUND, name
        hits_again(engine)
        assert engine.hosts() != [host], name
        engine.forget()
        assert right(engine, *PROMPTS) == WHOLE, f"{name}: hits come back"
        engine.forget()
    assert engine.metrics()["kvtiers_tier_host_starts{fs}"] >= 3
    assert engine.lines("its host ended")


def test_a_tier_whose_loads_take_long_costs_its_load_wait_and_neither_its_host_nor_its_breaker(
    engine, start, model, store, right
):
    limited = options(store, rate_limit={"bytes_per_second": "100KiB"}) | {"deadline": "60s"}
    waits = {"lookup_wait": "3s", "load_wait": "500ms"}
    slow = start(model, tiers(limited, kvtiers=waits))
    (host,) = slow.hosts()
    begun = time.monotonic()
    cached = right(slow, *PROMPTS)
    assert time.monotonic() - begun < 10.0, "the loads alone take 20 s"
    assert cached != WHOLE
    figures = slow.metrics()
    assert figures["kvtiers_tier_wait_expired{fs}"] > 0
    assert figures["kvtiers_tier_breaker_state{fs}"] == 0
    assert slow.hosts() == [host]


def test_an_engine_that_is_killed_leaves_nothing_of_ours(engine, start, model, store, right):
    (host,) = engine.hosts()
    engine.kill()
    until = time.monotonic() + 10
    while Path(f"/proc/{host}").exists():
        assert time.monotonic() < until, "the host outlives its engine"
        time.sleep(0.01)
    again = start(model, tiers(options(store)))
    assert right(again, *PROMPTS) == WHOLE
    again.shutdown()
    assert not again.lines("ERROR")


def test_a_tier_that_is_down_at_the_start_comes_into_use_when_it_is_there(start, model, tmp_path, right):
    store = tmp_path / "store"
    store.write_text("in the folder's place")
    engine = start(model, tiers(options(store, required=False)))
    assert right(engine, *PROMPTS) == [0, 0]
    engine.wait_for(lambda _: engine.lines("out of use"))
    (line,) = engine.lines("out of use")
    assert "fs: out of use" in line
    store.unlink()
    hits_again(engine)
    assert engine.do("reset_prefix_cache", connector=True)["ok"]
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    assert right(engine, *PROMPTS) == WHOLE
    engine.shutdown()


def test_with_lora_the_tier_is_off_for_the_whole_engine_and_says_so_once(start, model, tmp_path, right):
    engine = start(model, tiers(fs(tmp_path / "store")), enable_lora=True, max_lora_rank=8)
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    assert right(engine, *PROMPTS) == [0, 0]
    (line,) = engine.lines("fs: off: ")
    assert "LoRA is enabled" in line
    assert engine.metrics()["kvtiers_tier_off{fs}"] == 1
    assert engine.hosts() == []
    assert not (tmp_path / "store").exists()
