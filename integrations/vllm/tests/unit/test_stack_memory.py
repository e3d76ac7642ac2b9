"""The primary's memory is populated while the model loads: begun before that, taken by the spec, else given back."""

import gc
import os
import sys
from types import SimpleNamespace

import pytest

from kvtiers_vllm.plugin import register
from kvtiers_vllm.stack import memory
from kvtiers_vllm.stack.memory import take_memory_of

from . import fake_vllm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a shared region needs Linux")


class Config(SimpleNamespace):
    """vLLM's config of an engine."""


def config_of(connector="KvtiersConnector", **primary):
    config = {"version": 1, "primary": {"capacity": "8MiB", **primary}}
    transfer = SimpleNamespace(
        kv_connector=connector, engine_id="e-1", kv_connector_extra_config={"kvtiers_config": config}
    )
    return Config(kv_transfer_config=transfer)


@pytest.fixture
def executor(monkeypatch):
    """vLLM's class of executors, as it is once vLLM has loaded its plugins."""
    monkeypatch.delenv("KVTIERS_CONFIG", raising=False)
    fake_vllm.install(monkeypatch)
    register()
    from vllm.v1.executor.abstract import Executor

    yield Executor
    assert not memory._memories


def test_memory_is_begun_before_the_model_is_loaded_and_taken_once(executor):
    config = config_of()
    assert executor(config).loaded is config
    taken = take_memory_of(config)
    assert taken.nbytes == 8 << 20
    assert os.fstat(taken.fd).st_size == 8 << 20
    assert take_memory_of(config) is None
    taken.close()
    assert taken.prefault.ended


def test_what_no_spec_takes_is_given_back_with_its_engines_config(executor):
    config = config_of()
    executor(config)
    begun = memory._memories[id(config)]
    del config
    gc.collect()
    assert begun.prefault.ended
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(begun.fd)


@pytest.mark.parametrize(
    "config",
    [
        Config(kv_transfer_config=None),
        config_of("OffloadingConnector"),
        config_of(capacity="1MiB of it"),
        config_of(capacity=1 << 50),
        config_of(numa_node=0),
    ],
    ids=[
        "no connector",
        "another connector",
        "a broken config",
        "too much memory",
        "pages of one node",
    ],
)
def test_an_engine_without_early_memory_starts_as_before(executor, config):
    assert executor(config).loaded is config
    assert take_memory_of(config) is None
