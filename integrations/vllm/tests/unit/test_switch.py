"""``KVTIERS_CONFIG`` switches the whole stack on, explicit arguments win, and a wrong file stops the start."""

import logging

import pytest

from kvtiers.api import ConfigError, StartError
from kvtiers_vllm.engine_args import prepare_engine_args
from kvtiers_vllm.stack.options import VARIABLE, way_in

from . import fake_vllm

TIERS = """
version: 1
primary: {capacity: 64MiB}
secondary: [{type: memory, capacity: 1MiB}]
"""


@pytest.fixture(autouse=True)
def _vllm(monkeypatch, caplog):
    fake_vllm.install(monkeypatch)
    monkeypatch.delenv(VARIABLE, raising=False)
    caplog.set_level(logging.INFO)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "tiers.yaml"
    path.write_text(TIERS)
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def prepared(version="0.32.0", **given):
    args = fake_vllm.EngineArgs(**given)
    prepare_engine_args(args, version)
    return args.kv_transfer_config


def test_an_engine_without_an_argument_gets_the_connector_that_reads_the_file(file):
    config = prepared()
    assert (config.kv_connector, config.kv_role) == ("KvtiersConnector", "kv_both")
    assert config.kv_connector_extra_config == {"kvtiers_config": str(file)}
    assert way_in(config.kv_connector_extra_config) == f"by KVTIERS_CONFIG={file}"


def test_a_path_is_that_of_the_process_that_was_given_it(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv(VARIABLE, file.name)
    assert prepared().kv_connector_extra_config == {"kvtiers_config": str(file)}


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_nothing_changes(monkeypatch, value, caplog):
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert prepared() is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_transfer_config": fake_vllm.KVTransferConfig("NixlConnector")}, "--kv-transfer-config"),
        ({"kv_offloading_size": 4.0}, "--kv-offloading-size"),
    ],
)
def test_an_explicit_argument_wins_and_one_line_says_so(file, caplog, given, named):
    before = given.get("kv_transfer_config")
    assert prepared(**given) is before
    (record,) = caplog.records
    assert record.getMessage() == f"KVTIERS_CONFIG={file} is not used: {named} is given, and wins"


def test_arguments_that_were_prepared_once_stay_as_they_are_without_a_line(file, caplog):
    config = prepared()
    assert prepared(kv_transfer_config=config) is config
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (TIERS.replace("capacity: 64MiB", "capactiy: 64MiB"), "capactiy"),
        (TIERS.replace("memory", "memroy"), "unknown tier type 'memroy'"),
        (None, "cannot read the file"),
    ],
)
def test_a_wrong_file_stops_the_start_before_there_is_a_config(file, text, problem):
    file.write_text(text) if text is not None else file.unlink()
    with pytest.raises(ConfigError) as refused:
        prepared()
    assert refused.value.problems
    assert all(line.startswith("KVTIERS_CONFIG: ") and str(file) in line for line in refused.value.problems)
    assert problem in str(refused.value)


def test_a_release_that_the_whole_stack_is_not_for_is_refused_at_the_start(file):
    with pytest.raises(StartError, match=r"KvtiersConnector runs on vLLM .*, not on 0\.28\.0"):
        prepared("0.28.0")


def test_the_old_spelling_is_read_as_the_new_one_and_one_line_says_what_to_write(caplog):
    extra = {"spec_name": "KvtiersOffloadingSpec", "kvtiers_config": "tiers.yaml"}
    config = prepared(kv_transfer_config=fake_vllm.KVTransferConfig("OffloadingConnector", "kv_both", extra))
    assert (config.kv_connector, config.kv_connector_extra_config) == ("KvtiersConnector", extra)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'KvtiersConnector'" in record.getMessage()


def test_other_configs_of_vllms_own_connector_stay_as_they_are(caplog):
    extra = {"spec_name": "TieringOffloadingSpec"}
    config = prepared(kv_transfer_config=fake_vllm.KVTransferConfig("OffloadingConnector", "kv_both", extra))
    assert config.kv_connector == "OffloadingConnector"
    assert not caplog.records
