"""load, prefill and store by hand; text; adapters; trouble with the tiers."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from kvtiers._log_queue import flush_logs
from kvtiers.api import ConfigError
from kvtiers.client.client import Client
from kvtiers.client.state import ClientState
from kvtiers_transformers import PrefixCache
from kvtiers_transformers.reader import Reader
from kvtiers_transformers.writer import Writer

from .conftest import OPTIONS, greedy, loaded, tiers, values_in
from .models import make, prompt

IDS = prompt(100)


@pytest.mark.parametrize("name", ["llama", "mistral", "granite_hybrid"])
@pytest.mark.parametrize("way", ["load", "prefill"])
def test_by_hand(name, way, open_cache):
    model = make(name)
    truth = model.generate(IDS, max_new_tokens=16, do_sample=False)
    cache = open_cache(model)
    for _ in range(2):
        past = getattr(cache, way)(IDS)
        ids = model.generate(IDS, cache=past, max_new_tokens=16, do_sample=False)
        assert torch.equal(ids, truth)
        cache.store(past, ids)
        assert cache.flush()
    keeps = way == "prefill" or name == "llama"
    assert loaded(cache) == (96 if keeps else 0), "windows and states are kept where prefill() stops"
    longer = torch.cat([truth, prompt(5, seed=9)], 1)
    assert cache.load(longer).get_seq_length() == {"llama": 112, "mistral": 112}.get(name, 96) * keeps


@pytest.mark.parametrize(("name", "tokens"), [("llama", 100), ("mistral", 10), ("granite_hybrid", 10)])
@pytest.mark.parametrize("way", ["load", "prefill"])
def test_a_cache_that_has_nothing_yet_stores_nothing_and_is_no_failure(
    name, tokens, way, open_cache, warnings_of_cache
):
    """A model of full attention, which prefill() does not run; or a prompt that is shorter than a chunk."""
    model, ids = make(name), IDS[:, :tokens]
    cache = open_cache(model)
    past = getattr(cache, way)(ids)
    cache.store(past, ids)
    assert warnings_of_cache() == []
    assert cache.stats()["failed_calls"] == cache.stats()["bypassed_calls"] == cache.stats()["stored_values"] == 0
    out = model.generate(ids, cache=past, max_new_tokens=4, do_sample=False)
    cache.store(past, out)
    assert cache.flush()
    assert warnings_of_cache() == []
    assert cache.load(out).get_seq_length() == (96 if tokens == 100 else 0)


def test_a_cache_that_was_not_filled_from_these_tokens_is_not_stored(tmp_path, open_cache, warnings_of_cache):
    model = make("llama")
    cache = open_cache(model)
    elsewhere = DynamicCache(config=model.config)
    model(input_ids=IDS, cache=elsewhere)
    cache.store(elsewhere, IDS)
    past = cache.load(IDS)
    model(input_ids=IDS, cache=past)
    cache.store(past, prompt(100, seed=8))
    cache.store(past, IDS[:, :50])
    cache.store(None, IDS)
    past.batch_repeat_interleave(2)
    cache.store(past, IDS)
    assert cache.flush()
    assert values_in(tmp_path / "kv") == []
    assert len(warnings_of_cache()) == 3
    assert cache.load(torch.cat([IDS, IDS])).get_seq_length() == 0


def test_text_with_a_tokenizer(open_cache):
    class Tokenizer:
        def __call__(self, texts, *, return_tensors, padding, padding_side):
            assert (return_tensors, padding, padding_side) == ("pt", True, "left")
            rows = [[3 + ord(letter) % 100 for letter in text] for text in texts]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    model = make("llama")
    with PrefixCache(
        {"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [{"type": "memory", "capacity": "64MiB"}]},
        model,
        Tokenizer(),
        **OPTIONS,
    ) as cache:
        one = cache.generate("a long text, longer than two chunks of tokens", max_new_tokens=4, do_sample=False)
        both = cache.generate(
            ["a long text, longer than two chunks of tokens", "b"], max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert one.shape == (1, 49)
    assert torch.equal(one[0], both[0])


def adapted(seed):
    model = make("llama")
    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False), "one")
    model.add_adapter("two", LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False))
    return model.eval()


def test_adapters_share_nothing_with_each_other_or_the_base(open_cache):
    model = adapted(1)
    cache = open_cache(model)
    found = []
    for turn in (0, 96):
        for name in ("one", "two"):
            model.set_adapter(name)
            found.append(greedy(cache, IDS))
            assert found[-1] == greedy(model, IDS)
            assert loaded(cache) == turn
        with model.disable_adapter():
            found.append(greedy(cache, IDS))
            assert found[-1] == greedy(model, IDS)
            assert loaded(cache) == turn
    assert found[:3] == found[3:]
    assert found[0] != found[1] != found[2] != found[0]
    other = open_cache(adapted(2))
    greedy(other, IDS)
    assert loaded(other) == 0, "an adapter of the same name with other weights"
    same = open_cache(adapted(1))
    greedy(same, IDS)
    assert loaded(same) == 96


def test_a_merged_adapter_has_changed_the_weights(open_cache):
    model = adapted(1)
    cache = open_cache(model)
    greedy(cache, IDS)
    model.merge_adapter(["one"])
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert loaded(cache) == 0


def tenants_of(folder):
    """Return the tenants whose values are in a directory, "" for no one's."""
    return {next((part for part in path.parts if part.startswith("t-")), "") for path in values_in(folder)}


