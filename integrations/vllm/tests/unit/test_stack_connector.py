"""``KvtiersConnector`` builds kvtiers' spec from its own configs, and is refused where that would not hold."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from kvtiers.api import ConfigError, StartError
from kvtiers_vllm.engine import Engine, being_built, engine_being_built
from kvtiers_vllm.stack.options import note_tier_types

from . import fake_vllm
from .test_stack_guard import engine_config
from .test_stack_layout import FULL, STATES, STATES_EVERYWHERE, WINDOW


@pytest.fixture
def module(monkeypatch):
    return fake_vllm.load(monkeypatch, "stack.connector", "0.33.0")


def test_what_it_builds_is_built_for_the_configs_that_it_was_given(module):
    config = engine_config(kvtiers_config="tiers.yaml")
    connector = module.KvtiersConnector(config, "role", "cache")
    assert connector.built_in == Engine(config, "cache", whole_stack=True)
    assert engine_being_built() == Engine(None, None), "and nothing else is, afterwards"
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert extra["spec_name"] == "KvtiersOffloadingSpec", "by which vLLM's factory finds the spec"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(
    ("given", "chosen"),
    [({}, 4), ({"blocks_per_chunk": "auto"}, 4), ({"blocks_per_chunk": 1}, 1), ({"block_size": 32}, None)],
)
def test_vllm_is_told_how_many_blocks_a_chunk_has_unless_its_config_says_it(module, given, chosen):
    config = engine_config(kvtiers_config="tiers.yaml", **given)
    spec = SimpleNamespace(block_size=16, unpadded_page_size_bytes=4096)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])])
    module.KvtiersConnector(config, "role", groups)
    assert config.kv_transfer_config.kv_connector_extra_config.get("blocks_per_chunk") == chosen


def test_of_windows_in_chunks_of_several_blocks_vllms_own_table_is_looked_at(module):
    def groups(*windows):
        return [SimpleNamespace(group_idx=7 + n, sliding_window_size_in_chunks=w) for n, w in enumerate(windows)]

    table = [SimpleNamespace(block_ids=[1, 2, 3, 4]), SimpleNamespace(block_ids=[0, 0, 0, 9])]
    scheduler = SimpleNamespace(_req_status={"r": SimpleNamespace(group_states=table)})
    scheduler.config = SimpleNamespace(blocks_per_chunk=2, kv_group_configs=groups(None, 2))
    look = module._window_blocks(scheduler)
    assert [look("r", 8, 0), look("r", 8, 1)] == [[0, 0], [0, 9]]
    assert look("r", 7, 1) is None, "full attention loses no block"
    scheduler.config = SimpleNamespace(blocks_per_chunk=1, kv_group_configs=groups(None, 2))
    assert module._window_blocks(scheduler) is None
    scheduler.config = SimpleNamespace(blocks_per_chunk=2, kv_group_configs=groups(None))
    assert module._window_blocks(scheduler) is None


def test_vllm_does_not_flush_the_load_of_a_request_that_a_reset_has_preempted(module):
    connector = module.KvtiersConnector(engine_config(kvtiers_config="tiers.yaml"), "role", "cache")
    jobs = {7: SimpleNamespace(req_id="loaded")}
    connector.connector_scheduler = SimpleNamespace(_current_batch_load_jobs=jobs)
    step = SimpleNamespace(preempted_req_ids={"loaded", "b"})
    connector.build_connector_meta(step)
    assert connector.preempted == {"b"}
    assert step.preempted_req_ids == {"loaded", "b"}, "its workers are told of both"


def test_the_process_that_serves_figures_has_the_specs(module):
    metrics = module.KvtiersConnector.build_prom_metrics(engine_config(), {}, [], {})
    assert metrics.spec_name == "KvtiersOffloadingSpec"


def test_figures_of_tier_types_that_this_process_has_not_defined_come_by_a_label(module):
    config = engine_config(kvtiers_config={"version": 1, "primary": {"capacity": "1MiB"}, "secondary": []})
    note_tier_types(config.kv_transfer_config.kv_connector_extra_config)
    metrics = module.KvtiersConnector.build_prom_metrics(config, {}, [], {})
    known = {"kvtiers_tier_off": {("a",): 0.0}, "vllm:kv_offload_total_bytes": {("load",): 5}}
    kinds = {"kvtiers_tier_off": "gauge", "vllm:kv_offload_total_bytes": "counter", "kvtiers_tier_held_bytes": "gauge"}
    metrics.observe({"data": known, "types": kinds}, 1)
    metrics.observe({"data": {**known, "kvtiers_tier_held_bytes": {("a",): 7.0}}, "types": kinds}, 1)
    (same, _), (named, of_engine) = metrics.observed
    assert same["data"] == known
    assert named["data"] == {**known, "kvtiers_tier_own_figure": {("a", "held_bytes"): 7.0}}
    assert (named["types"]["kvtiers_tier_own_figure"], of_engine) == ("gauge", 1)


def test_a_spec_of_another_name_is_refused(module):
    with pytest.raises(ConfigError, match=r"spec_name is 'TieringOffloadingSpec', but KvtiersConnector has a spec"):
        module.KvtiersConnector(engine_config(spec_name="TieringOffloadingSpec"), "role", "cache")


def test_it_is_not_one_of_several_connectors(module):
    several = SimpleNamespace(kv_transfer_config=fake_vllm.KVTransferConfig("MultiConnector"))
    with (
        being_built(Engine(several, "cache")),
        pytest.raises(StartError, match="KvtiersConnector does not run under MultiConnector"),
    ):
        module.KvtiersConnector(engine_config(), "role", "cache")


def test_a_release_whose_connector_takes_something_else_is_refused_in_one_line(module, monkeypatch):
    monkeypatch.setattr(fake_vllm.OffloadingConnector, "on_new_request", lambda self, request, tenant: None)
    with pytest.raises(StartError, match=r"OffloadingConnector.on_new_request takes \(self, request, tenant\)"):
        module.KvtiersConnector(engine_config(), "role", "cache")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("OffloadingConnector", "connector_scheduler"),
        ("OffloadingConnectorScheduler", "manager"),
        ("OffloadingConnectorWorker", "worker"),
    ],
)
def test_a_release_that_keeps_the_manager_or_the_worker_elsewhere_is_refused(module, monkeypatch, kind, name):
    monkeypatch.setattr(getattr(fake_vllm, kind), "__init__", lambda self, vllm_config, role, kv_cache_config: None)
    with pytest.raises(StartError, match=f"{kind} has no {name}"):
        module.KvtiersConnector(engine_config(), "role", "cache")


def test_under_vllms_own_connector_the_spec_is_refused_with_the_spelling_of_now(monkeypatch):
    spec = fake_vllm.load(monkeypatch, "stack.spec", "0.33.0").KvtiersOffloadingSpec
    monkeypatch.setattr(spec.__base__, "__init__", lambda self, config: None, raising=False)
    with (
        being_built(Engine(engine_config(), "cache")),
        pytest.raises(StartError, match='write "kv_connector": "KvtiersConnector" and leave spec_name out') as refused,
    ):
        spec(SimpleNamespace())
    assert len(str(refused.value).splitlines()) == 1


def test_a_step_is_recorded_with_the_mean_position_of_what_it_computes(module):
    begun = []
    manager = SimpleNamespace(
        steps=SimpleNamespace(begins=lambda *step: begun.append(step)),
        computes=lambda: None,
        look_again=lambda: None,
        back_off=lambda computes: None,
    )
    connector = module.KvtiersConnector(engine_config(kvtiers_config="tiers.yaml"), "role", "cache")
    connector.connector_scheduler = SimpleNamespace(manager=manager)
    step = SimpleNamespace(
        total_num_scheduled_tokens=300,
        num_scheduled_tokens={"new": 200, "in parts": 100},
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=64)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["in parts"], num_computed_tokens=[4000]),
    )
    connector._step_begins(step)
    assert begun == [(300, 2, (200 * (64 + 100) + 100 * (4000 + 50)) / 300)]


@pytest.mark.parametrize(("reads_cache", "end"), [(True, 96), (False, 32)])
def test_of_a_request_that_wants_its_prompts_probabilities_nothing_is_looked_up(module, reads_cache, end):
    asked = []
    manager = SimpleNamespace(
        requests=SimpleNamespace(has_local_prefix=lambda *_: None, holds_back=lambda _: False),
        pass_is_over=lambda: False,
        waits=lambda *arguments: asked.append(arguments),
    )
    connector = module.KvtiersConnector(engine_config(kvtiers_config="tiers.yaml"), "role", "cache")
    status = SimpleNamespace(transfer_jobs=(), req_context="context")
    config = SimpleNamespace(kv_group_configs=[SimpleNamespace(sliding_window_size_in_chunks=None)])
    connector.connector_scheduler = SimpleNamespace(manager=manager, _req_status={"r": status}, config=config)
    request = SimpleNamespace(request_id="r", num_tokens=96, skip_reading_prefix_cache=not reads_cache)
    assert not connector._holds_back(request, 32)
    assert asked == [("context", 32, end)]


@pytest.mark.parametrize(
    ("interval", "groups", "stored"),
    [
        (0, [(64, FULL), (64, WINDOW)], 8192),
        (0, [(48, FULL), (48, WINDOW), (32, WINDOW)], 8160),
        (0, [(64, FULL)], 0),
        (0, [(64, FULL), (544, STATES)], 0),
        (0, [(64, FULL), (64, WINDOW), (544, STATES)], 8192),
        (512, [(64, FULL), (64, WINDOW)], 512),
        (None, [(64, FULL), (64, WINDOW)], None),
        (0, [(64, FULL), (16384, STATES_EVERYWHERE)], 16384),
        (0, [(48, FULL), (16, WINDOW)], 8160),
    ],
)
def test_windows_have_checkpoints_unless_vllms_config_says_how_many(module, interval, groups, stored):
    class Config(NamedTuple):
        retention_interval: int | None
        kv_group_configs: list

    made = [SimpleNamespace(tokens_per_chunk=tokens, kv_cache_spec=spec) for tokens, spec in groups]
    assert module._with_checkpoints(Config(interval, made)).retention_interval == stored
