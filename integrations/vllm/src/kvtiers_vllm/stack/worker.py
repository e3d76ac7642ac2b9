"""The worker of a rank under vLLM's connector: its jobs become those of a ``GpuWorker``.

vLLM's worker asserts that every copy succeeded, so every copy is reported to it as done. Its real result is kept
for the connector, which reports a failed store to the manager, and a request whose load failed to the scheduler. A job
that cannot be submitted has failed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingWorker, TransferResult

from kvtiers.gpu.worker import GpuWorker
from kvtiers.types import BlockSpec, ChunkIds
from kvtiers.types import TransferResult as Copied
from kvtiers_vllm.never_raise import BugCount, never_raises
from kvtiers_vllm.own_tiering.idle_backoff import LoadWatch, Wakeup
from kvtiers_vllm.stack.plans import CopyReport

__all__ = ["NO_PLAN", "WAKEUP", "KvtiersWorker", "PlannedRows"]

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


class KvtiersWorker(OffloadingWorker):
    """Translates; everything is done by ``worker``."""

    def __init__(self, worker: GpuWorker, blocks_per_chunk: int) -> None:
        self.bugs = BugCount("kvtiers")
        self._worker = worker
        self._blocks_per_chunk = blocks_per_chunk
        self._jobs: dict[int, tuple[PlannedRows, bool]] = {}
        self._refused: list[int] = []
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

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Start to copy rows into blocks."""
        self._jobs[job_id] = (src_spec, False)
        if not self._load(job_id, src_spec, dst_spec, expedited=expedited):
            self._refused.append(job_id)
        return True

    @never_raises(lambda: False)
    def _load(self, job_id: int, rows: PlannedRows, blocks: Any, *, expedited: bool) -> bool:
        """Submit a load; False: it is refused."""
        if rows.plan_id == NO_PLAN:
            return False
        self._worker.submit_load(job_id, rows.chunk_ids, _blocks(blocks), expedited)
        self._watch.watch(job_id)
        return True

    def note_step(self, *, computes: bool) -> None:
        """Record that vLLM begins a step on this rank."""
        self._worker.note_step(computes=computes)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies that have ended, each as done."""
        refused, self._refused = self._refused, []
        done = [self._ended(job_id, 0, 0.0, success=False) for job_id in refused]
        done += [
            self._ended(result.job_id, result.nbytes, result.seconds, success=result.success)
            for result in self._copied()
        ]
        return done

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

    def _has_whole_chunks(self, blocks: Any) -> bool:
        """Return whether no chunk lacks a block (a sliding window has moved on): such a chunk would hold old bytes."""
        per_chunk = self._blocks_per_chunk
        return not any(
            first % per_chunk or size % per_chunk
            for size, first in zip(blocks.group_sizes, blocks.block_indices, strict=True)
            if size
        )

    def _ended(self, job_id: int, nbytes: int, seconds: float, *, success: bool) -> TransferResult:
        self._note_end(job_id, success=success and job_id not in self._spoilt)
        self._spoilt.discard(job_id)
        return TransferResult(job_id, True, nbytes, seconds)

    @never_raises(lambda: None)
    def _note_end(self, job_id: int, *, success: bool) -> None:
        rows, is_store = self._jobs.pop(job_id)
        self._report.ended[rows.plan_id] += 1
        if not success:
            self._report.failed.add(rows.plan_id)
            if not is_store:
                self._failed_loads.add(rows.request_id)


def _blocks(spec: Any) -> BlockSpec:
    return BlockSpec(np.asarray(spec.block_ids, np.int64), tuple(spec.group_sizes), tuple(spec.block_indices))
