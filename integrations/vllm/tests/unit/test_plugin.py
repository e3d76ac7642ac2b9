"""What vLLM calls at the start of each of its processes: everything is there by name, and nothing else has changed."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvtiers.api import ConfigError, StartError
from kvtiers_vllm import compat
from kvtiers_vllm.plugin import register
from kvtiers_vllm.stack.options import VARIABLE

from . import fake_vllm
from .test_stack_guard import engine_config


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_connector_its_spec_and_every_tier_are_registered_by_name_however_often_vllm_asks(monkeypatch, caplog):
    fake_vllm.install(monkeypatch)
    register()
    register()
    assert fake_vllm.KVConnectorFactory.registered == {
        "KvtiersConnector": ("kvtiers_vllm.stack.connector", "KvtiersConnector")
    }
    assert set(fake_vllm.OffloadingSpecFactory.registered) == {"KvtiersOffloadingSpec"}
    assert "kvtiers-memory" in fake_vllm.SecondaryTierFactory.registered
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_engine_that_is_made_afterwards_has_the_connector_of_the_variables_file(monkeypatch, tmp_path):
    fake_vllm.install(monkeypatch)
    (tmp_path / "tiers.yaml").write_text("version: 1\nprimary: {capacity: 64MiB}\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "tiers.yaml"))
    register()
    from vllm.engine.arg_utils import EngineArgs

    config, usage, headless = EngineArgs().create_engine_config("usage", headless=True)
    assert config.kv_connector == "KvtiersConnector"
    assert (usage, headless) == ("usage", True)
    (tmp_path / "tiers.yaml").write_text("version: 1\n")
    with pytest.raises(ConfigError, match="KVTIERS_CONFIG: "):
        EngineArgs().create_engine_config()


def test_a_vllm_without_a_place_for_kvtiers_is_left_alone_unless_it_is_to_use_it(monkeypatch):
    fake_vllm.install(monkeypatch, without="SecondaryTierFactory")
    register()
    monkeypatch.setenv(VARIABLE, "/etc/kvtiers/tiers.yaml")
    with pytest.raises(StartError, match="KVTIERS_CONFIG is set, but this vLLM has no place for kvtiers"):
        register()


@pytest.mark.parametrize("use", ["stack.connector", "own_tiering.tier"])
def test_an_engine_that_is_to_use_kvtiers_by_an_argument_is_refused_on_a_vllm_that_starts_otherwise(monkeypatch, use):
    module = fake_vllm.load(monkeypatch, use, "0.32.0")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    monkeypatch.setattr(compat, "_unwrapped", [])
    monkeypatch.setattr(KVConnectorFactory, "create_connector", classmethod(lambda cls, something: something))
    for _ in range(2):  # vLLM loads its plugins more than once
        register()
    spec, rows = SimpleNamespace(config=None, extra_config={}), memoryview(bytearray(4096))
    start = {
        "stack.connector": lambda: module.KvtiersConnector(engine_config(), "role", "cache"),
        "own_tiering.tier": lambda: module.KvtiersTier(spec, rows, "kvtiers-memory", capacity="1MiB"),
    }
    with pytest.raises(StartError) as refused:
        start[use]()
    assert "kvtiers does not work with vLLM 0.32.0: KVConnectorFactory.create_connector takes (something), " in str(
        refused.value
    )
    assert str(refused.value).count("create_connector") == 1
    assert "\n" not in str(refused.value)


def test_a_vllm_that_starts_otherwise_is_left_alone_with_one_line_unless_it_is_to_use_it(monkeypatch, caplog):
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr(compat, "_unwrapped", [])
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self, something: something)
    register()
    assert EngineArgs().create_engine_config("as before") == "as before"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "EngineArgs.create_engine_config takes (self, something)" in line
    monkeypatch.setenv(VARIABLE, "/etc/kvtiers/tiers.yaml")
    with pytest.raises(StartError, match=r"EngineArgs\.create_engine_config takes \(self, something\)"):
        register()


def test_a_process_of_a_vllm_that_does_not_use_kvtiers_loads_no_config_and_nothing_of_the_stack():
    code = "import sys, kvtiers_vllm.plugin; print(*{name for name in sys.modules if name.startswith('kvtiers')})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    core = {name.split(".")[1] for name in loaded if name.startswith("kvtiers.")}
    assert core == {"_failures", "_version", "api", "plugins"}
