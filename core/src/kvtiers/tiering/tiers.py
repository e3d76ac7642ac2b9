"""One secondary tier as the tiering code sees it: guarded calls, budgets, speed, and whether it can be trusted.

Nothing that a tier does raises into the engine's step: an exception is logged, counted and answered as the contract
says. A tier that reports what it was not given is retired: it is asked nothing more, and what it may still touch stays
in quarantine.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvtiers.api import JobResult, LookupResult, OffloadKey, SecondaryTierManager, TierRequest, TransferJob
from kvtiers.metrics import TierMetrics

__all__ = ["TierOptions", "TierSlot"]

_log = logging.getLogger("kvtiers.tiering")
_SPEED_WEIGHT = 0.2  # of the newest transfer in the running seconds per chunk
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options of a tier that the tiering code itself obeys."""

    name: str
    read_only: bool = False
    admission: Literal["all", "second_access", "on_eviction"] = "all"
    deadline: float = 30.0


class TierSlot:
    """A tier in its place in the order, with what the manager knows of it."""

    def __init__(self, index: int, tier: SecondaryTierManager, options: TierOptions) -> None:
        self.index = index
        self.tier = tier
        self.options = options
        self.name = options.name
        self.metrics = TierMetrics()
        self.retired = ""
        self.pinned = 0
        """Rows that this tier's jobs, reservations and quarantine hold."""
        self.loading_chunks = 0
        self.seconds_per_chunk: float | None = None

    def available(self) -> bool:
        """Say whether the tier may be asked and given jobs now."""
        return not self.retired and self._guard(self.tier.is_available, otherwise=False)

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:
        """Ask the tier; a tier that raises, or answers nothing, has nothing."""
        return self._guard(lambda: self.tier.lookup_many(keys, context), otherwise=()) or (LookupResult.MISS,)

    def submit(self, job: TransferJob) -> bool:
        """Hand the job over; False if the tier did not take it, so that nothing has started."""

        def hand_over() -> bool:
            (self.tier.submit_load if job.is_promotion else self.tier.submit_store)(job)
            return True

        return self._guard(hand_over, otherwise=False)

    def finished_jobs(self) -> Sequence[JobResult]:
        """Take the results that have come; a retired tier is no longer believed."""
        return () if self.retired else self._guard(self.tier.get_finished_jobs, otherwise=())

    def started_jobs(self) -> Sequence[int] | None:
        """Take the jobs that have begun; None: jobs of this tier begin when they are submitted."""
        nothing: Sequence[int] | None = ()
        return nothing if self.retired else self._guard(self.tier.get_started_jobs, otherwise=nothing)

    def failed_jobs(self) -> Sequence[int]:
        """Take the jobs that have failed but whose rows the tier may still touch."""
        nothing: Sequence[int] = ()
        return nothing if self.retired else self._guard(self.tier.get_failed_jobs, otherwise=nothing)

    def abandon(self, job_id: int) -> None:
        """Tell the tier that a job of its was given up."""
        self._guard(lambda: self.tier.abandon_job(job_id), otherwise=None)

    def request_started(self, context: TierRequest) -> bool:
        """Tell the tier of a request; True if it wants all the request's chunks."""
        return not self.retired and self._guard(lambda: self.tier.on_new_request(context), otherwise=False)

    def request_finished(self, context: TierRequest) -> None:
        """Tell the tier that no further call will name this request."""
        if not self.retired:
            self._guard(lambda: self.tier.on_request_finished(context), otherwise=None)

    def end_step(self) -> None:
        """Tell the tier that the step is over."""
        if not self.retired:
            self._guard(self.tier.on_schedule_end, otherwise=None)

    def has_pending_work(self) -> bool:
        """Say whether the tier wants the engine to keep stepping."""
        return not self.retired and self._guard(self.tier.has_pending_work, otherwise=False)

    def retire(self, reason: str) -> None:
        """Put a tier that lies out of use, for good."""
        self.metrics.refused_results += 1
        if not self.retired:
            self.retired = reason
            self.metrics.out_of_use = 1
            _log.error("%s: put out of use: %s; restart the engine to use it again", self.name, reason)

    def measure(self, chunks: int, seconds: float) -> None:
        """Take a finished load into the running seconds per chunk."""
        if chunks:
            now = seconds / chunks
            before = self.seconds_per_chunk
            self.seconds_per_chunk = now if before is None else before + _SPEED_WEIGHT * (now - before)

    def _guard(self, call: Callable[[], _T], *, otherwise: _T) -> _T:
        try:
            return call()
        except Exception:  # noqa: BLE001 -- a tier is somebody else's code: nothing of it reaches the engine
            self.metrics.raised += 1
            if self.metrics.raised.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time: a broken tier is no flood
                _log.exception("%s: the tier raised (%d times so far)", self.name, self.metrics.raised)
            return otherwise
