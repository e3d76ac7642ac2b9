"""SGLang's plugin: what KVTIERS_CONFIG makes of the real server arguments, and weights that change."""

import json
import pkgutil
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from kvtiers.api import ConfigError
from kvtiers_sglang import plugin
from kvtiers_sglang.options import options_of
from kvtiers_sglang.weight_updates import UPDATER, UPDATES, update_begun

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
    updater = pkgutil.resolve_name(UPDATER)
    for name in UPDATES:
        monkeypatch.setattr(updater, name, getattr(updater, name).__wrapped__)
    plugin.register()
    HookRegistry.apply_hooks()


def test_sglang_finds_the_plugin():
    (found,) = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "kvtiers"]
    assert found.load() is plugin.register


def test_what_sglang_loads_in_all_of_its_processes_brings_no_backend_and_no_torch():
    """The detokenizer and the tokenizers have no cache."""
    program = "import sys; from kvtiers_sglang import plugin; print('torch' in sys.modules, 'sglang' in sys.modules)"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True)
    assert done.stdout == b"False False\n"


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


@pytest.mark.parametrize("name", UPDATES)
def test_every_way_to_change_the_weights_ends_the_use_of_the_tiers_first(name):
    """Whatever becomes of the change: the real method, on an object that has nothing, fails after the hook."""
    assert update_begun() == ""
    with pytest.raises(AttributeError):
        getattr(pkgutil.resolve_name(UPDATER), name)(object(), object())
    assert update_begun() == name


def test_sglang_has_no_further_way_to_change_the_weights():
    updater = pkgutil.resolve_name(UPDATER)
    known = {name for name in vars(updater) if "update_weight" in name or name.startswith("begin_weight")}
    others = ("flush", "record", "_", "init", "destroy")
    assert {name for name in known if not name.startswith(others)} == set(UPDATES)
