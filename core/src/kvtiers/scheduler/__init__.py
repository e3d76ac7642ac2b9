"""Which blocks to offload and which prefix to load, for engines that do not bring a scheduler of their own."""

from kvtiers.scheduler.engine import BlockHolder, EngineRequest, OffloadManager
from kvtiers.scheduler.offload import OffloadScheduler
from kvtiers.scheduler.transfers import LoadOutcome, StepTransfers, WorkerJob

__all__ = [
    "BlockHolder",
    "EngineRequest",
    "LoadOutcome",
    "OffloadManager",
    "OffloadScheduler",
    "StepTransfers",
    "WorkerJob",
]
