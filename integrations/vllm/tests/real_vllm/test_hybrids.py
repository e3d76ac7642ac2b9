"""Models whose layers do not all keep KV for the whole prompt, and drafts: tokens are those without kvtiers.

In each the prompts are longer than the windows, are computed, had back from the tier, then by another engine, and once
from vLLM's own prefix cache with a tail from the tier.
"""

import pytest

from .conftest import LONG, PROMPTS, STATES, WHOLE
from .engines import wait_until
from .models import STATE_MODULES, add_draft, make_adapter, make_draft, make_prompt, make_state_model, make_window_model
from .ways import fs, whole_stack

STATE_BLOCK = 544
"""Tokens in a block of the model with states: vLLM makes a block as large as a state."""
OF_STATES = (
    f"of {STATE_BLOCK} tokens (KV groups: {{}} with states, 1 with full attention; "
    "checkpoints: at a prompt's end, and where vLLM has seen prompts part)"
)
OF_WINDOWS = (
    "of 32 tokens (KV groups: {} with windows of 96 tokens, {} with full attention; "
    "checkpoints: every 8192 tokens, and before a prompt's end)"
)
CHECKPOINT = 8192
"""Tokens of a prompt to its first checkpoint."""
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


def play(start, model, config, more=(), prompts=PROMPTS, *, rows, **options):
    """Play the scenes; return how many tokens of each prompt an engine had from a tier. ``more``: of generate's.

    ``rows``: what the start line says of them.
    """
    ways = [{}, *more]
    plain = start(model, **options)
    right = [plain.generate(*prompts, **way)[0] for way in ways]
    plain.shutdown()
    assert len({str(tokens) for tokens in right}) == len(ways), "each way has tokens of its own"
    first = start(model, config, **options)
    for way, tokens in zip(ways, right, strict=True):
        assert first.generate(*prompts, **way) == (tokens, [0, 0])
    wait_until(lambda: first.lines(" is on, "), "there is no start line")
    assert first.lines(f" rows {rows}; tiers: ") == first.lines(" is on, ")
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
    config, rows = whole_stack(fs(tmp_path / "store")), OF_WINDOWS.format(5, 1)
    assert play(start, model, config, [{"adapter": adapter}], rows=rows, **LORA) == [WHOLE, WHOLE]


