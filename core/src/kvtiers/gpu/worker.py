"""The worker's end of offloading: takes transfer jobs, copies on a thread of its own, and reports each job once.

::

    engine's thread   submit_store, submit_load, get_finished, wait, shutdown: no copy, no wait for one (but wait)
    copy thread       plans and copies, a piece at a time: expedited loads first, then loads and stores in turns

Each direction is first in, first out. A job that is refused or fails is a failed result; the next one works. When the
manager's process ends, the copy thread lets the running copies end, leaves the region, and fails all further jobs.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtiers.base import BlockSpec, TransferResult
from kvtiers.gpu.host_copy import HostCopier
from kvtiers.rows.join import RegionJoin
from kvtiers.rows.layout import CacheLayout

__all__ = ["GpuWorker"]

_IDLE_SECONDS = 0.5  # how often an idle worker looks whether the manager is still there


@dataclass(slots=True, eq=False)
class _Job:
    """A job and how far it is; ``pieces`` copies when it is advanced."""

    job_id: int
    is_store: bool
    blocks: BlockSpec
    chunk_ids: npt.NDArray[np.int64]
    begun: bool = False
    pieces: Iterator[int] | None = None
    nbytes: int = 0
    seconds: float = 0.0


class GpuWorker:
    """Moves KV blocks between one rank's KV tensors and the region's rows. Its calls never raise into the engine.

    ``kv_tensors``: as ``HostCopier`` says. ``max_queued``: jobs that may wait in each direction; more are refused.
    """

    def __init__(
        self,
        layout: CacheLayout,
        kv_tensors: Sequence[Any],
        region: RegionJoin,
        *,
        rank: int = 0,
        max_queued: int = 1024,
    ) -> None:
        self._copier = HostCopier(layout, rank, kv_tensors)
        self._region = region
        self._attached = False
        self._left = ""
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._expedited: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._load_turn = True
        self._open: set[int] = set()
        self._results: deque[TransferResult] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvtiers-copy-{rank}", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, blocks: BlockSpec, chunk_ids: npt.NDArray[Any]) -> None:
        """Start to copy these blocks into these rows. What the engine wrote before this call is what is stored."""
        self._submit(job_id, blocks, chunk_ids, self._stores, is_store=True)

    def submit_load(self, job_id: int, chunk_ids: npt.NDArray[Any], blocks: BlockSpec, expedited: bool = False) -> None:
        """Start to copy these rows into these blocks; an expedited load overtakes all other transfers."""
        self._submit(job_id, blocks, chunk_ids, self._expedited if expedited else self._loads, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the results that have come since the last call: exactly one for every job submitted."""
        with self._changed:
            results = list(self._results)
            self._results.clear()
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these jobs have ended; ``get_finished`` still reports them. Unknown ids are ignored."""
        wanted = set(job_ids)
        with self._changed:
            self._changed.wait_for(lambda: not wanted & self._open)

    def shutdown(self) -> None:
        """End: a copy that runs is finished, queued jobs fail, the region is left. May be called again."""
        with self._changed:
            self._closing = True
            for queue in (self._expedited, self._loads, self._stores):
                for job in [job for job in queue if not job.begun]:
                    queue.remove(job)
                    self._finish(job, "the worker was shut down before the copy began")
            self._changed.notify_all()
        self._thread.join()
        self._copier.detach()
        self._region.close()

    def _submit(
        self, job_id: int, blocks: BlockSpec, chunk_ids: npt.NDArray[Any], queue: deque[_Job], *, is_store: bool
    ) -> None:
        # Copies: the engine may reuse its arrays as soon as this call returns.
        own = BlockSpec(np.array(blocks.block_ids), tuple(blocks.group_sizes), tuple(blocks.block_indices))
        job = _Job(job_id, is_store, own, np.array(chunk_ids))
        with self._changed:
            self._open.add(job_id)
            if self._closing:
                self._finish(job, "the worker is shut down")
            elif len(queue) >= self._max_queued:
                self._finish(job, f"{len(queue)} transfers are waiting already, and no more are taken")
            else:
                queue.append(job)
                self._changed.notify_all()

    def _finish(self, job: _Job, error: str = "") -> None:
        """Post the job's result; the lock is held."""
        error = error and f"{'store' if job.is_store else 'load'} job {job.job_id}: {error}"
        self._results.append(TransferResult(job.job_id, not error, job.nbytes, job.seconds, error))
        self._open.discard(job.job_id)
        self._changed.notify_all()

    # -- the copy thread

    def _run(self) -> None:
        while not self._all_done():
            queue = self._next_queue()
            if queue:
                job = queue[0]
                begin = time.perf_counter()
                ended, error = self._advance(job)
                job.seconds += time.perf_counter() - begin
                if ended:
                    with self._changed:
                        queue.popleft()
                        self._finish(job, error)
            if self._region.state == "lost" and not self._copying():
                self._leave()

    def _all_done(self) -> bool:
        with self._changed:
            return self._closing and not (self._expedited or self._loads or self._stores)

    def _copying(self) -> bool:
        with self._changed:
            return any(queue[0].begun for queue in (self._expedited, self._loads, self._stores) if queue)

    def _next_queue(self) -> deque[_Job] | None:
        """Wait for work; return the queue whose head is to be advanced, None if there is none for a while."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._expedited or self._loads or self._stores, _IDLE_SECONDS
            )
            turns = (self._loads, self._stores) if self._load_turn else (self._stores, self._loads)
            self._load_turn = not self._load_turn
            queue = self._expedited or turns[0] or turns[1]
            if not queue:
                return None
            queue[0].begun = True
            return queue

    def _advance(self, job: _Job) -> tuple[bool, str]:
        """Copy the job's next piece; return whether the job has ended, and the error if it failed."""
        try:
            if job.pieces is None:
                problem = self._join()
                if problem:
                    return True, problem
                copy = self._copier.store if job.is_store else self._copier.load
                job.pieces = copy(job.blocks, job.chunk_ids)
            for nbytes in job.pieces:
                job.nbytes += nbytes
                return False, ""
        except Exception as error:  # noqa: BLE001 -- whatever goes wrong in a copy is the job's failure, not the engine's
            return True, str(error) or type(error).__name__
        return True, ""

    def _join(self) -> str:
        """Take the region's memory if it is there; else say why not."""
        status = self._region.poll()
        # The manager may count this rank in a moment before the rank itself has mapped the rows.
        while status.state == "joining" and not self._closing:
            status = self._region.wait_change(status, _IDLE_SECONDS)
        if status.state != "ready":
            return self._left or status.reason or "this rank has not joined the region yet"
        if not self._attached:
            self._copier.attach(self._region.view)
            self._attached = True
        return ""

    def _leave(self) -> None:
        self._left = self._region.reason
        self._copier.detach()
        self._attached = False
        self._region.close()
