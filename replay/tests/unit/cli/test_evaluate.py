"""``kvtiers evaluate``: what is printed for people, and what is refused before any work."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [
        {"prompt_token_ids": [n % 5] * 400 + [n] * 100, "timestamp": 10 * n, "completion_tokens": 3} for n in range(60)
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "requests.jsonl"


def test_a_log_is_evaluated_and_the_terminal_says_what_pays_and_where_the_page_is(run, log):
    options = (
        "--gpu-cache",
        "64MiB",
        "--most-memory",
        "1GiB",
        "--no-replay",
        "--currency",
        "EUR ",
        "--output",
        "a.html",
    )
    result = run("evaluate", "--log", log, *options, "--output", "a.html")
    assert result.exit_code == 0, result.output
    assert "60 requests in 9.83 minutes, 420 full chunks of 64 tokens, " in result.output
    assert "It pays: " in result.output
    assert "EUR " in result.output
    assert "version: 1\nnamespace: prod\nprimary: {capacity: " in result.output
    assert "computing is faster at any length" in result.output
    assert "Assumed: Llama 3.1 8B (no --model given), 128 KiB of KV a token; 1 engine of 1 GPU" in result.output
    assert "Prices: EUR 2.5 for a GPU's hour; for a GiB and month memory EUR 0.3, disk EUR 0.01" in result.output
    assert result.output.rstrip().endswith("a.html")
    assert (log.parent / "a.html").stat().st_size > 10_000


def test_a_models_numbers_and_other_links_and_prices_are_taken(run, log):
    config = {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (log.parent / "config.json").write_text(json.dumps(config))
    options = ("--model", "config.json", "--tp", 2, "--kv-dtype", "fp8", "--gbps", "object=50", "--hours", 2, "--json")
    prices = ("--tier-price", "disk=0.5", "--gpu-price", 4, "--no-replay", "--gpu-cache", "16MiB", "--memory", "32MiB")
    data = json.loads(run("evaluate", "--log", log, *options, *prices).stdout)
    assert data["bytes_per_token"] == 65_536
    assert (data["gpus"], data["gpu_hour"], data["seconds"]) == (2, 4.0, 7200.0)
    assert [each["primary_bytes"] >> 20 for each in data["memory"]] == [32]  # though three chunks of 8 MiB fit, sealed
    tiers = {tier["type"]: tier for tier in data["tiers"]}
    assert tiers["object"]["break_even_tokens"] is not None
    assert tiers["disk"]["cost_a_day"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of --log, --vllm-log and --openai-log"),
        (("--log", "requests.jsonl", "--vllm-log", "x"), "give one of"),
        (("--log", "requests.jsonl", "--tp", "2"), "--tp and --kv-dtype need a --model"),
        (("--log", "requests.jsonl", "--tier-price", "disc=1"), "expected one of memory, disk, network, object"),
        (("--log", "requests.jsonl", "--output", "a.txt"), "a name that ends in .html"),
        (("--vllm-log", "requests.jsonl", "--only-model", "m"), "--only-model needs a log that names models"),
        (("--log", "blocks.jsonl"), "--tokens-per-block 64"),
        (("--log", "absent.jsonl"), "absent.jsonl: cannot read the log: No such file"),
        (("--vllm-log", "requests.jsonl"), "no request that can be used: it has no request (start vLLM with --enable-"),
        (
            ("--log", "server.log"),
            "2 lines are no JSON; the first is line 1. The log of a vLLM server is read",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(run, log, arguments, said):
    (log.parent / "blocks.jsonl").write_text('{"input_length": 640, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}\n')
    (log.parent / "server.log").write_text("INFO 11-25 10:00:00 [api_server.py:1] Starting\nINFO: Started\n")
    result = run("evaluate", *arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.slow
def test_ctrl_c_ends_it_between_two_steps_and_writes_no_page(log):
    lines = [{"prompt_token_ids": [n] * 4000, "timestamp": n} for n in range(3000)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "evaluate", "--log", log]
    process = subprocess.Popen(command, cwd=log.parent, stderr=subprocess.PIPE, text=True)
    # The handler is set by the time that a file is read.
    opened = Path(f"/proc/{process.pid}/fd")

    def is_log(descriptor):
        with contextlib.suppress(OSError):  # closed since it was listed
            return descriptor.readlink() == log.resolve()
        return False

    until = time.monotonic() + 100
    while not any(is_log(each) for each in opened.iterdir()):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert errors.endswith("stopped; nothing was written\n")
    assert not list(log.parent.glob("*.html"))
