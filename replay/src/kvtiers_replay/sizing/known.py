"""The model types whose KV cache has a shape that is known here, by the ``model_type`` of their ``config.json``.

A list of what is known, not of what is refused: a new architecture is seldom told by its fields, and a wrong number is
worse than none.
"""

import re

__all__ = ["ATTENTIONS", "HARMLESS", "LATENT", "LAYER_FIELD", "OTHER", "PLAIN"]

# Multi-head, multi-query or grouped-query attention with the same heads in every layer, with or without windows.
_PLAIN = """
    apertus arcee aria_text baichuan bloom chatglm codegen cohere cohere2 dbrx ernie4_5 ernie4_5_moe ernie4_5_moe_vl
    exaone exaone4 falcon gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text glm glm4 glm4_moe glm4v glm4v_moe
    glm4v_moe_text glm4v_text gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid
    granitemoeshared hunyuan_v1_dense hunyuan_v1_moe idefics3 internlm internlm2 internlm3 internvl llama llama4
    llama4_text llava llava_next minicpm minimax_m2 ministral ministral3 mistral mistral3 mixtral mpt nemotron olmo
    olmo2 olmo3 olmoe opt orion persimmon phi phi3 phi3_v phimoe pixtral qwen qwen2 qwen2_5_vl qwen2_5_vl_text
    qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text
    seed_oss smollm3 smolvlm solar stablelm starcoder2 step3_text step3_vl
    """
PLAIN = frozenset(_PLAIN.split())

# Multi-head latent attention, of which engines keep the latent. Others with a 'kv_lora_rank' keep whole heads.
_LATENT = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 kimi_k25 kimi_vl longcat_flash pangu_ultra_moe"
LATENT = frozenset(_LATENT.split())

# How many caches one of the config's layers has, where it is not one.
ATTENTIONS = {"longcat_flash": 2}

_STATES = "layers that keep one state instead of KV for each token"
_UNEQUAL = "layers with different numbers or sizes of heads"

_KEEP_STATES = """
    bailing_hybrid bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h
    olmo_hybrid plamo2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm
    zamba zamba2
    """
_OTHER_HEADS = "gemma4 gemma4_text mimo_v2_flash nemotron-nas openelm plamo3 step3p5 step3p7"

# Known types whose cache is of another kind, and of which.
OTHER = {
    **dict.fromkeys(
        _KEEP_STATES.split(),
        _STATES,
    ),
    **dict.fromkeys(_OTHER_HEADS.split(), _UNEQUAL),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), "a sparse-attention indexer, which has a cache of its own"
    ),
    **dict.fromkeys(("mllama", "mllama_text_model"), "cross-attention, which has a cache of its own"),
    "hunyuan": "layers that share their caches",
    "minicpm3": "latent attention of which engines keep whole heads, padded",
}

# Fields that say something about some layers; in a model of an unknown type each may mean another cache.
LAYER_FIELD = re.compile(
    r"(types|idxs?|indices|pattern|step|groups?|period|offset|interval|layers|factor)$|"
    r"^(attn|attention|block|cla|conv|global|hybrid|index|linear|local|lru|mamba|shared|ssm|state|swa|window)_|"
    r"layer_list|_share"
)
# Those that are about something else than a layer's cache.
HARMLESS = re.compile(
    r"moe|mlp|expert|rope|rotary|nextn|sparse_step|dense|^model_type$|^transformers_|vocab|scaling|init|"
    r"^(attention|attn)_(bias|dropout|probs|pdrop|softmax|logit|multiplier|out_bias)|num_hidden_layers|"
    r"^position_embedding|^hidden_act|^(n|num|topk|top_k)_groups?$|^max_window_layers$|router|tie|torch_dtype|_token"
)
