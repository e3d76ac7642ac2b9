"""``kvtiers size``: what is printed, for people and for programs, and what is refused."""

import json

import pytest

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 3840, "model_type": "gemma3_text", "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "sliding_window": 1024,
    },
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(document) -> str:
        (tmp_path / "config.json").write_text(json.dumps(document))
        return "config.json"

    return write


def lines_of(output: str) -> dict[str, list[str]]:
    """Return the cells of each line of the tables, by its first one."""
    found = {}
    for line in output.splitlines():
        name, *cells = [cell.strip() for cell in line.split("  ") if cell.strip()] or [""]
        found.setdefault(name, cells)
    return found


def test_the_tables_say_what_a_token_a_block_and_a_gib_are(run, config):
    result = run("size", "--model", config(LLAMA_31_8B), "--tp", "4", "--tokens-per-block", "32")
    assert result.exit_code == 0
    assert result.output.startswith("LlamaForCausalLM: 32 layers, GQA, 8 KV heads of 128, KV in bfloat16, 4 ranks\n")
    lines = lines_of(result.output)
    assert lines["a token"] == ["32KiB (32,768)", "128KiB (131,072)"]
    assert lines["a block of 32"] == ["1MiB (1,048,576)", "4MiB (4,194,304)"]
    assert lines["tokens per GiB"] == ["32,768", "8,192"]


def test_the_table_of_tiers_has_a_line_for_each_type(run, config):
    result = run("size", "--model", config(LLAMA_31_8B), "--gbps", "object=0.5", "--rtt", "network=2ms")
    lines = lines_of(result.output)
    # 3 GB/s * 2 ms are 6 MB: four blocks of 2 MiB. A token takes 131,072 / 3e9 s from there and 131,072 / 25e9 s to
    # the GPU, so that each gains 51 us on the 100 us of computing it, for 2.02 ms of round trips.
    assert lines["network"] == ["3", "2ms", "4", "64", "8MiB", "8MiB", "8,188", "64 tokens"]
    assert lines["object"][0] == "0.5"
    assert lines["object"][-1] == "never: computing is faster"
    assert {"primary", "memory", "disk"} <= lines.keys()


def test_hybrids_have_a_line_for_each_kind_of_layer_and_notes_say_what_was_left_out(run, config):
    result = run("size", "--model", config(GEMMA_3_12B))
    lines = lines_of(result.output)
    assert lines["full attention, 8 layers"][0] == "64KiB (65,536)"
    assert lines["window of 1,024, 40 layers"][0] == "320KiB (327,680)"
    assert "note: 'head_dim' is left out: taken as 256, the default of model type 'gemma3_text'\n" in result.output


def test_json_is_one_object_with_plain_numbers(run, config):
    result = run("size", "--model", config(LLAMA_31_8B), "--tp", "2", "--json", "--prefill", "5000")
    data = json.loads(result.stdout)
    assert data["bytes_per_token"] == {"rank": 65536, "stored": 131072}
    assert data["bytes_per_block"] == {"rank": 1 << 20, "stored": 2 << 20}
    assert data["groups"] == [{"layers": 32, "window": None, "bytes_per_token": 65536}]
    assert data["tokens_per_gib"] == {"rank": 16384.0, "stored": 8192.0}
    network = data["tiers"]["network"]
    assert (network["blocks_per_chunk"], network["value_bytes"]) == (1, [(2 << 20) + 4096])
    assert network["break_even_tokens"] == 16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gbps", "netwrok=3"], "unknown type of tier 'netwrok'. Did you mean 'network'? Types of tiers: primary, "),
        (["--gbps", "network"], "expected TIER=GB/s, got 'network'"),
        (["--gbps", "network=fast"], "network: expected GB/s, a number above 0, got 'fast'"),
        (["--gbps", "network=0"], "network: expected GB/s, a number above 0, got '0'"),
        (["--gbps", "network=nan"], "network: expected GB/s, a number above 0, got 'nan'"),
        (["--rtt", "disk=3"], "disk: no unit in '3'"),
        (["--tp", "0"], "0 is not in the range"),
        (["--prefill", "0"], "0 is not in the range"),
        (["--prefill", "nan"], "'nan' is not a valid integer"),
        (["--kv-dtype", "int3"], "'int3' is not one of 'auto', 'bfloat16'"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(run, config, arguments, text):
    result = run("size", "--model", config(LLAMA_31_8B), *arguments)
    assert result.exit_code == 2
    assert text in result.stderr.splitlines()[-1]


def test_a_config_of_unknown_shape_is_one_line_that_names_what_is_missing(run, config):
    result = run("size", "--model", config({"hidden_size": 64, "torch_dtype": "float16"}))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: config.json: missing: num_hidden_layers, num_attention_heads; add them, as the model's class has them\n"
    )


def test_the_help_has_examples_and_exit_statuses(run):
    result = run("size", "--help")
    assert result.exit_code == 0
    assert "  kvtiers size --model config.json\n" in result.output
    assert "Exit status:" in result.output
    assert max(map(len, result.output.splitlines())) <= 100
