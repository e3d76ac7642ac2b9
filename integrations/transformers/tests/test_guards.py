"""Calls and models that the cache does not cover: the model alone answers, one line says why, and nothing is stored."""

import pytest
import torch
from transformers import GenerationConfig

from kvtiers_transformers.arguments import left_padding, problem_of

from .conftest import greedy, loaded, values_in
from .models import make, prompt

IDS = prompt(60)
PLAIN = GenerationConfig(max_new_tokens=8)
HARMLESS = {
    "attention_mask": torch.ones_like(IDS),
    "do_sample": True,
    "eos_token_id": [2, 7],
    "logits_processor": [],
    "max_new_tokens": 5,
    "num_beams": 1,
    "output_attentions": False,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "use_cache": True,
}
HARMFUL = {
    "adapter_names": ["a"],
    "an_option_of_a_later_release": 1,
    "assistant_model": object(),
    "cache": object(),
    "cache_implementation": "static",
    "guidance_scale": 2.0,
    "inputs_embeds": torch.zeros(1, 60, 32),
    "num_beams": 2,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "past_key_values": object(),
    "pixel_values": torch.zeros(1, 3, 8, 8),
    "position_ids": torch.arange(60)[None] + 5,
    "prefill_chunk_size": 16,
    "prompt_lookup_num_tokens": 3,
    "token_healing": True,
    "token_type_ids": torch.zeros_like(IDS),
    "use_cache": False,
}


def test_what_cannot_change_a_prompts_kv_is_served():
    assert problem_of(PLAIN, IDS, HARMLESS) == ""
    assert problem_of(GenerationConfig(), IDS, {"generation_config": GenerationConfig(temperature=0.5)}) == ""


@pytest.mark.parametrize("name", HARMFUL)
def test_any_other_argument_is_refused_by_its_name(name):
    assert problem_of(PLAIN, IDS, {name: HARMFUL[name]}).startswith(f"{name} is given")


@pytest.mark.parametrize("own", [True, False])
def test_so_is_what_a_generation_config_asks_for(own):
    config = GenerationConfig(num_beams=4, max_new_tokens=8)
    problem = problem_of(config, IDS, {}) if own else problem_of(PLAIN, IDS, {"generation_config": config})
    assert problem.startswith("num_beams is given")


def test_masks_are_served_only_if_they_mask_padding_on_the_left():
    ones = torch.ones(2, 6, dtype=torch.long)
    left, right, hole, full = ones.clone(), ones.clone(), ones.clone(), ones.clone()
    left[0, :2], right[0, 4:], hole[0, 3], full[1] = 0, 0, 0, 0
    assert left_padding(ones, None) == [0, 0]
    assert left_padding(ones, left) == [2, 0]
    assert left_padding(ones, left.bool()) == [2, 0]
    for mask in (right, hole, full, ones[:, :5], ones[:, None, None], ones.float() * 0.5):
        assert left_padding(ones, mask) is None


def test_padding_tokens_without_a_mask_are_left_to_generate_which_makes_one():
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), IDS], 1)
    assert "padding token" in problem_of(PLAIN, ids, {"pad_token_id": 0})
    assert problem_of(PLAIN, ids, {"pad_token_id": 0, "eos_token_id": [0]}) == "", "as an end it is no padding"
    assert problem_of(PLAIN, ids, {"pad_token_id": 0, "attention_mask": torch.ones_like(ids)}) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("position_ids", torch.arange(60)[None] + 5),
        ("output_attentions", True),
        ("use_cache", False),
        ("attention_mask", torch.tensor([[1] * 20 + [0] * 3 + [1] * 37])),
    ],
)
def test_such_a_call_has_the_models_own_answer_and_stores_nothing(name, value, tmp_path, open_cache, warnings_of_cache):
    model = make("llama", attn_implementation="eager")
    cache = open_cache(model)
    arguments = {name: value, "return_dict_in_generate": True}
    truth = model.generate(IDS, max_new_tokens=8, do_sample=False, **arguments).sequences
    found = [cache.generate(IDS, max_new_tokens=8, do_sample=False, **arguments).sequences for _ in range(2)]
    assert torch.equal(found[0], truth)
    assert torch.equal(found[1], truth)
    assert cache.flush()
    assert values_in(tmp_path / "kv") == []
    assert cache.stats()["bypassed_calls"] == 2
    assert len(warnings_of_cache()) == 1, "once for each reason"


def change_weights(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def replace_weights(model):
    model.model.layers[0].self_attn.k_proj.weight.data = torch.ones(16, 32)


def write_through_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)


def hook(model):
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1.1)


def replace_forward(model):
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: forward(x) * 2


def change_config(model):
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}


CHANGES = {
    "training": lambda model: model.train(),
    "a part in training": lambda model: model.model.layers[0].train(),
    "weights": change_weights,
    "other weights": replace_weights,
    "weights, uncounted": write_through_data,
    "hook": hook,
    "forward": replace_forward,
    "config": change_config,
    "attention": lambda model: model.set_attn_implementation("eager"),
    "dtype": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_has_changed_is_used_without_the_cache(change, tmp_path, open_cache, warnings_of_cache):
    model = make("llama")
    cache = open_cache(model)
    greedy(cache, IDS)
    assert loaded(cache) == 0
    stored = len(values_in(tmp_path / "kv"))
    change(model)
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert loaded(cache) == 0
    past = cache.load(IDS)
    assert past.get_seq_length() == 0
    cache.store(past, IDS)
    assert cache.flush()
    assert len(values_in(tmp_path / "kv")) == stored
    assert len(warnings_of_cache()) <= 2


def test_autocast_computes_without_the_cache(open_cache):
    model = make("llama")
    cache = open_cache(model)
    greedy(cache, IDS)
    with torch.autocast("cpu", torch.bfloat16):
        greedy(cache, IDS)
    assert loaded(cache) == 0
    assert cache.stats()["bypassed_calls"] == 1
