"""As much of vLLM as kvtiers' classes under it import, for an environment that has none."""

import importlib
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from kvtiers_vllm.engine import engine_being_built

__all__ = ["NAMES", "fresh", "install", "load"]

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"


class LookupResult(Enum):
    MISS = 0
    HIT = 1
    RETRY = 2
    HIT_PENDING = 3


class Medium(Enum):
    STORAGE = "storage"


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class SecondaryTierManager:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self.tier_type = tier_type


@dataclass
class OffloadingConnectorMetadata:
    load_jobs: Any = "loads"
    store_jobs: Any = "stores"


@dataclass
class OffloadingWorkerMetadata:
    completed_jobs: Any = None
    transfer_stats: Any = None


class OffloadPromMetrics:
    """What serves ``/metrics``. ``observed``: each report."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self.spec_name = vllm_config.kv_transfer_config.kv_connector_extra_config["spec_name"]
        self.observed = []

    def observe(self, transfer_stats_data, engine_idx=0):
        self.observed.append((transfer_stats_data, engine_idx))


class OffloadingConnector:
    """vLLM's connector; ``calls``: what kvtiers' one has handed on to it. ``built_in``: the engine it was built for."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.calls: list[str] = []
        self.built_in = engine_being_built()
        self.connector_scheduler = self.connector_worker = None

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        raise NotImplementedError("kvtiers' connector makes metrics of its own")

    def on_new_request(self, request):
        self.calls.append("on_new_request")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.calls.append("get_num_new_matched_tokens")
        return 16, True

    def build_connector_meta(self, scheduler_output):
        self.calls.append("build_connector_meta")
        self.preempted = getattr(scheduler_output, "preempted_req_ids", None)
        return OffloadingConnectorMetadata()

    def bind_connector_metadata(self, connector_metadata):
        self.calls.append("bind_connector_metadata")

    def update_connector_output(self, connector_output):
        self.calls.append("update_connector_output")

    def build_connector_worker_meta(self):
        self.calls.append("build_connector_worker_meta")
        return OffloadingWorkerMetadata({1}, "stats")

    def get_transfer_results(self, finished_req_ids):
        self.calls.append("get_transfer_results")
        return Results()

    def get_block_ids_with_load_errors(self):
        self.calls.append("get_block_ids_with_load_errors")
        return set()


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: Any
    evicted_keys: list[bytes]


@dataclass
class RequestGroupState:
    next_stored_chunk_idx: int = 0


class OffloadingConnectorScheduler:
    def __init__(self, spec):
        self.manager = spec.get_manager()
        self.config = None
        self._req_status = {}
        self._current_batch_load_jobs = {}

    def reset_cache(self):
        for status in self._req_status.values():
            for group_state in status.group_states:
                group_state.next_stored_chunk_idx = 0


class OffloadingConnectorWorker:
    def __init__(self):
        self.worker = None


class EngineCore:
    """vLLM's engine core, as far as kvtiers follows it; ``called``: what reached its own functions."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.scheduler = SimpleNamespace(running=[])
        self.called: list[Any] = []
        self.weight_version = "default"

    def preprocess_add_request(self, request):
        self.called.append("preprocess_add_request")
        return request, 3

    def add_lora(self, lora_request):
        self.called.append(("add_lora", lora_request))
        return True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.called.append((method, timeout, args, kwargs))
        return ["done"]

    def set_weight_version(self, weight_version):
        self.weight_version = weight_version

    def get_weight_version(self):
        return self.weight_version

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return reset_connector if reset_running_requests else "done"


class Executor:
    """vLLM's executor, which loads the model; ``loaded``: with what config."""

    def __init__(self, vllm_config):
        self.loaded = vllm_config


@dataclass
class Results:
    failed_recving: set[str] = field(default_factory=set)


def _kind(name: str) -> type:
    return type(name, (), {})


class KVConnectorFactory:
    """vLLM's factory of connectors; like the two others it keeps what was registered, by name."""

    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name, module_path, class_name):
        _register(cls.registered, name, module_path, class_name)

    @classmethod
    def create_connector(cls, config, role, kv_cache_config):
        return (engine_being_built(), role)


class OffloadingSpecFactory:
    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_spec(cls, name, module_path, class_name):
        _register(cls.registered, name, module_path, class_name)


class SecondaryTierFactory:
    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_tier(cls, name, module_path, class_name):
        _register(cls.registered, name, module_path, class_name)


class CachePolicy:
    """What vLLM's primary asks which chunk leaves, from 0.31 on."""

    def __init__(self, cache_capacity):
        self.cache_capacity = cache_capacity

    def on_request_finished(self, key_groups, insertion_only_keys, reused_keys, req_context):
        raise NotImplementedError


class OldCachePolicy:
    """The same in 0.30, which says nothing of a request's end."""


class CachePolicyFactory:
    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_cache_policy(cls, name, module_path, class_name):
        _register(cls.registered, name, module_path, class_name)


def order_request_keys(key_groups, req_context):
    """Return the keys of all groups in the order of their places in the prompt."""
    return sorted((key for keys in key_groups for key in keys), key=req_context.get_offload_key_position)


def _register(registered: dict[str, tuple[str, str]], name: str, module: str, kind: str) -> None:
    if name in registered:
        raise ValueError(f"{name} is already registered")
    registered[name] = (module, kind)


