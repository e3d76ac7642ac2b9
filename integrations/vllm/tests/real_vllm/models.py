"""Models and adapters with random weights, and prompts, for tests with the real vLLM."""

import json
import random
from pathlib import Path
from typing import Any


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


def make_window_model(folder: Path, *, seed: int, window: int) -> Path:
    """Write a tiny model of which every other layer sees a window of so many tokens: two KV groups."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    torch.manual_seed(seed)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapter(folder: Path, *, seed: int) -> Path:
    """Write a LoRA adapter for the tiny model."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for module, size in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=numbers) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(size, 8, generator=numbers) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def make_prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt of random tokens."""
    numbers = random.Random(seed)
    return [numbers.randrange(512) for _ in range(tokens)]
