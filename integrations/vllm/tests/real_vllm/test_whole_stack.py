"""What only the whole stack has: copies of its own that may fail, weights that change in place, its config's errors."""

import shutil

import pytest

from .conftest import CHUNKS, PROMPTS, WHOLE
from .engines import EngineError
from .ways import fs, whole_stack

FIRST, _ = PROMPTS


def test_a_copy_that_fails_is_computed_or_stored_later_and_tokens_stay_right(start, model, tmp_path, right):
    engine = start(model, whole_stack(fs(tmp_path / "store")))
    engine.do("fail_copies", lane="store")
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    assert right(engine, *PROMPTS) == [0, 0], "what was never stored is nowhere"
    figures = engine.metrics()
    assert figures["kvtiers_failed_gpu_stores"] > 0
    assert figures.get("kvtiers_tier_stored_chunks{fs}", 0) == 0
    engine.forget()

    engine.do("fail_copies", lane="load")
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    assert right(engine, *PROMPTS) == [0, 0], "what cannot be loaded is computed"
    assert engine.metrics()["kvtiers_failed_gpu_loads"] == CHUNKS
    assert engine.do("reset_prefix_cache")["ok"]
    engine.do("fail_copies", lane="")
    assert right(engine, *reversed(PROMPTS)) == WHOLE[::-1], "it was there all the time"
    engine.shutdown()


def test_weights_that_change_in_place_find_nothing_of_the_ones_before(start, model, tmp_path):
    whole = [WHOLE[0]]
    engine = start(model, whole_stack(fs(tmp_path / "store")))
    before, _ = engine.generate(FIRST)
    engine.forget()
    assert engine.do("change_weights")["ok"]
    after, cached = engine.generate(FIRST, salt="to compute it")
    assert cached == [0]
    assert after != before
    stale, cached = engine.generate(FIRST)
    assert cached == whole, "as long as no call says that the weights are others"
    assert stale != after
    assert engine.do("change_weights", version="2")["ok"]
    assert engine.generate(FIRST) == (after, [0])
    engine.forget()
    assert engine.generate(FIRST) == (after, whole)
    engine.shutdown()


def test_what_vllm_itself_keeps_of_the_weights_before_is_not_stored_as_that_of_the_new_ones(start, model, tmp_path):
    engine = start(model, whole_stack(fs(tmp_path / "store")))
    before, _ = engine.generate(FIRST)
    assert engine.do("change_weights", reset=False)["ok"]
    assert engine.do("change_weights", version="2", reset=False)["ok"]
    _, cached = engine.generate(FIRST)
    assert cached == [WHOLE[0]], "vLLM was not asked to reset its own cache"
    engine.forget()
    after, cached = engine.generate(FIRST)
    assert cached == [0]
    assert after != before
    engine.forget()
    assert engine.generate(FIRST) == (after, [WHOLE[0]]), "what the new ones computed is stored"
    engine.shutdown()


def test_sleep_changes_no_weights_and_those_that_are_reloaded_after_it_are_others_without_a_version(
    start, model, other_model, truth, other_truth, tmp_path
):
    whole, first = [WHOLE[0]], tuple(FIRST)
    folder = shutil.copytree(model, tmp_path / "tiny")
    engine = start(folder, whole_stack(fs(tmp_path / "store")))
    assert engine.generate(FIRST) == ([truth[first]], [0])
    engine.forget()
    assert engine.do("sleep", level=1)["ok"]
    assert engine.generate(FIRST) == ([truth[first]], whole)
    engine.forget()
    shutil.copytree(other_model, folder, dirs_exist_ok=True)
    assert engine.do("sleep", level=2)["ok"]
    assert engine.do("reload_weights", seen=True)["ok"]
    assert engine.generate(FIRST) == ([other_truth[first]], [0])
    engine.forget()
    assert engine.generate(FIRST) == ([other_truth[first]], whole)
    engine.forget()
    shutil.copytree(model, folder, dirs_exist_ok=True)
    assert engine.do("reload_weights", seen=False)["ok"]
    stale, cached = engine.generate(FIRST)
    assert cached == whole, "as long as it is not vLLM's own call"
    assert stale != [truth[first]]
    engine.shutdown()


def test_an_option_that_there_is_not_is_refused_at_the_start_by_name(start, model):
    with pytest.raises(EngineError) as refused:
        start(model, whole_stack({"type": "memory", "capacty": "64MiB"}))
    assert "Did you mean 'capacity'" in str(refused.value)


def test_an_engine_whose_core_is_not_followed_uses_no_tier_and_says_so_once(start, model, tmp_path, right):
    engine = start(model, whole_stack(fs(tmp_path / "store")))
    engine.do("lose_core")
    assert right(engine, *PROMPTS) == [0, 0]
    assert engine.do("reset_prefix_cache")["ok"]
    assert right(engine, *PROMPTS) == [0, 0], "weights could have been updated unseen"
    (line,) = engine.lines("does not see the requests that vLLM's engine core takes in")
    assert "no request uses a tier" in line
    assert engine.metrics().get("kvtiers_tier_stored_chunks{fs}", 0) == 0
    engine.shutdown()
