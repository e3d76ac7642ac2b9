"""The identity of an engine's weights, without a user's help: a commit, a digest of the files, or random."""

import secrets
from typing import Any

from kvtiers.model_files import commit_of, digest_of

__all__ = ["is_random", "random_weights", "weights_of"]

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
    try:
        if digest := digest_of(model_config.model):
            return digest, ""
    except (OSError, ValueError) as error:
        return random_weights(), f"{model_config.model} cannot be read: {error}"
    # The commit that vLLM has resolved the revision to, or that the local cache of the hub has.
    resolved = getattr(model_config.hf_config, "_commit_hash", None)
    for revision in (resolved, model_config.revision) if resolved else (model_config.revision,):
        if commit := commit_of(model_config.model, revision):
            return f"commit-{commit}", ""
    return random_weights(), f"no commit of {model_config.model!r} is known"
