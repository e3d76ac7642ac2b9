"""kvtiers' own manager, primary and workers under vLLM's connector: tokens are right, wherever the KV came from."""

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import BLOCK, make_prompt, make_window_model, whole_stack

FIRST, SECOND = PROMPTS


def fs(path, **more):
    return {"type": "fs", "path": str(path), "capacity": "1GiB", "required": True} | more


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_what_one_engine_stored_another_one_loads_and_its_tokens_are_the_same(
    model, start, right, tmp_path, blocks_per_chunk
):
    chunk = BLOCK * blocks_per_chunk
    whole = [len(prompt) // chunk * chunk for prompt in PROMPTS]
    config = whole_stack(fs(tmp_path / "store"), blocks_per_chunk=blocks_per_chunk)
    first = start(model, config)
    assert right(first, *PROMPTS) == [0, 0]
    assert first.do("reset_prefix_cache")["ok"]
    assert right(first, SECOND, FIRST) == whole[::-1], "the primary has it"
    figures = first.metrics()
    assert figures["kvtiers_primary_hits"] == sum(whole) / chunk
    assert figures["kvtiers_tier_shared{fs}"] == 1
    assert figures.get("kvtiers_tier_loaded_chunks{fs}", 0) == 0
    first.forget()
    assert right(first, SECOND, FIRST) == whole[::-1], "the tier has it"
    assert first.metrics()["kvtiers_tier_loaded_chunks{fs}"] == sum(whole) / chunk
    first.shutdown()

    second = start(model, config)
    assert right(second, SECOND, FIRST) == whole[::-1]
    figures = second.metrics()
    assert figures["kvtiers_tier_hits{fs}"] == sum(whole) / chunk
    assert figures.get("kvtiers_tier_stored_chunks{fs}", 0) == 0
    second.shutdown()


def test_two_ranks_in_processes_of_their_own_share_rows_and_share_nothing_with_one_rank(start, model, tmp_path, right):
    config = whole_stack(fs(tmp_path / "store"))
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    both = start(model, config, **two)
    assert right(both, *PROMPTS) == [0, 0]
    both.forget()
    assert right(both, *PROMPTS) == WHOLE
    both.shutdown()
    again = start(model, config, **two)
    assert right(again, *reversed(PROMPTS)) == WHOLE[::-1]
    again.shutdown()
    alone = start(model, config)
    assert right(alone, *PROMPTS) == [0, 0]
    assert alone.metrics().get("kvtiers_tier_loaded_chunks{fs}", 0) == 0
    alone.shutdown()


def test_the_other_release_that_it_runs_on_stores_and_a_new_process_hits(start, model, tmp_path):
    config = whole_stack(fs(tmp_path / "store"))
    first = start(model, config, release="0.30.0")
    tokens, cached = first.generate(*PROMPTS)
    assert cached == [0, 0]
    first.shutdown()
    second = start(model, config, release="0.30.0")
    assert second.generate(*PROMPTS) == (tokens, WHOLE)
    assert second.metrics()["kvtiers_tier_shared{fs}"] == 1
    second.shutdown()


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_a_model_with_a_sliding_window_has_its_groups_back_together(start, tmp_path, blocks_per_chunk):
    model = make_window_model(tmp_path / "window", seed=0, window=96)
    chunk = BLOCK * blocks_per_chunk
    whole = [len(prompt) // chunk * chunk for prompt in PROMPTS]
    plain = start(model)
    tokens, cached = plain.generate(*PROMPTS)
    assert cached == [0, 0]
    plain.shutdown()
    config = whole_stack(fs(tmp_path / "store"), blocks_per_chunk=blocks_per_chunk)
    first = start(model, config)
    assert first.generate(*PROMPTS) == (tokens, [0, 0])
    first.forget()
    assert first.generate(*PROMPTS) == (tokens, whole)
    first.shutdown()
    second = start(model, config)
    assert second.generate(SECOND, FIRST) == (tokens[::-1], whole[::-1])
    groups = {
        path.name[-8:] for path in (tmp_path / "store").rglob("*") if path.name.endswith(("00000000", "00000001"))
    }
    assert len(groups) == 2, "values of both groups were stored"
    second.shutdown()


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
    assert engine.metrics()["kvtiers_failed_gpu_loads"] == sum(WHOLE) / BLOCK
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
    assert cached == whole, "as long as nobody says that the weights are others"
    assert stale != after
    assert engine.do("change_weights", version="2")["ok"]
    assert engine.generate(FIRST) == (after, [0])
    engine.forget()
    assert engine.generate(FIRST) == (after, whole)
    engine.shutdown()


def test_what_one_rank_stored_two_ranks_have_where_the_layout_certifies_it(start, model, tmp_path, right):
    config = whole_stack(fs(tmp_path / "store"), canonical_layout=True)
    alone = start(model, config)
    assert right(alone, *PROMPTS) == [0, 0]
    alone.shutdown()
    both = start(model, config, tensor_parallel_size=2, distributed_executor_backend="mp")
    assert right(both, *PROMPTS) == WHOLE
    both.generate(make_prompt(5, 333))
    stored, _ = both.generate(make_prompt(5, 333))
    both.shutdown()
    alone = start(model, config)
    assert alone.generate(make_prompt(5, 333)) == (stored, [WHOLE[1]])
    alone.shutdown()
