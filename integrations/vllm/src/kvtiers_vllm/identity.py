"""The model's identity, from vLLM's own config: everything that decides a row's bytes and its key.

Of vLLM's ``OffloadingConfig`` and of the ``VllmConfig`` that it was made from (``engine``): the first names neither
weights nor quantisation. A section of the config is made canonical plain data first (``plain``), so that it has the
same digest in every process, and another one for other settings.
"""

import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers_vllm.engine import Engine
from kvtiers_vllm.releases import public_version, release_of
from kvtiers_vllm.weights import random_weights, weights_of

__all__ = ["Identity", "digest", "identity_of", "plain", "row_layout"]

_UNSEEDED = {"xxhash", "xxhash_cbor"}  # vLLM keeps these algorithms' seed secret, by a random one for each process
_DEFAULT_SEED = "vllm-none-hash"
_OF_A_RANK = {"num_kv_heads", "page_size_padded"}
_BACKENDS = ("flashinfer-python", "flash-attn", "aiter")  # packages that vLLM's choice of a backend depends on
_NOT_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version", "architectures_override")
# Of the speculation: models are named by their weights and configs, their ranks by the layout.
_MODELS = {"model", "target_model_config", "draft_model_config", "target_parallel_config", "draft_parallel_config"}
_TEXTLESS: tuple[object, object] = (object.__str__, object.__repr__)


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """The model's identity, and the obstacles to sharing: sentences for the log, empty if there are none."""

    model: ModelIdentity
    warnings: tuple[str, ...]


def identity_of(
    engine: Engine, offloading: Any, version: str, given_weights: str | None, *, own_rows: bool = False
) -> Identity:
    """Return the identity of the KV that this engine computes.

    ``offloading``: vLLM's ``OffloadingConfig``; ``version``: vLLM's. ``given_weights``: the name that the config gives
    the weights, which is how dummy or reloaded ones get one. ``own_rows``: rows are kvtiers' own; canonical ones are
    the same for any number of ranks.
    """
    weights, unnamed = (f"given-{given_weights}", "") if given_weights else _weights(engine)
    algorithm = str(_of(engine, "cache_config.prefix_caching_hash_algo"))
    seed, unseeded = _seed(version, algorithm)
    model = ModelIdentity(
        name=_name(str(offloading.model.name)),
        weights=weights,
        kv_dtype=str(offloading.model.dtype),
        kv_scales=_kv_scales(engine),
        rope=_model_digest(engine),
        quantization=str(_of(engine, "model_config.quantization")),
        kv_layout=_layout_digest(engine, offloading, version, own_rows=own_rows),
        hash_algorithm=algorithm,
        hash_seed=seed,
        engine="vllm",
    )
    return Identity(model, tuple(warning for warning in (unnamed, unseeded) if warning))


def row_layout(identity: ModelIdentity, offloading: Any, row_bytes: int) -> CacheLayout:
    """Return the layout of vLLM's own rows: each holds one chunk of any group, and its value is all of the row."""
    chunk = int(offloading.cache.blocks_per_chunk)
    groups = tuple(
        KVGroup(f"group-{index}", int(group.tokens_per_block) * chunk) for index, group in enumerate(offloading.groups)
    )
    tensors = tuple(KVTensor(f"row-{index}", index, row_bytes) for index in range(len(groups)))
    return CacheLayout(identity, groups, tensors)


def _name(model: str) -> str:
    """Return a model's name; where it lies on this machine is no part of it."""
    return Path(model).name if Path(model).exists() else model


def _weights(engine: Engine) -> tuple[str, str]:
    """Return the identity of all weights that the engine has loaded, and a sentence for the log."""
    if engine.vllm_config is None:
        return random_weights(), _nothing_shared("vLLM's config was not found")
    found = [weights_of(*loaded) for loaded in _loaded(engine)]
    for weights, why in found:
        if why:
            return weights, _nothing_shared(why)
    return "+".join(weights for weights, _ in found), ""


