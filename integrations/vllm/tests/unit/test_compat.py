"""vLLM's functions that kvtiers wraps: each call reaches vLLM as before, and what follows that engine; no other."""

import gc
import inspect
import weakref
from types import SimpleNamespace

import pytest

from kvtiers.api import StartError
from kvtiers_vllm import compat
from kvtiers_vllm.engine import Engine, engine_being_built

from . import fake_vllm


class Config(SimpleNamespace):
    """vLLM's config of an engine."""


@pytest.fixture(autouse=True)
def kind(monkeypatch):
    """The class of the engine's core."""
    fake_vllm.install(monkeypatch)
    from vllm.v1.engine.core import EngineCore

    return EngineCore


@pytest.fixture
def config():
    return Config()


@pytest.fixture
def link(config):
    return compat.follow_core(Engine(config, None), "0.32.0")


@pytest.fixture
def core(kind, link, config):
    return kind(config)


def test_each_request_is_seen_as_vllm_has_prepared_it_by_every_tier_and_vllm_gets_what_it_got_before(
    core, link, config
):
    seen = []
    link.request_arrived.append(lambda request: seen.append(("first", request)))
    same = compat.follow_core(Engine(config, None), "0.32.0")
    same.request_arrived.append(lambda request: seen.append(("second", request)))
    assert core.preprocess_add_request("one") == ("one", 3)
    assert seen == [("first", "one"), ("second", "one")]
    assert core.called == ["preprocess_add_request"], "once, however many follow it"


def test_an_adapter_is_seen_before_vllm_loads_it(core, link):
    link.adapter_loads.append(lambda lora: core.called.append(("seen", lora)))
    assert core.add_lora(lora_request="mine") is True
    assert core.called == [("seen", "mine"), ("add_lora", "mine")]


def test_the_calls_of_another_engine_in_the_process_are_its_own(core, link, kind):
    seen = []
    for calls in (link.request_arrived, link.adapter_loads, link.workers_called):
        calls.append(seen.append)
    link.weights_named.append(lambda: seen.append("named"))
    link.cache_reset.append(lambda: seen.append("reset"))
    other = kind(Config())
    other.preprocess_add_request("one")
    other.add_lora("mine")
    other.collective_rpc("reload_weights")
    other.set_weight_version("2")
    other.reset_prefix_cache()
    assert seen == []
    assert not link.sees_requests
    core.preprocess_add_request("one")
    assert seen == ["one"]
    assert link.sees_requests


def test_an_engine_is_idle_while_it_has_begun_no_request_and_before_it_is_known_it_is_not(core, link):
    assert not link.is_idle(), "there is no rest in an engine of which nothing is known"
    core.preprocess_add_request("one")
    assert link.is_idle()
    core.scheduler.running.append("one")
    assert not link.is_idle()


def test_a_core_with_a_loop_is_seen_when_that_starts_before_any_request(kind, config):
    looping = type("EngineCoreProc", (kind,), {"__module__": kind.__module__, "run_busy_loop": lambda self: "over"})
    link = compat.follow_core(Engine(config, None), "0.32.0")
    core = looping(config)
    assert not link.is_idle()
    assert core.run_busy_loop() == "over"
    assert link.is_idle(), "it is attached"
    assert core.called == []


def test_a_core_with_functions_of_its_own_is_attached_by_its_loop_and_its_requests_are_not_seen(kind, config):
    """A subclass of another distribution, whose updates of the weights would go unseen, too."""
    looping = type("EngineCoreProc", (kind,), {"__module__": kind.__module__, "run_busy_loop": lambda self: "over"})
    own = {"preprocess_add_request": lambda self, request: (request, 3), "collective_rpc": lambda self, method: []}
    other = type("OtherCore", (looping,), {"__module__": "other_distribution"} | own)
    link = compat.follow_core(Engine(config, None), "0.32.0")
    core = other(config)
    assert core.run_busy_loop() == "over"
    assert core.preprocess_add_request("one") == ("one", 3)
    assert link.is_idle(), "it is attached"
    assert not link.sees_requests


def test_an_engine_that_has_replaced_its_config_is_followed_as_before(core, link):
    core.preprocess_add_request("one")
    core.vllm_config = Config()
    seen = []
    link.workers_called.append(seen.append)
    core.collective_rpc("reload_weights")
    assert seen == ["reload_weights"]


def test_nothing_of_an_engine_outlives_it(kind):
    config = Config()
    link = compat.follow_core(Engine(config, None), "0.32.0")
    core = kind(config)
    core.preprocess_add_request("one")
    gone = [weakref.ref(link), weakref.ref(core), weakref.ref(config)]
    del link, core, config
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


