"""What a pool's pages mean: all that SGLang's page keys lack, from the pool, the storage config and the arguments.

A page key is a chained SHA-256 over tokens. Two servers share a page only if everything here is equal. What decides the
bytes and cannot be established is refused, in one line: a miss is cheap, another model's KV is not.

===============  =======================================================================================================
from             is taken
===============  =======================================================================================================
pool             its class, type, layout and geometry, on the device too, and the bytes of each part of a page
storage config   the served model's name, ranks and their numbers
arguments        as SGLang has resolved them: how the model and a draft model are loaded and computed
files            a digest, or the hub's commit, of model, draft model and each adapter; scales of the KV by a digest
===============  =======================================================================================================

Adapters that are loaded while a server runs need nothing here: SGLang gives each load a random id, which is in its
pages' keys. Those of ``--lora-paths`` have an id that is made from name and path alone.
"""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvtiers import ModelIdentity
from kvtiers.api import ConfigError
from kvtiers.model_files import commit_of, digest_of, digest_of_file
from kvtiers_sglang.options import Options

__all__ = ["identity_of", "release"]

_PACKED = "torch.uint8"  # what numbers it holds, the pool does not say
_STATES = "mamba"  # sharded by rank also where the KV is not; SGLang backs it up on every rank
_GEOMETRY = (
    "layout", "page_size", "head_num", "head_dim", "v_head_dim", "layer_num", "start_layer", "end_layer",
    "kv_cache_dim", "kv_lora_rank", "qk_rope_head_dim", "dcp_size", "dcp_rank", "target_layer_num",
    "num_mamba_layers", "conv_state_shapes", "temporal_state_shape", "conv_dtype", "temporal_dtype",
    "storage_format_tag",
)  # fmt: skip
_COMPUTED_BY = (
    "dtype", "model_impl", "model_config_parser", "model_loader_extra_config", "custom_weight_loader",
    "modelopt_quant", "modelopt_checkpoint_restore_path", "quantize_and_serve", "rl_quant_profile",
    "decrypted_config_file", "qsa_indexer_dtype",
)  # fmt: skip
_INDEX_KEYS = ("index_head_dim", "quant_block_size", "index_page_size", "index_kpool", "index_kpool_compress")
_DRAFTED_BY = (
    "speculative_algorithm", "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype",
    "speculative_draft_load_format", "decrypted_draft_config_file", "context_length",
)  # fmt: skip
_ELSEWHERE = ("custom_weight_loader", "modelopt_checkpoint_restore_path", "decrypted_config_file")
"""Arguments by which weights or their config come from somewhere else than the model's own files."""
_FROM_FILES = frozenset(
    {"auto", "pt", "safetensors", "npcache", "instanttensor", "fastsafetensors", "sharded_state", "gguf"}
)
"""The load formats that read the weights from the model's own files; others may exist."""
_OPTIONS = "--hicache-storage-backend-extra-config"


def release() -> str:
    """Return SGLang's version."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def identity_of(pool_name: str, pool: Any, sizes: list[int], storage: Any, options: Options) -> ModelIdentity:
    """Return the identity of one pool's pages. ConfigError, in one line, if it cannot be established.

    ``sizes``: bytes of the parts of a page. ``storage``: SGLang's ``HiCacheStorageConfig``.
    """
    name = storage.model_name
    if not name:
        raise ConfigError("kvtiers: the storage config of SGLang names no model; set --served-model-name")
    arguments = _server_arguments()
    dtype = str(pool.dtype)
    kv_cache_dtype = _of(arguments, "kv_cache_dtype")
    if dtype == _PACKED and kv_cache_dtype in {"", "auto"}:
        raise ConfigError(
            f"kvtiers: pool {pool_name!r} has packed bytes, and --kv-cache-dtype does not say of what; set it"
        )
    return ModelIdentity(
        name,
        weights=_weights(arguments, options),
        kv_dtype=f"{dtype} {kv_cache_dtype}".strip(),
        kv_scales=_file(arguments, "quantization_param_path"),
        rope=_of(arguments, "json_model_override_args"),
        quantization=_of(arguments, "quantization"),
        kv_layout=json.dumps(_facts(pool_name, pool, sizes, storage, arguments), sort_keys=True, default=str),
        hash_algorithm="sglang-page-sha256",
        hash_seed="",
        engine="sglang",
    )


def _server_arguments() -> Any:
    """Return a view of the server's arguments as SGLang has resolved them."""
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.runtime_context import get_server_args

    try:
        return resolved_view(get_server_args())
    except ValueError:
        raise ConfigError(
            "kvtiers: SGLang has published no server arguments in this process, so that pages have no identity"
        ) from None


def _of(arguments: Any, name: str) -> str:
    try:
        value = getattr(arguments, name)
    except AttributeError:
        raise ConfigError(
            f"kvtiers: SGLang {release()} has no argument {name!r}, on which the identity of pages depends; install a "
            "release that this one of kvtiers-sglang is for"
        ) from None
    if value is None or value is False:
        return ""
    if isinstance(value, Mapping | list):
        return json.dumps(value, sort_keys=True) if value else ""
    return str(value)


def _file(arguments: Any, name: str) -> str:
    """Return the digest of the file that an argument names, "" if it names none."""
    path = _of(arguments, name)
    try:
        return digest_of_file(Path(path)) if path else ""
    except OSError as error:
        raise ConfigError(f"kvtiers: --{name.replace('_', '-')} {path!r} cannot be read: {error}") from None


# -- weights


