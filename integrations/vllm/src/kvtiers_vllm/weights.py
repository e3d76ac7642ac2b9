"""The identity of an engine's weights, without a user's help: a commit, a digest of the files, or random.

A digest reads every configuration file, every tensor's header, and a sample of every tensor: 1 ms a tensor, not minutes
for a large model. Two fine-tunes of one model differ in every tensor that was trained.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["digest_of_folder", "is_random", "random_weights", "weights_of"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAMPLE_BYTES = 4096
_SAMPLES = 4  # spread over a tensor
_FILE_SAMPLES = 64  # spread over a file whose tensors are not known
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_CONFIGS = {"config.json", "adapter_config.json"}
_READ_WHOLE = {".json", ".py"}  # a folder may bring the model's own code
_LARGEST_HEADER = 1 << 28
_RANDOM = "random-"
_FROM_FILES = {
    "auto",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "safetensors",
    "sharded_state",
}
"""The load formats that read the weights from the model's own files; other formats may exist."""


def random_weights() -> str:
    """Return an identity that no other process has."""
    return f"{_RANDOM}{secrets.token_hex(16)}"


def is_random(weights: str) -> bool:
    """Return whether this identity is random, so that no other process has it."""
    return weights.startswith(_RANDOM)


def weights_of(model_config: Any, load_format: str) -> tuple[str, str]:
    """Return the identity of the weights, and, if it is random, why.

    ``model_config``: vLLM's; its ``model`` is a folder, a file, or a name on a hub. ``load_format``: how vLLM loads it.
    """
    if load_format not in _FROM_FILES:
        return random_weights(), f"the load format {load_format!r} is not known to read the model's own files"
    path = Path(model_config.model)
    try:
        if path.is_dir():
            return digest_of_folder(path), ""
        if path.is_file():
            return f"digest-{_digest([path])}", ""
    except (OSError, ValueError, KeyError) as error:
        return random_weights(), f"{path} cannot be read: {error}"
    commit = _commit(model_config)
    if commit:
        return f"commit-{commit}", ""
    return random_weights(), f"no commit of {model_config.model!r} is known"


def digest_of_folder(folder: Path) -> str:
    """Return a digest over the model in a folder; ValueError if it holds no weights."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not any(path.suffix in _WEIGHT_FILES for path in files):
        raise ValueError("it has no file with weights")
    # Other files of a folder (a tokenizer, a README) change no KV.
    suffixes = _WEIGHT_FILES | {".py"}
    wanted = [path for path in files if path.suffix in suffixes or path.name in _CONFIGS]
    return f"digest-{_digest(wanted)}"


def _digest(paths: list[Path]) -> str:
    state = hashlib.sha256()
    for path in paths:
        state.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            if path.suffix in _READ_WHOLE:
                state.update(file.read())
                continue
            spans = _tensors(file) if path.suffix == ".safetensors" else None
            for start, end in spans or [(0, path.stat().st_size)]:
                for sample in _samples(start, end, _SAMPLES if spans else _FILE_SAMPLES):
                    file.seek(sample)
                    state.update(file.read(min(_SAMPLE_BYTES, end - sample)))
            if spans:
                file.seek(0)
                state.update(file.read(spans[0][0] if spans else 0))  # the header: names, types, shapes
    return state.hexdigest()[:32]


def _tensors(file: BinaryIO) -> list[tuple[int, int]]:
    """Return where each tensor of a safetensors file begins and ends, in bytes, in the file's order."""
    length = int.from_bytes(file.read(8), "little")
    if length > _LARGEST_HEADER:
        raise ValueError(f"{file.name} has a header of {length} bytes")
    header = json.loads(file.read(length))
    offsets = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    return [(8 + length + start, 8 + length + end) for start, end in offsets]


def _samples(start: int, end: int, count: int) -> Iterator[int]:
    """Return where to read: the first and the last bytes, and evenly between; everything, if it is short."""
    last = max(start, end - _SAMPLE_BYTES)
    if end - start <= count * _SAMPLE_BYTES:
        yield from range(start, end, _SAMPLE_BYTES)
    else:
        yield from (start + (last - start) * index // (count - 1) for index in range(count))


def _commit(model_config: Any) -> str:
    """Return the commit that vLLM has resolved the model's revision to, never a branch; "" if it is not known."""
    for found in (getattr(model_config.hf_config, "_commit_hash", None), _cached_commit(model_config)):
        if isinstance(found, str) and _COMMIT.fullmatch(found):
            return found
    return ""


def _cached_commit(model_config: Any) -> str:
    try:
        from huggingface_hub import try_to_load_from_cache  # vLLM depends on it; kvtiers does not
    except ImportError:
        return ""
    cached = try_to_load_from_cache(model_config.model, "config.json", revision=model_config.revision)
    return Path(cached).parent.name if isinstance(cached, str) else ""
