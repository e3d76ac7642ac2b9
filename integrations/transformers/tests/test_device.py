"""The same on CUDA tensors, where there is a device: tokens, batches, and one identity for each device."""

import pytest
import torch

from .conftest import greedy, loaded
from .models import FIRST, MODELS, make, prompt
from .test_batches import padded

ON_CPU = ("llama", "gemma3", "granite_hybrid")  # the others: test_tokens.py
CASES = [pytest.param(name, "cpu", marks=[] if name in ON_CPU else pytest.mark.every_model) for name in MODELS]
CASES += [
    pytest.param(name, "cuda", marks=[pytest.mark.gpu, *([] if name in FIRST else [pytest.mark.every_model])])
    for name in MODELS
]


@pytest.mark.parametrize(("name", "device"), CASES)
def test_cold_and_warm_on_a_device(name, device, open_cache):
    model, ids = make(name, device=device), prompt(150).to(device)
    truth = greedy(model, ids)
    cache = open_cache(model)
    assert greedy(cache, ids) == truth
    assert loaded(cache) == 0
    cache = open_cache(model)
    past = cache.load(ids)
    assert past.get_seq_length() == 144
    assert {part.of(past.layers[part.layer]).device for kind in cache._geometry.kinds for part in kind.parts} == {
        next(model.parameters()).device
    }
    assert loaded(cache) == 144
    assert greedy(cache, ids) == truth
    batch, mask = (it.to(device) for it in padded([prompt(150)[0], prompt(60)[0]]))
    found = greedy(cache, batch, attention_mask=mask, pad_token_id=0)
    assert found[0] == truth[0]


@pytest.mark.gpu
def test_what_the_cpu_computed_is_not_the_devices(open_cache):
    cache = open_cache(make("llama"))
    greedy(cache, prompt(100))
    cache = open_cache(make("llama", device="cuda"))
    greedy(cache, prompt(100).to("cuda"))
    assert loaded(cache) == 0
    assert torch.cuda.is_available()
