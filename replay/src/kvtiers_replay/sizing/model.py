"""The shape of a model's KV cache, read from the ``config.json`` of a Hugging Face model.

Per layer and token, with ``d`` bytes a number:

- multi-head and grouped-query attention: ``KV heads * (key head_dim + value head_dim) * d``; tensor parallelism
  divides the heads among the ranks, and a rank has at least one;
- multi-head latent attention (DeepSeek): ``(kv_lora_rank + qk_rope_head_dim) * d``, the same bytes on every rank.

Scales of a quantised cache and extra layers for speculation are not counted. Model types are known by name
(``sizing/known.py``); one whose cache is of another kind is refused: a wrong number would be worse than none. One that
is not known is taken for plain attention with a note, and refused where a field that nothing reads speaks of layers.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers_replay.sizing.fields import Fields
from kvtiers_replay.sizing.known import ATTENTIONS, LATENT, OTHER, PLAIN

__all__ = ["DTYPE_BYTES", "LayerGroup", "ModelShape", "read_model"]

DTYPE_BYTES = {
    "bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip

_LARGEST_FILE = 16 << 20
_MOST_LAYERS = 10_000

# Fields of caches without a fixed number of bytes for each token and layer, and their kinds.
_OTHER_CACHES = {
    "is_encoder_decoder": "an encoder, whose cross-attention has a cache of its own",
    "index_head_dim": "a sparse-attention indexer, which has a cache of its own",
    "global_head_dim": "layers with different head sizes",
    "block_configs": "layers with different numbers of heads",
    "use_cla": "layers that share their caches",
    **dict.fromkeys(
        (
            "mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size", "state_size", "attn_layer_period",
            "hybrid_override_pattern", "layers_block_type", "linear_attn_config", "linear_num_key_heads",
            "full_attention_interval", "attn_type_list",
        ),
        "layers that keep one state instead of KV for each token",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table: how many, the bytes of a token in one of them on one rank, their window."""

    layers: int
    layer_bytes: int
    window: int | None = None

    @property
    def name(self) -> str:
        """The kind of these layers."""
        kind = "full attention" if self.window is None else f"window of {self.window:,}"
        return f"{kind}, {self.layers} layers"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all of them, on one rank."""
        return self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's KV cache under tensor parallelism. ``latent``: every rank holds the same bytes, stored once.

    ``notes``: what the config leaves out and was taken as the model's class does.
    """

    name: str
    attention: str
    kv_dtype: str
    ranks: int
    groups: tuple[LayerGroup, ...]
    latent: bool = False
    notes: tuple[str, ...] = ()

    @property
    def rank_bytes_per_token(self) -> int:
        """Bytes of one token on one rank, all layers."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token as a tier stores it: of all ranks, what they have in common once."""
        return self.rank_bytes_per_token * self.stored_ranks

    @property
    def stored_ranks(self) -> int:
        """The number of ranks whose bytes a stored value has."""
        return 1 if self.latent else self.ranks

    def layout(self, tokens_per_block: int, blocks_per_chunk: int = 1) -> CacheLayout:
        """Return the layout of an engine that serves this model. ConfigError if the numbers do not fit."""
        tensors = [
            KVTensor(f"{index}.{layer}", index, tokens_per_block * group.layer_bytes)
            for index, group in enumerate(self.groups)
            for layer in range(group.layers)
        ]
        return CacheLayout(
            ModelIdentity(self.name, kv_dtype=self.kv_dtype),
            tuple(_kv_group(group, tokens_per_block) for group in self.groups),
            tuple(tensors),
            blocks_per_chunk,
            self.ranks,
            "replicated" if self.latent else "direct",
        )


def _kv_group(group: LayerGroup, tokens_per_block: int) -> KVGroup:
    kind = "full_attention" if group.window is None else "sliding_window"
    return KVGroup(group.name, tokens_per_block, kind, group.window)  # type: ignore[arg-type]  # one of the two


