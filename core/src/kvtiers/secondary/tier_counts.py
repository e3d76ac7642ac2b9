"""The counts of a store tier: its jobs and values, the room of its store queue, and the watch over a store that drops.

The tier uses them to decide what it sends and logs. Nothing here sends, waits or logs. Engine's thread.
"""

import math
from collections.abc import Callable
from typing import Literal

from kvtiers.host.messages import Status
from kvtiers.secondary.tier_jobs import InflightJob

__all__ = ["LEAST_STORE_QUEUE", "DropWatch", "TierCounts"]

LEAST_STORE_QUEUE = 1024
"""Values that may wait to be written with ``store_queue: auto``, however slow the store is."""
_LEAST_BYTES = 256 * 2**20  # of small values that may wait, likewise
_QUEUE_SECONDS = 2.0  # what may wait is written in so long
_HALF_LIFE = 5.0  # seconds of writing, after which what was before counts half
_ROWS_SHARE = 8  # of the primary's rows: half of the default of budgets.one_tier
_KNOWN_SECONDS = 300.0  # so long ago it may have been that a store did not take a value for it to be called full
_QUIET_SECONDS = 30.0  # for so long it must have dropped nothing: at its limit a store takes some values and drops some
_FIGURES = (
    "seal_failures",
    "retries",
    "dropped_full",
    "dropped_refused",
    "dropped_quota",
    "dropped_queue",
    "dropped_shutdown",
    "already_present",
    "errors",
    "missing",
)


class TierCounts:
    """One tier's counts.

    ``store_queue``: chunks on their way into the store at which it takes no more; ``row_bytes``: size of a row.
    """

    def __init__(
        self, store_queue: int | Literal["auto"], rows: int, row_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.store_queue = store_queue
        self._most_rows = rows // _ROWS_SHARE
        self._least_rows = max(LEAST_STORE_QUEUE, _LEAST_BYTES // row_bytes if row_bytes else 0)
        self.storing = 0
        """Chunks on their way into the store."""
        self.figures = dict.fromkeys(_FIGURES, 0)
        self._clock = clock
        self._written = 0.0  # in ``_busy`` seconds in which something was on its way
        self._busy = 0.0
        self._busy_since = clock()

    @property
    def has_room(self) -> bool:
        """Return whether the store queue takes another job: all of it, though it may reach beyond the queue's end.

        A part of a job may be worth nothing: without its windows or states a prompt of a hybrid model is not found.
        With "auto" the room follows the store's speed. A burst of prompts is computed faster than a fast store writes
        it, and a fixed number that is large enough for that would let values of a slow store wait beyond their
        deadline. It is full at an eighth of the primary's rows at the latest: half of what the default budgets give the
        tier, so that loads have the other half.
        """
        return self.storing < (self._auto if self.store_queue == "auto" else self.store_queue)

    @property
    def _auto(self) -> float:
        soon = _QUEUE_SECONDS * self._written / self._busy if self._busy else 0.0
        return max(self._least_rows, min(soon, self._most_rows))

    def begin(self, job: InflightJob) -> None:
        """Count a job."""
        if job.is_store:
            if not self.storing:
                self._busy_since = self._clock()
            self.storing += len(job.keys)

    def drop(self, chunks: int) -> None:
        """Count the chunks of a store that is not begun."""
        self.figures["dropped_queue"] += chunks

    def refuse(self, job: InflightJob) -> None:
        """Count a job that no host has accepted."""
        if job.is_store:
            self.storing -= len(job.keys)
            self.drop(len(job.keys))

    def end(self, job: InflightJob, *, success: bool) -> int:
        """Count a job's end; return how many of its values are damaged."""
        statuses, figures = job.statuses, self.figures
        if job.is_store:
            self.storing -= len(job.keys)
            self._note_written(statuses.count(Status.DONE))
        figures["retries"] += job.retries
        figures["already_present"] += statuses.count(Status.PRESENT)
        if success:
            return 0
        damaged = statuses.count(Status.CORRUPT)
        figures["seal_failures"] += damaged
        figures["missing"] += statuses.count(Status.MISSING)
        figures["dropped_full"] += statuses.count(Status.DROPPED)
        figures["dropped_refused"] += statuses.count(Status.REFUSED)
        figures["dropped_quota"] += statuses.count(Status.NO_ROOM)
        return damaged

    def _note_written(self, values: int) -> None:
        now = self._clock()
        if values:
            seconds = now - self._busy_since
            kept = 0.5 ** (seconds / _HALF_LIFE)
            self._busy = self._busy * kept + seconds
            self._written = self._written * kept + values
        self._busy_since = now


class DropWatch:
    """The watch over a store that does not take values: one log line when that begins, and one when it resumes.

    It is full, or a part of it is down: neither is a failure. It is still read, its breaker stays closed, and what is
    dropped is counted. Without the line an operator would see a healthy engine and a tier that gets nothing new.
    ``state``: the word for it; ``was``: the same of what is over.
    """

    def __init__(self, name: str, state: str, was: str, clock: Callable[[], float]) -> None:
        self._name, self._state, self._was = name, state, was
        self._clock = clock
        self._last = -math.inf
        self._is_said = False
        self.dropped = self.written = 0
        """Values since the line that says that it began."""

    @property
    def holds(self) -> bool:
        """Return whether it does not take values, as far as is known. From any thread.

        What was so five minutes ago may be over: an idle engine may have nothing left to offer it.
        """
        return self._is_said and self.seconds < _KNOWN_SECONDS

    @property
    def seconds(self) -> float:
        """How long ago it last did not take a value."""
        return self._clock() - self._last

    def stored(self, written: int, dropped: int, why: str) -> str:
        """Record how many of a job's values were written and dropped; return a line for the log, or "" for none.

        ``why``: the reason, or what to do.
        """
        if not (self._is_said or dropped):
            return ""
        if not self._is_said:
            self.dropped = self.written = 0
        self.dropped += dropped
        self.written += written
        if dropped:
            self._last = self._clock()
            began, self._is_said = not self._is_said, True
            if began:
                return (
                    f"{self._name}: {self._state}: its store has not taken {dropped} values; what it holds is read as "
                    f"before; {why}"
                )
        elif written and self.seconds >= _QUIET_SECONDS:
            self._is_said = False
            return f"{self._name}: takes values again; {self.dropped} were dropped while {self._was}"
        return ""
