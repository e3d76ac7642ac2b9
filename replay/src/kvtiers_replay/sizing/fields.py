"""The fields of a Hugging Face ``config.json``: their places, their names, and their defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvtiers.api import ConfigError
from kvtiers_replay.sizing.known import HARMLESS, LAYER_FIELD

__all__ = ["Fields"]

# A multi-modal model nests the part that has a KV cache.
_NESTED = ("text_config", "llm_config", "language_config")
_LARGEST = 1 << 32  # of any number in a config: a larger one is a slip

_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "head_dim": ("kv_channels", "attention_head_dim"),
}

# A nested config leaves out what its class has by default; these are transformers' configuration classes.
_CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma2": {
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096,
    },
    "llama": {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
    "mistral": {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "sliding_window": 4096,
    },
    "qwen2": {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096,
    },
}  # fmt: skip

# Every how many-th layer has full attention, where the config does not say so itself; and where none has.
_FULL_EVERY = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6}
_ALL_WINDOWED = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
_FULL_TYPES = {"full_attention", "attention"}
_WINDOW_TYPES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class Fields:
    """Reads the part of a config that describes the decoder. Every error is one line that begins with the file."""

    def __init__(self, where: str, document: object) -> None:
        if not isinstance(document, Mapping):
            raise ConfigError(f"{where}: expected a JSON object, got {type(document).__name__}")
        self._where = where
        self._whole: Mapping[str, Any] = document
        self._part = self._whole
        self._read: set[str] = set()  # fields that a number was taken from
        nested = next((name for name in _NESTED if isinstance(document.get(name), Mapping)), None)
        self._nested = nested is not None and self._raw("num_hidden_layers") is None
        if nested is not None and self._nested:
            self._part = document[nested]
        self.model_type = str(self._part.get("model_type") or self._whole.get("model_type") or "")
        self._defaults = _CLASS_DEFAULTS.get(self.model_type, {}) if self._nested else {}
        self.notes: list[str] = []

    @property
    def name(self) -> str:
        """The model's name, if the config has one."""
        architectures = self._whole.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        return str(self._whole.get("_name_or_path") or first or self._whole.get("model_type") or self._where)

    def error(self, text: str) -> ConfigError:
        """Return an error about this file."""
        return ConfigError(f"{self._where}: {' '.join(text.split())}")

    def given(self, name: str) -> bool:
        """Return whether the field is there with a value: not null, 0, false or empty."""
        return bool(self._raw(name))

    def is_plain(self, name: str) -> bool:
        """Return whether this field of a hybrid says that all layers are alike, or leaves it to ``layer_types``."""
        if self.model_type == "granitemoehybrid" and self.given("layer_types"):
            return True
        value = self._raw(name)
        return name == "attn_type_list" and isinstance(value, list) and all(each == 1 for each in value)

    def require(self, *names: str) -> None:
        """Raise one error that names all of these fields that are missing."""
        missing = [name for name in names if self._raw(name) is None and name not in self._defaults]
        if missing:
            place = f" in {next(name for name in _NESTED if name in self._whole)!r}" if self._nested else ""
            raise self.error(f"missing{place}: {', '.join(missing)}; add them, as the model's class has them")

    def count(self, name: str, most: int = _LARGEST) -> int:
        """Return a number from 1 to ``most``, which the file or the model's class must have."""
        value = self._raw(name)
        if value is None and name in self._defaults:
            value = self._defaults[name]
            self.notes.append(f"{name!r} is left out: taken as {value}, the default of model type {self.model_type!r}")
        if value is None:
            self.require(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(f"{name!r} is {repr(value)[:60]}, expected a whole number from 1 to {most}")
        return value

    def kv_heads(self, heads: int) -> int:
        """Return the number of KV heads; as many as attention heads where nothing is said."""
        if self.given("multi_query") and not self.given("new_decoder_architecture"):
            return 1
        if self._raw("num_key_value_heads") is not None or "num_key_value_heads" in self._defaults:
            return self.count("num_key_value_heads")
        if self._nested and not self._defaults:
            self.require("num_key_value_heads")  # the default of a class that is not known here
        self.notes.append(f"'num_key_value_heads' is left out: taken as 'num_attention_heads', {heads}")
        return heads

    def head_dim(self, heads: int) -> int:
        """Return the size of a head: its own field, or its share of the hidden size."""
        if self._raw("head_dim") is not None or "head_dim" in self._defaults:
            return self.count("head_dim")
        if self.model_type.startswith("gemma"):  # there it is no share of the hidden size
            self.require("head_dim")
        hidden = self.count("hidden_size")
        if hidden % heads:
            raise self.error(f"'hidden_size' {hidden} is no multiple of 'num_attention_heads' {heads}; give 'head_dim'")
        return hidden // heads

    def unread(self, layers: int) -> list[str]:
        """Return the fields that may say that some layers have another cache, and that nothing has read."""
        return [
            name
            for name, value in self._part.items()
            if value and value is not True and name not in self._read and not HARMLESS.search(name)
            if LAYER_FIELD.search(name) or (isinstance(value, list) and len(value) == layers)
        ]

    def dtype(self, known: Mapping[str, int], quantization: object = None) -> str:
        """Return the type of the cache's numbers as vLLM takes it where the user names none.

        ``quantization``: the config's own is left out, and this is that of a file beside it.
        """
        scheme = self._cache_scheme(quantization)
        if scheme is not None:
            self.notes.append("KV in fp8, as 'quantization_config' says; --kv-dtype takes another")
            return scheme
        for part in (self._whole, self._part):
            value = part.get("dtype") or part.get("torch_dtype")
            if value is not None:
                name = str(value).removeprefix("torch.")
                if name not in known:
                    raise self.error(f"type {name[:60]!r} is not known; give --kv-dtype: {', '.join(known)}")
                if name in {"float32", "float"}:
                    self.notes.append("weights in float32 are served as bfloat16; else give --kv-dtype float32")
                    return "bfloat16"
                return name
        raise self.error("missing: dtype (or torch_dtype); give --kv-dtype")

    def _cache_scheme(self, quantization: object) -> str | None:
        """Return the type of the cache that the checkpoint's quantization asks for, if it does."""
        parts = (self._whole, self._part)
        found = [
            part[name] for name in ("quantization_config", "compression_config") for part in parts if part.get(name)
        ]
        config = next((each for each in (*found, quantization) if isinstance(each, Mapping)), None)
        if config is None:
            return None
        inner = config.get("quantization")
        sources = (inner, config) if isinstance(inner, Mapping) else (config,)
        names = ("kv_cache_scheme", "kv_cache_quant_algo")
        said = next((each[name] for name in names for each in sources if each.get(name)), None)
        if said is None:
            return None
        if isinstance(said, Mapping) and (said.get("num_bits"), said.get("type")) == (8, "float"):
            return "fp8"
        if isinstance(said, str) and said.lower() == "fp8":
            return "fp8"
        raise self.error(
            f"'quantization_config' has the KV cache in {repr(said)[:60]}, not known here; give --kv-dtype"
        )

    def windows(self, layers: int) -> list[int | None]:
        """Return the attention window of each layer, in tokens; None: full attention."""
        types = self._raw("layer_types")
        if types is not None:
            return self._windows_of(types, layers)
        if self.given("attention_chunk_size"):
            if self.model_type in {"llama4", "llama4_text"}:
                return self._chunked(layers)
            raise self.error("missing: layer_types, which say where 'attention_chunk_size' applies")
        if not self._has_window():
            return [None] * layers
        window, pattern = self._window("sliding_window"), self._raw("sliding_window_pattern")
        if self.given("use_sliding_window") and self._raw("max_window_layers") is not None:
            first = self.count("max_window_layers") if self.given("max_window_layers") else 0
            return [window if layer >= first else None for layer in range(layers)]
        if pattern is not None or self.model_type in _FULL_EVERY:
            every = _FULL_EVERY[self.model_type] if pattern is None else self.count("sliding_window_pattern")
            return [window if (layer + 1) % every else None for layer in range(layers)]
        if self.model_type in _ALL_WINDOWED:
            return [window] * layers
        raise self.error(f"missing: layer_types, which say which layers have the 'sliding_window' of {window}")

    def _has_window(self) -> bool:
        # Qwen's configs name a window also where it is not used.
        if self._raw("use_sliding_window") is False or (
            self.model_type.startswith("qwen") and not self.given("use_sliding_window")
        ):
            return False
        # A field that is null means none, against the class's default.
        return self.given("sliding_window") or ("sliding_window" in self._defaults and not self._says("sliding_window"))

    def _windows_of(self, types: object, layers: int) -> list[int | None]:
        if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != layers:
            entries = f"{len(types)} entries" if isinstance(types, list) else repr(types)[:60]
            raise self.error(f"'layer_types' is {entries}, expected a list of {layers}, one for each layer")
        windows: dict[str, int | None] = {}
        for kind in dict.fromkeys(map(str, types)):
            if kind not in _FULL_TYPES and kind not in _WINDOW_TYPES:
                known = ", ".join(sorted(_FULL_TYPES | _WINDOW_TYPES.keys()))
                raise self.error(f"'layer_types' has {kind[:60]!r}, which is not a shape that is known here: {known}")
            windows[kind] = self._window(_WINDOW_TYPES[kind]) if kind in _WINDOW_TYPES else None
        return [windows[str(kind)] for kind in types]

    def _window(self, name: str) -> int:
        # A token of Cohere's attends to so many before it, and to itself.
        return self.count(name) + (self.model_type == "cohere2")

    def _chunked(self, layers: int) -> list[int | None]:
        """Return the windows of a Llama 4: layers with rotary positions attend in chunks; every fourth has none."""
        rotary = self._raw("no_rope_layers") or [(layer + 1) % 4 for layer in range(layers)]
        if not isinstance(rotary, list) or len(rotary) != layers:
            raise self.error(
                f"'no_rope_layers' is {repr(rotary)[:60]}, expected a list of {layers}, one for each layer"
            )
        chunk = self.count("attention_chunk_size")
        return [chunk if each else None for each in rotary]

    def _says(self, name: str) -> bool:
        return any(each in self._part for each in (name, *_ALIASES.get(name, ())))

    def _raw(self, name: str) -> Any:
        """Return the field under any of its names; None where it is missing or null."""
        for each in (name, *_ALIASES.get(name, ())):
            value = self._part.get(each)
            if value is not None:
                self._read.add(each)
                return value
        if name == "num_key_value_heads" and isinstance(nested := self._part.get("attn_config"), Mapping):
            self._read.add("attn_config")
            return nested.get("kv_n_heads")  # MPT and DBRX
        return None
