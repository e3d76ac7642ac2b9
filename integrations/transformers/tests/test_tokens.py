"""Greedy tokens, model by model: the same without a cache, cold, warm, from another process, and after damage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtiers.layout.seal import PlainSeal, SealVerdict

from .conftest import greedy, loaded, values_in
from .models import FIRST, MODELS, make, prompt

NAMES = [pytest.param(name, marks=[] if name in FIRST else pytest.mark.every_model) for name in MODELS]
PROMPT = 150
WHOLE = 144  # its chunks of 16


@pytest.fixture(scope="module")
def others(tmp_path_factory, request):
    """What another process has generated, and the directories that it left."""
    folder = tmp_path_factory.mktemp("others")
    names = sorted({item.callspec.params["name"] for item in request.session.items if item.path == request.path})
    script = Path(__file__).with_name("other_process.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, folder, *names],
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=True,
    )
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_what_another_process_stored_is_loaded_and_the_tokens_are_the_same(name, others, open_cache):
    folder, tokens = others
    model = make(name)
    truth = greedy(model, prompt(PROMPT))
    assert tokens[name] == truth, "cold, in the other process"
    cache = open_cache(model, folder / name)
    assert greedy(cache, prompt(PROMPT)) == truth
    assert loaded(cache) == WHOLE
    # An answer and a question behind it, and a prompt that leaves the first one in the middle.
    longer = torch.cat([prompt(PROMPT), torch.tensor(truth), prompt(20, seed=2)], 1)
    assert greedy(cache, longer) == greedy(model, longer)
    assert loaded(cache) >= WHOLE
    branch = torch.cat([prompt(PROMPT)[:, :107], prompt(40, seed=3)], 1)
    assert greedy(cache, branch) == greedy(model, branch)
    assert 64 <= loaded(cache) <= 96, "the last boundary before the branch, or, with states, the last that was kept"


@pytest.mark.parametrize("name", NAMES)
def test_damaged_values_are_computed_and_stored_again(name, tmp_path, open_cache):
    model, ids = make(name), prompt(PROMPT)
    truth = greedy(model, ids)
    cache = open_cache(model)
    assert greedy(cache, ids) == truth
    assert loaded(cache) == 0
    files = values_in(tmp_path / "kv")
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 0x40
        path.write_bytes(content)
    cache = open_cache(model)
    assert greedy(cache, ids) == truth
    assert loaded(cache) == 0
    # A damaged value is found where it is read, and rows are not read where windows or states have failed.
    for _ in range(2):
        assert greedy(cache, ids) == truth
    assert loaded(cache) >= WHOLE, "what was computed again is there again"
    middle = values_in(tmp_path / "kv")[0::3]
    for path in middle:
        path.unlink()
    cache = open_cache(model)
    assert greedy(cache, ids) == truth
    assert loaded(cache) < WHOLE


@pytest.mark.parametrize("name", NAMES)
def test_with_the_check_switched_off_the_tokens_are_wrong_so_these_tests_can_fail(
    name, tmp_path, open_cache, monkeypatch
):
    model, ids = make(name), prompt(PROMPT)
    truth = greedy(model, ids)
    assert greedy(open_cache(model), ids) == truth
    for path in values_in(tmp_path / "kv"):
        path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setattr(PlainSeal, "check", lambda *_: SealVerdict.OK)
    cache = open_cache(model, tier={"io": "thread"})
    assert greedy(cache, ids) != truth
    assert loaded(cache) == WHOLE
