"""The sealed tier: core's protection around a tier of the third rung: seals, per-model keys, a breaker.

Such a tier runs in the engine's process and moves rows by itself, so its values are sealed and checked on a thread of
core's own (``seal_thread.py``):

=======================  =========================================================================================
engine's thread          ``submit_store`` queues the job; a later step hands the sealed job to the tier
sealing thread           opens the tier; seals rows of stores; checks rows of loads; reads the tier's figures; closes it
engine's thread          a load's result is held back until its rows are checked; damaged ones are left out of it
drain thread             at the shutdown, the tier's ``drain``; one that does not return is left behind
=======================  =========================================================================================

The tier is trusted as any code of the engine's process is: what it answers is not judged here, but for what it has
loaded. The end of a request comes after its last store, which waits for its seal.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvtiers._failures import log_with_backoff, plugin_boundary
from kvtiers.api import (
    JobResult,
    LookupResult,
    OffloadKey,
    SecondaryTierManager,
    TierConfig,
    TierRequest,
    TransferJob,
)
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.breaker import Breaker, BreakerState
from kvtiers.secondary.managed.seal_thread import SealedJob, Sealer
from kvtiers.secondary.tier_jobs import EventTier, TierEvent, is_of, not_done, poll_getters

__all__ = ["SealedTier"]

_log = logging.getLogger("kvtiers.secondary")
_CLOSE_SECONDS = 5.0
_LATE_SECONDS = 0.5
_FIGURES_SECONDS = 1.0  # how often the tier's own figures are read
_NO_KEYS = (b"",)  # of no job


class SealedTier(EventTier):
    """Wraps the tier that ``open_tier`` opens. Not available until it is open.

    ``close_seconds``: for its thread and the tier to end. ``late_seconds``: by which the tier's drain() may take longer
    than it was given.
    """

    def __init__(
        self,
        config: TierConfig,
        open_tier: Callable[[], SecondaryTierManager],
        views: ValueViews,
        names: StorageNames,
        sizes: Sequence[tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
        *,
        close_seconds: float = _CLOSE_SECONDS,
        late_seconds: float = _LATE_SECONDS,
    ) -> None:
        self._close_seconds = close_seconds
        self._late_seconds = late_seconds
        self._name = config.tier_name
        self._names = names
        self._breaker = Breaker(config.breaker, clock)
        self._clock = clock
        self._figures_at = -math.inf
        self._jobs: dict[int, SealedJob] = {}
        self._probing_with: int | None = None
        self._in_use: SecondaryTierManager | None = None
        """The tier, once it is open and has been notified of the open requests."""
        self._requests: dict[TierRequest, None] = {}
        """Those that run."""
        self._sealing = 0
        """Stores that the tier has not been handed yet."""
        self._raised = 0
        reopen = (config.breaker.delay, config.breaker.max_delay)
        self._sealer = Sealer(open_tier, views, sizes, reopen, self._name)

    # -- the contract

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:
        """Ask the tier, by keys that no other model shares."""
        layout_id = self._names.layout_id
        return self._tier.lookup_many([layout_id + key for key in keys], context)

    def submit_store(self, job: TransferJob) -> None:
        """Queue the rows for sealing; the tier gets the job in a later step."""
        self._sealing += 1
        self._sealer.seal(self._take(job))

    def submit_load(self, job: TransferJob) -> None:
        """Hand the job to the tier."""
        taken = self._take(job)
        taken.handed_over = True
        try:
            self._tier.submit_load(taken.inner)
        except BaseException:
            self._judge(taken, ok=False)
            raise

    def poll(self) -> Iterable[TierEvent]:
        """Return what the tier's getters report; results that need a check when they have had theirs."""
        tier = self._opened()
        return self._finished(None) if tier is None else poll_getters(tier, self._finished)

    def is_available(self) -> bool:
        """Return whether the tier is available, its breaker not open, and no trial job in flight."""
        tier = self._opened()
        if tier is None or self._breaker.state is BreakerState.OPEN or self._probing_with is not None:
            return False
        return tier.is_available()

    def abandon_job(self, job_id: int) -> None:
        """Count an overdue job against the tier, and notify the tier if it has the job already."""
        if job_id in self._jobs and job_id != self._probing_with:
            self._record(self._jobs[job_id], ok=False)
        self.cancel_job(job_id)

    def cancel_job(self, job_id: int) -> None:
        """Notify the tier, if it has the job already, that it is not wanted any more."""
        known = self._jobs.get(job_id)
        if known is None:
            return
        known.failed_in_use = True
        if known.handed_over and self._in_use is not None:  # None: it hung in its drain
            self._in_use.abandon_job(job_id)

    def on_new_request(self, context: TierRequest) -> bool:
        """Notify the tier; one that is not open yet is notified when it opens, if the request still runs then."""
        tier = self._opened()
        self._requests[context] = None
        return tier is not None and tier.on_new_request(context)

    def on_request_finished(self, context: TierRequest) -> None:
        """Notify the tier as soon as it has the request's last store."""
        tier = self._opened()
        if context not in self._requests:
            return
        del self._requests[context]
        if self._sealing:
            self._sealer.pass_on(context)
        elif tier is not None:
            tier.on_request_finished(context)

    def on_schedule_end(self) -> None:
        """Submit the jobs that have been sealed. While the breaker tries the tier, the next job is its probe."""
        tier = self._opened()
        if tier is not None:
            self._breaker.wants_probe()
            self._hand_over(tier)
            tier.on_schedule_end()
            if (now := self._clock()) >= self._figures_at:
                self._figures_at = now + _FIGURES_SECONDS
                self._sealer.read_figures()

    def has_pending_work(self) -> bool:
        """Return whether the tier has work left to do in a step."""
        tier = self._opened()
        return False if tier is None else tier.has_pending_work()

    def drain(self, timeout: float) -> bool:
        """Seal, hand over, drain the tier, check; log how much was dropped.

        A tier that does not return in time is asked nothing more, not even to close.
        """
        until = time.monotonic() + timeout
        unfinished = list(self._jobs.values())
        self._sealer.settle(timeout)
        tier = self._opened()
        if tier is not None and not self._drain(tier, timeout, until):
            tier = self._in_use = None
            self._sealer.leave_tier()
        results = self._last_results(tier, until)
        self._sealer.results.extend(results)  # they are still to be reported
        ended = [known.result for known in unfinished if known.result is not None]
        jobs, chunks = not_done({known.job.job_id: known.job for known in unfinished}, ended)
        if jobs:
            text = "%s: shutdown within %.3gs dropped %d jobs with %d chunks"
            _log.warning(text, self._name, timeout, jobs, chunks)
        return not self._jobs

    def close(self) -> None:
        """End the thread and the tier."""
        self._in_use = None
        self._sealer.close(self._close_seconds)

    # -- beyond the contract, for core

    def wait_open(self, timeout: float) -> str:
        """Wait (from any thread) until the tier is open; return "" then, else why it is not."""
        return self._sealer.wait_open(timeout)

    def open_state(self) -> str | None:
        """Return "" if the tier is open, why it is not, or None while it has said neither. From any thread."""
        return self._sealer.open_state()

    def warn_unusable(self, error: str) -> None:
        """Do nothing: the sealing thread opens the tier, and has logged this itself."""

    def set_names(self, names: StorageNames) -> None:
        """Use other keys and names from now on."""
        self._names = names

    def stats(self) -> dict[str, float]:
        """Return the tier's own figures, as of about a second ago, and the seal's. From any thread."""
        return self._sealer.figures | {
            "seal_failures": self._sealer.seal_failures,
            "breaker_state": int(BreakerState.PROBING if self._breaker.probe_is_due else self._breaker.state),
            "breaker_opened": self._breaker.opened,
            "breaker_seconds": self._breaker.seconds,
            "open": int(self._in_use is not None or self._sealer.open_state() == ""),
        }

    # -- inside

    @property
    def _tier(self) -> SecondaryTierManager:
        tier = self._opened()
        assert tier is not None, "asked before it is available"
        return tier

    def _opened(self) -> SecondaryTierManager | None:
        """Return the tier once it is open; before anything else it is notified of the requests that it missed."""
        if self._in_use is None and self._sealer.tier is not None:
            self._in_use = self._sealer.tier
            for context in self._requests:
                self._notify("on_new_request", self._in_use.on_new_request, context)
        return self._in_use

    def _take(self, job: TransferJob) -> SealedJob:
        layout_id = self._names.layout_id
        keys = [layout_id + key for key in job.keys]
        rows = memoryview(job.chunk_ids)  # one of its own: the tier may release it, as by ``with``
        inner = TransferJob(job.job_id, keys, rows, job.is_promotion, job.context, keep_damaged=job.keep_damaged)
        taken = self._jobs[job.job_id] = SealedJob(job, inner, self._names)
        if self._breaker.state is BreakerState.PROBING and self._probing_with is None:
            self._probing_with = job.job_id
        return taken

    def _hand_over(self, tier: SecondaryTierManager) -> None:
        for _ in range(len(self._sealer.sealed)):
            sealed = self._sealer.sealed.popleft()
            if not isinstance(sealed, SealedJob):
                self._notify("on_request_finished", tier.on_request_finished, sealed)
                continue
            self._sealing -= 1
            error = sealed.error or ("given up before it began" if sealed.failed_in_use else "")
            if not error:
                sealed.handed_over = True
                with plugin_boundary() as submit:
                    tier.submit_store(sealed.inner)
                error = submit.error  # a submit that raises began nothing
            if error:
                _log.info("%s: store job %d: %s", self._name, sealed.job.job_id, error)
                self._sealer.results.append(JobResult(sealed.job.job_id, success=False))

    def _finished(self, tier: SecondaryTierManager | None) -> list[JobResult]:
        results = self._sealer.results
        finished = [results.popleft() for _ in range(len(results))]
        if tier is not None:
            self._hand_over(tier)
            try:
                for result in tier.get_finished_jobs():
                    finished += self._reported(result)
            except Exception:
                if not finished:  # else what has come goes first, or it were lost; a broken tier raises again
                    raise
        for result in finished:
            known = self._job_of(result)
            if known is not None:
                ok = result.success or result.successful_keys is not None
                known.result = result
                self._judge(known, ok=ok)
        return finished

    def _drain(self, tier: SecondaryTierManager, timeout: float, until: float) -> bool:
        """Hand over what waits, and let the tier drain; False if that does not return."""
        self._hand_over(tier)
        seconds = max(0.0, until - time.monotonic())
        draining = threading.Thread(
            target=self._try,
            args=("drain", lambda: tier.drain(seconds)),
            name=f"kvtiers-{self._name}-drain",
            daemon=True,
        )
        draining.start()
        draining.join(seconds + self._late_seconds)
        if draining.is_alive():
            late = f"its drain() does not return within the shutdown's {timeout:.3g}s"
            _log.warning("%s: %s; the tier is left as it is, and not closed", self._name, late)
        return not draining.is_alive()

    def _last_results(self, tier: SecondaryTierManager | None, until: float) -> list[JobResult]:
        """Return what the tier reports after its drain, checked."""
        results: list[JobResult] = []
        self._try("get_finished_jobs", lambda: results.extend(self._finished(tier)))
        self._sealer.settle(max(0.0, until - time.monotonic()))
        self._try("get_finished_jobs", lambda: results.extend(self._finished(tier)))
        return results

    def _notify(self, name: str, call: Callable[[TierRequest], object], context: TierRequest) -> None:
        with plugin_boundary() as boundary:
            call(context)
        if boundary.error:
            self._raised = times = self._raised + 1
            text = "%s: its %s() failed (%d times so far): %s"
            log_with_backoff(times, _log.warning, text, self._name, name, times, boundary.error)

    def _try(self, name: str, call: Callable[[], object]) -> None:
        with plugin_boundary(exits=True) as boundary:
            call()
        if boundary.error:
            _log.warning("%s: its %s() failed: %s", self._name, name, boundary.error)

    def _reported(self, result: JobResult) -> list[JobResult]:
        """Return what may be passed on of the tier's own result; what it has loaded is checked first."""
        known = self._job_of(result)
        if known is None:
            return [result]  # nothing of ours: let the manager judge it
        if known.reported:
            return [JobResult(result.job_id, success=False)]  # the check's own result makes it the second one
        known.reported = True
        if not is_of(known.inner, result):
            # Nor is this. As it is it may name the manager's keys, and would be believed though nothing was checked.
            return [JobResult(result.job_id, success=False, successful_keys=_NO_KEYS)]
        if known.job.is_promotion and (result.success or result.successful_keys is not None):
            self._sealer.check(known, result)
            return []
        return [_outer(known, result)]

    def _job_of(self, result: JobResult) -> SealedJob | None:
        try:
            return self._jobs.get(result.job_id) if isinstance(result, JobResult) else None
        except Exception:  # noqa: BLE001 -- the tier made it: no id at all
            return None

    def _judge(self, known: SealedJob, *, ok: bool) -> None:
        del self._jobs[known.job.job_id]
        if known.job.job_id == self._probing_with:
            self._probing_with = None
            self._breaker.probed(ok=ok and not known.failed_in_use, is_load=known.job.is_promotion)
            if self._breaker.state is BreakerState.CLOSED and not self._breaker.relapses:
                _log.warning("%s: works again; back in use", self._name)
        elif not known.failed_in_use:
            self._record(known, ok=ok)

    def _record(self, known: SealedJob, *, ok: bool) -> None:
        breaker = self._breaker
        was, relapses = breaker.state, breaker.relapses
        breaker.record(ok=ok, is_load=known.job.is_promotion)
        if breaker.state is not was and breaker.relapses <= 1:
            what = "loads" if known.job.is_promotion else "jobs"
            text = "%s: taken out of use after %s that failed; it is tried with one until that succeeds"
            _log.warning(text, self._name, what)
        elif relapses and not breaker.relapses:
            _log.warning("%s: its loads succeed again; back in use", self._name)


def _outer(known: SealedJob, result: JobResult) -> JobResult:
    """Return a result in the manager's keys."""
    if result.successful_keys is None:
        return result
    outer = dict(zip(known.inner.keys, known.job.keys, strict=True))
    keys = [outer[key] for key in result.successful_keys]
    return JobResult(result.job_id, result.success, keys, result.nbytes, result.seconds)
