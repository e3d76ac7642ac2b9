"""``kvtiers report``: everything that a bug report needs, no secret, and nothing written before it was seen."""

import pytest
import yaml
from click.testing import CliRunner

from kvtiers import __version__
from kvtiers.api import Secret
from kvtiers.cli.main import cli
from kvtiers.cli.redaction import Redaction
from kvtiers.config.options import options_of
from kvtiers.plugins import installed_tiers, load_tier

CANARY = "canary-5d0e7"
CONFIG = f"""
version: 1
primary: {{capacity: 64MiB}}  # {CANARY}: a comment may have one, too
secondary:
  - {{type: redis, host: "redis://me:{CANARY}@cache.example:6379", password: "${{REPORT_TEST}}"}}
  - {{type: memory, capacity: 64MiB}}
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPORT_TEST", "variable-91c2")
    (tmp_path / "tiers.yaml").write_text(CONFIG)
    (tmp_path / "vllm.log").write_text(
        "an early line\n" * 3
        + "".join(f"kvtiers: line {number}\n" for number in range(9))
        + f"kvtiers.redis: AUTH variable-91c2 failed at redis://me:{CANARY}@cache.example\nanother engine's line\n"
    )
    return lambda *arguments, answer="": CliRunner().invoke(cli, ["report", *arguments], input=answer)


def test_it_is_shown_and_asked_for_before_it_is_written_as_it_was_shown(report, tmp_path):
    arguments = ("tiers.yaml", "--log", "vllm.log", "--lines", "4")
    refused = report(*arguments, answer="n\n")
    file = tmp_path / "kvtiers-report.txt"
    assert refused.exit_code == 1
    assert not file.exists()
    done = report(*arguments, answer="y\n")
    assert done.exit_code == 0, done.output
    text = file.read_text()
    assert text.strip() in done.output
    for title in (
        "versions",
        "machine",
        "config tiers.yaml",
        "kvtiers check --offline",
        "running engines",
        "log vllm.log",
    ):
        assert f"== {title}\n" in text
    for said in (f"kvtiers {__version__}\n", "kvtiers-example", "pydantic ", "processors", "capacity: 64MiB"):
        assert said in text
    assert "kvtiers: line 8" in text
    assert "kvtiers: line 5" not in text  # four lines
    assert "another engine's line" not in text
    for secret in (CANARY, "variable-91c2"):
        assert secret not in done.output
        assert secret not in refused.output
    assert "password: ${REPORT_TEST}" in text  # the name is no secret
    assert "redis://***@cache.example" in text


def test_without_a_terminal_nothing_is_written_unless_it_is_said(report, tmp_path):
    assert report().exit_code == 1
    assert not (tmp_path / "kvtiers-report.txt").exists()
    assert report("--yes", "--output", "it.md").exit_code == 0
    assert "== versions" in (tmp_path / "it.md").read_text()


SECRET_OPTIONS = [
    (entry.name, option)
    for entry in installed_tiers()
    for option, field in load_tier(entry.name).config.model_fields.items()
    if "Secret" in str(field.annotation)
]


@pytest.mark.parametrize(("tier_type", "option"), SECRET_OPTIONS)
def test_every_secret_option_of_an_installed_tier_is_taken_out(tier_type, option):
    assert Secret.__name__ in str(load_tier(tier_type).config.model_fields[option].annotation)
    assert option in {it.name for it in options_of(load_tier(tier_type).config)}
    redaction = Redaction()
    text = yaml.safe_dump({"secondary": [{"type": tier_type, option: CANARY}]})
    assert CANARY not in "\n".join(redaction.config(text))
    assert redaction.apply(f"the log has {CANARY}") == "the log has ***"


def test_an_option_is_a_secret_by_its_type_whatever_its_name(distributions):
    source = """
from pydantic import Field
from kvtiers.api import Secret, TierConfig, TierPlugin, hookimpl

class Config(TierConfig):
    plate: Secret | None = Field(default=None, description="x")
    place: str = Field(default="", description="x")

@hookimpl
def kvtiers_tier():
    return TierPlugin(name="car", kind="store", config=Config, open=print, api_version=1)
"""
    distributions.install_tier("car", source)
    text = "\n".join(Redaction().config(f"secondary: [{{type: car, plate: {CANARY}, place: here}}]"))
    assert CANARY not in text
    assert "place: here" in text


def test_there_are_secret_options():
    assert {"redis", "s3", "azure"} <= {tier_type for tier_type, _ in SECRET_OPTIONS}


@pytest.mark.parametrize(
    "option",
    [
        "password: {}",
        "api_key: {}",
        "auth: {{user: x, pass: {}}}",
        "tokens: [{}]",
        "url: 'x://{}@h'",
        "access-token: {}",
    ],
)
def test_in_a_tier_that_is_not_installed_names_say_what_is_secret(option):
    redaction = Redaction()
    text = "secondary:\n  - {type: nowhere, " + option.format(CANARY) + "}\n"
    assert "nowhere" in "\n".join(redaction.config(text))
    assert CANARY not in "\n".join(redaction.config(text))
    assert CANARY not in redaction.apply(f"a line with {CANARY} in it")


def test_what_a_secret_s_file_has_is_taken_out_of_all_else(tmp_path):
    file = tmp_path / "secret"
    file.write_text(f"{CANARY}\n")
    redaction = Redaction()
    assert f"file: {file}" in "\n".join(redaction.config(f"secondary: [{{type: redis, password: {{file: {file}}}}}]"))
    assert CANARY not in redaction.apply(CANARY)


@pytest.mark.parametrize(
    "line",
    [
        f"GET https://x.example/c?sv=1&sig={CANARY}&se=2",
        f"Authorization: Bearer {CANARY}",
        f"connecting to s://user:{CANARY}@h",
    ],
)
def test_lines_of_a_log_have_no_secrets_that_the_config_has_not(line):
    assert CANARY not in Redaction().apply(line)


@pytest.mark.parametrize("text", [f"a: [{CANARY}", f"a: &it [*it, {CANARY}]"])
def test_a_config_that_cannot_be_read_is_left_out(text):
    (line,) = Redaction().config(text)
    assert CANARY not in line


def test_options_that_only_look_like_secrets_stay():
    text = "secondary:\n- token_file: /run/token\n  tokens_per_block: 16\n  authority: https://login.example\n"
    assert Redaction().config(text) == text.splitlines()
