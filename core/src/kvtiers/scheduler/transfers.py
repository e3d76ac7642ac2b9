"""The transfers of a step, and the jobs in flight: a job is done when every worker has reported it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvtiers.types import BlockSpec, ChunkIds, TransferResult

__all__ = ["JobsInFlight", "LoadOutcome", "StepTransfers", "WorkerJob"]

JobEnded: TypeAlias = Callable[[int, bool], None]
"""Called with the job's id and whether all workers succeeded."""


class WorkerJob(NamedTuple):
    """One transfer for every worker: ``submit_store`` or ``submit_load``, with these arguments."""

    job_id: int
    blocks: BlockSpec
    chunk_ids: ChunkIds


@dataclass(slots=True)
class StepTransfers:
    """A step's transfers. Submit them before the next step's: first the loads, for which requests wait."""

    loads: list[WorkerJob] = field(default_factory=list)
    stores: list[WorkerJob] = field(default_factory=list)


class LoadOutcome(NamedTuple):
    """The end of a request's load: its KV is in the blocks up to token ``end``, or (failed) has to be computed."""

    request_id: str
    success: bool
    start: int
    end: int


@dataclass(slots=True, eq=False)
class _Job:
    waiting: set[int]
    ended: JobEnded
    success: bool = True


class JobsInFlight:
    """The jobs that not all workers have reported yet, and those of this step, which no worker has been given."""

    def __init__(self, world_size: int) -> None:
        self._ranks = range(world_size)
        self._jobs: dict[int, _Job] = {}
        self._ids = itertools.count(1)
        self._step = StepTransfers()

    def __len__(self) -> int:
        return len(self._jobs)

    def load(self, blocks: BlockSpec, chunk_ids: ChunkIds, ended: JobEnded) -> int:
        """Add a load to the step; return its id, which is new for the life of the scheduler."""
        job = self._add(blocks, chunk_ids, ended)
        self._step.loads.append(job)
        return job.job_id

    def store(self, blocks: BlockSpec, chunk_ids: ChunkIds, ended: JobEnded) -> int:
        """Add a store to the step; return its id."""
        job = self._add(blocks, chunk_ids, ended)
        self._step.stores.append(job)
        return job.job_id

    def take_step(self) -> StepTransfers:
        """Return the step's transfers, and begin the next step."""
        step, self._step = self._step, StepTransfers()
        return step

    def report(self, result: TransferResult, rank: int) -> bool:
        """Accept one rank's result; the last one ends the job. False: no job waited for it, so it changes nothing.

        Each rank counts once for each job, with its first report.
        """
        job = self._jobs.get(result.job_id)
        if job is None or rank not in job.waiting:
            return False
        job.waiting.discard(rank)
        job.success = job.success and result.success
        if not job.waiting:
            del self._jobs[result.job_id]
            job.ended(result.job_id, job.success)
        return True

    def lose(self, rank: int) -> int:
        """Record that this rank will not report: its jobs have failed. Return how many it had."""
        lost = [job_id for job_id, job in self._jobs.items() if rank in job.waiting]
        for job_id in lost:
            self.report(TransferResult(job_id, False), rank)
        return len(lost)

    def _add(self, blocks: BlockSpec, chunk_ids: ChunkIds, ended: JobEnded) -> WorkerJob:
        job_id = next(self._ids)
        self._jobs[job_id] = _Job(set(self._ranks), ended)
        return WorkerJob(job_id, blocks, chunk_ids)
