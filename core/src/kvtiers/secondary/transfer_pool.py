"""The threads that move one store's values: loads before stores, and questions on a thread of their own.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
caller's           ``submit``, ``probe``, ``set_names``, ``take_events``: queue work and take events; never waits
transfer (N)       opens the store (one of them), then slices of jobs: loads first; at most N - 1 at stores
lookup (1)         probes, so that they do not stand behind transfers
=================  ==========================================================================================

A job is cut into slices that run side by side; its one result comes when the last has ended and nobody holds one of its
views any more.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import ChunkStore, OffloadKey, SupportsStats
from kvtiers.rows.names import StorageNames
from kvtiers.secondary.mover import Moved, MoverOptions, ValueMover
from kvtiers.secondary.protocol import Event, JobDone, JobFailed, JobStarted, Opened, Probed, Status, StoreJob
from kvtiers.secondary.views import Loan, ValueViews

__all__ = ["TransferPool"]

_log = logging.getLogger("kvtiers.secondary")
_STATS_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Running:
    """A job in the pool. ``names``: those current when it was submitted."""

    job: StoreJob
    names: StorageNames
    statuses: bytearray
    slices_left: int = 0
    started: float = 0.0
    nbytes: int = 0
    retries: int = 0
    error: str = ""
    abandoned: bool = False
    kept: list[Loan] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Probe:
    probe_id: int
    keys: Sequence[OffloadKey]
    names: StorageNames
    is_prefix: bool


class TransferPool:
    """Runs a store's I/O. All events go to ``emit``, which may be called from any thread and must not block."""

    def __init__(
        self,
        open_store: Callable[[], ChunkStore],
        views: ValueViews,
        names: StorageNames,
        options: MoverOptions,
        *,
        threads: int,
        deadline: float,
        emit: Callable[[Event], None],
        label: str,
    ) -> None:
        self._views = views
        self._names = names
        self._options = options
        self._threads = threads
        self._deadline = deadline
        self._emit = emit
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._loads: deque[tuple[_Running, int, int]] = deque()
        self._stores: deque[tuple[_Running, int, int]] = deque()
        self._probes: deque[_Probe] = deque()
        self._storing = 0
        self._running: dict[int, _Running] = {}
        self._kept: list[_Running] = []
        self._closed = False
        self._own_stats: dict[str, float] = {}
        self._store: ChunkStore | None = None
        self._mover: ValueMover | None = None
        self._workers = [
            threading.Thread(target=self._open_and_work, args=(open_store,), name=f"kvtiers-{label}-0", daemon=True),
        ]
        self._label = label
        self._workers[0].start()

    # -- the caller's side

    def submit(self, job: StoreJob) -> None:
        """Queue a job under the names current now. Its one JobDone comes through ``emit``."""
        running = _Running(job, self._names, bytearray([Status.FAILED]) * len(job.keys))
        with self._changed:
            if self._closed or not job.keys:
                self._emit(JobDone(job.job_id, bytes(running.statuses), 0, 0.0, error="closed" if job.keys else ""))
                return
            self._running[job.job_id] = running
            queue = self._loads if job.is_load else self._stores
            step = self._slice_length(len(job.keys))
            for start in range(0, len(job.keys), step):
                running.slices_left += 1
                queue.append((running, start, min(start + step, len(job.keys))))
            self._changed.notify_all()

    def probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> None:
        """Queue a question; its Probed comes through ``emit``."""
        with self._changed:
            self._probes.append(_Probe(probe_id, keys, self._names, is_prefix))
            self._changed.notify_all()

    def abandon(self, job_id: int) -> None:
        """Begin nothing more for this job; what runs, runs to its end."""
        with self._changed:
            running = self._running.get(job_id)
            if running is not None:
                running.abandoned = True

    def set_names(self, names: StorageNames) -> None:
        """Use these names for what is queued from now on."""
        self._names = names

    def stats(self) -> dict[str, float]:
        """Return the queues' lengths, and the store's own figures as of a second ago."""
        return self._own_stats | {"queued_loads": len(self._loads), "queued_stores": len(self._stores)}

    def check_kept(self) -> bool:
        """Report the jobs whose kept buffers have been let go since; say whether some are still kept."""
        if not self._kept:
            return False
        with self._changed:
            free = [running for running in self._kept if all(loan.is_free() for loan in running.kept)]
            self._kept = [running for running in self._kept if running not in free]
        for running in free:
            self._report(running)
        return bool(self._kept)

    def drain(self, timeout: float) -> bool:
        """Wait until no job is left; what has not begun within ``timeout`` seconds is dropped and reported."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            dropped = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
        for running, start, end in dropped:
            moved = Moved(bytearray([Status.FAILED]) * (end - start), error="dropped at shutdown")
            self._finish_slice(running, start, moved)
        return not self._running

    def close(self, timeout: float) -> None:
        """Drop what is queued, wait for what runs, close the store. A thread that hangs is left behind."""
        self._stop.set()
        self.drain(0.0)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        if self._store is not None and not any(worker.is_alive() for worker in self._workers):
            self._store.close()

    # -- the pool's threads

    def _open_and_work(self, open_store: Callable[[], ChunkStore]) -> None:
        try:
            self._store = open_store()
        except Exception as error:  # noqa: BLE001 -- a plugin is somebody else's code
            self._emit(Opened(f"{type(error).__name__}: {error}"))
            return
        self._mover = ValueMover(self._store, self._views, self._options, self._stop)
        with self._changed:
            if self._closed:
                return
            more = [
                threading.Thread(target=self._work, name=f"kvtiers-{self._label}-{i}", daemon=True)
                for i in range(1, self._threads)
            ]
            more.append(threading.Thread(target=self._answer, name=f"kvtiers-{self._label}-lookup", daemon=True))
            self._workers += more
        for worker in more:
            worker.start()
        self._emit(Opened())
        del open_store  # it knows the region, which must not outlive the pool
        self._work()

    def _work(self) -> None:
        while (task := self._next_slice()) is not None:
            running, start, end = task
            moved = self._run_slice(running, start, end)
            if not running.job.is_load:
                with self._changed:
                    self._storing -= 1
            self._finish_slice(running, start, moved)

    def _next_slice(self) -> tuple[_Running, int, int] | None:
        most_stores = max(1, self._threads - 1)
        with self._changed:
            while not self._closed:
                if self._loads:
                    return self._loads.popleft()
                if self._stores and self._storing < most_stores:
                    self._storing += 1
                    return self._stores.popleft()
                self._changed.wait()
        return None

    def _run_slice(self, running: _Running, start: int, end: int) -> Moved:
        with self._changed:
            first = not running.started
            if first:
                running.started = time.monotonic()
        job = running.job
        if first:
            self._emit(JobStarted(job.job_id))
        if running.abandoned:
            return Moved(bytearray([Status.FAILED]) * (end - start), error="given up before it began")
        assert self._mover is not None
        move = self._mover.load if job.is_load else self._mover.store
        try:
            return move(running.names, job.keys[start:end], job.rows[start:end], running.started + self._deadline)
        except Exception as error:  # noqa: BLE001 -- even a bug of ours must not lose a result
            _log.exception("%s: job %d", self._label, job.job_id)
            return Moved(bytearray([Status.FAILED]) * (end - start), error=f"{type(error).__name__}: {error}")

    def _finish_slice(self, running: _Running, start: int, moved: Moved) -> None:
        with self._changed:
            running.statuses[start : start + len(moved.statuses)] = moved.statuses
            running.nbytes += moved.nbytes
            running.retries += moved.retries
            running.error = running.error or moved.error
            running.kept += moved.kept
            running.slices_left -= 1
            if running.slices_left:
                return
            if running.kept:
                self._kept.append(running)
        if running.kept:
            self._emit(JobFailed(running.job.job_id, running.error))
        else:
            self._report(running)

    def _report(self, running: _Running) -> None:
        job_id = running.job.job_id
        seconds = time.monotonic() - running.started if running.started else 0.0
        statuses = bytes(running.statuses)
        self._emit(JobDone(job_id, statuses, running.nbytes, seconds, running.retries, running.error))
        with self._changed:
            del self._running[job_id]
            self._changed.notify_all()

    def _answer(self) -> None:
        while True:
            with self._changed:
                while not self._probes and not self._closed and self._changed.wait(_STATS_SECONDS):
                    pass
                if self._closed:
                    return
                probe = self._probes.popleft() if self._probes else None
            assert self._mover is not None
            if probe is None:
                self._take_stats()
                continue
            try:
                answers = self._mover.probe(probe.names, probe.keys, is_prefix=probe.is_prefix)
                self._emit(Probed(probe.probe_id, bytes(answers)))
            except Exception as error:  # noqa: BLE001 -- a store is somebody else's code
                self._emit(Probed(probe.probe_id, b"", f"{type(error).__name__}: {error}"))

    def _take_stats(self) -> None:
        """Ask the store for its figures here: they may need a lock that it holds during I/O."""
        if isinstance(self._store, SupportsStats):
            try:
                self._own_stats = {str(name): float(figure) for name, figure in self._store.stats().items()}
            except Exception as error:  # noqa: BLE001 -- a store is somebody else's code, and figures are no promise
                _log.debug("%s: stats: %s", self._label, error)

    def _slice_length(self, count: int) -> int:
        batch = self._mover.batch_values if self._mover is not None else 1
        return max(1, min(-(-count // self._threads), max(batch, -(-count // (4 * self._threads)))))
