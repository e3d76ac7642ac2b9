"""The identity of the weights that SGLang serves: a commit of the hub, or a digest of its files."""

import re
from pathlib import Path

from kvtiers.api import ConfigError
from kvtiers.model_files import digest_of_file, digest_of_folder

__all__ = ["weights_of"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_FROM_FILES = frozenset(
    {"auto", "pt", "safetensors", "npcache", "instanttensor", "fastsafetensors", "sharded_state", "gguf"}
)
"""The load formats that read the weights from the model's own files; others may exist."""


def weights_of(model: str, revision: str | None, load_format: str) -> str:
    """Return the identity of a model in a folder, in a file, or on the hub; ConfigError, in one line, if there is none.

    ``revision``: a branch or a tag stands for the commit that the local cache of the hub has it at.
    """
    if load_format not in _FROM_FILES:
        raise _unknown(model, f"the load format {load_format!r} is not known to read the model's own files")
    path = Path(model)
    try:
        if path.is_dir():
            return digest_of_folder(path)
        if path.is_file():
            return digest_of_file(path)
    except (OSError, ValueError, KeyError) as error:
        raise _unknown(model, str(error)) from None
    if revision and _COMMIT.fullmatch(revision):
        return f"commit-{revision}"
    if commit := _cached_commit(model, revision):
        return f"commit-{commit}"
    raise _unknown(model, "it is no folder, and its commit is not in the cache of the hub")


def _cached_commit(model: str, revision: str | None) -> str:
    try:
        from huggingface_hub import try_to_load_from_cache  # SGLang depends on it; kvtiers does not
    except ImportError:
        return ""
    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    found = Path(cached).parent.name if isinstance(cached, str) else ""
    return found if _COMMIT.fullmatch(found) else ""


def _unknown(model: str, why: str) -> ConfigError:
    return ConfigError(
        f"kvtiers: the weights of {model!r} cannot be identified: {why}; set 'weights' in "
        "--hicache-storage-backend-extra-config to their commit or digest"
    )
