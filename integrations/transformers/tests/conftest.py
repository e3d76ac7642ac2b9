"""Caches over a directory, what a call may say, and how tokens are generated."""

import logging
import os
import warnings
from pathlib import Path

import pytest
import torch

from kvtiers._log_queue import flush_logs
from kvtiers_transformers import PrefixCache

os.environ["HF_HUB_OFFLINE"] = "1"
NEW_TOKENS = 24
# These models compute a prompt in milliseconds, and the tests are about what is loaded.
OPTIONS = {"chunk_tokens": 16, "state_tokens": 32, "load_wait": 60.0, "load": "always"}


def pytest_collection_modifyitems(config, items):
    del config
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    """Two processes run the tests side by side, and these models are small."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")


def tiers(folder, **options):
    """Return a config with one directory."""
    tier = {"type": "fs", "path": str(folder), "capacity": "1GiB", "min_free": 0, **options}
    return {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [tier]}


@pytest.fixture
def open_cache(tmp_path):
    """Open caches over one directory; each is closed at the end."""
    opened = []

    def opens(model, folder=tmp_path / "kv", tier=(), **options):
        opened.append(PrefixCache(tiers(folder, **dict(tier)), model, **{**OPTIONS, **options}))
        return opened[-1]

    yield opens
    for cache in opened:
        cache.close()


def greedy(model_or_cache, ids, tokens=NEW_TOKENS, **arguments):
    """Return the tokens behind the prompts'."""
    arguments = {"attention_mask": torch.ones_like(ids), **arguments}
    found = model_or_cache.generate(ids, max_new_tokens=tokens, do_sample=False, **arguments)
    if isinstance(model_or_cache, PrefixCache):
        assert model_or_cache.flush(60)
    return found[:, ids.shape[1] :].tolist()


def loaded(cache):
    """Return how many tokens were loaded since the last time, and assert that the cache has not failed."""
    stats = cache.stats()
    assert stats["failed_calls"] == 0, stats
    before, cache.loaded_before = getattr(cache, "loaded_before", 0), stats["loaded_tokens"]
    return stats["loaded_tokens"] - before


def values_in(folder):
    """Return the files that hold values."""
    return sorted(
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name[0] != "." and "_layout" not in path.parts
    )


@pytest.fixture
def warnings_of_cache(caplog):
    """Return what the cache has said, line by line."""
    caplog.set_level(logging.WARNING, logger="kvtiers")

    def said():
        flush_logs(30.0)  # another thread handles them
        return [record.getMessage() for record in caplog.records if "transformers:" in record.getMessage()]

    return said
