"""The digest of a model's files: the identity of weights that are no commit of a hub.

It reads every configuration file, every tensor's header, and a sample of every tensor: 1 ms a tensor, not minutes
for a large model. Two fine-tunes of one model differ in every tensor that was trained.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["digest_of_file", "digest_of_folder"]

_SAMPLE_BYTES = 4096
_SAMPLES = 4  # spread over a tensor
_FILE_SAMPLES = 64  # spread over a file whose tensors are not known
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_CONFIGS = {"config.json", "adapter_config.json"}
_READ_WHOLE = {".json", ".py"}  # a folder may bring the model's own code
_LARGEST_HEADER = 1 << 28


def digest_of_file(path: Path) -> str:
    """Return a digest over a model that is one file."""
    return f"digest-{_digest([path])}"


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
