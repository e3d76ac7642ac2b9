"""kvtiers' eviction policies in vLLM's own primary: right tokens while chunks leave it, and what leaves."""

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import EngineError
from .models import make_prompt
from .test_releases import in_every_release, run
from .ways import fs, tiers

SMALL = 8 << 20
"""Bytes of a primary that the prompts of a test fill several times."""


@pytest.mark.parametrize("version", ["", *in_every_release("0.31.0"), "0.33.0"])
def test_vllms_own_manager_evicts_by_our_policies_and_an_lru_of_ours_as_its_own_does(version):
    found, *figures = run("evictions.py", version).split()
    assert found.startswith(version or "0.32.0")
    lru, ours, learning, errors = map(int, figures)
    assert errors == 0
    assert ours == lru > 0
    assert learning > 1.5 * lru


def test_a_request_gets_right_tokens_whatever_has_left_vllms_primary(start, model, right, tmp_path):
    policy = {"eviction_policy": "kvtiers-turn-hazard", "cpu_bytes_to_use": SMALL}
    engine = start(model, tiers(fs(tmp_path / "store"), **policy))
    assert right(engine, *PROMPTS) == [0, 0]
    engine.generate(*[make_prompt(seed, 700) for seed in range(10, 18)])
    engine.settle()  # a row that is still being written to the tier can take nothing from it
    assert engine.do("reset_prefix_cache")["ok"]
    assert right(engine, *PROMPTS) == WHOLE
    assert engine.metrics()["kvtiers_tier_loaded_chunks{fs}"] > 0, "some had left"
    assert not engine.lines("a bug of kvtiers")
    engine.shutdown()


def test_a_policy_that_is_not_installed_is_refused_by_name(start, model, tmp_path):
    with pytest.raises(EngineError) as refused:
        start(model, tiers(fs(tmp_path / "store"), eviction_policy="kvtiers-no-such"))
    assert "Unknown cache policy: 'kvtiers-no-such'" in str(refused.value)
