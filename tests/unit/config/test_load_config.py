"""A config that is right becomes plain numbers; one that is wrong becomes one clear line for each mistake."""

import os
from pathlib import Path

import pytest
import yaml

from kvtiers import plugins
from kvtiers.api import ConfigError
from kvtiers.config import ModelConfig, load_config

MINIMAL = "version: 1\nprimary: {capacity: 1GiB}\n"


def problems(source) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return caught.value.problems


def test_every_option_of_a_full_config_arrives(tiers_yaml, shelf, full):
    tiers_yaml.write_text(full)
    config = load_config(tiers_yaml)
    assert config.primary.capacity == 64 * 2**30
    assert (config.primary.huge_pages, config.primary.start_deadline) == ("off", 60.0)
    assert (config.lookup_wait, config.load_wait, config.clean_reserve) == (0.02, "auto", 0.05)
    assert config.start_wait == 1.0
    assert config.record.model_dump() == {"path": "/var/log/kvtiers/trace.jsonl", "max_bytes": 2 * 10**9}
    first, second = config.secondary
    assert (first.capacity, first.ttl, first.fill, first.nodes) == (500 * 2**30, 86400.0, 0.8, ["here", "there"])
    assert (first.breaker.failures, first.breaker.window, first.rate_limit.bytes_per_second) == (3, 20.0, 10**9)
    assert first.password.reveal() == "words"
    assert (first.tier_name, second.tier_name) == ("shelf", "second")
    assert (second.io, second.read_only, second.threads, second.deadline) == ("thread", True, 8, 10.0)


def test_what_is_left_out_has_the_documented_defaults():
    config = load_config({"version": 1, "primary": {"capacity": "1GiB"}})
    assert (config.namespace, config.model, config.secondary, config.record) == ("default", None, (), None)
    assert (config.lookup_wait, config.load_wait, config.clean_reserve) == (0.02, "auto", 0.05)
    assert config.start_wait == 1.0
    assert config.primary.model_dump(exclude={"capacity"}) == {
        "pool": None, "eviction": "lru", "huge_pages": "off", "numa_node": None, "prefault": "ahead",
        "prefault_window": 32 << 30, "pin_share": 0.1, "pin_piece": 0.002, "start_deadline": 60.0,
        "core_dumps": False,
    }  # fmt: skip
    assert config.budgets.model_dump() == {
        "store_reserve": 0.1, "all_tiers": 0.5, "one_tier": 0.25, "protected": 0.4, "protect_for": 10.0,
        "kept": 0.5,
    }  # fmt: skip


def test_a_validated_config_never_changes():
    config = load_config({"version": 1, "primary": {"capacity": "1GiB"}})
    with pytest.raises(ValueError, match="frozen"):
        config.primary.capacity = 5


def test_a_list_of_tiers_with_all_entries_commented_out_is_empty(tiers_yaml):
    tiers_yaml.write_text(MINIMAL + "secondary:\n#  - type: shelf\n")
    assert load_config(tiers_yaml).secondary == ()


def test_a_mapping_is_called_config_in_its_lines():
    assert problems({"version": 1}) == ["config: 'primary' is missing; expected a mapping of options"]


