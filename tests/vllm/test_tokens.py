"""Tokens are those of an engine without kvtiers, wherever the KV came from, and the tier really brought it."""

from pathlib import Path

import pytest

from .conftest import PROMPTS
from .engines import BLOCK, tiers

FIRST, SECOND = PROMPTS


def fs(path: Path, **more):
    return {"type": "kvtiers-fs", "path": str(path), "capacity": "1GiB", "required": True} | more


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_what_one_engine_stored_another_one_loads_and_its_tokens_are_the_same(
    model, start, right, tmp_path, blocks_per_chunk
):
    chunk = BLOCK * blocks_per_chunk
    whole = [len(prompt) // chunk * chunk for prompt in PROMPTS]
    config = tiers(fs(tmp_path / "store"), blocks_per_chunk=blocks_per_chunk)
    first = start(model, config)
    assert right(first, *PROMPTS) == [0, 0]
    first.forget()
    assert right(first, SECOND, FIRST) == whole[::-1]
    figures = first.metrics()
    assert figures["kvtiers_tier_loaded_chunks{fs}"] == sum(whole) / chunk
    assert figures["kvtiers_tier_shared{fs}"] == 1
    assert first.do("reset_prefix_cache")["ok"]
    assert right(first, FIRST, SECOND) == whole
    assert first.metrics()["kvtiers_tier_loaded_chunks{fs}"] == sum(whole) / chunk, "vLLM's primary had it"
    first.shutdown()

    second = start(model, config)
    assert right(second, SECOND, FIRST) == whole[::-1]
    figures = second.metrics()
    assert figures["kvtiers_tier_loaded_chunks{fs}"] == sum(whole) / chunk
    assert figures.get("kvtiers_tier_stored_chunks{fs}", 0) == 0
    second.shutdown()
