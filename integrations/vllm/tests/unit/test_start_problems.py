"""What stops an engine's start is said in the log before vLLM's traceback of it: a line a problem, each once."""

import pytest

from kvtiers.api import ConfigError, StartError
from kvtiers_vllm import compat
from kvtiers_vllm.engine_args import prepare_engine_args
from kvtiers_vllm.start_problems import logged_first

from . import fake_vllm


def test_each_problem_of_a_config_is_a_line_of_its_own_and_said_once(caplog):
    @logged_first()
    def inner():
        raise ConfigError(["one", "two"])

    with pytest.raises(ConfigError), logged_first():
        inner()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "kvtiers: one"),
        ("ERROR", "kvtiers: two"),
    ]


def test_what_is_no_problem_of_the_start_is_left_to_vllm(caplog):
    with pytest.raises(ZeroDivisionError), logged_first():
        raise ZeroDivisionError
    with pytest.raises(StartError), logged_first():
        raise StartError("three")
    assert caplog.messages == ["kvtiers: three"]


def test_a_mistake_in_the_file_of_kvtiers_config_is_a_line_before_vllms_traceback(monkeypatch, tmp_path, caplog):
    file = tmp_path / "tiers.yaml"
    file.write_text("version: 1\nprimary: {capacty: 1GiB}\n")
    monkeypatch.setenv("KVTIERS_CONFIG", str(file))
    kind = fake_vllm.fresh(fake_vllm.EngineArgs)
    compat.wrap_engine_args(kind, lambda args: prepare_engine_args(args, "0.32.0"), lambda _config: None, "0.32.0")
    with pytest.raises(ConfigError) as refused:
        kind().create_engine_config()
    assert caplog.messages == [f"kvtiers: {problem}" for problem in refused.value.problems]
    assert "Did you mean 'capacity'" in caplog.text
