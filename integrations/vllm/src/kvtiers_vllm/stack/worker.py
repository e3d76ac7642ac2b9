"""The worker of a rank under vLLM's connector: its jobs become those of a ``GpuWorker``.

vLLM's worker asserts that every copy succeeded, so every copy is reported to it as done. Its real result is kept
for the connector, which reports a failed store to the manager, and a request whose load failed to the scheduler. A job
that cannot be submitted has failed. A pipelined load (``pipelined_loads.py``) is one job of vLLM's and a copy for each
part; what it lacks at its end are blocks that the connector reports as not loaded.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingWorker, TransferResult

from kvtiers.gpu.worker import GpuWorker
from kvtiers.types import BlockSpec, ChunkIds
from kvtiers.types import TransferResult as Copied
from kvtiers_vllm.never_raise import BugCount, never_raises
from kvtiers_vllm.own_tiering.idle_backoff import LoadWatch, Wakeup
from kvtiers_vllm.stack.plans import CopyReport

__all__ = ["NO_PLAN", "WAKEUP", "KvtiersWorker", "LoadPart", "PlannedRows"]

WAKEUP = Wakeup()
"""Shared by the two halves of vLLM's connector, which vLLM makes apart, where they are in one process."""

NO_PLAN = 0
"""The plan of a load that the manager could not grant; plans are counted from 1."""


@dataclass(eq=False)
class PlannedRows(LoadStoreSpec):
    """The rows of one plan; travels from the manager through vLLM to each worker."""

    plan_id: int
    request_id: str
    chunk_ids: ChunkIds
    load_id: int = 0
    """Of a pipelined load, of which these are the first rows; others follow as ``LoadPart``. 0: these are all."""
    by_group: tuple[int, ...] = ()
    """Of a pipelined load: how many of the rows are of each KV group that it has blocks of."""


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The next rows of a pipelined load; None: there are none. ``is_last``: no more will come, all else is missing."""

    load_id: int
    rows: PlannedRows | None
    is_last: bool


@dataclass(slots=True, eq=False)
class _PipelinedRun:
    """The blocks of a pipelined load in one group. ``first``: the number of the first one in its request.

    ``given``: chunks whose rows have come; ``good``: chunks before the first copy that failed.
    """

    group: int
    block_ids: npt.NDArray[np.int64]
    first: int
    per_chunk: int
    given: int = 0
    good: int = field(init=False)

    def __post_init__(self) -> None:
        self.good = self.chunks()

    def chunks(self) -> int:
        """Return how many chunks have these blocks; the first may begin in its middle."""
        return -(-(self.first % self.per_chunk + len(self.block_ids)) // self.per_chunk)

    def span(self, first: int, end: int) -> slice:
        """Return where the blocks of these chunks are among its blocks."""
        lead = self.first % self.per_chunk
        return slice(max(0, first * self.per_chunk - lead), max(0, end * self.per_chunk - lead))


@dataclass(slots=True, eq=False)
class _PipelinedJob:
    """A job of vLLM's whose rows come in parts. ``copies``: in flight."""

    job_id: int
    request_id: str
    groups: int
    runs: list[_PipelinedRun]
    copies: int = 0
    is_closed: bool = False
    """No more rows will come."""
    nbytes: int = 0
    seconds: float = 0.0

    def give(self, by_group: Sequence[int]) -> BlockSpec:
        """Return the blocks of so many chunks more of each run; ValueError for another number of runs."""
        sizes, firsts, ids = [0] * self.groups, [0] * self.groups, []
        for run, chunks in zip(self.runs, by_group, strict=True):
            span = run.span(run.given, run.given + chunks)
            run.given += chunks
            ids.append(run.block_ids[span])
            sizes[run.group], firsts[run.group] = len(ids[-1]), run.first + span.start
        return BlockSpec(np.concatenate(ids), tuple(sizes), tuple(firsts))

    def has_ended(self) -> bool:
        """Return whether nothing more comes and nothing of it is in flight."""
        return not self.copies and (self.is_closed or all(run.given == run.chunks() for run in self.runs))