def _loaded(engine: Engine) -> list[tuple[Any, str]]:
    """Return the models that the engine has loaded, and how: its own, and its draft model unless it is the same."""
    main = (engine.vllm_config.model_config, str(_of(engine, "load_config.load_format")))
    drafts = _of(engine, "speculative_config.draft_model_config")
    if drafts is None:
        return [main]
    own = _of(engine, "speculative_config.draft_load_config")
    draft = (drafts, main[1] if own is None else str(own.load_format))
    return [main] if _place(*main) == _place(*draft) else [main, draft]


def _place(model_config: Any, load_format: str) -> tuple[str, str | None, str]:
    return model_config.model, model_config.revision, load_format


def _nothing_shared(why: str) -> str:
    return (
        f"{why}, so the weights have no name: nothing is shared, nothing survives a restart; "
        "name them by kvtiers.weights in kv_connector_extra_config, in the whole stack by model.revision in its file"
    )


def _seed(version: str, algorithm: str) -> tuple[str, str]:
    """Return the seed of vLLM's block hashes, and a sentence for the log."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed, ""
    if release_of(version).random_seed or algorithm in _UNSEEDED:
        warning = (
            f"vLLM seeds its block hashes ({algorithm}) at random in each process: nothing is shared, nothing survives "
            "a restart; set PYTHONHASHSEED to the same number for all engines"
        )
        return f"random-{secrets.token_hex(16)}", warning
    return _DEFAULT_SEED, ""


def _kv_scales(engine: Engine) -> str:
    """Return what stands for the scales of a quantised KV cache; those of the checkpoint are part of the weights."""
    if _of(engine, "cache_config.calculate_kv_scales"):
        return f"random-{secrets.token_hex(16)}"  # computed from the first prompt that the engine happens to see
    return "checkpoint"


def _model_digest(engine: Engine) -> str:
    """Digest each model's own config as vLLM uses it: with its overrides, rotary embedding and windows."""
    if _of(engine, "model_config.hf_config") is None:
        return ""
    return digest(
        {
            "model": _model(_of(engine, "model_config")),
            "load": _choice_of_files(_of(engine, "load_config")),
            "speculation": _speculation(engine),
        }
    )


def _model(model_config: Any) -> dict[str, Any]:
    config = model_config.hf_config.to_dict()
    return {
        "config": {name: value for name, value in config.items() if name not in _NOT_THE_MODEL},
        "dtype": str(getattr(model_config, "dtype", None)),
        "quantization": str(getattr(model_config, "quantization", None)),
        "layers": plain(getattr(model_config, "quantization_config", None)),
    }


def _choice_of_files(load_config: Any) -> Any:
    """Return the settings by which a loader may read other files of the model's folder."""
    return [plain(getattr(load_config, name, None)) for name in ("model_loader_extra_config", "ignore_patterns")]


def _speculation(engine: Engine) -> Any:
    speculative = _of(engine, "speculative_config")
    if speculative is None:
        return None
    found = {name: value for name, value in vars(speculative).items() if name not in _MODELS}
    load, draft = found.pop("draft_load_config", None), _of(engine, "speculative_config.draft_model_config")
    return {
        "settings": plain(found),
        "model": None if draft is None else _model(draft),
        "load": None if load is None else _choice_of_files(load),
    }


