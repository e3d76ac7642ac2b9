"""Which model's KV this is, from vLLM's own config: what decides the bytes of a row, and how its key came about.

vLLM gives a tier its ``OffloadingConfig``, which names neither weights nor quantisation. The ``VllmConfig`` that it was
made from is a local of the connector's constructor, which is on the stack while tiers are built.
"""

import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtiers.integrations.vllm.releases import public_version, release_of
from kvtiers.integrations.vllm.weights import is_random, random_weights, weights_of
from kvtiers.rows.layout import CacheLayout, KVGroup, KVTensor, ModelIdentity

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Engine", "Identity", "engine_of_stack", "identity_of", "row_layout"]

_UNSEEDED = {"xxhash", "xxhash_cbor"}  # vLLM keeps these algorithms' seed secret, by a random one for each process
_DEFAULT_SEED = "vllm-none-hash"
_OF_A_RANK = {"num_kv_heads", "page_size_padded"}
_BACKENDS = ("flashinfer-python", "flash-attn", "aiter")  # packages that vLLM's choice of a backend depends on
_NOT_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version", "architectures_override")


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """vLLM's config, as its connector was given it, that connector, and the engine whose scheduler it is built for.

    What is not on the stack is None.
    """

    vllm_config: Any
    kv_cache_config: Any
    connector: Any = None
    core: Any = None

    @property
    def is_alone(self) -> bool:
        """No other engine steps with it: what data parallel engines wait for is nothing to the others."""
        parallel = getattr(self.vllm_config, "parallel_config", None)
        return int(getattr(parallel, "data_parallel_size", 1) or 1) == 1


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """The model's identity, and what stands in the way of sharing: sentences for the log, empty if nothing does."""

    model: ModelIdentity
    warnings: tuple[str, ...]


def engine_of_stack() -> Engine:
    """Return the connector that is being built, and its configs."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 -- see the module's first lines
    while frame is not None:
        names = frame.f_locals
        if frame.f_code.co_name == "__init__" and "vllm_config" in names and "kv_cache_config" in names:
            return Engine(names["vllm_config"], names["kv_cache_config"], names.get("self"), _core_above(frame))
        frame = frame.f_back
    return Engine(None, None)


def _core_above(frame: "FrameType | None") -> Any:
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(type(found), "get_weight_version"):
            return found
        frame = frame.f_back
    return None


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
    if engine.vllm_config is None:
        return random_weights(), _nothing_shared("vLLM's config was not found")
    weights, why = weights_of(engine.vllm_config.model_config, str(_of(engine, "load_config.load_format")))
    draft = _of(engine, "speculative_config.draft_model_config")
    if not why and draft is not None and draft.model != engine.vllm_config.model_config.model:
        of_draft, why = weights_of(draft, str(_of(engine, "load_config.load_format")))
        weights = of_draft if is_random(of_draft) else f"{weights}+{of_draft}"
    return weights, _nothing_shared(why) if why else ""


def _nothing_shared(why: str) -> str:
    return (
        f"{why}, so the weights have no name: nothing is shared, nothing survives a restart; "
        "name them by kvtiers.weights in kv_connector_extra_config"
    )


def _seed(version: str, algorithm: str) -> tuple[str, str]:
    """Return the seed of vLLM's block hashes, and what is to be said about it."""
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
    """Digest the model's own config as vLLM uses it: with its overrides, rotary embedding and windows."""
    config = _of(engine, "model_config.hf_config")
    if config is None:
        return ""
    document = {name: value for name, value in config.to_dict().items() if name not in _NOT_THE_MODEL}
    return _digest(
        {
            "config": document,
            "dtype": str(_of(engine, "model_config.dtype")),
            "quantization": _plain(_of(engine, "model_config.quantization_config")),
            "speculative": _speculation(engine),
        }
    )


def _speculation(engine: Engine) -> Any:
    speculative = _of(engine, "speculative_config")
    if speculative is None:
        return None
    return {name: str(getattr(speculative, name, None)) for name in ("method", "num_speculative_tokens")}


def _layout_digest(engine: Engine, offloading: Any, version: str, *, own_rows: bool) -> str:
    """Digest what decides where in a row each number lies."""
    canonical = bool(getattr(offloading, "canonical_layout", False))
    any_ranks = own_rows and canonical
    groups = [
        {"tokens": group.tokens_per_block, "layers": list(group.layer_names), "spec": spec}
        for group, spec in zip(offloading.groups, _group_specs(engine, len(offloading.groups), any_ranks), strict=True)
    ]
    parallel = dataclasses.asdict(offloading.parallel)
    for name in ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"):
        parallel.pop(name, None)  # who computes it does not change it
    return _digest(
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
    """Return what decides vLLM's attention backend, and with it the order of the numbers in a page."""
    found = {
        "device": str(_of(engine, "device_config.device_type")),
        "attention": _plain(_of(engine, "attention_config")),
        "setting": os.environ.get("VLLM_ATTENTION_BACKEND", ""),
        "layout": os.environ.get("VLLM_KV_CACHE_LAYOUT", ""),
    }
    if engine.vllm_config is not None:
        found |= _device()
    return found


def _device() -> dict[str, str]:
    from vllm.platforms import current_platform  # only in an engine: whoever has a VllmConfig has vLLM

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


def _plain(value: Any) -> Any:
    """Return a section of vLLM's config as plain data, the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    if not isinstance(value, Mapping) and (isinstance(value, type) or not hasattr(value, "__dict__")):
        return str(value)
    fields = value if isinstance(value, Mapping) else vars(value)
    return {str(_plain(name)): _plain(item) for name, item in fields.items() if not str(name).startswith("_")}


def _of(engine: Engine, path: str) -> Any:
    """Return an attribute of vLLM's config by its dotted path; None where a release does not have it."""
    value = engine.vllm_config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