def test_layers_that_keep_a_state_in_the_place_of_kv_and_an_adapter_over_them(start, tmp_path):
    model = make_state_model(tmp_path / "tiny", seed=0, experts=False)
    path = make_adapter(tmp_path / "adapter", seed=1, layers=3, modules=STATE_MODULES)
    adapter = {"name": "mine", "number": 1, "path": str(path)}
    config = whole_stack(fs(tmp_path / "store"))
    found = play(start, model, config, [{"adapter": adapter}], prompts=LONG, rows=OF_STATES.format(3), **STATES, **LORA)
    assert found == [[len(prompt) // STATE_BLOCK * STATE_BLOCK for prompt in LONG]] * 2


def test_a_shared_prefix_is_found_at_the_checkpoint_where_another_prompt_left_it(start, tmp_path):
    """Of the windows a tier has those before a checkpoint and before a prompt's end alone."""
    model = make_window_model(tmp_path / "tiny", seed=0, window=96, layers=["sliding", "full"], positions=16_384)
    config, long = whole_stack(fs(tmp_path / "store")), {"max_model_len": 16_384, "num_gpu_blocks_override": 2048}
    prompt = make_prompt(7, 9000)
    others = [prompt[:8300] + make_prompt(seed, 100) for seed in (8, 9)]
    plain = start(model, **long)
    right = [plain.generate(other)[0] for other in others]
    plain.shutdown()
    assert right[0] != right[1]
    first = start(model, config, **long)
    first.generate(prompt)
    first.forget()
    assert first.generate(others[0]) == (right[0], [CHECKPOINT])
    first.settle()
    first.shutdown()
    second = start(model, config, **long)
    assert second.generate(others[1]) == (right[1], [CHECKPOINT])
    second.shutdown()


def test_no_window_is_stored_once_its_blocks_are_those_of_another_request(start, tmp_path, way):
    """After a reset vLLM has requests that run offer their whole prompt again, with blocks that they had before."""
    model = make_window_model(tmp_path / "tiny", seed=0, window=96, layers=["sliding"] * 3 + ["full"])
    few = {"num_gpu_blocks_override": 118, "max_model_len": 832}
    prompt, other = make_prompt(1, 340), make_prompt(2, 700)
    plain = start(model, **few)
    ((right,), _) = plain.generate(prompt, tokens=100)
    plain.shutdown()
    engine = start(model, way(fs(tmp_path / "store")), **few)
    answer = engine.do("generate_with_reset", prompt=prompt, other=other, max_tokens=100, after=60)
    assert answer == {"tokens": right}
    engine.settle()
    assert engine.do("reset_prefix_cache")["ok"]
    assert engine.generate(prompt)[0] == [right[:8]]
    engine.shutdown()


@pytest.mark.parametrize(("interval", "part", "found"), [(0, 2, 0), (1, 2, 2), (2, 2, 2), (8, 8, 8)])
def test_a_state_within_a_prompt_is_stored_where_vllm_keeps_it(start, tmp_path, interval, part, found):
    """By default vLLM keeps that of a prompt's end, which no other prompt shares, and shows a connector no other.

    With one block as its interval it keeps those of the ends of all parts in which it computes a prompt. In blocks; in
    the last case there is one every 4,352 tokens.
    """
    model = make_state_model(tmp_path / "tiny", seed=0)
    share = {
        "max_num_batched_tokens": part * STATE_BLOCK + 100, "max_model_len": 16_384,
        "prefix_cache_retention_interval": interval * STATE_BLOCK,
    }  # fmt: skip
    config, prompt = whole_stack(fs(tmp_path / "store")), make_prompt(5, (2 * part + 1) * STATE_BLOCK + 9)
    other = prompt[: (part + 1) * STATE_BLOCK + 9] + make_prompt(6, STATE_BLOCK)
    first = start(model, config, **(STATES | share))
    first.generate(prompt)
    first.settle()
    first.shutdown()
    second = start(model, config, **(STATES | share))
    tokens, cached = second.generate(other)
    second.shutdown()
    plain = start(model, **(STATES | share))
    assert (tokens, cached) == (plain.generate(other)[0], [found * STATE_BLOCK])
    plain.shutdown()


@pytest.mark.parametrize("windows", [False, True])
def test_tokens_beside_a_draft_model_are_those_without_kvtiers(start, model, tmp_path, windows):
    rows = "of 32 tokens"
    if windows:
        model, rows = make_window_model(tmp_path / "tiny", seed=0, window=96), OF_WINDOWS.format(1, 2)
    eagle = {"method": "eagle", "model": str(make_draft(tmp_path / "draft", seed=3)), "num_speculative_tokens": 2}
    assert play(start, model, whole_stack(fs(tmp_path / "store")), rows=rows, speculative_config=eagle) == [WHOLE]


def test_tokens_of_a_model_with_states_beside_its_own_draft_are_those_without_kvtiers(start, tmp_path):
    """With a draft vLLM drops the last block of a hit, and keeps the state of a prompt's end a block before that."""
    model = add_draft(make_state_model(tmp_path / "tiny", seed=0), seed=3)
    own = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    config, prompts = whole_stack(fs(tmp_path / "store")), [make_prompt(3, 1300), make_prompt(4, 1900)]
    found = play(start, model, config, prompts=prompts, rows=OF_STATES.format(2), **own, **STATES)
    assert found == [[(len(prompt) // STATE_BLOCK - 1) * STATE_BLOCK for prompt in prompts]]
