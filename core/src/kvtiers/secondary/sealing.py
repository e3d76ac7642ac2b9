"""Core's protection around a tier of the third rung: seals, keys that differ between models, a breaker.

Such a tier runs in the engine's process and moves rows by itself, so its values are sealed and checked on a thread of
core's own:

=======================  =========================================================================================
engine's thread          ``submit_store`` queues the job; a later step hands the sealed job to the tier
sealing thread           opens the tier; seals rows of stores; checks rows of loads
engine's thread          a load's result is held back until its rows are checked; damaged ones are left out of it
=======================  =========================================================================================
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtiers.api import (
    JobResult,
    LookupResult,
    OffloadKey,
    SecondaryTierManager,
    SupportsStats,
    TierConfig,
    TierRequest,
    TransferJob,
    group_of,
)
from kvtiers.rows.names import StorageNames
from kvtiers.rows.seal import SealVerdict, check_value, seal_value
from kvtiers.secondary.health import Breaker, BreakerState
from kvtiers.secondary.views import ValueViews

__all__ = ["SealedTier"]

_log = logging.getLogger("kvtiers.secondary")


@dataclass(slots=True, eq=False)
class _Job:
    """A job between us and the tier. ``names``: those current when it was submitted. ``inner``: as the tier sees it."""

    job: TransferJob
    inner: TransferJob
    names: StorageNames


class SealedTier(SecondaryTierManager):
    """Wraps the tier that ``open_tier`` opens. Not available until it is open."""

    def __init__(
        self,
        config: TierConfig,
        open_tier: Callable[[], SecondaryTierManager],
        views: ValueViews,
        names: StorageNames,
        sizes: Sequence[tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = config.tier_name
        self._views = views
        self._names = names
        self._sizes = sizes
        self._breaker = Breaker(config.breaker, clock)
        self._tier: SecondaryTierManager | None = None
        self._opened = threading.Event()
        self._open_error = "not opened yet"
        self._jobs: dict[int, _Job] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sealed: deque[_Job] = deque()
        self._results: deque[JobResult] = deque()
        self._seal_failures = 0
        self._probing_with: int | None = None
        self._thread = threading.Thread(
            target=self._seal_and_check, args=(open_tier,), name=f"kvtiers-{self._name}-seal", daemon=True
        )
        self._thread.start()

    # -- the contract

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:
        """Ask the tier, by keys that no other model shares."""
        assert self._tier is not None
        layout_id = self._names.layout_id
        return self._tier.lookup_many([layout_id + key for key in keys], context)

    def submit_store(self, job: TransferJob) -> None:
        """Have the rows sealed; the tier gets the job in a later step."""
        sealed = self._take(job)
        self._work.put(lambda: self._seal(sealed))

    def submit_load(self, job: TransferJob) -> None:
        """Hand the job to the tier."""
        assert self._tier is not None
        self._tier.submit_load(self._take(job).inner)

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return the results that need no check, or have had theirs."""
        if self._tier is None:
            return ()
        self._hand_over()
        finished = []
        for result in self._tier.get_finished_jobs():
            known = self._jobs.get(result.job_id)
            if known is None:
                finished.append(result)  # nothing of ours: let the manager judge it
            elif known.job.is_promotion and (result.success or result.successful_keys):
                self._work.put(lambda known=known, result=result: self._check(known, result))  # type: ignore[misc]
            else:
                finished.append(self._outer(known, result))
        finished += [self._results.popleft() for _ in range(len(self._results))]
        for result in finished:
            if self._jobs.pop(result.job_id, None) is not None:
                self._judge(result)
        return finished

    def get_started_jobs(self) -> Sequence[int] | None:
        """Return the jobs that the tier has begun, where it says so."""
        return self._tier.get_started_jobs() if self._tier is not None else None

    def get_failed_jobs(self) -> Sequence[int]:
        """Return the jobs that have failed but whose rows the tier may still touch."""
        return self._tier.get_failed_jobs() if self._tier is not None else ()

    def is_available(self) -> bool:
        """Say whether the tier is open, in order, and not just being tried with one job."""
        if self._tier is None or self._breaker.state is BreakerState.OPEN or self._probing_with is not None:
            return False
        return self._tier.is_available()

    def abandon_job(self, job_id: int) -> None:
        """Count an overdue job against the tier."""
        self._breaker.record(ok=False)
        if self._tier is not None:
            self._tier.abandon_job(job_id)

    def on_new_request(self, context: TierRequest) -> bool:
        """Pass on."""
        return self._tier.on_new_request(context) if self._tier is not None else False

    def on_request_finished(self, context: TierRequest) -> None:
        """Pass on."""
        if self._tier is not None:
            self._tier.on_request_finished(context)

    def on_schedule_end(self) -> None:
        """Hand over what has been sealed; the breaker's probe is the next job."""
        if self._tier is not None:
            self._breaker.wants_probe()
            self._hand_over()
            self._tier.on_schedule_end()

    def has_pending_work(self) -> bool:
        """Pass on."""
        return self._tier.has_pending_work() if self._tier is not None else False

    def drain(self, timeout: float) -> bool:
        """Seal, hand over, let the tier end, check."""
        until = time.monotonic() + timeout
        self._settle(until)
        if self._tier is None:
            return True
        self._hand_over()
        done = self._tier.drain(max(0.0, until - time.monotonic()))
        self._results.extend(self.get_finished_jobs())
        self._settle(until)
        return done

    def close(self) -> None:
        """End the thread and the tier."""
        self._work.put(None)
        self._thread.join(5.0)
        if self._tier is not None:
            self._tier.close()
            self._tier = None

    # -- beyond the contract, for core

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the tier is open; return "" then, else why it is not."""
        self._opened.wait(timeout)
        return self._open_error

    def set_names(self, names: StorageNames) -> None:
        """Use other keys and names from now on."""
        self._names = names

    def stats(self) -> dict[str, float]:
        """Return the tier's own figures and the seal's."""
        own: dict[str, float] = dict(self._tier.stats()) if isinstance(self._tier, SupportsStats) else {}
        return own | {
            "seal_failures": self._seal_failures,
            "breaker_state": int(self._breaker.state),
            "breaker_opened": self._breaker.opened,
            "open": int(self._tier is not None),
        }

    # -- inside, on the engine's thread

    def _take(self, job: TransferJob) -> _Job:
        layout_id = self._names.layout_id
        keys = [layout_id + key for key in job.keys]
        inner = TransferJob(job.job_id, keys, job.chunk_ids, job.is_promotion, job.context)
        taken = self._jobs[job.job_id] = _Job(job, inner, self._names)
        if self._breaker.state is BreakerState.PROBING:
            self._probing_with = job.job_id
        return taken

    def _hand_over(self) -> None:
        assert self._tier is not None
        for _ in range(len(self._sealed)):
            sealed = self._sealed.popleft()
            try:
                self._tier.submit_store(sealed.inner)
            except Exception as error:  # noqa: BLE001 -- a tier is somebody else's code; a submit that raises began nothing
                _log.warning("%s: store job %d was refused: %s", self._name, sealed.job.job_id, error)
                self._results.append(JobResult(sealed.job.job_id, success=False))

    def _judge(self, result: JobResult) -> None:
        ok = result.success or result.successful_keys is not None
        if result.job_id == self._probing_with:
            self._probing_with = None
            self._breaker.probed(ok=ok)
        else:
            self._breaker.record(ok=ok)

    @staticmethod
    def _outer(known: _Job, result: JobResult) -> JobResult:
        """Return a result in the manager's keys."""
        if result.successful_keys is None:
            return result
        outer = dict(zip(known.inner.keys, known.job.keys, strict=True))
        keys = [outer.get(key, key) for key in result.successful_keys]
        return JobResult(result.job_id, result.success, keys, result.nbytes, result.seconds)

    def _settle(self, until: float) -> None:
        """Wait until the sealing thread has done what was asked of it so far."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait(max(0.0, until - time.monotonic()))

    # -- inside, on the sealing thread

    def _seal_and_check(self, open_tier: Callable[[], SecondaryTierManager]) -> None:
        try:
            self._tier = open_tier()
            self._open_error = ""
        except Exception as error:  # noqa: BLE001 -- a plugin is somebody else's code
            self._open_error = f"{type(error).__name__}: {error}"
            _log.warning("%s: cannot be opened: %s; the engine goes on without it", self._name, self._open_error)
        del open_tier  # it knows the region, which must not outlive the tier
        self._opened.set()
        while (work := self._work.get()) is not None:
            work()

    def _seal(self, sealed: _Job) -> None:
        for key, row in zip(sealed.job.keys, sealed.job.chunk_ids, strict=True):
            payload, value = self._sizes[group_of(key)]
            seal_value(self._views.own(row, value), payload, sealed.names.name(key), sealed.names.layout_id)
        self._sealed.append(sealed)

    def _check(self, known: _Job, result: JobResult) -> None:
        good = set(known.inner.keys if result.success else result.successful_keys or ())
        pairs = zip(known.inner.keys, known.job.keys, known.job.chunk_ids, strict=True)
        landed = [key for inner, key, row in pairs if inner in good and self._is_sound(known.names, key, row)]
        if len(landed) < len(good):
            self._seal_failures += len(good) - len(landed)
            _log.warning("%s: %d values are damaged; counted as misses", self._name, len(good) - len(landed))
        success = len(landed) == len(known.job.keys)
        self._results.append(JobResult(result.job_id, success, landed, result.nbytes, result.seconds))

    def _is_sound(self, names: StorageNames, key: OffloadKey, row: int) -> bool:
        payload, value = self._sizes[group_of(key)]
        return check_value(self._views.own(row, value), payload, names.name(key), names.layout_id) is SealVerdict.OK