class EngineArgs:
    """vLLM's arguments of an engine."""

    def __init__(self, kv_transfer_config=None, kv_offloading_size=None):
        self.kv_transfer_config = kv_transfer_config
        self.kv_offloading_size = kv_offloading_size

    def create_engine_config(self, usage_context=None, headless=False):
        return (self.kv_transfer_config, usage_context, headless)


@dataclass
class KVTransferConfig:
    kv_connector: str
    kv_role: str = "kv_both"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: str = "fail"


_BASE = ("OffloadingCounterMetadata", "OffloadingGaugeMetadata", "RequestOffloadingContext", "OffloadingSpec")
_MODULES: dict[str, dict[str, Any]] = {
    f"{_CONNECTORS}.offloading.metrics": {
        "OffloadingConnectorStats": _kind("OffloadingConnectorStats"),
        "OffloadPromMetrics": OffloadPromMetrics,
    },
    f"{_CONNECTORS}.offloading.common": {
        "OffloadingConnectorMetadata": OffloadingConnectorMetadata,
        "OffloadingWorkerMetadata": OffloadingWorkerMetadata,
    },
    f"{_CONNECTORS}.offloading.scheduler": {
        "OffloadingConnectorScheduler": OffloadingConnectorScheduler,
        "RequestGroupState": RequestGroupState,
    },
    f"{_CONNECTORS}.offloading.worker": {"OffloadingConnectorWorker": OffloadingConnectorWorker},
    f"{_CONNECTORS}.offloading_connector": {"OffloadingConnector": OffloadingConnector},
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": KVConnectorFactory},
    "vllm.v1.kv_offload.factory": {"OffloadingSpecFactory": OffloadingSpecFactory},
    "vllm.v1.kv_offload.tiering.factory": {"SecondaryTierFactory": SecondaryTierFactory},
    "vllm.v1.kv_offload.cpu.policies.base": {"CachePolicy": CachePolicy, "order_request_keys": order_request_keys},
    "vllm.v1.kv_offload.cpu.policies.factory": {"CachePolicyFactory": CachePolicyFactory},
    "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
    "vllm.config": {"KVTransferConfig": KVTransferConfig},
    "vllm.v1.engine.core": {"EngineCore": EngineCore},
    "vllm.v1.executor.abstract": {"Executor": Executor},
    "vllm.v1.kv_offload.base": {
        **{name: _kind(name) for name in (*_BASE, "LoadStoreSpec", "OffloadingWorker")},
        "OffloadingManager": _kind("OffloadingManager"),
        "OffloadingEvent": _kind("OffloadingEvent"),
        "PrepareStoreOutput": PrepareStoreOutput,
        "Locality": Enum("Locality", {"LOCAL": "LOCAL", "REMOTE": "REMOTE"}),
        "OffloadPolicy": Enum("OffloadPolicy", ["CHUNK_LEVEL", "REQUEST_LEVEL"]),
        "LookupResult": LookupResult,
        "Medium": Medium,
        "TransferResult": TransferResult,
    },
    "vllm.v1.kv_offload.tiering.base": {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager},
}
NAMES = {
    "own_tiering.tier": (
        "OffloadingConnectorStats",
        "Locality",
        "LookupResult",
        "Medium",
        "OffloadingCounterMetadata",
        "OffloadingEvent",
        "OffloadingGaugeMetadata",
        "RequestOffloadingContext",
        "JobResult",
        "SecondaryTierManager",
    ),
    "own_tiering.cache_policy": ("CachePolicy", "order_request_keys"),
    "stack.connector": (
        "OffloadingConnectorMetadata",
        "OffloadingWorkerMetadata",
        "OffloadPromMetrics",
        "OffloadingConnectorScheduler",
        "OffloadingConnectorWorker",
        "OffloadingConnector",
    ),
    "stack.spec": (
        "OffloadingConnectorStats",
        "OffloadingCounterMetadata",
        "OffloadingGaugeMetadata",
        "OffloadingSpec",
    ),
}
"""What modules of ours that vLLM loads import of it."""


def fresh(kind: type) -> type:
    """Return a class like this one, of which nothing has been wrapped."""
    names = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, kind.__bases__, names)


def load(monkeypatch: Any, name: str, version: str, without: str = "") -> ModuleType:
    """Import a module of ours with a vLLM of this version that lacks a name; until the test's end."""
    install(monkeypatch, version, without)
    ours = f"kvtiers_vllm.{name}"
    monkeypatch.setitem(sys.modules, ours, ModuleType(ours))  # so that it is forgotten at the end
    del sys.modules[ours]
    return importlib.import_module(ours)


def install(monkeypatch: Any, version: str = "0.32.0", without: str = "") -> None:
    """Have a vLLM of this version that lacks a name; until the test's end."""
    packages = {part.rpartition(".")[0] for part in _MODULES} | {"vllm"}
    while parents := {part.rpartition(".")[0] for part in packages if "." in part} - packages:
        packages |= parents
    modules = {part: ModuleType(part) for part in (*packages, *_MODULES)}
    modules["vllm"].__dict__["__version__"] = version
    for part, names in _MODULES.items():
        modules[part].__dict__.update({called: what for called, what in names.items() if called != without})
    for part in modules.values():
        for wrapped in (EngineCore, EngineArgs, Executor, KVConnectorFactory):
            if wrapped.__name__ in part.__dict__:
                part.__dict__[wrapped.__name__] = fresh(wrapped)
    for factory in (KVConnectorFactory, OffloadingSpecFactory, SecondaryTierFactory, CachePolicyFactory):
        factory.registered.clear()
    for part, module in modules.items():
        monkeypatch.setitem(sys.modules, part, module)
