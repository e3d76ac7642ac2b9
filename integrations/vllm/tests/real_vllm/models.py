"""Models and adapters with random weights, and prompts, for tests with the real vLLM."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ATTENTION_MODULES = {"self_attn.q_proj": 128, "self_attn.v_proj": 64}
STATE_MODULES = {"linear_attn.in_proj_qkvz": 768}
"""Modules of the models here that adapters may change, and the rows of each."""


def make_model(folder: Path, *, seed: int, **config: Any) -> Path:
    """Write a tiny model whose greedy tokens depend on every token before them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(shape | config))).save_pretrained(folder)
    return folder


def make_window_model(
    folder: Path, *, seed: int, window: int, layers: Sequence[str] = ("sliding", "full") * 2, positions: int = 4096
) -> Path:
    """Write a tiny model of whose layers some see a window of so many tokens. By default two KV groups.

    Its layers weigh more than its embeddings, which are its output's, too, and attend to few tokens: with random
    weights alone its tokens would be the prompt's last one again, whatever its KV. ``positions``: of a prompt, at most.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        initializer_range=0.15,
        sliding_window=window,
        query_pre_attn_scalar=2,
        layer_types=[f"{kind}_attention" for kind in layers],
    )
    torch.manual_seed(seed)
    model = Gemma3ForCausalLM(config)
    model.model.embed_tokens.weight.data.mul_(0.1)
    model.save_pretrained(folder)
    return folder


def make_state_model(folder: Path, *, seed: int, experts: bool = True) -> Path:
    """Write a tiny model of which three layers of four keep a state (a gated delta net), and one has KV.

    Its states keep some hundred tokens; by random weights they would forget within ten, and any state would do.
    ``experts``: False where it is to have LoRA adapters, beside which vLLM computes experts by Triton alone.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[] if experts else [0, 1, 2, 3],
        max_position_embeddings=16_384,
        initializer_range=0.15,
    )
    torch.manual_seed(seed)
    model = Qwen3NextForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(weight, -7.0)
        elif name.endswith("A_log"):
            torch.nn.init.zeros_(weight)
    model.save_pretrained(folder)
    if not experts:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["DenseQwen3Next"]}))
    return folder


def add_draft(folder: Path, *, seed: int) -> Path:
    """Give the model with states a draft of its own (multi-token prediction): its last layer again."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    numbers = torch.Generator().manual_seed(seed)
    draft = {"fc": torch.randn((128, 256), generator=numbers) * 0.15}
    draft |= dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), tensors["model.norm.weight"])
    tensors |= {f"mtp.{name}.weight": tensor.clone() for name, tensor in draft.items()}
    layer, own = "model.layers.3.", "mtp.layers.0."
    tensors |= {name.replace(layer, own): tensor.clone() for name, tensor in tensors.items() if layer in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_draft(folder: Path, *, seed: int) -> Path:
    """Write an EAGLE draft for the tiny model: one layer, over its hidden states and its own embeddings."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "fc": (128, 256),
        "layers.0.self_attn.q_proj": (128, 128),
        "layers.0.self_attn.k_proj": (64, 128),
        "layers.0.self_attn.v_proj": (64, 128),
        "layers.0.self_attn.o_proj": (128, 128),
        "layers.0.mlp.gate_proj": (256, 128),
        "layers.0.mlp.up_proj": (256, 128),
        "layers.0.mlp.down_proj": (128, 256),
    }
    numbers = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": torch.randn(shape, generator=numbers) * 0.15 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(128)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_adapter(folder: Path, *, seed: int, layers: int = 4, modules: Mapping[str, int] = ATTENTION_MODULES) -> Path:
    """Write a LoRA adapter for the tiny model, or for so many layers of one of the same size. ``modules``: by rows."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    settings["target_modules"] = [name.rpartition(".")[2] for name in modules]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module, size in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=numbers) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(size, 8, generator=numbers) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def make_prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt of random tokens."""
    numbers = random.Random(seed)
    return [numbers.randrange(512) for _ in range(tokens)]
