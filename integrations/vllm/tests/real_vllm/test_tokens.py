"""Tokens are those of an engine without kvtiers, wherever the KV came from, and the tier really brought it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import CHUNKS, PROMPTS, WHOLE
from .engines import BLOCK, PATIENCE
from .ways import tiers, whole_stack

FIRST, SECOND = PROMPTS
KVTIERS = Path(sys.executable).with_name("kvtiers")


@pytest.mark.parametrize(
    ("kind", "blocks_per_chunk"),
    [
        ("fs", 1),
        pytest.param("fs", 4, marks=pytest.mark.every_release),
        pytest.param("redis", 1, marks=pytest.mark.every_release),
        ("redis", 4),
        ("s3", 1),
    ],
)
def test_what_one_engine_stored_another_one_loads_and_its_tokens_are_the_same(
    model, start, right, way, shared_tier, kind, blocks_per_chunk
):
    chunk = BLOCK * blocks_per_chunk
    whole = [len(prompt) // chunk * chunk for prompt in PROMPTS]
    config = way(shared_tier(kind), blocks_per_chunk=blocks_per_chunk)
    loaded, stored = f"kvtiers_tier_loaded_chunks{{{kind}}}", f"kvtiers_tier_stored_chunks{{{kind}}}"
    first = start(model, config)
    assert right(first, *PROMPTS) == [0, 0]
    assert first.do("reset_prefix_cache")["ok"]
    assert right(first, SECOND, FIRST) == whole[::-1], "the primary has it"
    assert first.metrics().get(loaded, 0) == 0
    first.forget()
    assert right(first, *PROMPTS) == whole, "the tier has it"
    figures = first.metrics()
    assert figures[loaded] == figures[stored] == sum(whole) / chunk
    assert figures[f"kvtiers_tier_shared{{{kind}}}"] == 1
    first.shutdown()

    own_python = (kind, blocks_per_chunk) == ("fs", 1)
    second = start(model, config, own_python=own_python)
    assert right(second, SECOND, FIRST) == whole[::-1]
    figures = second.metrics()
    assert figures[loaded] == sum(whole) / chunk
    assert figures.get(stored, 0) == 0
    second.shutdown(finalize=own_python)


def test_what_is_loaded_behind_a_hit_of_vllms_own_prefix_cache_is_priced_by_its_position(start, model, right, way):
    engine = start(model, way({"type": "memory", "capacity": "64MiB", "required": True}))
    assert right(engine, FIRST) == [0]
    engine.forget()
    half = WHOLE[0] // 2 // BLOCK * BLOCK
    engine.do("note_prices")
    assert engine.generate(FIRST[: half + 1])[1] == [half], "from the tier"
    assert engine.do("note_prices")["priced"] == [(half, half / 2)]
    assert right(engine, FIRST) == [WHOLE[0]], "one half by vLLM's own prefix cache, the other one from the tier"
    assert engine.do("note_prices")["priced"] == [(WHOLE[0] - half, (half + WHOLE[0]) / 2)]
    engine.shutdown()


@pytest.mark.parametrize(
    ("way", "kind", "options"),
    [
        (tiers, "memory", {"capacity": "64MiB"}),
        (whole_stack, "memory", {"capacity": "64MiB"}),
        (whole_stack, "memory-async", {"max_blocks": 512}),
    ],
    ids=["tiers", "whole-stack", "whole-stack-async"],
)
def test_a_tier_in_memory_serves_what_the_primary_has_lost(start, model, right, way, kind, options):
    engine = start(model, way({"type": kind, "required": True, **options}))
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    assert right(engine, *reversed(PROMPTS)) == WHOLE[::-1]
    assert engine.metrics()[f"kvtiers_tier_loaded_chunks{{{kind}}}"] == CHUNKS
    assert right(engine, FIRST, salt="mine") == [0], "a salted request shares nothing with one that is not"
    engine.forget()
    assert right(engine, FIRST, salt="mine") == [WHOLE[0]]
    assert right(engine, FIRST, salt="another user's") == [0]
    engine.shutdown()


def test_a_namespace_that_was_bumped_has_nothing_of_before_and_takes_what_comes_after(
    start, model, right, way, shared_tier, tmp_path
):
    tier = shared_tier("fs")
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps({"version": 1, "primary": {"capacity": "64MiB"}, "secondary": [tier]}))
    config = way(tier, options={"namespace": "prod"})
    before = start(model, config)
    assert right(before, *PROMPTS) == [0, 0]
    before.shutdown()
    bump = [KVTIERS, "store", "bump", "--config", file, "--namespace", "prod"]
    done = subprocess.run(bump, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    after = start(model, config)
    assert right(after, *PROMPTS) == [0, 0]
    after.forget()
    assert right(after, *PROMPTS) == WHOLE
    after.shutdown()