@pytest.mark.parametrize("call", sorted(compat.CORE))
def test_a_call_has_the_signature_that_it_has_without_kvtiers(call, link, kind):
    """A served engine reads off it what a client's message is to be turned into, and how much it may hold."""
    assert inspect.signature(getattr(kind, call)) == inspect.signature(getattr(fake_vllm.EngineCore, call))


def test_a_connector_of_vllms_own_is_built_with_its_configs_at_hand_and_nothing_else_is():
    factory = fake_vllm.fresh(fake_vllm.KVConnectorFactory)
    for _ in range(2):  # vLLM loads its plugins more than once
        compat.wrap_factory(factory, "0.32.0")
    found, role = factory.create_connector("config", "role", kv_cache_config="cache")
    assert (found, role) == (Engine("config", "cache"), "role")
    assert engine_being_built() == Engine(None, None)


def test_the_arguments_of_an_engine_are_seen_once_before_they_become_its_config():
    kind, seen, made = fake_vllm.fresh(fake_vllm.EngineArgs), [], []

    def prepare(args):
        seen.append(args)
        args.kv_transfer_config = "ours"

    for _ in range(2):
        compat.wrap_engine_args(kind, prepare, made.append, "0.32.0")
    args = kind()
    assert args.create_engine_config("usage", headless=True) == ("ours", "usage", True)
    assert seen == [args]
    assert made == [("ours", "usage", True)]


# -- the self-test


def test_a_release_whose_function_takes_something_else_is_refused_in_one_line(kind):
    kind.add_lora = lambda self, lora_request, adapter: None
    with pytest.raises(StartError) as refused:
        compat.follow_core(Engine(Config(), None), "0.34.0")
    (line,) = str(refused.value).splitlines()
    assert "vLLM 0.34.0" in line
    assert "EngineCore.add_lora takes (self, lora_request, adapter), expected (self, lora_request)" in line
    assert "report this" in line


@pytest.mark.parametrize("name", sorted(compat.CORE))
def test_a_release_without_a_function_is_refused_by_the_functions_name(kind, name):
    delattr(kind, name)
    with pytest.raises(StartError, match=rf"EngineCore\.{name} takes \(nothing: it is not there\)"):
        compat.follow_core(Engine(Config(), None), "0.32.0")


def test_a_release_whose_core_has_no_scheduler_is_refused(kind):
    kind.__init__ = lambda self, vllm_config: setattr(self, "vllm_config", vllm_config)
    with pytest.raises(StartError, match="EngineCore has no vllm_config; EngineCore has no scheduler"):
        compat.follow_core(Engine(Config(), None), "0.32.0")


def test_a_release_in_which_a_served_core_has_a_function_of_its_own_is_refused(kind):
    served = type("EngineCoreProc", (kind,), {"collective_rpc": kind.collective_rpc, "__module__": kind.__module__})
    with pytest.raises(StartError, match=r"EngineCoreProc\.collective_rpc replaces EngineCore\.collective_rpc"):
        compat.follow_core(Engine(Config(), None), "0.32.0")
    assert served


@pytest.mark.parametrize(
    ("wrap", "kind", "name"),
    [
        (compat.wrap_factory, "KVConnectorFactory", "create_connector"),
        (
            lambda kind, version: compat.wrap_engine_args(kind, print, print, version),
            "EngineArgs",
            "create_engine_config",
        ),
    ],
)
def test_a_release_that_starts_otherwise_is_refused_and_left_as_it_is(wrap, kind, name):
    other = type(kind, (), {name: lambda self, something: something})
    with pytest.raises(StartError, match=rf"{kind}\.{name} takes \(self, something\)"):
        wrap(other, "0.34.0")
    assert other().create_connector("x") == "x" if name == "create_connector" else other().create_engine_config("x")


def test_after_a_reset_requests_offer_full_attention_again_and_no_window_that_they_have_offered(link):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestGroupState,
    )

    full, window = RequestGroupState(5), RequestGroupState(4)
    scheduler = OffloadingConnectorScheduler(SimpleNamespace(get_manager=lambda: None))
    groups = [SimpleNamespace(sliding_window_size_in_chunks=size) for size in (None, 2)]
    scheduler.config = SimpleNamespace(kv_group_configs=groups)
    scheduler._req_status["r"] = SimpleNamespace(group_states=[full, window])
    scheduler.reset_cache()
    assert (full.next_stored_chunk_idx, window.next_stored_chunk_idx) == (0, 4)


def test_a_release_that_does_not_say_what_a_request_has_offered_is_refused(link):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    class Other:
        offered: int

    with pytest.raises(StartError, match=r"vLLM 9\.9: Other has no next_stored_chunk_idx"):
        compat.wrap_offloading(OffloadingConnectorScheduler, Other, "9.9")
