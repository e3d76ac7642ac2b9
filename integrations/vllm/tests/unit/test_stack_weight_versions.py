"""Which weights an engine has: every change is seen, with a version or without."""

from types import SimpleNamespace

import pytest

from kvtiers_vllm import compat
from kvtiers_vllm.engine import Engine
from kvtiers_vllm.stack.requests import WeightUpdates

from . import fake_vllm


class Config(SimpleNamespace):
    """vLLM's config of an engine."""


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    fake_vllm.install(monkeypatch)


def engine():
    """Return a core of vLLM's, and what follows its weights."""
    config = Config()
    updates = WeightUpdates(compat.follow_core(Engine(config, None), "0.32.0"))
    from vllm.v1.engine.core import EngineCore

    return EngineCore(config), updates


@pytest.fixture
def both():
    return engine()


@pytest.fixture
def core(both):
    return both[0]


@pytest.fixture
def updates(both):
    return both[1]


@pytest.mark.parametrize("call", ["reload_weights", "start_weight_update", "update_weights", "finish_weight_update"])
def test_weights_that_change_without_a_version_are_shared_with_no_engine(core, updates, call):
    seen = {updates.version()}
    for _ in range(3):
        assert core.collective_rpc(call, None, kwargs={"a": 1}) == ["done"]
        seen.add(updates.version())
    assert len(seen) == 4
    assert core.called == [(call, None, (), {"a": 1})] * 3
    other, others = engine()
    other.collective_rpc(call)
    assert others.version() not in seen


def test_weights_with_a_version_are_called_so_in_every_engine(core, updates):
    core.collective_rpc("update_weights")
    core.collective_rpc("finish_weight_update")
    core.set_weight_version("2")
    assert updates.version() == "2"
    core.set_weight_version("3")
    assert updates.version() == "3"


def test_weights_that_are_named_before_the_first_request_are_others_than_those_of_the_start(core, updates):
    start = updates.version()
    assert start == core.get_weight_version(), "every release of vLLM's begins with the same word"
    core.set_weight_version("2")
    assert updates.version() != start


@pytest.mark.parametrize("call", ["profile", "get_kv_cache_spec", print, b"pickled"])
def test_other_calls_change_nothing(core, updates, call):
    before = updates.version()
    core.collective_rpc(call)
    assert updates.version() == before


def test_the_weights_of_another_engine_in_the_process_are_its_own(core, updates):
    other, others = engine()
    before = updates.version()
    other.collective_rpc("reload_weights")
    other.set_weight_version("7")
    other.reset_prefix_cache()
    assert (updates.version(), updates.resets) == (before, 0)
    assert (others.version(), others.resets) == ("7", 1)


def test_vllms_own_prefix_cache_is_empty_after_a_reset_that_was_done(core, updates):
    assert updates.resets == 0
    assert core.reset_prefix_cache() == "done"
    assert updates.resets == 1
    assert core.reset_prefix_cache(True, reset_connector=False) is False
    assert updates.resets == 1
