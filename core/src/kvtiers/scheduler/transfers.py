"""The transfers of a step, and the jobs in flight: a job is done when every worker has reported it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtiers.base import BlockSpec, ChunkIds, LoadPlan, StorePlan, TransferResult

__all__ = ["JobsInFlight", "LoadOutcome", "StepTransfers", "WorkerJob"]


class WorkerJob(NamedTuple):
    """One transfer that every worker is to be given: ``submit_store`` or ``submit_load``, with these arguments."""

    job_id: int
    blocks: BlockSpec
    chunk_ids: ChunkIds


@dataclass(slots=True)
class StepTransfers:
    """What a step has decided. Submit it before the next one: first the loads, which somebody waits for."""

    loads: list[WorkerJob] = field(default_factory=list)
    stores: list[WorkerJob] = field(default_factory=list)


class LoadOutcome(NamedTuple):
    """The end of a request's load: its KV is in the blocks up to token ``end``, or (failed) has to be computed."""

    request_id: str
    success: bool
    start: int
    end: int


@dataclass(slots=True, eq=False)
class JobInFlight:
    """A job that workers have; ``load`` is None for a store."""

    plan: StorePlan | LoadPlan
    held: Sequence[int]
    waiting: set[int]
    load: LoadOutcome | None = None
    success: bool = True


class JobsInFlight:
    """The jobs that workers have not all reported yet."""

    def __init__(self, world_size: int) -> None:
        self._ranks = range(world_size)
        self._jobs: dict[int, JobInFlight] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._jobs)

    def add(
        self, plan: StorePlan | LoadPlan, held: Sequence[int], blocks: BlockSpec, load: LoadOutcome | None = None
    ) -> WorkerJob:
        """Take a job in; its id is new for the life of the process."""
        job_id = next(self._ids)
        self._jobs[job_id] = JobInFlight(plan, held, set(self._ranks), load)
        return WorkerJob(job_id, blocks, plan.chunk_ids)

    def report(self, result: TransferResult, rank: int, done: Callable[[JobInFlight], None]) -> None:
        """Take one rank's result; call ``done`` if it was the last one. A rank that reports twice counts once."""
        job = self._jobs.get(result.job_id)
        if job is None:
            return
        job.waiting.discard(rank)
        job.success = job.success and result.success
        if not job.waiting:
            del self._jobs[result.job_id]
            done(job)
