"""What a model's KV cache takes: real configs against numbers worked out by hand; and what is refused."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers_replay.sizing import LINKS, LayerGroup, Link, ModelShape, break_even_tokens, read_model, suggest

# As published beside the weights; what has no part in the KV cache is left out.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_1_7B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "torch_dtype": "float16",
}  # fmt: skip
QWEN_25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "max_window_layers": 28, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072,
    "torch_dtype": "bfloat16", "use_sliding_window": False,
}  # fmt: skip
QWEN_3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 4096, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "sliding_window": None,
    "dtype": "bfloat16", "use_sliding_window": False,
}  # fmt: skip
MISTRAL_7B_01 = {
    "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "kv_lora_rank": 512, "model_type": "deepseek_v3",
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16", "v_head_dim": 128,
}  # fmt: skip
GEMMA_2_9B = {
    "architectures": ["Gemma2ForCausalLM"], "head_dim": 256, "hidden_size": 3584, "model_type": "gemma2",
    "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window": 4096,
    "torch_dtype": "float32",
}  # fmt: skip
GEMMA_3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 3840, "model_type": "gemma3_text", "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "head_dim": 64, "hidden_size": 2880, "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "sliding_window": 128, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    def read(config, **options) -> ModelShape:
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return read_model(path, **options)

    return read


@pytest.mark.parametrize(
    ("config", "nbytes", "groups"),
    [
        # 2 (key, value) * 8 heads * 128 * 2 bytes = 4 KiB a layer
        (LLAMA_31_8B, 128 * 1024, [(32, 4096, None)]),
        # no KV heads given: as many as attention heads; 2 * 32 * 128 * 2
        (LLAMA_1_7B, 512 * 1024, [(32, 16384, None)]),
        # 2 * 4 * 128 * 2 = 2 KiB; the window is named but not used
        (QWEN_25_7B, 56 * 1024, [(28, 2048, None)]),
        (QWEN_3_8B, 144 * 1024, [(36, 4096, None)]),
        (MISTRAL_7B_01, 128 * 1024, [(32, 4096, 4096)]),
        # (512 + 64) * 2 = 1152 bytes a layer; heads have no part in it
        (DEEPSEEK_V3, 1152 * 61, [(61, 1152, None)]),
        # every second layer is full; 2 * 8 * 256 * 2: float32 weights are served as bfloat16
        (GEMMA_2_9B, 42 * 8192, [(21, 8192, None), (21, 8192, 4096)]),
        # every sixth; head_dim 256 is the class's default, not 3840 / 16
        (GEMMA_3_12B, 48 * 8192, [(8, 8192, None), (40, 8192, 1024)]),
        # 2 * 8 * 64 * 2
        (GPT_OSS_20B, 24 * 2048, [(12, 2048, None), (12, 2048, 128)]),
    ],
)
def test_a_known_model_takes_what_its_shape_says(model, config, nbytes, groups):
    shape = model(config)
    assert shape.bytes_per_token == shape.rank_bytes_per_token == nbytes
    assert [(group.layers, group.layer_bytes, group.window) for group in shape.groups] == groups


@pytest.mark.parametrize(
    ("more", "full", "windowed"),
    [
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20, "sliding_window": 99}, 20, 12),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 99}, 0, 32),
        ({"sliding_window_pattern": 4, "sliding_window": 99}, 8, 24),
        ({"model_type": "cohere2", "sliding_window": 98}, 8, 24),  # and the token itself
        ({"model_type": "mistral", "sliding_window": None}, 32, 0),
        ({"layer_types": ["chunked_attention"] * 24 + ["full_attention"] * 8, "attention_chunk_size": 99}, 8, 24),
        ({"layer_types": ["full_attention"] * 32, "sliding_window": 99}, 32, 0),
    ],
)
def test_windows_are_where_the_config_puts_them(model, more, full, windowed):
    groups = {group.window: group.layers for group in model(LLAMA_31_8B | more).groups}
    assert groups == {window: layers for window, layers in ((None, full), (99, windowed)) if layers}


def test_layers_that_reuse_the_cache_of_others_are_not_counted_and_they_are_the_last(model):
    types = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 28
    shape = model(LLAMA_31_8B | {"num_kv_shared_layers": 28, "layer_types": types, "sliding_window": 512})
    assert [(group.layers, group.window) for group in shape.groups] == [(1, None), (3, 512)]


@pytest.mark.parametrize(
    ("config", "ranks", "rank_bytes", "stored"),
    [
        (LLAMA_31_8B, 4, 32 * 1024, 128 * 1024),
        (LLAMA_31_8B, 16, 16 * 1024, 256 * 1024),  # each rank has at least one head, so that each is there twice
        (DEEPSEEK_V3, 8, 1152 * 61, 1152 * 61),  # the same bytes on every rank, stored once
    ],
)
def test_tensor_parallelism_divides_heads_but_not_a_latent_cache(model, config, ranks, rank_bytes, stored):
    shape = model(config, ranks=ranks)
    assert (shape.rank_bytes_per_token, shape.bytes_per_token) == (rank_bytes, stored)
    layout = shape.layout(16, 2)
    assert layout.payload_bytes(0) == stored * 32
    assert layout.cell_bytes(0, ranks - 1) == rank_bytes * 32


@pytest.mark.parametrize(("dtype", "nbytes"), [("fp8", 64), ("float32", 256), ("auto", 128)])
def test_the_type_of_a_number_can_be_another_than_the_models(model, dtype, nbytes):
    assert model(LLAMA_31_8B, kv_dtype=dtype).bytes_per_token == nbytes * 1024


def test_names_that_older_models_use_are_understood(model):
    gpt2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "torch_dtype": "torch.float32", "model_type": "gpt2"}
    falcon = {"hidden_size": 4544, "multi_query": True, "num_attention_heads": 71, "num_hidden_layers": 32}
    assert model(gpt2, kv_dtype="float32").bytes_per_token == 2 * 12 * 12 * 64 * 4
    assert model(falcon | {"torch_dtype": "bfloat16"}).bytes_per_token == 32 * 2 * 64 * 2


def test_a_folder_stands_for_the_config_in_it(model, tmp_path):
    model(LLAMA_31_8B)
    assert read_model(tmp_path).bytes_per_token == 128 * 1024


def test_what_a_nested_config_leaves_out_is_its_classs_default_and_is_reported(model):
    pixtral = {"text_config": {"hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40, "model_type": "mistral",
                               "sliding_window": None}, "torch_dtype": "bfloat16"}  # fmt: skip
    shape = model(pixtral)
    assert shape.bytes_per_token == 40 * 2 * 8 * 128 * 2
    assert any("'num_key_value_heads' is left out: taken as 8" in note for note in shape.notes)
    assert model(QWEN_3_8B).notes == ()


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (without(LLAMA_31_8B, "num_hidden_layers", "hidden_size"), "missing: num_hidden_layers, hidden_size; "),
        (without(DEEPSEEK_V3, "qk_rope_head_dim"), "missing: qk_rope_head_dim; "),
        (without(GEMMA_2_9B, "head_dim"), "missing: head_dim; "),
        (without(LLAMA_31_8B, "torch_dtype"), "missing: dtype (or torch_dtype); give --kv-dtype"),
        ({"text_config": {"model_type": "new", "hidden_size": 5}}, "missing in 'text_config': num_hidden_layers, num_"),
        (
            {"text_config": without(LLAMA_31_8B, "num_key_value_heads", "model_type")},
            "missing in 'text_config': num_key",
        ),
        (without(GPT_OSS_20B, "layer_types"), "missing: layer_types, which say which layers have the 'sliding_window'"),
        (LLAMA_31_8B | {"attention_chunk_size": 8192}, "missing: layer_types, which say where 'attention_chunk_size'"),
        (without(GPT_OSS_20B, "sliding_window"), "missing: sliding_window; "),
        (LLAMA_31_8B | {"layer_types": ["full_attention"]}, "'layer_types' is 1 entries, expected a list of 32"),
        (LLAMA_31_8B | {"layer_types": "full"}, "'layer_types' is 'full', expected a list of 32"),
        (
            LLAMA_31_8B | {"layer_types": ["linear_attention"] * 32},
            "'layer_types' has 'linear_attention', which is not",
        ),
        (LLAMA_31_8B | {"mamba_d_state": 16}, "'mamba_d_state' says that the model has layers that keep one state"),
        (LLAMA_31_8B | {"is_encoder_decoder": True}, "'is_encoder_decoder' says that the model has an encoder"),
        (DEEPSEEK_V3 | {"index_head_dim": 128}, "'index_head_dim' says that the model has a sparse-attention indexer"),
        (LLAMA_31_8B | {"num_hidden_layers": "32"}, "'num_hidden_layers' is '32', expected a whole number"),
        (LLAMA_31_8B | {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000, expected a whole number"),
        (LLAMA_31_8B | {"num_key_value_heads": [8, 4]}, "'num_key_value_heads' is [8, 4], expected a whole number"),
        (LLAMA_31_8B | {"num_key_value_heads": 0}, "'num_key_value_heads' is 0, expected a whole number"),
        (LLAMA_31_8B | {"num_key_value_heads": 5}, "32 attention heads cannot share 5 KV heads evenly"),
        (LLAMA_31_8B | {"hidden_size": 4097}, "'hidden_size' 4097 is no multiple of 'num_attention_heads' 32"),
        (LLAMA_31_8B | {"num_kv_shared_layers": 32}, "'num_kv_shared_layers' leaves 0 of 32 layers"),
        (LLAMA_31_8B | {"torch_dtype": "int3"}, "type 'int3' is not known; give --kv-dtype: bfloat16, "),
        ("[]", "expected a JSON object, got list"),
        ("{", "this is no JSON: "),
        ("[" * 100_000, "this is no JSON: "),
    ],
)
def test_a_config_of_another_shape_is_one_line_that_says_what_is_missing(model, tmp_path, config, text):
    with pytest.raises(ConfigError) as refused:
        model(config)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{tmp_path / 'config.json'}: {text}")
    assert "\n" not in problem


def test_ranks_that_cannot_divide_the_heads_are_refused(model):
    with pytest.raises(ConfigError, match="8 KV heads cannot be divided among 3 ranks; give a --tp that divides them"):
        model(LLAMA_31_8B, ranks=3)


@pytest.mark.parametrize("name", ["absent.json", "nul\0.json"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name):
    with pytest.raises(ConfigError, match=r"cannot read: .*; expected a model's config\.json") as refused:
        read_model(tmp_path / name)
    assert len(refused.value.problems) == 1


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.text(max_size=3), st.just([]), st.just({}), st.just(10**30),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", 7]), min_size=32, max_size=32),
)  # fmt: skip
NAMES = [*LLAMA_31_8B, "layer_types", "sliding_window", "text_config", "kv_lora_rank", "head_dim", "v_head_dim",
         "use_sliding_window", "max_window_layers", "sliding_window_pattern", "num_kv_shared_layers"]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_no_config_whatever_it_says_is_more_than_one_line(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("fuzz") / "config.json"
    path.write_text(json.dumps(LLAMA_31_8B | changes))
    try:
        shape = read_model(path)
    except ConfigError as error:
        assert [str(error)] == str(error).splitlines()  # noqa: PT017 -- either outcome is right, a third is not
    else:
        assert shape.bytes_per_token > 0


# -- chunks and break-even


def test_a_chunk_is_the_smallest_whose_value_is_good_for_the_tier(model):
    by_name = {each.link.name: each for each in suggest(model(LLAMA_31_8B, kv_dtype="fp8"), 16, LINKS, 10_000)}
    blocks = {name: each.layout.blocks_per_chunk for name, each in by_name.items()}
    # A block has 1 MiB. 3 GB/s * 500 us = 1.5 MB, below the 2 MiB of a network; 1 GB/s * 30 ms, above the 8 MiB.
    assert blocks == {"primary": 1, "memory": 1, "disk": 1, "network": 2, "object": 8}
    network = by_name["network"]
    assert (network.tokens, network.rank_bytes, network.value_bytes) == (32, (2 << 20,), ((2 << 20) + 4096,))
    assert network.tokens_per_gib == pytest.approx(32 * 2**30 / (2**21 + 4096))


def test_a_faster_or_farther_tier_wants_larger_values(model):
    far = [replace(link, round_trip=1e-3) if link.name == "network" else link for link in LINKS]  # 3 MB
    network = suggest(model(DEEPSEEK_V3), 16, far, 10_000)[3]
    assert network.layout.blocks_per_chunk == 4  # 1.07 MiB a block


def test_a_chunk_never_has_more_blocks_than_a_layout_may(model):
    tiny = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1, "torch_dtype": "float16"}
    assert {each.layout.blocks_per_chunk for each in suggest(model(tiny), 16, LINKS, 10_000)} == {64}


def test_a_row_of_the_primary_is_as_long_as_its_largest_value(model):
    primary, memory, *_ = suggest(model(GEMMA_3_12B), 16, LINKS, 10_000)
    assert memory.value_bytes == ((1 << 20) + 4096, (5 << 20) + 4096)
    assert primary.tokens_per_gib == pytest.approx(16 * 2**30 / (2 * ((5 << 20) + 4096)))


def test_break_even_is_where_the_formula_says():
    shape = ModelShape("m", "", "", 2, (LayerGroup(10, 5000),))  # 50 kB a token and rank, 100 kB stored
    primary, tier = Link("primary", 10e9, 0.001, 0, 0), Link("tier", 1e9, 0.009, 0, 0)
    # 1 / 5000 - (100 us + 5 us) = 95 us gained a token, for 10 ms: 105.3 tokens
    assert break_even_tokens(shape, [tier, primary], 5000) == 106
    assert break_even_tokens(shape, [tier, primary], 5000, step=16) == 112
    assert break_even_tokens(shape, [tier, primary], 1 / 105e-6) is None
    assert break_even_tokens(shape, [replace(tier, round_trip=0.0), replace(primary, round_trip=0.0)], 5000, 16) == 16


@settings(deadline=None, max_examples=300)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 9000), st.sampled_from([None, 1, 16, 300])), min_size=1, max_size=3
    ),
    prefill=st.floats(100, 1e5),
    rate=st.floats(1e7, 1e11),
    round_trip=st.floats(0, 0.1),
)
def test_break_even_is_the_first_length_at_which_loading_is_faster(groups, prefill, rate, round_trip):
    shape = ModelShape("m", "", "", 1, tuple(LayerGroup(*group) for group in groups))
    link = Link("tier", rate, round_trip, 0, 0)

    def gain(tokens: int) -> float:
        nbytes = sum(layers * size * min(tokens, window or tokens) for layers, size, window in groups)
        return tokens / prefill - round_trip - nbytes / rate

    found = break_even_tokens(shape, [link], prefill)
    if found is None:
        assert all(gain(tokens) <= 1e-9 for tokens in (1, 16, 300, 10**4, 10**7))
    else:
        assert gain(found) >= -1e-9 * max(1.0, found)
        assert found == 1 or gain(found - 1) <= 1e-9 * max(1.0, found)
        assert math.isfinite(found)
