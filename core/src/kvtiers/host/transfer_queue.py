"""The job queue of a transfer pool: slices that run side by side, loads before stores, with one thread kept for loads.

A job is begun with its first slice and ends with its last. All of this is under one lock, held for no longer than it
takes to move an entry.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtiers.host.messages import Status, StoreJob
from kvtiers.host.row_fence import RowFence
from kvtiers.host.value_run import Moved
from kvtiers.layout.borrowed_views import LentValues, Loan
from kvtiers.layout.storage_name import StorageNames

__all__ = ["PoolJob", "Slice", "TransferQueue"]


@dataclass(slots=True, eq=False)
class PoolJob:
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
    failed_in_use: bool = False
    """It was reported as failed, with its result still to come."""
    kept: list[Loan | LentValues] = field(default_factory=list)
    fence: RowFence = field(default_factory=RowFence)

    @classmethod
    def of(cls, job: StoreJob, names: StorageNames) -> "PoolJob":
        """Return a job of which nothing has been moved yet."""
        return cls(job, names, bytearray([Status.FAILED]) * len(job.keys))


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a job for one thread: its values from index ``start`` up to ``end``, which is excluded."""

    of: PoolJob
    start: int
    end: int


class TransferQueue:
    """A pool's queued slices, and its jobs that are not reported yet. ``store_threads``: how many at most store."""

    def __init__(self, threads: int, store_threads: int | None = None) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._loads: deque[Slice] = deque()
        self._stores: deque[Slice] = deque()
        self._storing = 0
        self._jobs: dict[int, PoolJob] = {}
        self._counted_until = {True: 0.0, False: 0.0}  # loads, stores
        self._in_flight = {True: 0, False: 0}
        self._closed = False
        self._leaving = 0
        self.set_threads(threads, store_threads)

    def set_threads(self, threads: int, store_threads: int | None, leaving: int = 0) -> None:
        """Count on this many threads from now on; ``leaving``: so many of those that ask for work are to end."""
        with self._lock:
            most = store_threads or threads
            self._most_stores = max(1, min(most, threads - 1))  # one thread at least is kept for loads
            self._leaving = leaving
            self._work.notify_all()

    @property
    def loads(self) -> int:
        """Slices of loads that wait for a thread."""
        return len(self._loads)

    @property
    def stores(self) -> int:
        """Slices of stores that wait for a thread."""
        return len(self._stores)

    def add(self, job: PoolJob, values_a_slice: int) -> bool:
        """Queue a job; False if the queue is closed."""
        count = len(job.job.keys)
        with self._lock:
            if self._closed:
                return False
            self._jobs[job.job.job_id] = job
            slices = [Slice(job, at, min(at + values_a_slice, count)) for at in range(0, count, values_a_slice)]
            job.slices_left = len(slices)
            (self._loads if job.job.is_load else self._stores).extend(slices)
            self._work.notify(len(slices))
        return True

    def next(self) -> Slice | None:
        """Wait for a slice and take it; None: the thread is to end. A slice of a store ends with ``store_done``."""
        with self._lock:
            while not self._closed:
                if self._leaving:
                    self._leaving -= 1
                    return None
                if self._loads:
                    return self._loads.popleft()
                if self._stores and self._storing < self._most_stores:
                    self._storing += 1
                    return self._stores.popleft()
                self._work.wait()
        return None

    def begin(self, job: PoolJob, now: float) -> bool:
        """Record that a slice of the job begins; return whether it is the first."""
        with self._lock:
            if job.started:
                return False
            job.started = now
            if job.job.is_delete:
                return True
            if not self._in_flight[job.job.is_load]:
                self._counted_until[job.job.is_load] = now
            self._in_flight[job.job.is_load] += 1
        return True

    def finish(self, piece: Slice, moved: Moved) -> bool:
        """Put a slice's outcome into its job, and free its thread; return whether it was the job's last."""
        job = piece.of
        with self._lock:
            job.statuses[piece.start : piece.end] = moved.statuses
            job.nbytes += moved.nbytes
            job.retries += moved.retries
            job.error = job.error or moved.error
            job.kept += moved.kept
            job.slices_left -= 1
            return not job.slices_left

    def busy_seconds(self, job: PoolJob, now: float) -> float:
        """Return the seconds that an ended job has kept the pool busy, without those counted for jobs before it.

        Jobs overlap, and the sum of these is the time in which any load, or any store, was in flight. A removal moves
        no bytes, so that its time is none of these.
        """
        if not job.started or job.job.is_delete:
            return 0.0
        with self._lock:
            since = self._counted_until[job.job.is_load]
            self._counted_until[job.job.is_load] = max(since, now)
            self._in_flight[job.job.is_load] -= 1
        return max(0.0, now - since)

    def store_done(self) -> None:
        """Record that the slice of a store, taken by ``next``, has ended; its thread asks for the next one."""
        with self._lock:
            # No thread is woken: this one takes the next store, or a load whose thread, woken for it, then takes one.
            self._storing -= 1

    def abandon(self, job_id: int) -> list[Slice]:
        """Mark a job as given up and return its slices that have not begun; they are the caller's to finish."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return []
            job.abandoned = True
            return self._take_out(lambda piece: piece.of is job)

    def job(self, job_id: int) -> PoolJob | None:
        """Return a job that has not been reported yet, None if there is none."""
        with self._lock:
            return self._jobs.get(job_id)

    def take_all(self) -> list[Slice]:
        """Take all slices that have not begun; they are the caller's to finish."""
        with self._lock:
            return self._take_out(lambda _: True)

    def forget(self, job: PoolJob) -> None:
        """Remove a job whose result has been reported."""
        with self._lock:
            self._jobs.pop(job.job.job_id, None)
            if not self._jobs:
                self._idle.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no job is left; False if that takes longer than ``timeout`` seconds."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._jobs, timeout)

    def close(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._closed = True
            self._work.notify_all()

    def _take_out(self, wanted: Callable[[Slice], bool]) -> list[Slice]:
        taken: list[Slice] = []
        for queue in (self._loads, self._stores):
            taken += [piece for piece in queue if wanted(piece)]
            left = [piece for piece in queue if not wanted(piece)]
            queue.clear()
            queue.extend(left)
        return taken