def _weights(arguments: Any, options: Options) -> str:
    """Return the identity of the model, of the draft model, whose layers may be in the same pages, and of adapters."""
    model, revision = _of(arguments, "model_path"), _of(arguments, "revision")
    cache = _of(arguments, "download_dir") or None
    elsewhere = [name for name in _ELSEWHERE if _of(arguments, name)]
    if _of(arguments, "weight_cache_mode") == "client":
        elsewhere.append("weight_cache_mode")
    if options.weights:
        weights = options.weights
    elif elsewhere:
        why = f"--{elsewhere[0].replace('_', '-')} brings others than those of its files"
        raise _unknown(model, why, f"set 'weights' in {_OPTIONS} to their commit or digest")
    else:
        weights = _weights_of(model, revision, _of(arguments, "load_format"), cache, "weights")
    return " ".join([weights, *_draft(arguments, options, weights, cache), *_adapters(arguments, cache)])


def _draft(arguments: Any, options: Options, weights: str, cache: str | None) -> list[str]:
    if not _of(arguments, "speculative_algorithm"):
        return []
    # What is not said of the draft model is as the model's, in SGLang too.
    models = [_of(arguments, name) for name in ("model_path", "revision", "load_format")]
    drafts = [_of(arguments, f"speculative_draft_{name}") for name in ("model_path", "model_revision", "load_format")]
    draft, revision, load_format = (its or other for its, other in zip(drafts, models, strict=True))
    if options.draft_weights:
        found = options.draft_weights
    elif _of(arguments, "decrypted_draft_config_file"):
        why = "--decrypted-draft-config-file brings another config"
        raise _unknown(draft, why, f"set 'draft_weights' in {_OPTIONS} to their commit or digest")
    elif [draft, revision, load_format] == models:
        found = weights
    else:
        found = _weights_of(draft, revision, load_format, cache, "draft_weights")
    return ["draft", *[f"{name}={_of(arguments, name)}" for name in _DRAFTED_BY], found]


def _adapters(arguments: Any, cache: str | None) -> list[str]:
    paths = {}
    for adapter in getattr(arguments, "lora_paths", None) or ():
        name, path = getattr(adapter, "lora_name", None), getattr(adapter, "lora_path", None)
        if not name or not path:
            raise ConfigError(f"kvtiers: --lora-paths has {adapter!r}, expected adapters with a name and a path")
        paths[str(name)] = str(path)
    if draft := _of(arguments, "uno_lora_path"):
        paths["uno"] = draft
    return [f"adapter {name}={_weights_of(path, '', 'auto', cache, '')}" for name, path in sorted(paths.items())]


def _weights_of(model: str, revision: str, load_format: str, cache: str | None, option: str) -> str:
    """Return the identity of weights in a folder, in a file, or on the hub; ConfigError, in one line, if there is none.

    ``cache``: where the hub's files are, None for the usual place. ``option``: of ours, that may name them instead.
    """
    advice = f"set {option!r} in {_OPTIONS} to their commit or digest" if option else "give it as a folder"
    if load_format not in _FROM_FILES:
        raise _unknown(model, f"the load format {load_format!r} is not known to read the model's own files", advice)
    try:
        digest = digest_of(model)
    except (OSError, ValueError) as error:
        raise _unknown(model, str(error), advice) from None
    if digest:
        return digest
    if commit := commit_of(model, revision or None, cache):
        return f"commit-{commit}"
    raise _unknown(model, "it is no folder, and its commit is not in the cache of the hub", advice)


def _unknown(model: str, why: str, advice: str) -> ConfigError:
    return ConfigError(f"kvtiers: the weights of {model!r} cannot be identified: {why}; {advice}")


# -- layout


def _facts(pool_name: str, pool: Any, sizes: list[int], storage: Any, arguments: Any) -> dict[str, Any]:
    """Return what decides the place and the computation of a page's bytes. ConfigError for what is never found."""
    facts: dict[str, Any] = {"sglang": release(), "pool": pool_name, "class": type(pool).__name__, "parts": sizes}
    facts |= {fact: getattr(pool, fact) for fact in _GEOMETRY if hasattr(pool, fact)}
    # Pages are copied from the device as they lie there: with SGLANG_USE_HND_KVCACHE, heads come before tokens.
    buffers = [getattr(info, "buffers", None) for info in getattr(pool, "_buffer_infos", ())]
    facts["on_device"] = [str(getattr(each, "layout", "")) for each in buffers]
    facts |= {name: getattr(storage, name) for name in ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")}
    if (declared := getattr(pool, "decl", None)) is not None:
        facts["indexer"] = _indexer(declared)
    facts["computed_by"] = {name: _of(arguments, name) for name in _COMPUTED_BY}
    # A replicated pool is written by one rank and read by all, of any number. Heads are always sharded.
    is_sharded = hasattr(pool, "head_num")
    if storage.is_mla_model and is_sharded and storage.tp_size > 1:
        raise ConfigError(
            f"kvtiers: pool {pool_name!r} is split among {storage.tp_size} ranks, and SGLang backs up all pools of "
            "this model on one of them, so that no prefix would be found; serve without this draft model"
        )
    if not storage.is_mla_model or pool_name == _STATES or is_sharded:
        facts |= {name: getattr(storage, name) for name in ("tp_rank", "tp_size")}
    return facts


def _indexer(declared: Any) -> dict[str, Any]:
    """Return what decides the bytes of an indexer's page: its layers and the shape of its keys.

    ``declared``: SGLang's declaration of the pool. On ROCm the keys of a page are in another order than on CUDA.
    """
    facts = {name: getattr(declared.device_pool, name, None) for name in _INDEX_KEYS}
    return facts | {"layers": declared.owned_device_layers, "rocm": torch.version.hip is not None}
