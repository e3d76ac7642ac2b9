"""Batches: padding on the left, prompts that share a document, and single prompts with padding."""

import pytest
import torch

from .conftest import greedy, loaded
from .models import FIRST, MODELS, make, prompt

NAMES = [pytest.param(name, marks=[] if name in FIRST else pytest.mark.every_model) for name in MODELS]


def padded(prompts):
    """Return ids and mask of prompts that are padded on the left."""
    length = max(len(ids) for ids in prompts)
    ids, mask = torch.zeros(len(prompts), length, dtype=torch.long), torch.zeros(len(prompts), length, dtype=torch.long)
    for row, tokens in enumerate(prompts):
        ids[row, length - len(tokens) :] = tokens
        mask[row, length - len(tokens) :] = 1
    return ids, mask


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_questions_about_one_document(name, open_cache):
    model, document = make(name), prompt(100)[0]
    questions = [torch.cat([document, prompt(tokens, seed=tokens)[0]]) for tokens in (30, 5, 17)]
    prompts = [*questions, prompt(9, seed=4)[0], document[:40]]
    ids, mask = padded(prompts)
    truth = greedy(model, ids, attention_mask=mask, pad_token_id=0)
    cache = open_cache(model)
    if name == "deepseek_v32":
        assert greedy(cache, ids, attention_mask=mask, pad_token_id=0) == truth
        assert cache.stats()["bypassed_calls"] == 1, "an indexer looks at padding, too"
        return
    alone = [greedy(model, tokens[None])[0] for tokens in prompts]
    cold = greedy(cache, ids, attention_mask=mask, pad_token_id=0)
    assert cold == alone
    assert cold == truth
    first = loaded(cache)
    assert greedy(cache, ids, attention_mask=mask, pad_token_id=0) == truth
    assert loaded(cache) > max(first, 3 * 96)


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite_hybrid"])
def test_a_single_prompt_with_padding(name, open_cache):
    model = make(name)
    ids, mask = padded([prompt(70)[0], prompt(90)[0]])
    ids, mask = ids[:1], mask[:1]
    cache = open_cache(model)
    truth = greedy(model, ids, attention_mask=mask, pad_token_id=0)
    for tokens in (0, 64):
        assert greedy(cache, ids, attention_mask=mask, pad_token_id=0) == truth
        assert loaded(cache) == tokens


def test_a_prompt_of_one_token_is_the_models_alone(open_cache):
    model = make("llama")
    cache = open_cache(model)
    assert greedy(cache, prompt(1)) == greedy(model, prompt(1))
    assert cache.stats()["bypassed_calls"] == 1
