"""kvtiers' own manager, primary and workers under vLLM's connector: tokens are right, wherever the KV came from."""

import pytest

from .conftest import PROMPTS
from .engines import BLOCK, whole_stack

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
