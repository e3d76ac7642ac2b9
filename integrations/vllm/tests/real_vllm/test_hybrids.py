"""Models whose layers do not all keep KV for the whole prompt, and drafts: tokens are those without kvtiers.

In each the prompts are longer than the windows, are computed, had back from the tier, then by another engine, and once
from vLLM's own prefix cache with a tail from the tier.
"""

import pytest

from .conftest import LONG, PROMPTS, STATES, WHOLE
from .models import make_adapter, make_draft, make_prompt, make_state_model, make_window_model
from .ways import fs, whole_stack

STATE_BLOCK = 544
"""Tokens in a block of the model with states: vLLM makes a block as large as a state."""
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


def play(start, model, config, more=(), prompts=PROMPTS, **options):
    """Play the scenes; return how many tokens of each prompt an engine had from a tier. ``more``: of generate's."""
    ways = [{}, *more]
    plain = start(model, **options)
    right = [plain.generate(*prompts, **way)[0] for way in ways]
    plain.shutdown()
    assert len({str(tokens) for tokens in right}) == len(ways), "each way has tokens of its own"
    first = start(model, config, **options)
    for way, tokens in zip(ways, right, strict=True):
        assert first.generate(*prompts, **way) == (tokens, [0, 0])
    first.forget()
    found = []
    for way, tokens in zip(ways, right, strict=True):
        warm, cached = first.generate(*prompts, **way)
        assert warm == tokens
        found.append(cached)
    first.shutdown()
    second = start(model, config, **options)
    for way, tokens, cached in zip(ways[::-1], right[::-1], found[::-1], strict=True):
        assert second.generate(*prompts[::-1], **way) == (tokens[::-1], cached[::-1])
    second.forget()
    second.generate(prompts[0][: found[0][0] // 2 + 1], tokens=1)
    behind, cached = second.generate(prompts[0])
    assert behind == right[0][:1]
    assert cached[0] >= found[0][0]
    second.shutdown()
    return found


def test_five_layers_of_six_with_a_window_and_an_adapter_over_them(start, tmp_path):
    layers = ["sliding"] * 5 + ["full"]
    model = make_window_model(tmp_path / "tiny", seed=0, window=96, layers=layers)
    adapter = {"name": "mine", "number": 1, "path": str(make_adapter(tmp_path / "adapter", seed=1, layers=len(layers)))}
    found = play(start, model, whole_stack(fs(tmp_path / "store")), [{"adapter": adapter}], **LORA)
    assert found == [WHOLE, WHOLE]


def test_layers_that_keep_a_state_in_the_place_of_kv(start, tmp_path):
    model = make_state_model(tmp_path / "tiny", seed=0)
    (found,) = play(start, model, whole_stack(fs(tmp_path / "store")), prompts=LONG, **STATES)
    assert found == [len(prompt) // STATE_BLOCK * STATE_BLOCK for prompt in LONG]


@pytest.mark.parametrize(("interval", "found"), [(0, 0), (2 * STATE_BLOCK, 2 * STATE_BLOCK)])
def test_a_state_within_a_prompt_is_stored_where_vllm_keeps_it(start, tmp_path, interval, found):
    """By default vLLM keeps that of a prompt's end, which no other prompt shares, and shows a connector no other."""
    model = make_state_model(tmp_path / "tiny", seed=0)
    share = {"max_num_batched_tokens": 2 * STATE_BLOCK + 100, "prefix_cache_retention_interval": interval}
    config, prompt = whole_stack(fs(tmp_path / "store")), make_prompt(5, 5 * STATE_BLOCK + 9)
    other = prompt[: 3 * STATE_BLOCK + 9] + make_prompt(6, STATE_BLOCK)
    first = start(model, config, **STATES, **share)
    first.generate(prompt)
    first.settle()
    first.shutdown()
    second = start(model, config, **STATES, **share)
    tokens, cached = second.generate(other)
    second.shutdown()
    plain = start(model, **STATES, **share)
    assert (tokens, cached) == (plain.generate(other)[0], [found])
    plain.shutdown()


def test_tokens_beside_a_draft_model_are_those_without_kvtiers(start, model, tmp_path):
    eagle = {"method": "eagle", "model": str(make_draft(tmp_path / "draft", seed=3)), "num_speculative_tokens": 2}
    assert play(start, model, whole_stack(fs(tmp_path / "store")), speculative_config=eagle) == [WHOLE]
