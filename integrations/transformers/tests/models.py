"""Small models on random weights, one for each kind of layer and of cache, with weights large enough to matter."""

import torch
import transformers

SIZE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # by default so little that most tokens follow from the last one
    "tie_word_embeddings": False,  # else the last token comes again and again
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    **EXPERTS,
}
WINDOW = {"sliding_window": 24, "head_dim": 8}
MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **WINDOW}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 16}
# The class before "ForCausalLM", the config's class where it has another name, what differs from SIZE.
MODELS = {
    "llama": ("Llama", "", {}),
    "qwen3": ("Qwen3", "", {"head_dim": 8}),
    "mistral": ("Mistral", "", {"sliding_window": 24}),
    "gemma3": ("Gemma3", "Gemma3TextConfig", MIXED),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        "",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "mamba_n_groups": 1}
        | {"shared_intermediate_size": 32, "mamba_expand": 1}
        | STATES,
    ),
    "deepseek_v3": ("DeepseekV3", "", LATENT),
    # those that `make test-transformers-all` adds
    "deepseek_v32": ("DeepseekV32", "", LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}),
    "nemotron_h": (
        "NemotronH",
        "",
        {"layer_types": ["linear_attention", "full_attention"], "mamba_num_heads": 4, "mamba_head_dim": 8}
        | {"ssm_state_size": 16, "n_groups": 1, "chunk_size": 16, "head_dim": 8},
    ),
    "falcon_h1": ("FalconH1", "", {"mamba_d_ssm": 32} | STATES),
    "gpt_oss": (
        "GptOss",
        "",
        {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]} | WINDOW,
    ),
    "lfm2": ("Lfm2", "", {"layer_types": ["conv", "full_attention"]}),
    "llama4": (
        "Llama4",
        "Llama4TextConfig",
        {"num_hidden_layers": 3, "layer_types": ["chunked_attention", "chunked_attention", "full_attention"]}
        | {"head_dim": 8, "attention_chunk_size": 24, "num_local_experts": 2, "intermediate_size_mlp": 64},
    ),
    "qwen3_next": (
        "Qwen3Next",
        "",
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_experts": 4}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"shared_expert_intermediate_size": 16}
        | EXPERTS,
    ),
}
# Of these, transformers itself continues otherwise from a cache than without one.
INCONSISTENT = {
    "bamba": ("Bamba", "", {"attn_layer_indices": [1], "mamba_n_groups": 1, "mamba_expand": 1} | STATES),
    "jamba": (
        "Jamba",
        "",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
}
FIRST = ("llama", "qwen3", "mistral", "gemma3", "granite_hybrid", "deepseek_v3")


def make(name, seed=0, device="cpu", **changed):
    """Return a model in eval mode; the same name and seed give the same weights in every process."""
    family, config_name, options = (MODELS | INCONSISTENT)[name]
    config = getattr(transformers, config_name or f"{family}Config")(**{**SIZE, **options, **changed})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.generation_config.pad_token_id = None
    return model.eval().to(device)


def prompt(tokens, seed=1):
    """Return token ids, [1, tokens]."""
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))
