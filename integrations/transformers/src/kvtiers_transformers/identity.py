"""The identity of a model in transformers: everything but the tokens that decides what its KV is, and how it lies.

Two processes share values only where all of it is equal. What may change from one call to the next is not here: it is
in the keys (``adapters.py``), or keeps a call away from the cache (``model_checks.py``).
"""

import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import transformers

from kvtiers import BLOCK_HASH_ALGORITHM, ModelIdentity
from kvtiers.api import ConfigError
from kvtiers_transformers.adapters import adapter_configs, refuse_adapters
from kvtiers_transformers.geometry import Geometry
from kvtiers_transformers.weights import weights_identity

__all__ = ["config_digest", "identity_of", "refuse_model", "text_config"]

_OLDEST = (5, 24)
_FORMAT = 1  # of the values' bytes; another one shares nothing with this one
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "_commit_hash"}
_BY_LENGTH = {"dynamic", "longrope"}


def text_config(model: Any) -> Any:
    """Return the config that decides the cache's layers."""
    return model.config.get_text_config(decoder=True)


def refuse_model(model: Any) -> None:
    """Raise ConfigError, in one line, for a model whose KV the identity and the keys would not cover."""
    config = model.config
    if tuple(map(int, transformers.__version__.split(".")[:2])) < _OLDEST:
        raise ConfigError(
            f"transformers {transformers.__version__} has other caches; install {_OLDEST[0]}.{_OLDEST[1]} or newer"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("the model is an encoder-decoder; its cache depends on the encoder's input")
    if text_config(model) is not config:
        raise ConfigError("the model takes more than text; load its text model alone (AutoModelForCausalLM may do so)")
    if getattr(model, "hf_quantizer", None) is not None or getattr(config, "quantization_config", None) is not None:
        raise ConfigError("the model's weights are quantised, and a digest of their tensors does not name them")
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        raise ConfigError("the model's weights are quantised, and a digest of their tensors does not name them")
    if kinds := sorted(_BY_LENGTH & set(_rope_types(_rope(config)))):
        raise ConfigError(
            f"the rotary embedding is {kinds[0]!r}: a prefix's KV depends on how long the whole prompt is"
        )
    if "mrope_section" in json.dumps(_plain(_rope(config))):
        raise ConfigError(
            "the rotary embedding has several positions a token (mrope), which text alone does not decide"
        )
    refuse_adapters(model)


def identity_of(model: Any, geometry: Geometry, weights: str) -> ModelIdentity:
    """Return the model's identity. ``weights``: as in ``weights_identity``."""
    config = text_config(model)
    name = Path(str(getattr(config, "_name_or_path", "") or "")).name or type(model).__name__
    dtypes = sorted({str(part.dtype).removeprefix("torch.") for kind in geometry.kinds for part in kind.parts})
    layout = {
        "format": _FORMAT,
        "values": geometry.describe(),
        "model": config_digest(model),
        "code": _code(model),
        "adapters": _plain(adapter_configs(model)),
        "device": sorted({part.device.type for kind in geometry.kinds for part in kind.parts}),
    }
    return ModelIdentity(
        name,
        weights=weights_identity(model, weights),
        kv_dtype="+".join(dtypes),
        rope=_digest(_plain(_rope(config))),
        kv_layout=f"transformers {transformers.__version__} {_digest(layout)}",
        hash_algorithm=BLOCK_HASH_ALGORITHM,
        engine="transformers",
    )


def config_digest(model: Any) -> str:
    """Digest the model's config as it is now, with the implementations that compute attention and experts."""
    config = text_config(model)
    known = {name: value for name, value in config.to_dict().items() if name not in _NOT_THE_MODEL}
    chosen = {
        name: value
        for name, value in vars(config).items()
        if name.endswith("_implementation") or "_implementation_" in name
    }
    return _digest([_plain(known), _plain(chosen), str(model.dtype)])


def _rope(config: Any) -> Any:
    return [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta")]


def _rope_types(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [str(value[key]) for key in ("rope_type", "type") if key in value]
        return own + [kind for inner in value.values() for kind in _rope_types(inner)]
    return [kind for inner in value for kind in _rope_types(inner)] if isinstance(value, list) else []


def _code(model: Any) -> list[str]:
    """Return the name and a digest of the source of each class of the model's modules: a hub's model brings its own."""
    files = {}
    for module in model.modules():
        origin = sys.modules.get(type(module).__module__)
        path = getattr(origin, "__file__", None)
        if path and not type(module).__module__.startswith("torch."):
            files[type(module).__module__] = path
    sources = []
    for name, path in sorted(files.items()):
        try:
            sources.append(f"{name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}")
        except OSError:
            sources.append(f"{name} {inspect.getmodulename(path)}")
    return [f"{type(model).__module__}.{type(model).__qualname__}", *sources]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=_text))


def _text(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