class KvtiersWorker(OffloadingWorker):
    """Translates; everything is done by ``worker``."""

    def __init__(self, worker: GpuWorker, blocks_per_chunk: int) -> None:
        self.bugs = BugCount("kvtiers")
        self._worker = worker
        self._blocks_per_chunk = blocks_per_chunk
        self._jobs: dict[int, tuple[PlannedRows, bool]] = {}
        self._refused: list[int] = []
        self._begun: set[int] = set()
        """Loads that vLLM will submit in this step, and that have begun already."""
        self._pipelined: dict[int, _PipelinedJob] = {}
        """By load id."""
        self._part_of: dict[int, tuple[_PipelinedJob, Sequence[int]]] = {}
        """The load of a part's copy, and its first chunk of each run, by the copy's id, which is no job's of vLLM."""
        self._part_ids = itertools.count(-1, -1)
        self._missing_blocks: set[int] = set()
        self._spoilt: set[int] = set()
        """Jobs that vLLM wanted to wait for and could not."""
        self._report = CopyReport()
        self._failed_loads: set[str] = set()
        self._watch = LoadWatch(self._wait, WAKEUP)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start to copy blocks into rows."""
        self._jobs[job_id] = (dst_spec, True)
        if not self._store(job_id, src_spec, dst_spec):
            self._refused.append(job_id)
        return True

    @never_raises(lambda: False)
    def _store(self, job_id: int, blocks: Any, rows: PlannedRows) -> bool:
        """Submit a store; False: it is refused."""
        if not self._has_whole_chunks(blocks):
            return False
        self._worker.submit_store(job_id, _blocks(blocks), rows.chunk_ids)
        return True

    def begin_load(self, job_id: int, rows: PlannedRows, blocks: Any) -> None:
        """Start a load that vLLM submits later in the step."""
        self._begun.add(job_id)
        self._submit_load(job_id, rows, blocks, expedited=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Start to copy rows into blocks, unless that was begun already."""
        if job_id in self._begun:
            self._begun.remove(job_id)
        else:
            self._submit_load(job_id, src_spec, dst_spec, expedited=expedited)
        return True

    def _submit_load(self, job_id: int, rows: PlannedRows, blocks: Any, *, expedited: bool) -> None:
        in_parts = bool(getattr(rows, "load_id", 0))
        if in_parts and self._begin_parts(job_id, rows, blocks):
            return
        self._jobs[job_id] = (rows, False)
        if in_parts or not self._load(job_id, rows, blocks, expedited=expedited):
            self._refused.append(job_id)

    @never_raises(lambda: False)
    def _load(self, job_id: int, rows: PlannedRows, blocks: Any, *, expedited: bool) -> bool:
        """Submit a load; False: it is refused."""
        if rows.plan_id == NO_PLAN:
            return False
        blocks = blocks if isinstance(blocks, BlockSpec) else _blocks(blocks)
        self._worker.submit_load(job_id, rows.chunk_ids, blocks, expedited)
        self._watch.watch(job_id)
        return True

    @never_raises(lambda: False)
    def _begin_parts(self, job_id: int, rows: PlannedRows, blocks: Any) -> bool:
        """Begin a pipelined load; False: it is refused."""
        job = _pipelined(job_id, rows.request_id, _blocks(blocks), self._blocks_per_chunk)
        self._pipelined[rows.load_id] = job
        self._copy_part(job, rows)
        return True

    def continue_loads(self, parts: Iterable[LoadPart]) -> None:
        """Start to copy the next rows of pipelined loads; those of a load that was refused are given back."""
        for part in parts:
            job = self._pipelined.get(part.load_id)
            if job is not None:
                job.is_closed |= part.is_last
                if part.rows is not None:
                    self._copy_part(job, part.rows)
            elif part.rows is not None:
                self._report.ended[part.rows.plan_id] += 1
                self._report.failed.add(part.rows.plan_id)

    def _copy_part(self, job: _PipelinedJob, rows: PlannedRows) -> None:
        part_id, firsts = next(self._part_ids), [run.given for run in job.runs]
        job.copies += 1
        self._jobs[part_id] = (rows, False)
        self._part_of[part_id] = (job, firsts)
        if not self._load_part(part_id, job, rows):
            self._refused.append(part_id)

    @never_raises(lambda: False)
    def _load_part(self, part_id: int, job: _PipelinedJob, rows: PlannedRows) -> bool:
        """Submit the copy of a part; False: it is refused."""
        return bool(self._load(part_id, rows, job.give(rows.by_group), expedited=False))

    def note_step(self, *, computes: bool) -> None:
        """Record that vLLM begins a step on this rank."""
        self._worker.note_step(computes=computes)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies that have ended, each as done."""
        refused, self._refused = self._refused, []
        done = []
        for copied in [*(Copied(job_id, False) for job_id in refused), *self._copied()]:
            part = self._part_of.pop(copied.job_id, None)
            success = copied.success and copied.job_id not in self._spoilt
            self._spoilt.discard(copied.job_id)
            self._note_end(copied.job_id, success=success, is_part=part is not None)
            if part is None:
                done.append(TransferResult(copied.job_id, True, copied.nbytes, copied.seconds))
            else:
                self._part_ended(*part, copied, success=success)
        return done + [self._end(load_id) for load_id, job in list(self._pipelined.items()) if job.has_ended()]

    def _part_ended(self, job: _PipelinedJob, firsts: Sequence[int], copied: Copied, *, success: bool) -> None:
        job.copies -= 1
        job.nbytes += copied.nbytes
        job.seconds += copied.seconds
        if not success:
            for run, first in zip(job.runs, firsts, strict=True):
                run.good = min(run.good, first)

    def _end(self, load_id: int) -> TransferResult:
        job = self._pipelined.pop(load_id)
        missing = [run.block_ids[run.span(min(run.good, run.given), run.chunks())] for run in job.runs]
        if job.groups == 1:
            self._missing_blocks.update(*(blocks.tolist() for blocks in missing))
        elif any(map(len, missing)):
            self._failed_loads.add(job.request_id)
        return TransferResult(job.job_id, True, job.nbytes, job.seconds)

    @never_raises(tuple)
    def _copied(self) -> Iterable[Copied]:
        return self._worker.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Block until these copies have ended. If waiting fails they count as failed, since vLLM goes on regardless.

        It may reuse blocks that such a store still reads: what is read then is never accepted as a chunk.
        """
        if not self._wait(job_ids):
            self._spoilt |= job_ids & self._jobs.keys()

    @never_raises(lambda: False)
    def _wait(self, job_ids: set[int]) -> bool:
        self._worker.wait(job_ids)
        return True

    @never_raises(lambda: None)
    def shutdown(self) -> None:
        """End: a copy that runs is finished, the rows are left."""
        self._worker.shutdown()
        self._watch.close()

    def take_report(self) -> CopyReport:
        """Return the results of the copies since the last call."""
        report, self._report = self._report, CopyReport()
        return report

    def take_failed_loads(self) -> set[str]:
        """Return the requests whose load has failed since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_missing_blocks(self) -> set[int]:
        """Return the blocks of pipelined loads that have ended since the last call without them."""
        missing, self._missing_blocks = self._missing_blocks, set()
        return missing

    def _has_whole_chunks(self, blocks: Any) -> bool:
        """Return whether no chunk lacks a block (a sliding window has moved on): such a chunk would hold old bytes."""
        per_chunk = self._blocks_per_chunk
        return not any(
            first % per_chunk or size % per_chunk
            for size, first in zip(blocks.group_sizes, blocks.block_indices, strict=True)
            if size
        )

    @never_raises(lambda: None)
    def _note_end(self, job_id: int, *, success: bool, is_part: bool) -> None:
        rows, is_store = self._jobs.pop(job_id)
        self._report.ended[rows.plan_id] += 1
        if not success:
            self._report.failed.add(rows.plan_id)
            if not (is_store or is_part):
                self._failed_loads.add(rows.request_id)


def _pipelined(job_id: int, request_id: str, blocks: BlockSpec, per_chunk: int) -> _PipelinedJob:
    runs, at = [], 0
    for group, (size, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
        if size:
            runs.append(_PipelinedRun(group, blocks.block_ids[at : at + size], first, per_chunk))
        at += size
    return _PipelinedJob(job_id, request_id, len(blocks.group_sizes), runs)


def _blocks(spec: Any) -> BlockSpec:
    return BlockSpec(np.asarray(spec.block_ids, np.int64), tuple(spec.group_sizes), tuple(spec.block_indices))