def test_tenants_share_nothing_and_a_call_may_name_another_than_the_caches(tmp_path):
    model = make("llama")
    config = tiers(tmp_path / "kv") | {"tenants": {}}
    truth = greedy(model, IDS)
    with PrefixCache(config, model, tenant="blue", **OPTIONS) as cache:
        for tenant in ("blue", "red", ""):
            for turn in (0, 96):
                assert greedy(cache, IDS, **({"tenant": tenant} if tenant != "blue" else {})) == truth
                assert loaded(cache) == turn
        assert tenants_of(tmp_path / "kv") == {"t-blue", "t-red", ""}
        longer = torch.cat([IDS, prompt(40, seed=3)], 1)
        past = cache.prefill(longer, tenant="red")
        cache.store(past, model.generate(longer, cache=past, max_new_tokens=2, do_sample=False))
        assert cache.flush()
        assert cache.load(longer, tenant="red").get_seq_length() == 128
        assert cache.load(longer).get_seq_length() == 96, "of blue it is the first prompt alone"


def test_a_tenant_that_may_not_be_is_one_line(tmp_path, caplog):
    model = make("llama")
    config = tiers(tmp_path / "kv") | {"tenants": {"unknown": False, "named": {"blue": {}}}}
    for named, line in (("Blue", "tenant 'Blue' cannot be used"), ("red", "tenant 'red' is not among 'tenants.named'")):
        with pytest.raises(ConfigError, match=line):
            PrefixCache(config, model, tenant=named, **OPTIONS)
    with PrefixCache(config, model, tenant="blue", **OPTIONS) as cache:
        truth = greedy(model, IDS)
        for named in ("red", "Blue", 5):
            assert greedy(cache, IDS, tenant=named) == truth
        assert cache.load(IDS, tenant="red").get_seq_length() == 0
        stats = cache.stats()
        assert (stats["prompts"], stats["bypassed_calls"], stats["failed_calls"]) == (0, 4, 0)
    assert values_in(tmp_path / "kv") == []
    flush_logs(30.0)
    lines = [record.getMessage() for record in caplog.records if "runs without tiers" in record.getMessage()]
    assert "tenant 'red' is not among 'tenants.named' in the config" in lines[0]
    assert len(lines) == 3, "with backoff"