def read_model(path: str | os.PathLike[str], *, kv_dtype: str = "auto", ranks: int = 1) -> ModelShape:
    """Read a model's ``config.json``, or the one in this folder. ConfigError, one line, says what is missing.

    ``kv_dtype`` ``auto``: the model's own. ``ranks``: tensor parallelism.
    """
    where = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    fields = Fields(os.fspath(where), _read(where))
    _refuse_other_caches(fields)
    latent = fields.model_type in LATENT
    names = ("num_hidden_layers", *(("kv_lora_rank", "qk_rope_head_dim") if latent else ("num_attention_heads",)))
    fields.require(*names, *(() if latent or fields.given("head_dim") else ("hidden_size",)))
    layers = fields.count("num_hidden_layers", _MOST_LAYERS)
    if latent:
        width = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
        attention = f"MLA of {width} numbers"
    else:
        heads, head_bytes, attention = _heads(fields)
        width = _heads_on_a_rank(fields, heads, ranks) * head_bytes
    # Layers that reuse the cache of earlier ones are the last.
    own = layers - (fields.count("num_kv_shared_layers") if fields.given("num_kv_shared_layers") else 0)
    if own < 1:
        raise fields.error(f"'num_kv_shared_layers' leaves {own} of {layers} layers with a cache, expected at least 1")
    if kv_dtype == "auto":
        kv_dtype = fields.dtype(DTYPE_BYTES, _quantization_beside(where))
    windows = Counter(fields.windows(layers)[:own])
    if fields.model_type not in PLAIN | LATENT:
        _note_unknown(fields, layers)
    each = ATTENTIONS.get(fields.model_type, 1)
    groups = [
        LayerGroup(count * each, width * DTYPE_BYTES[kv_dtype], window)
        for window, count in sorted(windows.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    ]
    return ModelShape(fields.name, attention, kv_dtype, ranks, tuple(groups), latent, tuple(fields.notes))


def _refuse_other_caches(fields: Fields) -> None:
    advice = "this is not a shape that is known here; take vLLM's own number, as --bytes-per-token of kvtiers plan"
    if fields.model_type in OTHER:
        raise fields.error(f"model_type {fields.model_type!r} has {OTHER[fields.model_type]}; {advice}")
    for name, what in _OTHER_CACHES.items():
        if fields.given(name) and not fields.is_plain(name):
            raise fields.error(f"{name!r} says that the model has {what}; {advice}")
    if fields.given("kv_lora_rank") and fields.model_type not in LATENT:
        text = "'kv_lora_rank' says that the model has latent attention: an engine keeps the latent or whole heads"
        raise fields.error(f"{text}; model_type {fields.model_type[:60]!r} is not known here")


def _note_unknown(fields: Fields, layers: int) -> None:
    """Say that the shape is a guess, or refuse it where the config speaks of layers in a field that nothing read."""
    called = f"model_type {fields.model_type[:60]!r} is not known here" if fields.model_type else "no model_type"
    if unread := fields.unread(layers):
        named = ", ".join(each[:60] for each in unread[:5])
        raise fields.error(
            f"{called}, and these may say that its layers have other caches: {named}; take vLLM's number"
        )
    fields.notes.append(f"{called}: taken as plain attention in every layer; compare with what the engine prints")


def _quantization_beside(where: Path) -> object:
    """Return what ModelOpt writes beside the config, which vLLM takes where the config says nothing."""
    beside = where.with_name("hf_quant_config.json")
    if not beside.is_file():
        return None
    return _read(beside)


def _heads(fields: Fields) -> tuple[int, int, str]:
    """Return the KV heads, the numbers of one (key and value), and both in words."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.kv_heads(heads)
    if heads % kv_heads:
        raise fields.error(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
    head_dim = fields.head_dim(heads)
    value_dim = fields.count("v_head_dim") if fields.given("v_head_dim") else head_dim
    kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    size = f"{head_dim}" if value_dim == head_dim else f"{head_dim} and {value_dim}"
    return kv_heads, head_dim + value_dim, f"{kind}, {kv_heads} KV heads of {size}"


def _heads_on_a_rank(fields: Fields, heads: int, ranks: int) -> int:
    if heads % ranks and ranks % heads:
        raise fields.error(f"{heads} KV heads cannot be divided among {ranks} ranks; give a --tp that divides them")
    return max(1, heads // ranks)


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot read: {reason}; expected a model's config.json") from None
    if len(content) > _LARGEST_FILE:
        raise ConfigError(f"{path}: larger than {_LARGEST_FILE >> 20} MiB; expected a model's config.json")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is no JSON: {error}; expected a model's config.json") from None
