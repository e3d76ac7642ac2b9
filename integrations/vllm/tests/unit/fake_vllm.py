"""As much of vLLM as kvtiers' classes under it import, for an environment that has none."""

import importlib
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

__all__ = ["NAMES", "load"]

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
class OffloadingWorkerMetadata:
    completed_jobs: Any = None
    transfer_stats: Any = None


class OffloadingConnector:
    """vLLM's connector; ``calls``: what kvtiers' one has handed on to it."""

    def __init__(self):
        self.calls: list[str] = []

    def on_new_request(self, request):
        self.calls.append("on_new_request")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.calls.append("get_num_new_matched_tokens")
        return 16, True

    def build_connector_meta(self, scheduler_output):
        self.calls.append("build_connector_meta")
        return "meta"

    def update_connector_output(self, connector_output):
        self.calls.append("update_connector_output")

    def build_connector_worker_meta(self):
        self.calls.append("build_connector_worker_meta")
        return OffloadingWorkerMetadata({1}, "stats")

    def start_load_kv(self, forward_context):
        self.calls.append("start_load_kv")

    def get_transfer_results(self, finished_req_ids):
        self.calls.append("get_transfer_results")
        return Results()


@dataclass
class Results:
    failed_recving: set[str] = field(default_factory=set)


def _kind(name: str) -> type:
    return type(name, (), {})


_BASE = ("OffloadingCounterMetadata", "OffloadingGaugeMetadata", "RequestOffloadingContext", "OffloadingSpec")
_MODULES: dict[str, dict[str, Any]] = {
    f"{_CONNECTORS}.offloading.metrics": {"OffloadingConnectorStats": _kind("OffloadingConnectorStats")},
    f"{_CONNECTORS}.offloading.common": {"OffloadingWorkerMetadata": OffloadingWorkerMetadata},
    f"{_CONNECTORS}.offloading_connector": {"OffloadingConnector": OffloadingConnector},
    "vllm.v1.kv_offload.base": {
        **{name: _kind(name) for name in (*_BASE, "LoadStoreSpec", "OffloadingWorker")},
        "LookupResult": LookupResult,
        "Medium": Medium,
        "TransferResult": TransferResult,
    },
    "vllm.v1.kv_offload.tiering.base": {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager},
}
NAMES = {
    "own_tiering.tier": (
        "OffloadingConnectorStats",
        "LookupResult",
        "Medium",
        "OffloadingCounterMetadata",
        "OffloadingGaugeMetadata",
        "RequestOffloadingContext",
        "JobResult",
        "SecondaryTierManager",
    ),
    "stack.spec": (
        "OffloadingConnectorStats",
        "OffloadingCounterMetadata",
        "OffloadingGaugeMetadata",
        "OffloadingSpec",
    ),
}
"""What modules of ours that vLLM loads import of it."""


def load(monkeypatch: Any, name: str, version: str, without: str = "") -> ModuleType:
    """Import a module of ours with a vLLM of this version that lacks a name; until the test's end."""
    packages = {part.rpartition(".")[0] for part in _MODULES} | {"vllm"}
    while parents := {part.rpartition(".")[0] for part in packages if "." in part} - packages:
        packages |= parents
    modules = {part: ModuleType(part) for part in (*packages, *_MODULES)}
    modules["vllm"].__dict__["__version__"] = version
    for part, names in _MODULES.items():
        modules[part].__dict__.update({called: what for called, what in names.items() if called != without})
    for part, module in modules.items():
        monkeypatch.setitem(sys.modules, part, module)
    ours = f"kvtiers_vllm.{name}"
    monkeypatch.setitem(sys.modules, ours, ModuleType(ours))  # so that it is forgotten at the end
    del sys.modules[ours]
    return importlib.import_module(ours)