def hosts():
    """Return the processes that this one has started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def test_a_store_that_hangs_costs_its_wait_and_nothing_else(tmp_path):
    model = make("llama")
    before = hosts()
    with PrefixCache(tiers(tmp_path, deadline="2s", grace="100ms"), model, **{**OPTIONS, "load_wait": 0.5}) as cache:
        truth = greedy(cache, IDS)
        [host] = hosts() - before
        os.kill(host, signal.SIGSTOP)
        try:
            start = time.monotonic()
            found = cache.generate(prompt(100, seed=3), max_new_tokens=4, do_sample=False)
            assert time.monotonic() - start < 10
        finally:
            os.kill(host, signal.SIGCONT)
        assert torch.equal(found, model.generate(prompt(100, seed=3), max_new_tokens=4, do_sample=False))
        assert greedy(cache, IDS) == truth


def has_put_all_that_it_can(thread):
    """Return whether a call of the client's in this thread waits for its values: it has begun as many as it may."""
    frame = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_code is not ClientState.wait.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_background_store_that_hangs_leaves_bounce_rows_for_loads_from_another_tier(tmp_path):
    """Of a prompt whose 16 values of 16 MiB would take all of them; the other tier has a shorter one."""
    model = make("llama", num_hidden_layers=8, num_key_value_heads=4, head_dim=1024, max_position_embeddings=2048)
    options = {**OPTIONS, "chunk_tokens": 64, "load_wait": 10.0}
    config = tiers(tmp_path / "works", io="thread")
    with PrefixCache(config, model, **options) as cache:
        greedy(cache, IDS, tokens=1)
    [hangs] = tiers(tmp_path / "hangs", name="hangs", deadline="300s")["secondary"]
    config["secondary"].append(hangs)
    before = hosts()
    with PrefixCache(config, model, **options) as cache:
        [host] = hosts() - before
        os.kill(host, signal.SIGSTOP)
        try:
            cache.generate(prompt(1024, seed=3), max_new_tokens=1)
            [writer] = [each for each in threading.enumerate() if each.name == "kvtiers-transformers-writer"]
            while not has_put_all_that_it_can(writer):
                assert cache.stats()["waiting_bytes"], "the store does not hang"
                time.sleep(0.01)
            assert cache.load(IDS).get_seq_length() == 64
            assert cache.stats()["waiting_bytes"] == 256 << 20, "the store does not hang any more"
        finally:
            os.kill(host, signal.SIGCONT)


def test_a_fault_of_the_cache_is_one_line_and_the_model_computes(open_cache, monkeypatch, warnings_of_cache):
    model = make("gemma3")
    truth = greedy(model, IDS)
    cache = open_cache(model)

    def fails(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(Reader, "restore", fails)
    assert greedy(cache, IDS) == truth
    monkeypatch.undo()
    monkeypatch.setattr(Writer, "submit", fails)
    assert greedy(cache, IDS) == truth
    assert cache.stats()["failed_calls"] == 2
    assert all("no such thing" in line for line in warnings_of_cache())
    assert len(warnings_of_cache()) == 2


def test_more_than_may_wait_is_not_stored_and_what_was_is_right(open_cache, monkeypatch):
    model = make("gemma3")
    put = Client.put

    def slow(*args, **more):
        time.sleep(0.2)
        return put(*args, **more)

    monkeypatch.setattr(Client, "put", slow)
    cache = open_cache(model, pending_bytes=1, state_tokens=16)
    truth = greedy(model, IDS)
    assert greedy(cache, IDS) == truth
    assert cache.stats()["dropped_values"] > 0
    assert greedy(cache, IDS) == truth
    assert cache.stats()["failed_calls"] == 0


def test_under_inference_mode_and_then_without(open_cache):
    model = make("granite_hybrid")
    truth = greedy(model, IDS)
    cache = open_cache(model)
    with torch.inference_mode():
        assert greedy(cache, IDS) == truth
        assert greedy(cache, IDS) == truth
    assert greedy(cache, IDS) == truth
    assert loaded(cache) == 2 * 96


def test_what_waits_is_stored_when_the_interpreter_exits(tmp_path, open_cache):
    program = (
        "from conftest import OPTIONS, tiers; from models import make, prompt; import sys\n"
        "from kvtiers_transformers import PrefixCache\n"
        "cache = PrefixCache(tiers(sys.argv[1]), make('llama'), **OPTIONS)\n"
        "cache.generate(prompt(100), max_new_tokens=4, do_sample=False)\n"
    )
    folder = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, tmp_path / "kv"], cwd=folder, timeout=120, check=True
    )
    cache = open_cache(make("llama"))
    greedy(cache, IDS)
    assert loaded(cache) == 96


def test_the_example_gives_the_same_answers_and_a_plot(tmp_path):
    script = Path(__file__).parents[3] / "examples" / "transformers" / "long_document.py"
    options = ["--random", "--cache", tmp_path / "kv", "--plot", tmp_path / "plot.png", "--tokens", "4"]
    command = [sys.executable, "-W", "ignore", script, *options, "--device", "cpu"]
    said = [
        subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout for _ in range(2)
    ]
    assert [text.count("the same answer as without: True") for text in said] == [3, 3]
    counts = [[int(word) for word in text.split("\n\n")[-1].split() if word.isdigit()] for text in said]
    assert counts[0][0] < counts[1][0], "the second process finds the document, too"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_after_close_the_model_computes(open_cache):
    model = make("llama")
    cache = open_cache(model)
    truth = greedy(cache, IDS)
    cache.close()
    assert greedy(cache, IDS) == truth
