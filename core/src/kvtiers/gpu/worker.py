"""The GPU worker: queues a rank's transfer jobs, copies on a thread of its own, and reports each job once.

::

    engine's thread   submit_store, submit_load, get_finished, wait, shutdown: no copy, no wait for one (except wait)
    copy thread       plans and starts copies, a piece at a time: expedited loads first, then loads and stores in turns

    queued --> begun --> launched (all pieces begun) --> reported, once every piece has ended

Each lane (stores, loads, expedited loads) is first in, first out. A job that is refused or fails is a failed result,
reported when nothing of it is in flight any more; later jobs are not affected. When the manager's process ends, the
copy thread lets the running copies end, leaves the region, and fails all further jobs. When the device is lost, all
jobs fail at once.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from kvtiers.gpu.copier import Copier, Copy, Lane, LostDeviceError
from kvtiers.gpu.host_copy import HostCopier, HostCopies
from kvtiers.gpu.settings import CopySettings
from kvtiers.gpu.tensors import kv_pages
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.rank_map import RankMap
from kvtiers.region.client import RegionJoin
from kvtiers.types import BlockSpec, TransferResult

__all__ = ["GpuWorker"]

_log = logging.getLogger("kvtiers.gpu")
_IDLE_SECONDS = 0.5  # how often an idle worker looks whether the manager is still there
_JOINING_SECONDS = 0.02  # the same, until it has the rows
_BUSY_SECONDS = 1.0  # an engine without a call for this long counts as idle; its longest steps take about as much


@dataclass(slots=True, eq=False)
class _Job:
    """A job and its progress."""

    job_id: int
    lane: Lane
    blocks: BlockSpec
    chunk_ids: npt.NDArray[np.int64]
    mark: Any = None
    begun: bool = False
    copy: Copy | None = None
    error: str = ""

    def __str__(self) -> str:
        return f"{'store' if self.lane == 'store' else 'load'} job {self.job_id}"


@dataclass(slots=True, eq=False)
class _LaneJobs:
    """The jobs of one lane, oldest first."""

    queued: deque[_Job] = field(default_factory=deque)
    launched: deque[_Job] = field(default_factory=deque)


class GpuWorker:
    """Moves KV blocks between one rank's KV tensors and the region's rows. Its calls never raise into the engine.

    ``kv_tensors``: CUDA tensors, CPU tensors or numpy arrays, as ``kv_pages`` says. ``rank_map``: where this rank's
    bytes lie in a canonical row. ``max_queued``: jobs that may wait in each lane; more are refused.
    ``on_shutdown``: called at the end of each ``shutdown``.
    """

    def __init__(
        self,
        layout: CacheLayout,
        kv_tensors: Sequence[Any],
        region: RegionJoin,
        *,
        rank: int = 0,
        rank_map: RankMap | None = None,
        copying: CopySettings | None = None,
        max_queued: int = 1024,
        on_shutdown: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_shutdown = on_shutdown
        self._copier: Copier = _open_copier(layout, rank, kv_tensors, rank_map, copying or CopySettings())
        self._region = region
        self._attached = self._prepared = False
        self._heard = -math.inf
        self._says_what_computes = False
        self._left = self._gone = ""
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._lanes: dict[Lane, _LaneJobs] = {lane: _LaneJobs() for lane in get_args(Lane)}
        self._load_turn = True
        self._open: set[int] = set()
        self._results: deque[TransferResult] = deque()
        self._waiting = 0  # callers of ``wait`` that wait for a copy, outside the lock
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvtiers-copy-{rank}", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, blocks: BlockSpec, chunk_ids: npt.NDArray[Any]) -> None:
        """Start to copy these blocks into these rows, with the bytes that the engine wrote before this call.

        On a CUDA device "before" is the order of the stream that is current when this is called.
        """
        self._submit(job_id, "store", blocks, chunk_ids)

    def submit_load(self, job_id: int, chunk_ids: npt.NDArray[Any], blocks: BlockSpec, expedited: bool = False) -> None:
        """Start to copy these rows into these blocks; an expedited load overtakes all other transfers."""
        self._submit(job_id, "expedited" if expedited else "load", blocks, chunk_ids)

    def note_step(self, *, computes: bool = True) -> None:
        """Record that the engine begins a step: background pinning pauses.

        ``computes``: it launches kernels. From the first call on nothing else counts as work, and a step that computes
        nothing ends it: while an engine only waits for loads is the best moment to pin.
        """
        self._says_what_computes = True
        self._heard = time.monotonic() if computes else -math.inf

    def is_busy(self) -> bool:
        """Return whether the engine computes: it began a step lately, or else submitted a job or asked for results."""
        return time.monotonic() - self._heard < _BUSY_SECONDS

    def _note_call(self) -> None:
        if not self._says_what_computes:
            self._heard = time.monotonic()

    def get_finished(self) -> list[TransferResult]:
        """Return the results that have come since the last call: exactly one for every job submitted."""
        self._note_call()
        if not (self._open or self._results):  # in most steps; a job is in one of them until it is given
            return []
        with self._changed:
            self._harvest()
            results = list(self._results)
            self._results.clear()
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these jobs have ended; ``get_finished`` still reports them. Unknown ids are ignored."""
        wanted = set(job_ids)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not wanted & self._open or self._launched(wanted))
                self._harvest()
                running = self._launched(wanted)
                if not wanted & self._open:
                    return
                self._waiting += bool(running)
            if running:
                self._wait_for(running[0])

    def shutdown(self) -> None:
        """End: a copy that runs is finished, queued jobs fail, the region is left. May be called again."""
        with self._changed:
            self._closing = True
            self._fail_queued("the worker was shut down before the copy began")
            self._changed.notify_all()
        self._thread.join()
        self._copier.detach()
        with self._changed:
            self._harvest()
            self._changed.wait_for(lambda: not self._waiting)  # what they wait for is freed now
        self._copier.close()
        self._region.close()
        self._on_shutdown()

    def _wait_for(self, copy: Copy) -> None:
        try:
            copy.wait()
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def _submit(self, job_id: int, lane: Lane, blocks: BlockSpec, chunk_ids: npt.NDArray[Any]) -> None:
        self._note_call()
        job = _Job(job_id, lane, blocks, chunk_ids)
        try:
            # Copies: the engine may reuse its arrays as soon as this call returns.
            job.blocks = BlockSpec(np.array(blocks.block_ids), tuple(blocks.group_sizes), tuple(blocks.block_indices))
            job.chunk_ids = np.array(chunk_ids)
            job.mark = self._copier.mark()
        except LostDeviceError as error:
            job.error = str(error)
            with self._changed:
                self._lose(error)
        except Exception as error:  # noqa: BLE001 -- nothing raises into the engine: what is no job is a failed one
            job.error = f"cannot be taken: {error!r}"
        with self._changed:
            self._open.add(job_id)
            queued = self._lanes[lane].queued
            if self._closing:
                job.error = "the worker is shut down"
            elif not job.error and len(queued) >= self._max_queued:
                job.error = f"{len(queued)} transfers are waiting already, and no more are taken"
            if job.error:
                self._report(job)
            else:
                queued.append(job)
                self._changed.notify_all()

    # -- with the lock held

    def _report(self, job: _Job) -> None:
        error = job.error and f"{job}: {job.error}"
        nbytes, seconds = (job.copy.nbytes, job.copy.seconds) if job.copy else (0, 0.0)
        self._results.append(TransferResult(job.job_id, not error, nbytes, seconds, error))
        self._open.discard(job.job_id)
        self._changed.notify_all()

    def _fail_queued(self, error: str) -> None:
        for lane in self._lanes.values():
            for job in [job for job in lane.queued if not job.begun]:
                lane.queued.remove(job)
                job.error = error
                self._report(job)

    def _launched(self, wanted: set[int]) -> list[Copy]:
        jobs = (job for lane in self._lanes.values() for job in lane.launched)
        return [job.copy for job in jobs if job.copy and job.job_id in wanted]

    def _harvest(self) -> None:
        """Report the launched jobs whose copies have ended, in each lane's order."""
        for lane in self._lanes.values():
            while lane.launched and self._has_ended(lane.launched[0]):
                self._report(lane.launched.popleft())

    def _has_ended(self, job: _Job) -> bool:
        try:
            return job.copy is None or bool(self._gone) or job.copy.ended()
        except LostDeviceError as error:
            self._lose(error)
            job.error = str(error)
        except Exception as error:  # noqa: BLE001 -- any error in a copy is the job's failure
            job.error = job.error or str(error) or type(error).__name__
        return True

    def _lose(self, error: LostDeviceError) -> None:
        """Fail all jobs, present and future: the device is lost."""
        if self._gone:
            return
        self._gone = str(error)
        _log.error("KV offload has ended, and the engine goes on without it: %s", error)
        self._fail_queued(self._gone)
        for lane in self._lanes.values():
            for job in lane.launched:
                job.error = self._gone

    # -- the copy thread

    def _run(self) -> None:
        while (job := self._next_job()) is not None or not self._closing:
            if job is not None and not self._advance(job):
                lane = self._lanes[job.lane]
                with self._changed:
                    lane.queued.popleft()
                    lane.launched.append(job)
                    self._changed.notify_all()
                    self._harvest()
            if not self._prepared and self._region.state != "joining":
                self._prepare()
            if self._region.state == "lost" and not self._copying():
                self._leave()

    def _copying(self) -> bool:
        with self._changed:
            return any(lane.queued[0].begun for lane in self._lanes.values() if lane.queued)

    def _next_job(self) -> _Job | None:
        """Wait for work; return the job to advance, None if there is none for a while."""
        with self._changed:
            turns: list[Lane] = ["load", "store"] if self._load_turn else ["store", "load"]
            queues = [self._lanes[lane].queued for lane in ("expedited", *turns)]
            patience = _IDLE_SECONDS if self._prepared else _JOINING_SECONDS
            self._changed.wait_for(lambda: self._closing or any(queues), patience)
            self._load_turn = not self._load_turn
            job = next((queue[0] for queue in queues if queue), None)
            if job is not None:
                job.begun = True
            return job

    def _advance(self, job: _Job) -> bool:
        """Start the job's next piece; False if all have been started, or it has failed."""
        try:
            if job.copy is None:
                job.error = self._gone or self._join()
                if job.error:
                    return False
                job.copy = self._copier.copy(job.lane, job.blocks, job.chunk_ids, job.mark)
            if job.lane == "load":
                self._let_expedited_pass()
            return job.copy.advance()
        except LostDeviceError as error:
            job.error = str(error)
            with self._changed:
                self._lose(error)
        except Exception as error:  # noqa: BLE001 -- any error in a copy is the job's failure, not the engine's
            job.error = str(error) or type(error).__name__
        return False

    def _let_expedited_pass(self) -> None:
        """Wait until no expedited load is in flight: a copy engine serves a queue that is fed until it is empty."""
        with self._changed:
            expedited = [job.copy for job in self._lanes["expedited"].launched if job.copy]
        for copy in expedited:
            copy.wait()

    def _join(self) -> str:
        """Attach the region's memory if it is ready; else return why not."""
        status = self._region.poll()
        # The manager may count this rank in a moment before the rank itself has mapped the rows.
        while status.state == "joining" and not self._closing:
            status = self._region.wait_change(status, _IDLE_SECONDS)
        if status.state != "ready":
            return self._left or status.reason or "this rank has not joined the region yet"
        if not self._attached:
            self._copier.attach(self._region, self.is_busy)
            self._attached = True
        return ""

    def _prepare(self) -> None:
        """Attach the region's memory before the first job needs it: compiling, measuring and pinning take a while."""
        self._prepared = True
        try:
            self._join()
        except LostDeviceError as error:
            with self._changed:
                self._lose(error)
            self._region.settle()  # it pins nothing: a start that waits for pinned memory must not wait for this rank
        except Exception as error:  # noqa: BLE001 -- the first job tries again, and fails by it
            _log.warning("preparing for copies failed, the first job tries again: %s", error)
            self._region.settle()

    def _leave(self) -> None:
        self._left = self._region.reason
        self._copier.detach()
        self._attached = False
        self._region.close()


def _open_copier(
    layout: CacheLayout, rank: int, kv_tensors: Sequence[Any], rank_map: RankMap | None, settings: CopySettings
) -> Copier:
    """Return the copier for these tensors: CUDA's, or the host's. ConfigError if they do not fit the layout."""
    pages = kv_pages(layout, rank, kv_tensors)
    device = next((page.device for page in pages if page is not None), None)
    if device is None:
        return HostCopies(HostCopier(layout, rank, kv_tensors, rank_map))
    from kvtiers.gpu.cuda.copy import CudaCopies  # torch is loaded already: these are its tensors

    return CudaCopies(layout, rank, pages, rank_map, settings, device)
