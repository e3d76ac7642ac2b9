"""SGLang's plugin: what KVTIERS_CONFIG makes of the real server arguments, and weights that change."""

import json
import pkgutil
from importlib.metadata import entry_points

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from kvtiers.api import ConfigError
from kvtiers_sglang import backend, plugin
from kvtiers_sglang.options import options_of

CONFIG = "version: 1\nprimary: {capacity: 1MiB}\nsecondary: []\n"


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    path = tmp_path / "tiers.yaml"
    path.write_text(CONFIG)
    monkeypatch.setenv("KVTIERS_CONFIG", str(path))
    return path


@pytest.fixture
def hooks(monkeypatch):
    """SGLang's registry of hooks, as at the start of a process; what it patches is put back."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    # The rest of it reads the config of a model, of which there is none.
    monkeypatch.setattr(ServerArgs, "resolve_once", lambda arguments: None)
    updater = pkgutil.resolve_name(plugin._UPDATER)
    for name in plugin._UPDATES:
        monkeypatch.setattr(updater, name, getattr(updater, name))
    plugin.register()
    HookRegistry.apply_hooks()
    return updater


def test_sglang_finds_the_plugin():
    (found,) = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "kvtiers"]
    assert found.load() is plugin.register


def test_the_variable_alone_turns_the_hierarchical_cache_on(config_file, hooks):
    arguments = ServerArgs(model_path="test/model")
    arguments.resolve_once()
    assert arguments.enable_hierarchical_cache
    assert arguments.hicache_storage_backend == "dynamic"
    extra = json.loads(arguments.hicache_storage_backend_extra_config)
    assert options_of(extra).config == str(config_file)
    assert (extra["module_path"], extra["class_name"]) == ("kvtiers_sglang", "KvtiersHiCache")


def test_a_backend_that_is_given_wins(config_file, hooks):
    arguments = ServerArgs(model_path="test/model", hicache_storage_backend="file")
    arguments.resolve_once()
    assert (arguments.hicache_storage_backend, arguments.enable_hierarchical_cache) == ("file", False)


def test_without_the_variable_nothing_changes(monkeypatch, hooks):
    monkeypatch.delenv("KVTIERS_CONFIG", raising=False)
    arguments = ServerArgs(model_path="test/model")
    arguments.resolve_once()
    assert (arguments.hicache_storage_backend, arguments.enable_hierarchical_cache) == (None, False)


def test_a_wrong_config_stops_the_start_before_a_model_is_loaded(config_file, hooks):
    config_file.write_text("version: 1\nsecondary: 7\n")
    with pytest.raises(ConfigError):
        ServerArgs(model_path="test/model").resolve_once()


def test_every_way_to_change_the_weights_ends_the_use_of_the_tiers_first(monkeypatch, hooks):
    """Whatever becomes of the change: the real methods, on an object that has nothing, fail after the hook."""
    reported = []
    monkeypatch.setattr(backend, "forget_weights", reported.append)
    for name in plugin._UPDATES:
        with pytest.raises(AttributeError):
            getattr(hooks, name)(object(), object())
    assert reported == list(plugin._UPDATES)
    known = {name for name in vars(hooks) if "update_weight" in name or name.startswith("begin_weight")}
    assert {name for name in known if not name.startswith(("flush", "record", "_", "init", "destroy"))} == set(reported)
