"""The public surface of the engine's side: all that an engine imports, each name loaded when it is first used.

kvtiers moves an LLM engine's KV cache out of GPU memory, through tiers of storage, and back. An engine imports from
here, the author of a tier from ``kvtiers.api`` and, in tests, from ``kvtiers.testing``; ``kvtiers.metrics.export``
gives the figures to Prometheus. Every other module is internal and may change in any release. ``docs/stability.md``
says what the public ones promise.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvtiers._version import __version__

if TYPE_CHECKING:
    from kvtiers.client import Client, PutResult, open_client
    from kvtiers.config import OffloadConfig, load_config
    from kvtiers.gpu.settings import CopySettings
    from kvtiers.gpu.worker import GpuWorker
    from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
    from kvtiers.runtime import open_manager, open_worker
    from kvtiers.scheduler import (
        BlockHashChain,
        BlockHolder,
        EngineRequest,
        FreeQueue,
        LoadOutcome,
        OffloadScheduler,
        SchedulerOptions,
        StepTransfers,
        WorkerJob,
    )
    from kvtiers.scheduler.block_hash import BLOCK_HASH_ALGORITHM
    from kvtiers.tiering.manager import TieringManager
    from kvtiers.types import (
        BlockSpec,
        ChunkBlocks,
        ChunkIds,
        LoadPlan,
        OffloadEvent,
        OffloadPolicy,
        PromptGroup,
        Reach,
        RequestContext,
        RequestHints,
        StorePlan,
        TransferResult,
        request_hints,
    )

__all__ = [
    "BLOCK_HASH_ALGORITHM",
    "BlockHashChain",
    "BlockHolder",
    "BlockSpec",
    "CacheLayout",
    "ChunkBlocks",
    "ChunkIds",
    "Client",
    "CopySettings",
    "EngineRequest",
    "FreeQueue",
    "GpuWorker",
    "KVGroup",
    "KVTensor",
    "LoadOutcome",
    "LoadPlan",
    "ModelIdentity",
    "OffloadConfig",
    "OffloadEvent",
    "OffloadPolicy",
    "OffloadScheduler",
    "PromptGroup",
    "PutResult",
    "Reach",
    "RequestContext",
    "RequestHints",
    "SchedulerOptions",
    "StepTransfers",
    "StorePlan",
    "TieringManager",
    "TransferResult",
    "WorkerJob",
    "__version__",
    "load_config",
    "open_client",
    "open_manager",
    "open_worker",
    "request_hints",
]

# A test holds this equal to the imports above, which type checkers and editors read.
_NAMES_BY_MODULE = {
    "kvtiers.client": ("Client", "PutResult", "open_client"),
    "kvtiers.config": ("OffloadConfig", "load_config"),
    "kvtiers.gpu.settings": ("CopySettings",),
    "kvtiers.gpu.worker": ("GpuWorker",),
    "kvtiers.layout.cache_layout": ("CacheLayout", "KVGroup", "KVTensor", "ModelIdentity"),
    "kvtiers.runtime": ("open_manager", "open_worker"),
    "kvtiers.scheduler": (
        "BlockHashChain",
        "BlockHolder",
        "EngineRequest",
        "FreeQueue",
        "LoadOutcome",
        "OffloadScheduler",
        "SchedulerOptions",
        "StepTransfers",
        "WorkerJob",
    ),
    "kvtiers.scheduler.block_hash": ("BLOCK_HASH_ALGORITHM",),
    "kvtiers.tiering.manager": ("TieringManager",),
    "kvtiers.types": (
        "BlockSpec",
        "ChunkBlocks",
        "ChunkIds",
        "LoadPlan",
        "OffloadEvent",
        "OffloadPolicy",
        "PromptGroup",
        "Reach",
        "RequestContext",
        "RequestHints",
        "StorePlan",
        "TransferResult",
        "request_hints",
    ),
}
_OF_COMPANIONS = {"replay": ("kvtiers_replay.notebook", "kvtiers[replay]")}
"""By name, the module of a companion that has it, and what to install for that."""
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    # Late, so that `import kvtiers`, which every plugin's entry module does, stays cheap.
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name in _OF_COMPANIONS:
        module, requirement = _OF_COMPANIONS[name]
        if find_spec(module.partition(".")[0]) is None:
            raise AttributeError(
                f"kvtiers.{name} comes with a companion: pip install --find-links wheels {requirement!r}"
            )
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OF_COMPANIONS})
