"""The counts of a store tier's jobs, and the watch over a store that is full.

A full store is no failure: it is still read, its breaker stays closed, and what is dropped is counted. Without a line
in the log an operator would see a healthy engine and a tier that gets nothing new.
"""

from collections.abc import Callable

from kvtiers.host.messages import Status
from kvtiers.secondary.inflight_jobs import InflightJob

__all__ = ["FullWatch", "StoreCounts"]

_QUIET_SECONDS = 30.0  # for so long it must have dropped nothing: at its limit a store takes some values and drops some
_FIGURES = (
    "seal_failures",
    "retries",
    "dropped_full",
    "dropped_queue",
    "dropped_shutdown",
    "already_present",
    "errors",
    "missing",
)


class StoreCounts:
    """One tier's counts. ``store_queue``: the most chunks that may be on their way into the store. Engine's thread."""

    def __init__(self, store_queue: int) -> None:
        self._store_queue = store_queue
        self.storing = 0
        """Chunks on their way into the store."""
        self.figures = dict.fromkeys(_FIGURES, 0)

    @property
    def room(self) -> int:
        """Chunks that the store queue has room for."""
        return max(0, self._store_queue - self.storing)

    def begin(self, job: InflightJob) -> None:
        """Count a job; those of its chunks that are not handed over are dropped."""
        self.figures["dropped_queue"] += len(job.job.keys) - len(job.keys)
        if not job.job.is_promotion:
            self.storing += len(job.keys)

    def refuse(self, job: InflightJob) -> None:
        """Count a job that no host has accepted."""
        if not job.job.is_promotion:
            self.storing -= len(job.keys)
            self.figures["dropped_queue"] += len(job.keys)

    def end(self, job: InflightJob, *, success: bool) -> int:
        """Count a job's end; return how many of its values are damaged."""
        statuses, figures = job.statuses, self.figures
        if not job.job.is_promotion:
            self.storing -= len(job.keys)
        figures["retries"] += job.retries
        figures["already_present"] += statuses.count(Status.PRESENT)
        if success:
            return 0
        damaged = statuses.count(Status.CORRUPT)
        figures["seal_failures"] += damaged
        figures["missing"] += statuses.count(Status.MISSING)
        figures["dropped_full"] += statuses.count(Status.DROPPED)
        return damaged


class FullWatch:
    """The watch of one tier. ``advice``: what to do. By the caller's clock; engine's thread."""

    def __init__(self, name: str, advice: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._advice = advice
        self._clock = clock
        self._dropped = 0
        self._last = 0.0
        self.is_full = False

    def stored(self, written: int, dropped: int) -> str:
        """Record how many of a job's values were written and dropped; return a line for the log, or "" for none."""
        if dropped:
            self._last = self._clock()
            self._dropped = self._dropped + dropped if self.is_full else dropped
            began, self.is_full = not self.is_full, True
            if began:
                return (
                    f"{self._name}: full: its store has not taken {dropped} values; what it holds is read as before; "
                    f"{self._advice}"
                )
        elif self.is_full and written and self._clock() - self._last >= _QUIET_SECONDS:
            self.is_full = False
            return f"{self._name}: takes values again; {self._dropped} were dropped while it was full"
        return ""
