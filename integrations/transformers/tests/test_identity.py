"""What decides a model's KV is in its identity: what differs shares nothing, and what is equal is found again."""

import pytest
import torch

from kvtiers_transformers import PrefixCache
from kvtiers_transformers.identity import identity_of, text_config
from kvtiers_transformers.model_checks import probe
from kvtiers_transformers.weights import weights_identity

from .conftest import OPTIONS, greedy, loaded, tiers
from .models import make, prompt

IDS = prompt(60)
ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
OTHERS = {
    "weights": (lambda: make("llama", seed=1), {}),
    "one number": (lambda: one_number(make("llama")), {}),
    "a buffer": (lambda: other_buffer(make("llama")), {}),
    "dtype": (lambda: make("llama").to(torch.bfloat16), {}),
    "attention": (lambda: make("llama", attn_implementation="eager"), {}),
    "rope": (lambda: make("llama", rope_parameters=ROPE), {}),
    "model": (lambda: make("qwen3"), {}),
    "chunks": (lambda: make("llama"), {"chunk_tokens": 20}),
    "salt": (lambda: make("llama"), {"salt": "another tenant"}),
}


def one_number(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-3
    return model


def other_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(1.01)
    return model


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A directory in which a model has left the prompt."""
    folder = tmp_path_factory.mktemp("filled")
    with PrefixCache(tiers(folder), make("llama"), **OPTIONS) as cache:
        greedy(cache, IDS)
    return folder


@pytest.mark.parametrize(("other", "options"), OTHERS.values(), ids=OTHERS)
def test_a_model_that_differs_shares_nothing(other, options, filled, open_cache):
    other = other()
    cache = open_cache(other, filled, **options)
    assert greedy(cache, IDS) == greedy(other, IDS)
    assert loaded(cache) == 0


def test_an_equal_one_does(filled, open_cache):
    model = make("llama")
    cache = open_cache(model, filled)
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert loaded(cache) == 48, "the control"


def identity(model):
    return identity_of(model, probe(model, text_config(model), 16), "digest")


def test_the_engine_is_named_and_the_folders_name_is_no_part_of_it():
    one, other = make("llama"), make("llama")
    one.config._name_or_path = "/data/models/small"
    other.config._name_or_path = "hub/small"
    assert identity(one) == identity(other)
    assert identity(one).kv_layout.startswith("transformers ")
    assert identity(one).weights.startswith("digest-")


def test_the_hubs_commit_names_the_weights_with_samples_of_them():
    one, other = make("llama"), make("llama", seed=1)
    for model in (one, other):
        model.config._commit_hash = "a" * 40
    names = [weights_identity(model, "commit") for model in (one, other, one)]
    assert all(name.startswith(f"commit-{'a' * 40}-") for name in names)
    assert names[0] == names[2] != names[1], "what was loaded from a commit may have been changed since"
