"""``kvtiers replay`` as people run it: a process, its exit status, and what it prints."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtiers.cli.main import cli
from kvtiers_replay.content import BlockContent

from .setups import named, wait_until

CONFIG = """\
version: 1
primary: {capacity: 4MiB}
secondary:
  - {type: memory, io: thread, capacity: 64MiB}
lookup_wait: 30s
load_wait: 30s
"""


# Of the made-up trace, hundreds are to fit into a small primary.
SMALL = ("--bytes-per-chunk", 4032)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "replay", *map(str, arguments)]


def run(*arguments: object) -> Result:
    """Run the command in this process: to start one takes longer than most of these replays."""
    return CliRunner().invoke(cli, ["replay", *map(str, arguments)], prog_name="kvtiers")


@pytest.fixture
def config_file(tmp_path) -> Path:
    path = tmp_path / "tiers.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def test_json_is_exactly_one_object_on_stdout_with_what_a_tier_counts_itself(config_file, trace_file) -> None:
    arguments = command("--config", config_file, "--trace", trace_file, "--requests", 60, *SMALL, "--json")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert {"references", "prefix_hits", "hits", "wrong_bytes", "bytes", "seconds"} <= set(figures)
    assert figures["wrong_bytes"] == 0
    assert 0 < figures["prefix_hits"] == sum(figures["hits"].values()) < figures["references"]
    assert set(figures["hits"]) == {"primary", "memory"}
    assert set(figures["bytes"]) == {"gpu -> primary", "primary -> gpu", "primary -> memory", "memory -> primary"}
    (own,) = figures["own_figures"]["memory"]
    stored = figures["bytes"]["primary -> memory"]
    assert stored > 0
    records = 2 * 4096  # a page each: of this fingerprint, and of the engine that has stored last
    assert own["held_bytes"] == stored + records  # of the end, though it comes each second only


def test_without_a_config_the_code_workload_runs_and_ends_with_a_table_and_a_verdict() -> None:
    done = run("--workload", "code", "--requests", 40, "--bytes-per-chunk", "4KiB")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("Replay of code: 40 requests in ")
    for text in ("an infinite cache's", "from primary", "from memory", "tokens not recomputed", "memory -> primary"):
        assert text in done.stdout
    assert done.stdout.rstrip().endswith("Every chunk that came back was compared byte by byte: all bytes are right.")
    assert "\x1b" not in done.stdout


def test_a_trace_with_tenants_shows_that_they_share_nothing(tmp_path) -> None:
    """Each prompt comes four times: of blue, of red, of blue, of none; only the third finds anything."""
    trace, config = tmp_path / "trace.jsonl", tmp_path / "tiers.yaml"
    with trace.open("w", encoding="utf-8") as lines:
        for number, tenant in enumerate(["blue", "red", "blue", ""] * 5):
            ids = [f"{number // 4}.{place}" for place in range(4)]
            fields = {"timestamp": number, "input_length": 4 * 512 + 1, "hash_ids": ids}
            lines.write(json.dumps(fields | ({"tenant": tenant} if tenant else {})) + "\n")
    disk = f"{{type: fs, path: {tmp_path / 'fs'}, capacity: 64MiB, min_free: 0}}"
    waits = "lookup_wait: 30s\nload_wait: 30s\n"
    config.write_text(f"version: 1\nprimary: {{capacity: 4MiB}}\ntenants: {{}}\nsecondary: [{disk}]\n{waits}")
    done = run("--config", config, "--trace", trace, *SMALL, "--json")
    assert done.exit_code == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tenants"] == {
        "blue": {"requests": 10, "references": 40, "hits": 20},
        "red": {"requests": 5, "references": 20, "hits": 0},
    }
    assert figures["prefix_hits"] == 20
    counted = CliRunner().invoke(cli, ["store", "du", "fs", "--config", str(config), "--by", "tenant", "--json"])
    of = {each["tenant"]: each["values"] for each in json.loads(counted.stdout)["tenants"]}
    assert of == {"blue": 20, "red": 20}
    assert json.loads(counted.stdout)["total"]["values"] == 60


LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_models_config_gives_the_bytes_of_a_chunk(tmp_path, trace_file) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA_32_1B), encoding="utf-8")
    options = ("--model", model, "--kv-dtype", "fp8", "--requests", 3, "--blocks-per-chunk", 2, "--json")
    done = run("--trace", trace_file, *options)
    assert done.exit_code == 0, done.stderr
    figures = json.loads(done.stdout)
    per_token = 16 * 8 * (64 + 64) * 1
    assert figures["bytes"]["gpu -> primary"] > 0
    assert figures["bytes"]["gpu -> primary"] % (2 * 512 * per_token) == 0
    assert "KV in fp8" in figures["settings"]["model"]
    assert figures["settings"]["chunks"].startswith("16MiB,")


def test_without_one_a_chunk_is_as_large_as_a_small_models(trace_file) -> None:
    done = run("--trace", trace_file, "--requests", 3, "--json")
    figures = json.loads(done.stdout)
    assert figures["settings"]["chunks"].startswith("6MiB,")
    assert "12 KiB a token, as Qwen2.5-0.5B in bfloat16" in figures["settings"]["model"]
    assert figures["bytes"]["gpu -> primary"] % (512 * 12 * 1024) == 0


def test_without_any_tier_installed_the_code_workload_runs_on_the_primary_alone() -> None:
    # As in an environment with core and replay alone (which tests/packaging makes).
    script = (
        "from kvtiers import plugins; real = plugins.distributions\n"
        "plugins.distributions = lambda **at: [d for d in real(**at) if d.name in ('kvtiers', 'kvtiers-replay')]\n"
        "from kvtiers.cli.main import main; main()"
    )
    arguments = ("replay", "--workload", "code", "--requests", "5", "--json")
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        "no tier below the primary: give a --config, or pip install --find-links wheels kvtiers-example" in done.stderr
    )
    assert set(json.loads(done.stdout)["hits"]) == {"primary"}


def test_a_second_run_over_a_store_that_stays_says_that_it_was_warm(tmp_path, trace_file) -> None:
    file = tmp_path / "fs.yaml"
    file.write_text(CONFIG.replace("type: memory, io: thread", f"type: fs, path: {tmp_path}/fs"), encoding="utf-8")
    arguments = ("--config", file, "--trace", trace_file, "--requests", 60, *SMALL)
    first, second = run(*arguments), run(*arguments)
    assert first.exit_code == second.exit_code == 0, first.stderr + second.stderr
    assert "the store was warm" not in first.stdout
    assert re.search(r"an infinite cache's +- +the store was warm", second.stdout)


def test_kvtiers_status_sees_a_running_replay(config_file, trace_file) -> None:
    arguments = ("--config", config_file, "--trace", trace_file, "--speed", 1, *SMALL)
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        status = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "status", "--json"]

        def answer() -> list[dict]:
            done = subprocess.run(status, capture_output=True, text=True, timeout=100, check=False)
            return [engine for engine in json.loads(done.stdout) if engine["pid"] == process.pid]

        wait_until(lambda: any(engine["tiers"]["memory"]["stored_chunks"] for engine in answer()))
        (engine,) = answer()
        assert engine["engine"].startswith("kvtiers replay ")
        assert engine["model"] == "replay"
        assert engine["tiers"]["memory"]["open"]
    finally:
        process.kill()
        process.wait(60)


def test_the_engines_prefix_cache_appears_among_the_hits(config_file, trace_file) -> None:
    done = run("--config", config_file, "--trace", trace_file, "--gpu-blocks", 300, *SMALL, "--json")
    figures = json.loads(done.stdout)
    assert figures["hits"]["gpu"] > 0
    assert figures["wrong_bytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give either --trace FILE or --workload NAME"),
        (("--workload", "code", "--trace", "x"), "give either --trace FILE or --workload NAME"),
        (("--workload", "poems"), "'poems' is not one of 'code', 'agent', 'rag'"),
        (("--trace", "/no/such/trace"), "error: /no/such/trace: cannot read the trace: No such file or directory"),
        (("--workload", "code", "--config", "/no/such.yaml"), "error: /no/such.yaml: cannot read the file"),
        (("--workload", "code", "--bytes-per-chunk", "4 parsecs"), "unknown unit 'parsecs'"),
        (("--workload", "code", "--bytes-per-chunk", "0"), "expected more than 0"),
        (("--workload", "code", "--gpu-blocks", "2"), "error: --gpu-blocks 2: the longest request has"),
        (("--workload", "code", "--requests", "0"), "0 is not in the range"),
        (("--workload", "code", "--engines", "2"), "--engines needs a --config with tiers that processes share"),
        (("--workload", "code", "--store", "lazy"), "error: --store lazy stores what the engine's own prefix cache"),
        (("--workload", "code", "--workers", "3", "--bytes-per-chunk", "4KiB"), "give a multiple of 3"),
        (("--workload", "code", "--model", "x", "--bytes-per-chunk", "4KiB"), "exclude each other"),
        (("--workload", "code", "--model", "/no/config.json"), "error: /no/config.json: cannot read"),
        (("--workload", "code", "--bytes-per-chunk", "1TiB"), "error: the engine's blocks take up to"),
        (("--workload", "code", "--speed", "0"), "0.0 is not in the range x>0"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_exit_status_2(arguments, text) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert text in done.stderr
    assert done.stdout == ""


def test_wrong_bytes_are_exit_status_1_and_one_clear_line(config_file, trace_file, monkeypatch) -> None:
    write = BlockContent.write

    def write_with_a_flipped_bit(content, hashes, block_ids) -> None:
        write(content, hashes, block_ids)
        content._tensors[0][block_ids[-1], 7] ^= 1

    monkeypatch.setattr(BlockContent, "write", write_with_a_flipped_bit)
    done = run("--config", config_file, "--trace", trace_file, "--requests", 60, *SMALL)
    assert done.exit_code == 1
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"WRONG: [\d,]+ bytes that came back are not those that were stored\.", last)


def test_a_process_that_ends_early_is_one_line_and_no_report(config_file, trace_file) -> None:
    arguments = ("--config", config_file, "--trace", trace_file, "--workers", 2, "--speed", 1, *SMALL)
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: named(process.pid, "rank 1"))
    os.kill(named(process.pid, "rank 1")[0], signal.SIGKILL)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 2
    assert out == ""
    assert re.search(
        r"^error: rank 1 \(process \d+\) was killed by signal 9; the replay cannot go on", err, re.MULTILINE
    )
    assert "Traceback" not in err


def test_a_malformed_trace_names_file_and_line(tmp_path, trace_file) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(trace_file.read_text(encoding="utf-8").splitlines()[0] + "\n{]\n", encoding="utf-8")
    done = run("--trace", bad)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {bad}:2: this is no JSON")
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_cleanly_with_the_report_so_far(config_file, trace_file, tmp_path) -> None:
    lines = trace_file.read_text(encoding="utf-8")
    endless = tmp_path / "endless.jsonl"
    endless.write_text(lines * 40, encoding="utf-8")
    process = subprocess.Popen(
        command("--config", config_file, "--trace", endless, "--bytes-per-chunk", "64KiB", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()  # the first line of progress
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    figures = json.loads(out)
    assert figures["wrong_bytes"] == 0
    assert figures["references"] > 0