def test_the_path_stands_in_the_line_as_it_was_given(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("version: 1\n")
    assert problems(str(path))[0].startswith(f"{path}: 'primary' is missing")


@pytest.mark.parametrize(
    ("written", "mode"), [("true", "ahead"), ("off", "off"), ("on", "ahead"), ("ahead", "ahead"), ("all", "all")]
)
def test_prefault_is_a_mode_and_a_bare_boolean_is_one_too(tiers_yaml, written, mode):
    tiers_yaml.write_text(f"version: 1\nprimary: {{capacity: 1GiB, prefault: {written}}}\n")
    assert load_config(tiers_yaml).primary.prefault == mode


@pytest.mark.parametrize(
    ("written", "bytes_of_a_page"), [("on", "2MiB"), ("off", "off"), ("1GiB", "1GiB"), ("2MiB", "2MiB")]
)
def test_huge_pages_may_be_written_as_yaml_people_do(tiers_yaml, written, bytes_of_a_page):
    tiers_yaml.write_text(f"version: 1\nprimary: {{capacity: 1GiB, huge_pages: {written}}}\n")
    assert load_config(tiers_yaml).primary.huge_pages == bytes_of_a_page


@pytest.mark.parametrize(("written", "seconds"), [("auto", "auto"), ("250ms", 0.25), ("0", 0.0)])
def test_load_wait_is_auto_or_a_duration(written, seconds):
    config = load_config({"version": 1, "primary": {"capacity": "1GiB"}, "load_wait": written})
    assert config.load_wait == seconds


def test_the_models_identity_is_what_was_given():
    model = ModelConfig(name="llama", revision="0e9e39f", kv_dtype="bfloat16")
    assert model.identity() == {"name": "llama", "weights": "0e9e39f", "kv_dtype": "bfloat16"}


def test_a_plugin_s_own_check_that_fails_is_one_line(distributions):
    options = """
shelf: str = ""

def model_post_init(self, context):
    raise RuntimeError("no home directory")
"""
    distributions.tier("odd", options=options)
    (line,) = problems({**yaml.safe_load(MINIMAL), "secondary": [{"type": "odd"}]})
    said = "RuntimeError: no home directory"
    assert line == f"config: secondary[0] (odd): its options cannot be checked, by the plugin's fault: {said}"


# Files that are no config at all

QUOTED = '; within { } write a variable in quotes: "${NAME}"'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "the file is empty; expected at least 'version: 1' and 'primary'"),
        ("# nothing\n", "the file is empty; expected at least 'version: 1' and 'primary'"),
        ("- a\n- b\n", "expected a mapping of options, got a list"),
        ("hello", "expected a mapping of options, got a text"),
        ("a: b: c", "line 1, column 5: not valid YAML: mapping values are not allowed here"),
        ("a:\n\t- b", r"line 2, column 1: not valid YAML: found character '\t' that cannot start any token"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: key 'a' is already on line 1; remove one of the two"),
        ("{a: 1, a: 2}", "line 1, column 8: key 'a' is already on line 1; remove one of the two"),
        ("a: 2024-13-44", "line 1, column 4: this value cannot be read as timestamp; put it in quotes"),
        ("a: !!int", "line 1, column 4: this value cannot be read as int; put it in quotes"),
        ("a: !!int x", "line 1, column 4: this value cannot be read as int; put it in quotes"),
        ("{a: ${NAME}}", "line 1, column 6: not valid YAML: expected ',' or '}', but got '{'" + QUOTED),
        ("? [a]\n: b", "line 1, column 3: not valid YAML: found unhashable key"),
        (
            "--- a\n--- b\n",
            "line 2, column 1: not valid YAML: expected a single document in the stream, but found another document",
        ),
        ("[" * 3000, "not valid YAML: it is nested too deeply"),
        ("a: \x01", "not valid YAML: special characters are not allowed (at 3); expected UTF-8 text"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_our_yaml_is_one_line_with_its_place(wrong, text, line):
    assert wrong(text) == [line]


def test_a_file_that_is_not_text_is_one_line(tiers_yaml):
    tiers_yaml.write_bytes(b"a: \xff\xfe\n")
    assert problems(tiers_yaml) == ["tiers.yaml: not valid YAML: invalid start byte (at 3); expected UTF-8 text"]


def test_a_key_below_another_key_may_repeat_it_but_not_itself(wrong):
    assert wrong("version: 1\nprimary:\n  capacity: 1\n  version: 1\n  capacity: 2\n") == [
        "line 5, column 3: key 'capacity' is already on line 3; remove one of the two"
    ]


def test_a_merged_key_may_be_overridden(tiers_yaml, shelf):
    tiers_yaml.write_text(
        MINIMAL
        + "secondary:\n"
        + "  - &first {type: shelf, path: /a, threads: 2}\n"
        + "  - &second {<<: *first, name: second, path: /b}\n"
        + "  - {<<: *second, name: third, path: /c}\n"
    )
    assert [(t.tier_name, t.path, t.threads) for t in load_config(tiers_yaml).secondary] == [
        ("shelf", "/a", 2), ("second", "/b", 2), ("third", "/c", 2),
    ]  # fmt: skip


def test_a_missing_file_says_so(tiers_yaml):
    assert problems(tiers_yaml) == ["tiers.yaml: cannot read the file: No such file or directory"]


def test_a_directory_says_so(tiers_yaml):
    tiers_yaml.mkdir()
    assert problems(tiers_yaml) == ["tiers.yaml: this is a directory; expected a YAML file"]


def test_a_file_without_read_permission_says_so(tiers_yaml):
    tiers_yaml.write_text(MINIMAL)
    tiers_yaml.chmod(0)
    if os.access(tiers_yaml, os.R_OK):  # root reads everything: a name that no system takes fails as well
        tiers_yaml = Path("x" * 300)
        assert problems(tiers_yaml) == [f"{'x' * 300}: cannot read the file: File name too long"]
    else:
        assert problems(tiers_yaml) == ["tiers.yaml: cannot read the file: Permission denied"]


def test_a_file_that_never_answers_or_never_ends_is_refused(tiers_yaml):
    no_file = "cannot read the file: it is a pipe, a socket or a device; expected a regular file"
    assert problems("/dev/zero") == [f"/dev/zero: {no_file}"]
    os.mkfifo(tiers_yaml)
    assert problems(tiers_yaml) == [f"tiers.yaml: {no_file}"]
    tiers_yaml.unlink()
    tiers_yaml.write_bytes(b"a" * (2 << 20))
    assert problems(tiers_yaml) == ["tiers.yaml: the file is larger than 1 MiB, so it is hardly a config"]


@pytest.mark.parametrize("option", ["password: {file: FIFO}", "keys: [{file: FIFO}]"])
def test_a_secret_s_file_that_never_answers_is_refused(wrong, tmp_path, with_tier, option):
    os.mkfifo(tmp_path / "fifo")
    (line,) = wrong(with_tier(option.replace("FIFO", str(tmp_path / "fifo"))))
    assert "cannot read the secret's file" in line
    assert "it is a pipe, a socket or a device" in line


@pytest.mark.parametrize("name", ["Prod", "_check", "t-me", "a/b", "a..b", "-a", "x" * 65, ""])
def test_a_namespace_that_cannot_stand_in_a_storage_name_is_refused(name):
    (line,) = problems({"version": 1, "primary": {"capacity": 1}, "namespace": name})
    assert line.startswith(f"config: namespace: {name!r} cannot be used; expected ")


def test_policies_that_are_not_installed_are_a_line_each_that_says_what_to_install(monkeypatch, tmp_path):
    installed = plugins._installed
    monkeypatch.setattr(
        plugins, "_installed", lambda group: [e for e in installed(group) if e.dist.name != "kvtiers-policies"]
    )
    tier = {"type": "fs", "path": str(tmp_path), "capacity": "1GiB", "admission": "expected-reuse"}
    primary = {"capacity": "1GiB", "eviction": "turn-hazard"}
    comes = "comes with kvtiers-policies, which is not installed: pip install --find-links wheels kvtiers-policies"
    assert problems({"version": 1, "primary": primary, "secondary": [tier], "what_if": True}) == [
        f"config: primary.eviction: eviction policy 'turn-hazard' {comes}",
        f"config: secondary[0] (fs): admission: admission policy 'expected-reuse' {comes}",
        f"config: what_if: shadow cache 'what-if' {comes}",
    ]
