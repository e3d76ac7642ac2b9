"""The identity of weights that a model's files give: a digest of them, or the commit of a hub that they are of.

A digest reads every configuration file, every tensor's header, and a sample of every tensor: 1 ms a tensor, not minutes
for a large model. Two fine-tunes of one model differ in every tensor that was trained.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["commit_of", "digest_of", "digest_of_file", "digest_of_folder"]

_COMMIT = re.compile(r"[0-9a-f]{40}")

_SAMPLE_BYTES = 4096
_SAMPLES = 4  # spread over a tensor
_FILE_SAMPLES = 64  # spread over a file whose tensors are not known
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_CONFIGS = {"config.json", "adapter_config.json"}
_READ_WHOLE = {".json", ".py"}  # a folder may bring the model's own code
_LARGEST_HEADER = 1 << 28


def commit_of(model: str, revision: str | None, cache_dir: str | None = None) -> str:
    """Return the commit of a model of the hub, or "" if none is known here. No network.

    ``revision``: a commit is taken as it is; a branch or a tag stands for the commit that the local cache of the hub
    has it at. ``cache_dir``: that cache, where it is not the default one.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    try:
        from huggingface_hub import try_to_load_from_cache  # engines depend on it; kvtiers does not
    except ImportError:
        return ""
    cached = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir, revision=revision)
    found = Path(cached).parent.name if isinstance(cached, str) else ""
    return found if _COMMIT.fullmatch(found) else ""


def digest_of(model: str) -> str:
    """Return the digest of a model in a folder or a file, "" if it is neither; OSError or ValueError if unreadable."""
    path = Path(model)
    try:
        if path.is_dir():
            return digest_of_folder(path)
        return digest_of_file(path) if path.is_file() else ""
    except KeyError as error:
        raise ValueError(f"a tensor's header lacks {error}") from None


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
