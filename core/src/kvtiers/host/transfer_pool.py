"""The thread pool of one store: transfers, loads before stores, and a separate thread for lookups.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
caller's           ``submit``, ``probe``, ``set_names``, ``set_limits``, ``abandon``: never waits for a store
transfer (N)       opens the store (one of them; ``store_opening.py``), then slices of jobs: loads first; N - 1 or fewer
                   at stores
lookup (1)         probes (``prober.py``), so that they do not stand behind transfers
quota (1)          counts what tenants have (``quotas.py``), where they have quotas
key (8 or fewer)   read tenants' own keys (``tenant_keys.py``), where they have some, and end
=================  ==========================================================================================

A job is cut into slices that run side by side; its one result comes when the last has ended and the store holds none
of its views any more.
"""

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtiers._failures import logged_boundary
from kvtiers.api import ChunkStore, OffloadKey, RateLimit, TierConfig
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.tenant_keys import KEY_WAIT
from kvtiers.host.bounce_buffers import BounceBufferViews
from kvtiers.host.layout_record import LayoutRecord
from kvtiers.host.messages import Event, JobDone, JobFailed, JobReleased, JobStarted, Limits, Opened, Status, StoreJob
from kvtiers.host.prober import Prober
from kvtiers.host.quotas import TenantQuotas
from kvtiers.host.store_calls import StoreLog
from kvtiers.host.store_opening import OpenStore, StoreOpener, close_store
from kvtiers.host.transfer import MoverOptions, mover_options
from kvtiers.host.transfer_queue import PoolJob, Slice, TransferQueue
from kvtiers.host.value_run import Moved, ValueRun
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.fingerprint_record import Described
from kvtiers.layout.storage_name import StorageNames

__all__ = ["PoolOptions", "TransferPool"]

_log = logging.getLogger("kvtiers.secondary")
_KEPT_SECONDS = 0.05  # how often kept buffers are checked for their release
_LEAST_CLOSE_SECONDS = 0.1
_HUNG_SECONDS = 10.0  # of one call of the store, or of its opening


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The options of a pool. ``label``: the tier's name, in log lines. ``deadline``: of a job, in seconds.

    ``reopen``: seconds until a store that could not be opened is tried again, doubling from the first to the second.
    ``store_threads``: how many of the threads may write at the same time; None: all but one. ``key_wait``: for tenants'
    own keys, when a store is opened; what comes later is added then.
    """

    mover: MoverOptions
    label: str
    threads: int
    deadline: float
    reopen: tuple[float, float]
    store_threads: int | None = None
    key_wait: float = KEY_WAIT

    @classmethod
    def of(
        cls, config: TierConfig, sizes: Sequence[tuple[int, int]], give_way: Callable[[], object] | None = None
    ) -> "PoolOptions":
        """Return the options that a tier's config gives its pool. ``sizes``, ``give_way``: as in ``MoverOptions``."""
        return cls(
            mover_options(config, sizes, *([] if give_way is None else [give_way])),
            config.tier_name,
            config.threads,
            config.deadline,
            (config.breaker.delay, config.breaker.max_delay),
            None if config.store_threads == "auto" else config.store_threads,
        )


