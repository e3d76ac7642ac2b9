"""The identity of an engine's weights, without a user's help: a commit, a digest of the files, or random."""

import re
import secrets
from pathlib import Path
from typing import Any

from kvtiers.model_files import digest_of_file, digest_of_folder

__all__ = ["digest_of_folder", "is_random", "random_weights", "weights_of"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
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
            return digest_of_file(path), ""
    except (OSError, ValueError, KeyError) as error:
        return random_weights(), f"{path} cannot be read: {error}"
    commit = _commit(model_config)
    if commit:
        return f"commit-{commit}", ""
    return random_weights(), f"no commit of {model_config.model!r} is known"


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
