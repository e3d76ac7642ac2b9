"""A prompt's rows are copied into the engine's KV while a slow tier still reads later ones: tokens stay right."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import LONG, PROMPTS, STATES, WHOLE
from .engines import BLOCK, TWO_RANKS, Engine, wait_until
from .models import make_state_model, make_window_model
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


def slow(path: Path, rate: int = 8) -> dict[str, Any]:
    """Return a tier that reads one value after the other, so many in a second."""
    return fs(path, rate_limit={"requests_per_second": rate}, threads=1, processes=1)


SOME = {"load_wait": "5s"}
"""In which a tier that brings two values a second brings some of ``FIRST``, and not all, on a busy machine too."""


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
    engine = start(model, whole_stack(slow(store, 2), waits=PATIENT | SOME))
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
    engine = start(model, whole_stack(slow(path, 2), waits=PATIENT | SOME), **TWO_RANKS)
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


# -- several KV groups: all of a load, or nothing


class Hybrid:
    """A model with several KV groups, what it says to some prompts, and a store with their KV.

    ``slow``: how many values a tier is to bring in a second, and in a job.
    """

    def __init__(
        self,
        start_any: Callable[..., Engine],
        model: Path,
        prompts: list[list[int]],
        slow: tuple[int, int],
        **options: Any,
    ) -> None:
        self.prompts, self._slow = prompts, slow
        self._start, self._model, self._options = start_any, model, options
        self.store = model.parent / "store"
        engine = start_any(model, whole_stack(fs(self.store)), **options)
        self.tokens, cached = engine.generate(*prompts)
        assert cached == [0, 0]
        engine.forget()
        _, self.whole = engine.generate(*prompts)
        assert min(self.whole) > 0
        engine.shutdown()

    def engine(self, store: Path | None = None, slower: int = 1, **waits: str) -> Engine:
        """Start an engine over that store, or another, with a tier that brings its values slowly."""
        rate, chunks = self._slow
        tier = fs(store or self.store, rate_limit={"requests_per_second": rate / slower}, threads=1, processes=1)
        engine = self._start(self._model, whole_stack(tier, waits=PATIENT | waits), **self._options)
        engine.do("cut_jobs", chunks=chunks)
        return engine


@pytest.fixture(scope="module", params=["windows", "states"])
def hybrid(
    request: pytest.FixtureRequest, start_any: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> Hybrid:
    folder = tmp_path_factory.mktemp("hybrid") / "tiny"
    if request.param == "states":
        return Hybrid(start_any, make_state_model(folder, seed=0), LONG, (2, 1), **STATES)
    layers = ["sliding"] * 5 + ["full"]
    return Hybrid(start_any, make_window_model(folder, seed=0, window=96, layers=layers), PROMPTS, (16, 2))


def test_of_several_groups_rows_follow_in_parts_and_every_token_is_right(hybrid):
    engine = hybrid.engine()
    assert engine.generate(*hybrid.prompts) == (hybrid.tokens, hybrid.whole)
    assert begun(engine) == 2
    figures = engine.metrics()
    assert figures.get("kvtiers_failed_gpu_loads", 0) == figures.get("kvtiers_late_loads", 0) == 0
    assert engine.do("reset_prefix_cache")["ok"]
    assert engine.generate(*hybrid.prompts) == (hybrid.tokens, hybrid.whole), "now from the primary"
    assert begun(engine) == 2
    engine.shutdown()


def test_of_several_groups_what_lacks_a_chunk_at_its_end_is_computed(hybrid):
    engine = hybrid.engine(slower=4, **SOME)
    tokens, cached = engine.generate(hybrid.prompts[0])
    assert tokens == hybrid.tokens[:1]
    assert cached[0] < hybrid.whole[0]
    assert begun(engine) == 1
    assert engine.metrics()["kvtiers_late_loads"] == 1
    assert engine.lines("its prompt is computed")
    engine.forget()
    assert engine.generate(hybrid.prompts[0])[0] == tokens
    engine.shutdown()


def test_of_several_groups_a_failed_copy_fails_the_whole_load(hybrid):
    engine = hybrid.engine()
    engine.do("fail_copies", lane="load")
    assert engine.generate(*hybrid.prompts) == (hybrid.tokens, [0, 0])
    engine.do("fail_copies", lane="")
    assert begun(engine) > 0
    assert engine.metrics()["kvtiers_failed_gpu_loads"] > 0
    engine.shutdown()


def test_of_several_groups_a_damaged_value_is_used_by_no_load(hybrid, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(hybrid.store, store)
    values = sorted(found for found in store.rglob("*") if found.is_file() and found.stat().st_size > 4096)
    for path in values[::3]:
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    engine = hybrid.engine(store)
    assert engine.generate(*hybrid.prompts)[0] == hybrid.tokens
    assert engine.metrics()["kvtiers_tier_seal_failures{fs}"] > 0
    engine.forget()
    assert engine.generate(*hybrid.prompts)[0] == hybrid.tokens
    engine.shutdown()


def test_of_several_groups_tokens_are_right_if_the_tiers_host_is_killed(hybrid):
    engine = hybrid.engine()
    engine.begin(hybrid.prompts[0], tokens=8)
    wait_until(lambda: len(engine.hosts()) == 1, "no tier host")
    time.sleep(0.5)
    for pid in engine.hosts():
        os.kill(pid, signal.SIGKILL)
    assert engine.end()[0] == hybrid.tokens[:1]
    assert engine.generate(*hybrid.prompts)[0] == hybrid.tokens
    engine.shutdown()


def test_of_several_groups_tokens_are_wrong_if_vllm_does_not_see_what_is_missing(hybrid):
    engine = hybrid.engine()
    engine.do("hide_missing_blocks")
    engine.do("fail_copies", lane="load")
    assert engine.generate(hybrid.prompts[0])[0] != hybrid.tokens[:1], "so the tests above can fail"
    engine.shutdown()