class TransferPool:
    """Runs a store's I/O. All events go to ``emit``, which may be called from any thread and must not block.

    ``described``: what the fingerprint in the names was made from, written to the store with the first value.
    ``callers``: the views for jobs of which values lie in a client's region. ``encryption``: where the keys come from
    that values are encrypted with; they are read before the store is opened, and again each time that it has to be
    opened again.
    """

    def __init__(
        self,
        open_store: Callable[[], ChunkStore],
        views: ValueViews,
        names: StorageNames,
        options: PoolOptions,
        emit: Callable[[Event], None],
        *,
        described: Described | None = None,
        callers: BounceBufferViews | None = None,
        encryption: EncryptionConfig | None = None,
    ) -> None:
        self._views = views
        self._names = names
        self._options = options.mover
        self._threads = options.threads
        self._store_threads = options.store_threads
        self._deadline = options.deadline
        self._reopen = options.reopen
        self._emit = emit
        self._label = label = options.label
        self._record = LayoutRecord(described, label, options.mover.compression)
        self._stop = threading.Event()
        self._opener = StoreOpener(
            views,
            self._record,
            self._stop,
            label=label,
            pauses=options.reopen,
            key_wait=options.key_wait,
            callers=callers,
            encryption=encryption,
        )
        self._queue = TransferQueue(options.threads, options.store_threads)
        self._prober = Prober(options.deadline, emit, label)
        self._kept: list[PoolJob] = []
        self._kept_lock = threading.Lock()
        self._opened: OpenStore | None = None
        self._opening_since = time.monotonic()
        """When the opening began that is on; infinite between two, and once it has been looked at."""
        self._store_log = StoreLog(label)
        self._life = threading.Lock()  # of ``_workers`` and ``_opened``, between the opening thread and ``close``
        self._numbers = itertools.count(1)
        self._workers = [self._thread(0, self._open_and_work, open_store)]
        self._workers[0].start()

    # -- the caller's side

    def submit(self, job: StoreJob) -> None:
        """Queue a job under the current names. Its one JobDone comes through ``emit``."""
        pooled = PoolJob.of(job, self._names)
        # A removal is a few calls of many names each.
        values = len(job.keys) if job.is_delete else self._values_a_slice(len(job.keys))
        if not job.keys or not self._queue.add(pooled, values):
            pooled.error = "the tier is closed" if job.keys else ""
            self._report(pooled)

    def probe(self, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> None:
        """Queue a question; its Probed comes through ``emit``."""
        self._prober.ask(probe_id, keys, self._names, is_prefix=is_prefix)

    def abandon(self, job_id: int) -> None:
        """Begin nothing more for this job; a call that runs, runs to its end."""
        self._drop(self._queue.abandon(job_id), "given up before it began")

    def release(self, job_id: int) -> None:
        """Detach a job from its memory; its JobReleased says from when on. Nothing more of it is begun.

        Not possible, and nothing is done, with values in rows that are sealed, or read into, where they lie.
        """
        job = self._queue.job(job_id)
        if job is not None and (job.job.parts or (job.job.is_load and self._views.are_beside_rows)):
            fence, rows = job.fence, job.job.rows
            fence.detach(lambda: self._emit(JobReleased(job_id, fence.statuses(rows))))
            self.abandon(job_id)

    def set_names(self, names: StorageNames) -> None:
        """Use these names for what is queued from now on."""
        self._names = names

    def set_limits(self, limits: Limits) -> None:
        """Use these limits from now on: threads come at once, and leave when they have ended what they do."""
        limit = RateLimit(bytes_per_second=limits.bytes_per_second, requests_per_second=limits.requests_per_second)
        with self._life:
            self._options = replace(self._options, rate_limit=limit)
            self._store_threads = limits.store_threads
            if self._opened is None:  # not open yet: it begins with them
                self._threads = limits.threads
                self._queue.set_threads(limits.threads, limits.store_threads)
                return
            self._opened.mover.set_rate_limit(limit)
            self._resize(limits.threads)

    def _resize(self, threads: int) -> None:
        self._workers = [worker for worker in self._workers if worker.is_alive()]
        have = len(self._workers) - self._others
        fresh = [self._thread(next(self._numbers), self._work) for _ in range(have, threads)]
        self._threads = threads
        self._queue.set_threads(threads, self._store_threads, leaving=max(0, have - threads))
        if problem := self._start(fresh):
            self._go_on_with_fewer(problem)

    def stats(self) -> dict[str, float]:
        """Return the queues' lengths, and the store's own figures as of a second ago; called once a second."""
        self._log_hung()
        quotas = self._quotas
        own = self._prober.figures if quotas is None else self._prober.figures | {"quota_deleted": quotas.deleted}
        return own | {"queued_loads": self._queue.loads, "queued_stores": self._queue.stores}

    def _log_hung(self) -> None:
        """Log where the store hangs, before the engine ends this host for it: that knows no method's name."""
        seconds = min(_HUNG_SECONDS, self._deadline / 2)
        if self._opened is not None:
            self._opened.mover.log_hung(seconds)
        elif time.monotonic() - self._opening_since >= seconds and (ident := self._workers[0].ident) is not None:
            self._opening_since = math.inf
            self._store_log.log_hung(seconds, ident)

    @property
    def _others(self) -> int:
        """The threads that move nothing: the prober's, and that of quotas."""
        return 1 + (self._quotas is not None)

    @property
    def _quotas(self) -> TenantQuotas | None:
        return None if self._opened is None else self._opened.mover.quotas

    def check_kept(self) -> bool:
        """Report the jobs whose kept buffers have been released since; return whether some are still kept."""
        if not self._kept:
            return False
        with self._kept_lock:
            free = [job for job in self._kept if all(loan.is_free() for loan in job.kept)]
            self._kept = [job for job in self._kept if job not in free]
        for job in free:
            self._report(job)
        return bool(self._kept)

    def drain(self, timeout: float) -> bool:
        """Wait until no job is left; what has not begun within ``timeout`` seconds is dropped and reported."""
        until = time.monotonic() + timeout
        while not self._queue.wait_idle(min(_KEPT_SECONDS, max(0.0, until - time.monotonic()))):
            self.check_kept()
            if time.monotonic() >= until:
                break
        self._drop(self._queue.take_all(), "dropped at shutdown")
        return self._queue.wait_idle(0.0)

    def close(self, timeout: float) -> None:
        """Drop what is queued, let running calls return, close the store. A thread that hangs is left behind."""
        until = time.monotonic() + timeout
        self._stop.set()
        self._drop(self._queue.take_all(), "dropped at shutdown")
        self._queue.close()
        self._prober.close()
        if (quotas := self._quotas) is not None:
            quotas.close()
        self._opener.close()
        with self._life:
            workers, opened = self._workers, self._opened
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))
        if opened is not None and not any(worker.is_alive() for worker in workers):
            closing = opened.store, self._label
            closer = threading.Thread(target=close_store, args=closing, daemon=True)  # it may hang
            try:
                closer.start()
            except RuntimeError:  # none can be had: the engine kills a host that hangs
                close_store(*closing)
            else:
                closer.join(max(_LEAST_CLOSE_SECONDS, until - time.monotonic()))

    def _drop(self, slices: Sequence[Slice], error: str) -> None:
        for piece in slices:
            self._finish(piece, Moved.nothing(piece.end - piece.start, error))

    def _values_a_slice(self, count: int) -> int:
        batch = self._opened.mover.batch_values if self._opened is not None else 1
        return max(1, min(-(-count // self._threads), max(batch, -(-count // (4 * self._threads)))))

    # -- the pool's threads

    def _thread(self, number: int, target: Callable[..., None], *args: object) -> threading.Thread:
        return threading.Thread(target=target, args=args, name=f"kvtiers-{self._label}-{number}", daemon=True)

    def _open_and_work(self, open_store: Callable[[], ChunkStore]) -> None:
        pause, longest = self._reopen
        while (error := self._open(open_store)) and not self._stop.is_set():
            self._opening_since = math.inf
            self._emit(Opened(error))
            self._stop.wait(pause)
            self._opening_since = time.monotonic()
            pause = min(2 * pause, longest)
        del open_store  # it refers to the region, which must not outlive the pool
        if not error:
            self._work()

    def _open(self, open_store: Callable[[], ChunkStore]) -> str:
        """Open the store and start the other threads; return why it cannot be opened, if it cannot."""
        opened: OpenStore | None = None
        error = ""
        with logged_boundary(_log, "%s: its store is not opened; a bug of kvtiers", self._label, exits=True) as opening:
            opened, error = self._opener.open(open_store, self._names, self._options)
        if opened is None:
            return opening.error or error
        mover = opened.mover
        with self._life:
            mover.set_rate_limit(self._options.rate_limit)  # it may have changed meanwhile
            more = [self._thread(next(self._numbers), self._work) for _ in range(1, self._threads)]
            threads = [self._prober.thread(opened.compressed, mover)]
            if mover.quotas is not None:
                threads.append(mover.quotas.thread())
            error = "the tier is closed" if self._stop.is_set() else self._start(threads)
            if not error:
                self._opened = opened
                if problem := self._start(more):
                    self._go_on_with_fewer(problem)
                self._emit(Opened(epoch=opened.epoch))
                return ""
        close_store(opened.store, self._label)
        return error

    def _start(self, threads: Sequence[threading.Thread]) -> str:
        """Start these threads; return why one, and each after it, cannot be started, if so."""
        for thread in threads:
            try:
                thread.start()
            except RuntimeError as error:
                return f"{error}; raise the limit of processes and threads (of the user, or the container: pids)"
            self._workers = [*self._workers, thread]
        return ""

    def _go_on_with_fewer(self, problem: str) -> None:
        count = len(self._workers) - self._others
        self._queue.set_threads(count, self._store_threads)
        _log.warning("%s: %d of its %d threads have started: %s", self._label, count, self._threads, problem)

    def _work(self) -> None:
        while (piece := self._queue.next()) is not None:
            is_load = piece.of.job.is_load
            moved = self._run(piece)
            is_store = not (is_load or piece.of.job.is_delete)
            names, stored = piece.of.names, is_store and Status.DONE in moved.statuses
            self._finish(piece, moved)
            del moved
            if stored and self._record.described is not None and (opened := self._opened) is not None:
                self._record.write(opened.store, names, opened.epoch, opened.keys)
            if not is_load:
                self._queue.store_done()
            del piece  # the wait for the next must not hold this one's buffers

    def _run(self, piece: Slice) -> Moved:
        job = piece.of
        if self._queue.begin(job, time.monotonic()):
            self._emit(JobStarted(job.job.job_id))
        wanted = slice(piece.start, piece.end)
        run = ValueRun(
            job.names,
            job.job.keys[wanted],
            job.job.rows[wanted],
            job.started + self._deadline,
            lambda: not (job.abandoned or self._stop.is_set()),
            job.fence,
            job.job.overwrites[wanted],
            job.job.parts[wanted],
            job.job.keep_damaged,
        )
        # Neither sys.exit() in a store nor a bug of ours may lose a result.
        with logged_boundary(_log, "%s: job %d", self._label, job.job.job_id, exits=True) as moving:
            return self._move_of(job.job)(run)
        return Moved.nothing(len(run.keys), moving.error)

    def _move_of(self, job: StoreJob) -> Callable[[ValueRun], Moved]:
        assert self._opened is not None
        mover = self._opened.mover
        if job.is_delete:
            return mover.delete
        return mover.load if job.is_load else mover.store

    def _finish(self, piece: Slice, moved: Moved) -> None:
        job = piece.of
        last = self._queue.finish(piece, moved)
        if moved.kept:
            self._report_kept(job)
        if last and not job.kept:
            self._report(job)
        elif last:
            with self._kept_lock:
                self._kept.append(job)

    def _report_kept(self, job: PoolJob) -> None:
        """Report a job whose buffer a store has kept as failed, at once, and begin nothing more for it."""
        job.abandoned = True
        with self._kept_lock:
            first, job.failed_in_use = not job.failed_in_use, True
        if first:
            self._emit(JobFailed(job.job.job_id, job.error))

    def _report(self, job: PoolJob) -> None:
        job.fence.end()
        seconds = self._queue.busy_seconds(job, time.monotonic())
        statuses = bytes(job.statuses)
        self._emit(JobDone(job.job.job_id, statuses, job.nbytes, seconds, job.retries, job.error))
        self._queue.forget(job)