def _layout_digest(engine: Engine, offloading: Any, version: str, *, own_rows: bool) -> str:
    """Digest the settings that decide where in a row each number lies."""
    canonical = bool(getattr(offloading, "canonical_layout", False))
    any_ranks = own_rows and canonical
    groups = [
        {"tokens": group.tokens_per_block, "layers": list(group.layer_names), "spec": spec}
        for group, spec in zip(offloading.groups, _group_specs(engine, len(offloading.groups), any_ranks), strict=True)
    ]
    parallel = dataclasses.asdict(offloading.parallel)
    for name in ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"):
        parallel.pop(name, None)  # who computes it does not change it
    return digest(
        {
            "epoch": release_of(version).epoch(public_version(version)),
            "groups": groups,
            "parallel": None if any_ranks else parallel,
            "bytes_per_block": None if any_ranks else offloading.worker_kv_bytes_per_block,
            "tokens_per_hash": offloading.cache.tokens_per_hash,
            "blocks_per_chunk": offloading.cache.blocks_per_chunk,
            "replicated": None if any_ranks else offloading.replicated_layout,
            "canonical": canonical,
            "layout": str(getattr(offloading, "kv_cache_layout", None) or ""),
            "cache_dtype": str(_of(engine, "cache_config.cache_dtype")),
            "runner": str(_of(engine, "use_v2_model_runner")),
            "backend": _backend(engine),
        }
    )


def _group_specs(engine: Engine, count: int, any_ranks: bool) -> list[str]:
    groups = getattr(engine.kv_cache_config, "kv_cache_groups", ())
    specs = [_shared_spec(group.kv_cache_spec) if any_ranks else repr(group.kv_cache_spec) for group in groups]
    return specs if len(specs) == count else [""] * count


def _shared_spec(spec: Any) -> str:
    """Return a group's spec without what depends on how many ranks hold its heads."""
    fields = {field.name: repr(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    return repr((type(spec).__name__, {name: value for name, value in fields.items() if name not in _OF_A_RANK}))


def _backend(engine: Engine) -> dict[str, Any]:
    """Return the settings that decide vLLM's attention backend, and with it the order of the numbers in a page."""
    found = {
        "device": str(_of(engine, "device_config.device_type")),
        "attention": plain(_of(engine, "attention_config")),
        "setting": os.environ.get("VLLM_ATTENTION_BACKEND", ""),
        "layout": os.environ.get("VLLM_KV_CACHE_LAYOUT", ""),
    }
    if engine.vllm_config is not None:
        found |= _device()
    return found


def _device() -> dict[str, str]:
    from vllm.platforms import current_platform  # only in an engine: a VllmConfig implies vLLM

    found = {
        "name": str(current_platform.get_device_name()),
        "capability": str(current_platform.get_device_capability()),
        "packages": ",".join(map(_installed, _BACKENDS)),
    }
    if current_platform.is_cpu():
        import torch  # vLLM has loaded it

        # The CPU backend orders a page by the processor's instructions.
        found["instructions"] = str(torch.backends.cpu.get_cpu_capability())
        found["tiles"] = str(torch.cpu._is_amx_tile_supported())  # noqa: SLF001 -- as vLLM asks
    return found


def _installed(package: str) -> str:
    try:
        return f"{package}={importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _of(engine: Engine, path: str) -> Any:
    """Return an attribute of vLLM's config by its dotted path; None where a release does not have it."""
    value = engine.vllm_config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def plain(value: Any) -> Any:
    """Return a value as JSON data: an object as its class and public fields, a class or function as its full name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    return _fields(value) if isinstance(value, Mapping) else _object(value)


def digest(document: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits that stand for a document of plain data."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _fields(fields: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(plain(name)): plain(item) for name, item in fields.items() if not str(name).startswith("_")}


def _object(value: Any) -> Any:
    """Return an object's class and public fields; never its address, which differs by process."""
    if isinstance(value, enum.Enum):
        return value.name
    if hasattr(value, "__qualname__"):
        return _qualified_name(value)
    kind = type(value)
    if not hasattr(value, "__dict__") and (kind.__str__, kind.__repr__) != _TEXTLESS:
        return str(value)
    slots = {name: getattr(value, name, None) for base in kind.__mro__ for name in getattr(base, "__slots__", ())}
    return {"class": _qualified_name(kind), "fields": _fields(slots | getattr(value, "__dict__", {}))}


def _qualified_name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"
