"""``kvtiers size`` on published configs against vLLM's own KV cache specs.

``published_models.json`` has, for each model, the fields of its ``config.json`` that have a part in the KV cache, as
they were known when it was written, and what vLLM 0.32 computed from them: ``tools/vllm_kv_sizes.py`` built vLLM's
engine config and its model class on the ``meta`` device and asked each attention layer for ``get_kv_cache_spec``.
``layers``: ``[count, bytes a token, window]``, of ``page_size_bytes / block_size``; ``state``: ``page_size_bytes`` of
all layers that keep a state. Where vLLM did not build the model (``error``: an architecture that it lacks, an operator
that needs a GPU, or it was not asked), the number is not vLLM's: ``worked_out`` is the bytes a token that heads and
layers give by hand, in bfloat16.
"""

import json
import re
from pathlib import Path

import pytest

from kvtiers.api import ConfigError
from kvtiers_replay.sizing import read_model

MODELS = json.loads(Path(__file__).with_name("published_models.json").read_text())
BY_VLLM = {name: model for name, model in MODELS.items() if "layers" in model["vllm"]}

_STATES = "keep one state instead of KV"
_HEADS = "different numbers or sizes of heads"
# What is refused, by a word of the reason.
REFUSED = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _STATES,
    "Qwen/Qwen3.5-35B-A3B": _STATES,
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": _STATES,
    "MiniMaxAI/MiniMax-Text-01-hf": _STATES,
    "nvidia/Nemotron-H-8B-Base-8K": _STATES,
    "ai21labs/AI21-Jamba-Mini-1.5": _STATES,
    "ibm-ai-platform/Bamba-9B-v2": _STATES,
    "tiiuae/Falcon-H1-7B-Instruct": _STATES,
    "state-spaces/mamba-2.8b-hf": _STATES,
    "LiquidAI/LFM2-1.2B": _STATES,
    "LiquidAI/LFM2-8B-A1B": _STATES,
    "google/recurrentgemma-2b": _STATES,
    "pfnet/plamo-2-8b": _STATES,
    "google/gemma-4-E4B-it": _HEADS,
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": _HEADS,
    "stepfun-ai/Step-3.5-Flash": _HEADS,
    "pfnet/plamo-3-nict-8b-base": _HEADS,
    "XiaomiMiMo/MiMo-V2-Flash": _HEADS,
    "ibm-granite/granite-4.0-h-small": "'layer_types' has 'mamba'",
    "deepseek-ai/DeepSeek-V3.2": "a sparse-attention indexer",
    "tencent/Tencent-Hunyuan-Large": "layers that share their caches",
    "openbmb/MiniCPM3-4B": "engines keep whole heads",
}  # fmt: skip


def read(tmp_path, name: str, **options):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[name]["config"]))
    return read_model(path, **options)


@pytest.mark.parametrize("name", [name for name in BY_VLLM if name not in REFUSED])
def test_a_published_model_takes_the_bytes_that_vllm_gives_it(tmp_path, name):
    vllm, config = MODELS[name]["vllm"], MODELS[name]["config"]
    assert "state" not in vllm
    # A type that the config leaves out is said by the weights, which are not here.
    said = any(part.get("torch_dtype") or part.get("dtype") for part in (config, config.get("text_config", {})))
    if not said:
        with pytest.raises(ConfigError, match="missing: dtype"):
            read(tmp_path, name)
    shape = read(tmp_path, name, **({} if said else {"kv_dtype": vllm["dtype"]}))
    assert [[group.layers, group.layer_bytes, group.window] for group in shape.groups] == vllm["layers"]
    assert not any("not known here" in note for note in shape.notes)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if "worked_out" in model])
def test_a_published_model_that_vllm_did_not_build_takes_what_its_heads_and_layers_say(tmp_path, name):
    assert read(tmp_path, name, kv_dtype="bfloat16").bytes_per_token == MODELS[name]["worked_out"]


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_published_model_of_another_shape_is_refused_by_name(tmp_path, name, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        read(tmp_path, name)
    assert len(refused.value.problems) == 1


def test_every_model_is_compared_or_refused():
    assert [
        name
        for name, model in MODELS.items()
        if not ({"worked_out"} & model.keys() or name in BY_VLLM or name in REFUSED)
    ] == []


UNKNOWN = {"model_type": "new", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
           "hidden_size": 512, "dtype": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize("model_type", ["new", None])
def test_a_type_that_is_not_known_is_taken_as_plain_attention_with_a_note(tmp_path, model_type):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNKNOWN | {"model_type": model_type, "num_experts": 8, "decoder_sparse_step": 1}))
    shape = read_model(path)
    assert shape.bytes_per_token == 4 * 2 * 2 * 64 * 2
    (note,) = shape.notes
    assert "taken as plain attention" in note


@pytest.mark.parametrize(
    "field",
    [
        {"block_types": ["recurrent", "attention"]}, {"full_attn_idxs": [1, 2]}, {"full_attention_idx": [1]},
        {"hybrid_layer_pattern": [0, 1, 0, 1]}, {"mamba_step": 2}, {"lru_width": 512}, {"num_lookahead_groups": 2},
        {"attn_layer_indices": [1]}, {"cla_share_factor": 2}, {"swa_num_key_value_heads": 4},
        {"anything": [1, 2, 3, 4]},
        {"full_attention_every_period": 4},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_a_field_of_layers_that_nothing_read_refuses_a_type_that_is_not_known(tmp_path, field):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNKNOWN | field))
    with pytest.raises(ConfigError, match=f"'new' is not known here, and these may say .*: {next(iter(field))}; "):
        read_model(path)


def test_a_latent_of_a_type_that_is_not_known_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNKNOWN | {"kv_lora_rank": 256, "qk_rope_head_dim": 32}))
    with pytest.raises(ConfigError, match="keeps the latent or whole heads; model_type 'new' is not known here"):
        read_model(path)


@pytest.mark.parametrize(
    ("quantization", "kv_dtype"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": None}}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bfloat16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "bfloat16"),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_auto_takes_the_type_that_the_quantization_gives_the_cache(tmp_path, quantization, kv_dtype, beside):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNKNOWN | ({} if beside else {"quantization_config": quantization})))
    if beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert read_model(path).kv_dtype == kv_dtype
    assert read_model(path, kv_dtype="float16").kv_dtype == "float16"


def test_a_cache_of_four_bits_is_refused_unless_a_type_is_given(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNKNOWN | {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}))
    with pytest.raises(ConfigError, match="has the KV cache in 'NVFP4', not known here; give --kv-dtype"):
        read_model(path)
    assert read_model(path, kv_dtype="fp8").kv_dtype == "fp8"


def test_weights_in_float32_are_served_as_bfloat16_and_a_note_says_so(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNKNOWN | {"model_type": "llama", "dtype": "float32"}))
    shape = read_model(path)
    assert shape.kv_dtype == "bfloat16"
    assert shape.notes == ("weights in float32 are served as bfloat16; else give --kv-dtype float32",)
