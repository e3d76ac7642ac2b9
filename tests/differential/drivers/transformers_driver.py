"""The driver of transformers: a real model on random weights, and greedy tokens."""

import sys
from pathlib import Path

from common import PATIENCE, Here, result

sys.path.insert(0, str(Path(__file__).parents[3] / "integrations" / "transformers"))

import torch
import transformers
from tests.conftest import OPTIONS
from tests.models import make, prompt

from kvtiers_transformers import PrefixCache

CHUNK, TOKENS, NEW = OPTIONS["chunk_tokens"], 70, 8
CHUNKS = TOKENS // CHUNK
torch.set_num_threads(1)


def release():
    return f"transformers {transformers.__version__}"


def greedy(model, ids):
    found = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    return found[:, ids.shape[1] :].tolist()


class Engine(Here):
    def __init__(self, config, weights):
        self._model = make("llama", sum(weights.encode()))
        self._truths = {}
        self._cache = PrefixCache(config, self._model, **{**OPTIONS, "load_wait": PATIENCE})

    def put(self, seed):
        greedy(self._cache, prompt(TOKENS, seed))
        self._cache.flush(PATIENCE)

    def get(self, seed):
        ids = prompt(TOKENS, seed)
        if seed not in self._truths:
            self._truths[seed] = greedy(self._model, ids)
        before = self._cache.stats()["loaded_tokens"]
        tokens = greedy(self._cache, ids)
        self._cache.flush(PATIENCE)
        found = (self._cache.stats()["loaded_tokens"] - before) // CHUNK
        return result(found, CHUNKS, int(tokens != self._truths[seed]))

    def close(self):
        self._cache.close()


open = Engine  # noqa: A001 -- the interface of drivers
