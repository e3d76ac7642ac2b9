"""A Llama with random weights, to try kvtiers in vLLM on a CPU without a download.

Its answers are nonsense, but the same each time. It is large enough that computing a prompt of 3,000 tokens takes
longer than loading its KV::

    python examples/vllm/tiny_model.py FOLDER
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    initializer_range=0.15,
    tie_word_embeddings=False,
)


def main() -> None:
    (folder,) = sys.argv[1:]
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
