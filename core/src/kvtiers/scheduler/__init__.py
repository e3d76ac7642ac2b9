"""The offload scheduler: which blocks to store and which prefix to load, for engines without a policy of their own."""

from kvtiers.scheduler.block_hash import BlockHashChain
from kvtiers.scheduler.engine import BlockHolder, EngineRequest, FreeQueue
from kvtiers.scheduler.offload import OffloadScheduler
from kvtiers.scheduler.options import SchedulerOptions
from kvtiers.scheduler.transfers import LoadOutcome, StepTransfers, WorkerJob

__all__ = [
    "BlockHashChain",
    "BlockHolder",
    "EngineRequest",
    "FreeQueue",
    "LoadOutcome",
    "OffloadScheduler",
    "SchedulerOptions",
    "StepTransfers",
    "WorkerJob",
]
