"""What a pool's pages mean: all that SGLang's page keys lack, from the pool, the storage config and the arguments.

A page key is a chained SHA-256 over tokens. Two servers share a page only if everything here is equal. What decides the
bytes and cannot be established is refused, in one line: a miss is cheap, another model's KV is not.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvtiers import ModelIdentity
from kvtiers.api import ConfigError
from kvtiers_sglang.weights import weights_of

__all__ = ["identity_of"]

_PACKED = "torch.uint8"  # what numbers it holds, the pool does not say
_STATES = "mamba"  # sharded by rank also where the KV is not
_GEOMETRY = (
    "layout", "page_size", "head_num", "head_dim", "v_head_dim", "layer_num", "start_layer", "end_layer",
    "kv_cache_dim", "kv_lora_rank", "qk_rope_head_dim", "dcp_size", "dcp_rank", "target_layer_num",
    "num_mamba_layers", "conv_state_shapes", "temporal_state_shape", "conv_dtype", "temporal_dtype",
    "storage_format_tag",
)  # fmt: skip


def identity_of(
    pool_name: str, pool: Any, sizes: list[int], storage: Any, arguments: Any, weights: str, release: str
) -> ModelIdentity:
    """Return the identity of one host pool's pages. ConfigError, in one line, if it cannot be established.

    ``sizes``: bytes of the parts of a page. ``storage``: SGLang's ``HiCacheStorageConfig``. ``arguments``: its
    ``ServerArgs``, or None. ``weights``: as the user says, or "". ``release``: SGLang's.
    """
    name = storage.model_name
    if not name:
        raise ConfigError("kvtiers: the storage config of SGLang names no model; set --served-model-name")
    dtype = str(pool.dtype)
    kv_cache_dtype = _of(arguments, "kv_cache_dtype")
    if dtype == _PACKED and kv_cache_dtype in {"", "auto"}:
        raise ConfigError(
            f"kvtiers: pool {pool_name!r} has packed bytes, and --kv-cache-dtype does not say of what; set it"
        )
    return ModelIdentity(
        name,
        weights=_weights(arguments, weights),
        kv_dtype=f"{dtype} {kv_cache_dtype}".strip(),
        kv_scales=_of(arguments, "quantization_param_path"),
        rope=_of(arguments, "json_model_override_args"),
        quantization=_of(arguments, "quantization"),
        kv_layout=_layout(pool_name, pool, sizes, storage, release),
        hash_algorithm="sglang-page-sha256",
        hash_seed="",
    )


def _weights(arguments: Any, weights: str) -> str:
    """Return the identity of the model, and of the draft model, whose layers may be in the same pages."""
    model = _of(arguments, "model_path")
    if not weights:
        if not model:
            raise ConfigError(
                "kvtiers: the server's arguments are not known, so the weights are not; set 'weights' in "
                "--hicache-storage-backend-extra-config to their commit or digest"
            )
        weights = weights_of(model, _of(arguments, "revision") or None, _of(arguments, "load_format") or "auto")
    algorithm, draft = _of(arguments, "speculative_algorithm"), _of(arguments, "speculative_draft_model_path")
    if algorithm and draft and draft != model:
        revision = _of(arguments, "speculative_draft_model_revision") or None
        return f"{weights} draft {algorithm} {weights_of(draft, revision, 'auto')}"
    return f"{weights} draft {algorithm}" if algorithm else weights


def _layout(pool_name: str, pool: Any, sizes: list[int], storage: Any, release: str) -> str:
    facts: dict[str, Any] = {"sglang": release, "pool": pool_name, "class": type(pool).__name__, "parts": sizes}
    facts |= {fact: getattr(pool, fact) for fact in _GEOMETRY if hasattr(pool, fact)}
    facts |= {name: getattr(storage, name) for name in ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")}
    # A replicated pool is written by one rank and read by all, of any number. Heads are always sharded.
    if not storage.is_mla_model or pool_name == _STATES or hasattr(pool, "head_num"):
        facts |= {name: getattr(storage, name) for name in ("tp_rank", "tp_size")}
    return json.dumps(facts, sort_keys=True, default=str)


def _of(arguments: Any, name: str) -> str:
    value = getattr(arguments, name, None)
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    return "" if value is None else str(value)
