"""``kvtiers vllm-config``: what it prints is what vLLM takes, with no secret in it; what cannot be had is refused."""

import base64
import json
import shlex

import pytest
from click.testing import CliRunner

from kvtiers.api import ConfigError
from kvtiers.cli.main import cli
from kvtiers.encryption.config import encryption_of
from kvtiers_vllm.own_tiering.options import load_tier_options
from kvtiers_vllm.stack.options import load_stack_config

TIERS = """
version: 1
namespace: prod
model: {name: some-org/model, revision: abc}
primary: {capacity: 4GiB, eviction: arc}
lookup_wait: 50ms
load_wait: 1s
secondary:
  - {type: memory, name: near, capacity: "${ROOM}"}
  - {type: memory, name: far, capacity: 2GiB, deadline: 3s}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOM", "3GiB")

    def run(text, *arguments):
        (tmp_path / "tiers.yaml").write_text(text)
        monkeypatch.chdir(tmp_path)
        return CliRunner().invoke(cli, ["vllm-config", "tiers.yaml", *arguments])

    return run


def assert_no_config(printed):
    """See to it that vLLM takes this neither for a config nor, as it does an empty argument, for none."""
    (word,) = shlex.split(printed)
    assert word not in ("", "None")
    with pytest.raises(json.JSONDecodeError):
        json.loads(word)


def test_it_prints_one_argument_for_a_shell(run):
    result = run(TIERS)
    assert result.exit_code == 0, result.output
    option, value = shlex.split(result.stdout)
    assert option == "--kv-transfer-config"
    assert json.loads(value) == json.loads(run(TIERS, "--json").stdout)


def test_the_engine_reads_from_it_what_the_file_says(run):
    config = json.loads(run(TIERS, "--json", "--blocks-per-chunk", "4").stdout)
    extra = config["kv_connector_extra_config"]
    assert (config["kv_connector"], config["kv_role"]) == ("OffloadingConnector", "kv_both")
    assert (extra["spec_name"], extra["blocks_per_chunk"]) == ("TieringOffloadingSpec", 4)
    assert (extra["cpu_bytes_to_use"], extra["eviction_policy"]) == (4 << 30, "arc")
    tiers = []
    for entry in extra["secondary_tiers"]:
        tier, settings = load_tier_options(entry.pop("type"), entry, extra)
        tiers.append((tier.tier_name, tier.capacity, tier.deadline))
        assert (settings.namespace, settings.weights) == ("prod", "abc")
        assert (settings.lookup_wait, settings.load_wait) == (0.05, 1.0)
    assert tiers == [("near", 3 << 30, 30.0), ("far", 2 << 30, 3.0)]


@pytest.mark.parametrize(("name", "vllms"), [("lru", "lru"), ("arc", "arc"), ("turn-hazard", "kvtiers-turn-hazard")])
def test_a_policy_that_vllm_lacks_is_named_as_kvtiers_registers_it(run, name, vllms):
    extra = json.loads(run(TIERS.replace("arc", name), "--json").stdout)["kv_connector_extra_config"]
    assert extra["eviction_policy"] == vllms


def test_encryption_is_carried_over_and_never_left_out(run, monkeypatch):
    monkeypatch.setenv("KV_KEY", base64.b64encode(bytes(range(9, 41))).decode())
    text = TIERS + "  - {type: memory, name: clear, capacity: 1MiB, encrypt: false}\nencryption: {key: {env: KV_KEY}}\n"
    extra = json.loads(run(text, "--json").stdout)["kv_connector_extra_config"]
    assert extra["kvtiers"]["encryption"] == {"key": {"env": "KV_KEY"}}
    tiers = [load_tier_options(entry.pop("type"), entry, extra) for entry in extra["secondary_tiers"]]
    encrypted = [encryption_of(tier, settings.encryption) for tier, settings in tiers]
    assert [found is not None for found in encrypted] == [True, True, False]
    monkeypatch.delenv("KV_KEY")
    with pytest.raises(ConfigError, match=r"kvtiers\.encryption\.key\.env: environment variable 'KV_KEY' is not set"):
        load_tier_options("kvtiers-memory", {"capacity": "1MiB"}, extra)


def test_a_variable_stays_a_variable(run):
    output = run(TIERS).stdout
    assert "${ROOM}" in output
    assert "3GiB" not in output


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("4GiB,", "4GiB, huge_pages: 2MiB,"), "primary.huge_pages: vLLM's own primary has no such option"),
        (("4GiB,", "4GiB, prefault: all,"), "primary.prefault: vLLM's own primary has no such option"),
        (("4GiB,", "4GiB, pin_share: 5%,"), "primary.pin_share: vLLM's own primary has no such option"),
        (("lookup_wait: 50ms", "clean_reserve: 10%"), "clean_reserve: vLLM's own tiering has no such bound"),
        (("lookup_wait: 50ms", "budgets: {one_tier: 20%}"), "budgets: vLLM's own primary has none"),
        (("revision: abc", "revision: abc, kv_dtype: fp8"), "model.kv_dtype: the engine sets it"),
        (("deadline: 3s", "admission: on_eviction"), "admission: 'on_eviction' needs the whole stack"),
        (("memory, name: far, capacity: 2GiB", "memory-async, name: far, max_blocks: 9"), "moves rows by itself"),
        (("type: memory, name: far", "type: memroy, name: far"), "unknown tier type 'memroy'. Did you mean 'memory'?"),
    ],
)
def test_what_cannot_be_had_is_one_line_with_its_place(run, change, problem):
    result = run(TIERS.replace(*change))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: tiers.yaml: ")
    assert problem in line
    assert_no_config(result.stdout)


def test_a_file_that_is_not_there_is_one_line(run):
    result = CliRunner().invoke(cli, ["vllm-config", "nowhere.yaml"])
    assert result.exit_code == 2
    assert result.stderr == "error: nowhere.yaml: cannot read the file: No such file or directory\n"
    assert_no_config(result.stdout)


def test_the_whole_stack_reads_the_file_itself(run, tmp_path):
    result = run(TIERS + "budgets: {one_tier: 10%}\n", "--whole-stack", "--json", "--blocks-per-chunk", "4")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    extra = printed["kv_connector_extra_config"]
    assert printed["kv_connector"] == "KvtiersConnector"
    assert "spec_name" not in extra
    assert extra["blocks_per_chunk"] == 4
    config, weights = load_stack_config(extra)
    assert weights == "abc"
    assert [tier.tier_name for tier in config.secondary] == ["near", "far"]
    assert extra["kvtiers_config"] == str(tmp_path / "tiers.yaml")


def test_what_the_engine_says_itself_is_refused_for_the_whole_stack_too(run):
    result = run(TIERS.replace("revision: abc", "kv_dtype: float16"), "--whole-stack")
    assert result.exit_code == 2
    assert "tiers.yaml: model.kv_dtype: the engine sets it" in result.stderr
