"""Which weights an engine has: every change is seen, with a version or without."""

import inspect

import pytest

from kvtiers.api import StartError
from kvtiers_vllm.stack.weight_versions import WeightUpdates


class Core:
    """vLLM's engine core, as far as weights go."""

    def __init__(self):
        self.called = []
        self.weight_version = "default"

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.called.append((method, timeout, args, kwargs))
        return ["done"]

    def set_weight_version(self, weight_version):
        self.weight_version = weight_version

    def get_weight_version(self):
        return self.weight_version

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return reset_connector if reset_running_requests else "done"


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def updates(core):
    return WeightUpdates(core, "0.32.0")


@pytest.mark.parametrize("call", ["reload_weights", "start_weight_update", "update_weights", "finish_weight_update"])
def test_weights_that_change_without_a_version_are_nobody_elses(core, updates, call):
    seen = {updates.version()}
    for _ in range(3):
        assert core.collective_rpc(call, None, kwargs={"a": 1}) == ["done"]
        seen.add(updates.version())
    assert len(seen) == 4
    assert core.called == [(call, None, (), {"a": 1})] * 3
    other = Core()
    others = WeightUpdates(other, "0.32.0")
    other.collective_rpc(call)
    assert others.version() not in seen


def test_weights_with_a_version_are_called_so_in_every_engine(core, updates):
    core.collective_rpc("update_weights")
    core.collective_rpc("finish_weight_update")
    core.set_weight_version("2")
    assert updates.version() == "2"
    core.set_weight_version("3")
    assert updates.version() == "3"


@pytest.mark.parametrize("call", ["profile", "get_kv_cache_spec", print, b"pickled"])
def test_other_calls_change_nothing(core, updates, call):
    before = updates.version()
    core.collective_rpc(call)
    assert updates.version() == before


@pytest.mark.parametrize("call", ["collective_rpc", "set_weight_version", "reset_prefix_cache"])
def test_a_call_has_the_signature_that_it_has_without_kvtiers(call):
    """A served engine reads off it what a client's message is to be turned into, and how much it may hold."""
    core = Core()
    before = inspect.signature(getattr(core, call))
    WeightUpdates(core, "0.32.0")
    assert inspect.signature(getattr(core, call)) == before


def test_vllms_own_prefix_cache_is_empty_after_a_reset_that_was_done(core, updates):
    assert updates.resets == 0
    assert core.reset_prefix_cache() == "done"
    assert updates.resets == 1
    assert core.reset_prefix_cache(True, reset_connector=False) is False
    assert updates.resets == 1


def test_an_engine_whose_weights_cannot_be_followed_does_not_start():
    with pytest.raises(StartError, match=r"vLLM 0\.32\.0 .* updated in place would go unseen"):
        WeightUpdates(None, "0.32.0")
