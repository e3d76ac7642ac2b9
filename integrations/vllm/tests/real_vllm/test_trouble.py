"""A tier's host that hangs or dies, loads that take long, an engine that is killed: requests end, nothing is left."""

import os
import signal
import time
from pathlib import Path

import pytest

from .conftest import CHUNKS, PROMPTS, WHOLE
from .engines import BLOCK, wait_until
from .servers import ENDING, VALUE_BYTES
from .ways import fs, tiers, whole_stack

DEADLINE, GRACE, BUSY = 10.0, 2.0, 30.0
BOUND = 2 * DEADLINE + GRACE + BUSY
"""Seconds: a job may wait for its start and for its end as long as the deadline, and be killed after the grace.

The machine may be busy with something else for ``BUSY`` of them.
"""


def options(path, **more):
    quick = {"deadline": f"{DEADLINE}s", "grace": f"{GRACE}s", "breaker": {"delay": "200ms", "max_delay": "1s"}}
    return fs(path, processes=1, **quick) | more


def bytes_read(pid):
    """Return how many bytes a process has read from files."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


def in_use(figures):
    return figures.get("kvtiers_tier_open{fs}") and not figures["kvtiers_tier_breaker_state{fs}"]


@pytest.fixture(scope="module")
def store(tmp_path_factory, way):
    return tmp_path_factory.mktemp(f"trouble-{way.__name__}") / "store"


@pytest.fixture(scope="module")
def engine(start_any, model, store, right, way):
    """An engine that has stored the prompts, and has only the tier to get them from; the last test with it kills it."""
    slow = options(store, rate_limit={"bytes_per_second": "1MiB"})
    engine = start_any(model, way(slow))
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    yield engine
    engine.kill()


@pytest.mark.parametrize("trouble", ["SIGKILL", "SIGSTOP"])
def test_a_host_that_is_killed_or_hangs_in_the_middle_of_loads_is_replaced(engine, right, truth, trouble):
    starts = engine.metrics()["kvtiers_tier_host_starts{fs}"]
    (host,) = engine.hosts()
    before = bytes_read(host)
    engine.begin(*PROMPTS)
    wait_until(lambda: bytes_read(host) >= before + 3 * VALUE_BYTES, "nothing is loaded")
    os.kill(host, getattr(signal, trouble))
    begun = time.monotonic()
    tokens, _ = engine.end()
    assert time.monotonic() - begun < BOUND
    assert tokens == [truth[tuple(prompt)] for prompt in PROMPTS]
    figures = engine.wait_for(lambda now: now["kvtiers_tier_host_starts{fs}"] > starts and in_use(now))
    assert engine.hosts() != [host]
    engine.forget()
    assert right(engine, *PROMPTS) == WHOLE, f"hits come back; {figures}"
    assert engine.lines("its host ended")
    engine.forget()


def test_a_tier_whose_loads_take_long_costs_its_load_wait_and_neither_its_host_nor_its_breaker(
    engine, start, model, store, right, way
):
    limited = options(store, rate_limit={"bytes_per_second": "10KiB"}, deadline="600s")
    slow = start(model, way(limited, options={"load_wait": "500ms"}))
    (host,) = slow.hosts()
    begun = time.monotonic()
    # One after the other: while the first one's loads still run, the tier is asked for the second.
    cached = [tokens for prompt in PROMPTS for tokens in right(slow, prompt)]
    assert time.monotonic() - begun < BUSY, "the loads alone take 200 s"
    assert cached != WHOLE
    figures = slow.metrics()
    expired = {tiers: "kvtiers_tier_wait_expired{fs}", whole_stack: "kvtiers_wait_expired"}
    assert figures[expired[way]] > 0
    assert figures["kvtiers_tier_breaker_state{fs}"] == 0
    assert slow.hosts() == [host]


def test_an_engine_that_is_killed_leaves_nothing_of_ours_and_the_next_one_hits(engine, start, model, store, right, way):
    assert engine.hosts()
    engine.crash()
    wait_until(lambda: not engine.family(), f"processes outlive their engine: {engine.family()}")
    again = start(model, way(options(store)))
    assert right(again, *PROMPTS) == WHOLE
    again.shutdown()
    assert not again.lines("ERROR")


def test_an_engine_that_is_killed_in_the_middle_of_stores_leaves_whole_values_and_no_process(
    start, model, tmp_path, right, way
):
    store, before = tmp_path / "store", set(Path("/dev/shm").iterdir())

    def values():
        return [path for path in store.rglob(f"*{ENDING}") if path.is_file()]

    engine = start(model, way(options(store, rate_limit={"bytes_per_second": "256KiB"})))
    assert right(engine, *PROMPTS) == [0, 0]
    wait_until(lambda: len(values()) >= 3, "nothing is stored")
    assert engine.hosts()
    engine.crash()
    wait_until(lambda: not engine.family(), f"processes outlive their engine: {engine.family()}")
    assert 3 <= len(values()) < CHUNKS, "it was to be in the middle"
    ours = {path for path in set(Path("/dev/shm").iterdir()) - before if "kvtiers" in path.name}
    assert {path for path in ours if not path.name.startswith("vllm_offload")} == set(), "what is vLLM's is vLLM's"

    again = start(model, way(options(store)))
    hits = right(again, *PROMPTS)
    figures = again.metrics()
    assert figures.get("kvtiers_tier_seal_failures{fs}", 0) == 0, "a value is whole, or not there"
    assert sum(hits) <= BLOCK * len(values())
    again.forget()
    assert right(again, *PROMPTS) == WHOLE, "what was lost is stored now"
    again.shutdown()
    assert not again.lines("ERROR")
    left = [path.name for path in store.rglob("*") if path.is_file() and not path.name.endswith(ENDING)]
    assert not [name for name in left if "tmp" in name], "halves of values"


def test_a_tier_that_is_down_at_the_start_comes_into_use_when_it_is_there(start, model, tmp_path, right, way):
    store = tmp_path / "store"
    store.write_text("in the folder's place")
    engine = start(model, way(options(store, required=False)))
    assert right(engine, *PROMPTS) == [0, 0]
    engine.wait_for(lambda _: engine.lines("out of use"))
    (line,) = engine.lines("out of use")
    assert "fs: out of use" in line
    store.unlink()
    engine.wait_for(in_use)
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
    (start_line,) = engine.lines(" is off, under vLLM's own tiering")
    assert "tiers: fs (fs) off; namespace" in start_line
    assert engine.metrics()["kvtiers_tier_off{fs}"] == 1
    assert engine.hosts() == []
    assert not (tmp_path / "store").exists()
    engine.shutdown()
