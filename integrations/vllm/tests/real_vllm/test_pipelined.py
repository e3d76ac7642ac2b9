"""A prompt's rows are copied into the engine's KV while a slow tier still reads later ones: tokens stay right."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import BLOCK, TWO_RANKS, Engine
from .ways import PATIENT, fs, whole_stack

FIRST = PROMPTS[0]
BOTH = sum(WHOLE) // BLOCK


@pytest.fixture(scope="module")
def store(start_any: Callable[..., Engine], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the KV of both prompts."""
    path = tmp_path_factory.mktemp("pipelined") / "store"
    engine = start_any(model, whole_stack(fs(path)))
    assert engine.generate(*PROMPTS)[1] == [0, 0]
    engine.shutdown()
    return path


@pytest.fixture(scope="module")
def shared(start_any: Callable[..., Engine], model: Path, store: Path) -> Iterator[Engine]:
    """An engine over that store: of a prompt eight chunks come at once and the others in parts, eight a second."""
    engine = start_any(model, whole_stack(slow(store)))
    engine.do("cut_jobs", chunks=2)
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """That engine, with nothing in its own cache or in its primary."""
    shared.forget()
    return shared


def slow(path: Path) -> dict[str, Any]:
    """Return a tier that reads one value after the other."""
    return fs(path, rate_limit={"requests_per_second": 8}, threads=1, processes=1)


def begun(engine: Engine) -> int:
    """Return how many loads were pipelined so far; none is now."""
    loads = engine.do("pipelined_loads")
    assert not loads["open"]
    return int(loads["begun"])


def test_rows_follow_in_parts_and_every_token_is_right(engine, right):
    before = begun(engine)
    assert right(engine, *PROMPTS) == WHOLE
    assert begun(engine) == before + 2
    figures = engine.metrics()
    assert figures["kvtiers_tier_hits{fs}"] == BOTH
    assert figures.get("kvtiers_failed_gpu_loads", 0) == 0
    assert engine.do("reset_prefix_cache")["ok"]
    assert right(engine, *PROMPTS) == WHOLE, "now from the primary"
    assert begun(engine) == before + 2


def test_rows_that_come_in_the_step_in_which_a_load_begins_are_not_lost(start, model, store, right):
    """vLLM's worker sees them before the load that they belong to."""
    engine = start(model, whole_stack(slow(store)))
    engine.do("cut_jobs", chunks=2)
    engine.do("hurry_parts", seconds=0.6)
    assert right(engine, FIRST) == WHOLE[:1]
    assert begun(engine) == 1
    engine.shutdown()


def test_copies_that_fail_are_computed(engine, right):
    before, failed = begun(engine), engine.metrics().get("kvtiers_failed_gpu_loads", 0)
    engine.do("fail_copies", lane="load")
    right(engine, *PROMPTS)
    engine.do("fail_copies", lane="")
    assert begun(engine) > before
    assert engine.metrics()["kvtiers_failed_gpu_loads"] > failed


def test_after_a_reset_it_is_loaded_again(engine, right):
    before = begun(engine)
    assert right(engine, FIRST) == WHOLE[:1]
    engine.forget()
    assert right(engine, FIRST) == WHOLE[:1]
    assert begun(engine) == before + 2


def test_what_has_not_come_in_time_is_computed_after_what_has(start, model, store, right):
    engine = start(model, whole_stack(slow(store), waits=PATIENT | {"load_wait": "1.2s"}))
    engine.do("cut_jobs", chunks=2)
    right(engine, FIRST)
    assert begun(engine) == 1
    figures = engine.metrics()
    assert 0 < figures["kvtiers_wait_expired"] < WHOLE[0] // BLOCK
    assert figures.get("kvtiers_failed_gpu_loads", 0) == 0, "a copy that has begun is ended"
    assert figures["kvtiers_late_loads"] == 1
    assert len(engine.lines("Recovered from KV load failure: 1 request(s)")) == 1
    (line,) = engine.lines("came too late or not at all")
    assert f"of {WHOLE[0] // BLOCK} chunks from tiers" in line
    engine.forget()
    right(engine, FIRST)
    engine.shutdown()


def test_two_ranks_copy_the_same_parts_and_miss_the_same_blocks(start, model, tmp_path, right):
    path = tmp_path / "store"
    first = start(model, whole_stack(fs(path)), **TWO_RANKS)
    assert right(first, FIRST) == [0]
    first.shutdown()
    engine = start(model, whole_stack(slow(path), waits=PATIENT | {"load_wait": "1.2s"}), **TWO_RANKS)
    engine.do("cut_jobs", chunks=2)
    right(engine, FIRST)
    assert begun(engine) == 1
    assert 0 < engine.metrics()["kvtiers_wait_expired"] < WHOLE[0] // BLOCK
    engine.shutdown()


def test_a_damaged_value_ends_a_load_before_it(engine, store, right):
    values = sorted(found for found in store.rglob("*") if found.is_file() and found.stat().st_size > 4096)
    for path in values[::3]:
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    cached = right(engine, *PROMPTS)
    assert engine.metrics()["kvtiers_tier_seal_failures{fs}"] > 0
    assert sum(cached) < sum(WHOLE) or begun(engine)
    engine.forget()
    right(engine, *PROMPTS)


def test_tokens_are_wrong_if_vllm_does_not_see_what_is_missing(engine, truth):
    engine.do("hide_missing_blocks")
    engine.do("fail_copies", lane="load")
    tokens, _ = engine.generate(FIRST)
    engine.do("fail_copies", lane="")
    assert tokens != [truth[tuple(FIRST)]], "so the tests above can fail"
