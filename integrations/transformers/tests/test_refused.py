"""Models that are refused before anything is stored, each in one line."""

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from kvtiers.api import ConfigError
from kvtiers_transformers import identity
from kvtiers_transformers.geometry import geometry_of

from .conftest import values_in
from .models import INCONSISTENT, SIZE, make

TINY = {"vocab_size": 128, "d_model": 16, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2}


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**TINY, decoder_start_token_id=0)).eval()


def mamba():
    sizes = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16, "chunk_size": 16}
    config = transformers.Mamba2Config(vocab_size=128, hidden_size=32, num_hidden_layers=2, expand=2, **sizes)
    return transformers.Mamba2ForCausalLM(config).eval()


def rope(kind, **options):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **options}
    return make("llama", rope_parameters=parameters)


def quantised():
    model = make("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


def hooked():
    model = make("llama")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output)
    return model


def sharded():
    class Sharded(torch.Tensor):
        pass

    model = make("llama")
    weight = model.model.norm.weight.detach().as_subclass(Sharded)
    del model.model.norm.weight
    model.model.norm.register_buffer("weight", weight)
    return model


def offloaded():
    model = make("llama")
    model.lm_head = torch.nn.Linear(1, 1, device="meta")
    model.lm_head.forward = lambda x: torch.zeros(*x.shape[:-1], 128)
    return model


def prompt_tuned():
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(make("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()


def both_ways():
    return make("gemma3", use_bidirectional_attention=True)


REFUSED = {
    "encoder-decoder": (t5, "encoder-decoder"),
    "no attention": (mamba, "no attention layer"),
    "rope by length": (lambda: rope("dynamic"), "'dynamic'"),
    "quantised": (quantised, "quantised"),
    "hooked": (hooked, "forward hook"),
    "sharded": (sharded, "Sharded"),
    "training": (lambda: make("llama").train(), r"model.eval\(\)"),
    "prompt tuning": (prompt_tuned, "PROMPT_TUNING"),
    "both ways": (both_ways, "depends on what follows|continues otherwise"),
    **{name: (lambda name=name: make(name), "continues otherwise from a cache") for name in INCONSISTENT},
}


@pytest.mark.parametrize(("model", "why"), REFUSED.values(), ids=REFUSED)
def test_such_a_model_is_refused_before_anything_is_stored(model, why, tmp_path, open_cache):
    with pytest.raises(ConfigError, match=why) as refused:
        open_cache(model())
    assert "\n" not in str(refused.value)
    assert values_in(tmp_path) == []


def test_caches_of_other_kinds_are_refused():
    config = make("llama").config
    with pytest.raises(ConfigError, match="StaticCache"):
        geometry_of(StaticCache(config=config, max_cache_len=64), 16)

    class Quantised(transformers.cache_utils.DynamicLayer):
        pass

    cache = DynamicCache(config=config)
    cache.layers[0] = Quantised()
    with pytest.raises(ConfigError, match="Quantised"):
        geometry_of(cache, 16)


def test_a_release_with_other_caches_is_refused(open_cache, monkeypatch):
    monkeypatch.setattr(identity.transformers, "__version__", "5.17.0")
    with pytest.raises(ConfigError, match=r"transformers 5\.17\.0 has other caches; install 5\.24 or newer"):
        open_cache(make("llama"))


def test_other_mistakes_are_one_line(open_cache):
    model = make("llama")
    with pytest.raises(ConfigError, match="chunk_tokens"):
        open_cache(model, chunk_tokens=0)
    with pytest.raises(ConfigError, match="'digest' or 'commit'"):
        open_cache(model, weights="latest")
    with pytest.raises(ConfigError, match="not loaded from a hub"):
        open_cache(model, weights="commit")
    assert SIZE["num_hidden_layers"] == 2
