"""The whole stack on the device that vLLM runs on: CUDA where there is one, the CPU elsewhere."""

import pytest
import torch

from .conftest import CHUNKS, PROMPTS, WHOLE
from .ways import fs, whole_stack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 4 * (128 * (128 + 2 * 64 + 128) + 3 * 128 * 256)
"""Weights of the tiny model's layers; each is one multiply and one add a token."""
ATTENTION = 4 * 4 * 128 * 8192 + 512 * 128 * 2
"""Most operations for the products with 8,192 tokens before it, and for the logits."""
COPIES = {"cpu": "HostCopies", "cuda": "CudaCopies"}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param != DEVICE:
        pytest.skip(f"vLLM's device here is {DEVICE}; it needs vLLM for {request.param}, and its device")
    return request.param


def test_kv_of_this_device_comes_back_and_what_orders_its_pages_is_in_the_fingerprint(
    device, start, model, right, tmp_path
):
    config = whole_stack(fs(tmp_path / "store"))
    engine = start(model, config)
    assert right(engine, *PROMPTS) == [0, 0]
    assert engine.do("reset_prefix_cache")["ok"]
    assert right(engine, *reversed(PROMPTS)) == WHOLE[::-1], "the primary has it"
    engine.forget()
    assert right(engine, *PROMPTS) == WHOLE, "the tier has it"
    assert engine.metrics()["kvtiers_tier_loaded_chunks{fs}"] == CHUNKS

    kv = engine.do("kv")
    assert (kv["memory"], kv["copies"]) == (device, COPIES[device])
    assert kv["digested"]["layout"] == kv["layout"]
    decides = kv["digested"]["backend"]
    assert (decides["device"], decides["name"]) == (device, kv["device"])
    assert LAYERS * 2 <= kv["operations_per_token"] <= LAYERS * 2 + ATTENTION
    assert kv["prefill_seconds"], "the peak of either is known"
    engine.shutdown()

    named = start(model, config, attention_config={"backend": kv["backend"]})
    right(named, *PROMPTS)
    found = named.do("kv")
    assert found["digested"]["backend"]["attention"]["fields"]["backend"] == kv["backend"]
    assert found["backend"] == kv["backend"]
    named.shutdown()
