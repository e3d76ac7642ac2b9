"""A primary larger than the machine is refused when vLLM has made its config: before it loads a model."""

from types import SimpleNamespace

import pytest

from kvtiers.api import StartError
from kvtiers_vllm import compat
from kvtiers_vllm.engine_args import examine_config, refuse_large_primary
from kvtiers_vllm.plugin_figures import plugin_gauges
from kvtiers_vllm.stack.options import noted_tier_types

from . import fake_vllm

TIB = 1 << 40


def made(capacity="1PiB", engines=1, **extra):
    """vLLM's config, as far as it is looked at."""
    config = {"version": 1, "primary": {"capacity": capacity}}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"kvtiers_config": config} | extra),
        parallel_config=SimpleNamespace(data_parallel_size_local=engines),
    )


@pytest.fixture
def engine_args():
    kind = fake_vllm.fresh(fake_vllm.EngineArgs)
    made_config = []
    kind.create_engine_config = lambda self, usage_context=None, headless=False: made_config[-1]
    compat.wrap_engine_args(kind, lambda args: None, refuse_large_primary, "0.32.0")

    def of(config):
        made_config.append(config)
        return kind()

    return of


def test_a_primary_larger_than_the_machine_stops_the_config_in_one_line(engine_args, caplog):
    with pytest.raises(StartError, match=r"primary\.capacity: 1PiB of memory are wanted, but the machine has"):
        engine_args(made()).create_engine_config(usage_context="a server")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert "lower primary.capacity below" in line


def test_one_that_fits_and_a_vllm_without_kvtiers_are_not_held_up(engine_args):
    for config in (
        made("1MiB"),
        SimpleNamespace(kv_transfer_config=None),
        SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"spec_name": "x"})),
    ):
        assert engine_args(config).create_engine_config() is config


def test_a_config_that_is_wrong_fails_only_where_it_is_read_to_be_used():
    refuse_large_primary(made(kvtiers_config="/no/such/file.yaml"))


def test_engines_that_share_the_machine_are_counted_together():
    asked = []
    refuse_large_primary(made("1TiB", engines=4), asked.append)
    assert asked == [4 * TIB]


def test_huge_pages_are_not_counted_as_other_memory():
    config = made()
    config.kv_transfer_config.kv_connector_extra_config["kvtiers_config"]["primary"]["huge_pages"] = "2MiB"
    refuse_large_primary(config)


def test_an_engine_of_a_pool_does_not_need_memory_of_its_own_beside_it():
    config = made()
    config.kv_transfer_config.kv_connector_extra_config["kvtiers_config"]["primary"]["pool"] = "/run/pool.sock"
    refuse_large_primary(config)


def own_tiering(nbytes, *types, engines=1):
    """vLLM's config of its own tiering, with secondary tiers of these types."""
    extra = {"cpu_bytes_to_use": nbytes, "secondary_tiers": [{"type": name} for name in types]}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(data_parallel_size_local=engines),
    )


def test_vllms_own_primary_larger_than_the_machine_stops_the_config_in_one_line(engine_args, caplog):
    with pytest.raises(StartError, match=r"cpu_bytes_to_use, for 2 engines on this machine: 2PiB of memory are wanted"):
        engine_args(own_tiering(1 << 50, "fs", "kvtiers-fs", engines=2)).create_engine_config()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert "lower cpu_bytes_to_use below" in line


def test_vllms_own_primary_is_not_ours_to_check_without_a_tier_of_ours(engine_args):
    for config in (own_tiering(1 << 50, "fs"), own_tiering(1 << 50), own_tiering(1 << 20, "kvtiers-fs")):
        assert engine_args(config).create_engine_config() is config
    refuse_large_primary(own_tiering("a word", "kvtiers-fs"))


def test_the_tier_types_are_those_of_the_config_as_vllm_made_its_own_whatever_the_file_says_later(tmp_path):
    file = tmp_path / "tiers.yaml"
    text = "version: 1\nprimary: {capacity: 1MiB}\nsecondary: [{type: memory, capacity: 1MiB}]\n"
    file.write_text(text)
    config = made(kvtiers_config=str(file))
    examine_config(config)
    extra = config.kv_transfer_config.kv_connector_extra_config
    file.write_text(text.replace("memory", f"fs, path: {tmp_path}"))
    assert noted_tier_types(extra) == ("memory",)
    assert plugin_gauges(("memory",)).keys() < plugin_gauges().keys()


def test_where_no_tier_types_were_noted_all_that_are_installed_count():
    config = made(kvtiers_config="/no/such/file.yaml")
    examine_config(config)
    assert noted_tier_types(config.kv_transfer_config.kv_connector_extra_config) is None
