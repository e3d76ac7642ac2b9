"""The jobs of a secondary tier: the events that report them, their results, and those of a store tier in flight.

A tier reports by one stream of events, those of core's own in the order in which they came (``EventTier``):

===============  =====================================================================================
event            the job
===============  =====================================================================================
``JobStarted``   has begun; without this event it counts as begun when it was submitted
``JobFailed``    has failed in use: its requests go on at once, its rows are not free yet
``JobReleased``  was to be detached from its memory, and is
``JobResult``    has ended, and its rows are free; the one event that each job has
===============  =====================================================================================

Authors of the third rung write getters instead, in vLLM's shape: ``poll_getters`` is the one place that asks them.
Results are made by plugins, so nothing in them is taken for granted.

In flight a store tier's job is one ``InflightJob``, and a ``JobPart`` in each host that has some of it. The backend of
each host keeps its parts by job id; together these tables are the tier's one ledger::

    TransferJob <- InflightJob <- JobPart, one a host -> StoreJob, the message to the host

Engine's thread. A host's client also changes ``is_started``, ``failed_in_use``, ``is_released`` and ``has_ended`` of
its parts wherever it polls, under its connection's lock.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from kvtiers.api import JobResult, OffloadKey, SecondaryTierManager, TransferJob
from kvtiers.host.messages import JobDone, JobFailed, JobReleased, JobStarted, Status, StoreJob

__all__ = [
    "NO_RESULTS",
    "EventTier",
    "InflightJob",
    "JobFailed",
    "JobPart",
    "JobReleased",
    "JobStarted",
    "TierEvent",
    "good_keys",
    "is_of",
    "landed_keys",
    "moved",
    "not_done",
    "poll_getters",
    "without",
]

_FAILED = bytes([Status.FAILED])
_GOOD = frozenset({Status.DONE, Status.PRESENT})

TierEvent: TypeAlias = JobStarted | JobFailed | JobReleased | JobResult
NO_RESULTS = (JobStarted, JobFailed, JobReleased)


class EventTier(SecondaryTierManager):
    """A tier as core drives it: by one stream of events, and with what core's own tiers can do besides the contract.

    A subclass implements ``poll``, which stands for all getters, or those. What else it cannot do it leaves as it is.
    """

    can_delete: ClassVar[bool] = False
    is_tended: ClassVar[bool] = False
    """Its methods may be called by another thread than the engine's, between any two other calls."""

    def poll(self) -> Iterable[TierEvent]:
        """Return the events since the last call, of a bounded number of jobs, oldest first."""
        return poll_getters(self)

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return the results among the events, and drop the others: for a caller that waits for results alone."""
        if type(self).poll is EventTier.poll:  # it would ask this method
            raise NotImplementedError
        return [event for event in self.poll() if not isinstance(event, NO_RESULTS)]

    def lacks_all(self, keys: Sequence[OffloadKey]) -> bool:  # noqa: ARG002 -- this, and those below, do nothing
        """Return whether a lookup of each of these chunks would be a MISS, without asking the store."""
        return False

    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Ask about chunks that will be looked up soon; between any two other calls."""

    def submit_delete(self, job: TransferJob) -> None:
        """Start to remove the chunks of a job, which has no rows; only if it ``can_delete``."""
        raise NotImplementedError

    def release_job(self, job_id: int) -> None:
        """Detach a job whose request is over from its memory, if possible; not a failure of the tier."""

    def kill_job(self, job_id: int, reason: str) -> None:
        """End whatever still touches the rows of a job, and all that is in its process."""

    def cancel_job(self, job_id: int) -> None:
        """Begin nothing more of a job that is not wanted any more; its result must still follow."""
        self.abandon_job(job_id)

    def tend(self) -> None:
        """Do what a step does for the tier itself, while no step comes; only if it ``is_tended``."""

    def open_state(self) -> str | None:
        """Return "" if it is open, why it is not, or None while it has said neither. From any thread."""
        return ""

    def has_spoken(self) -> bool:
        """Return whether ``is_available`` knows that it is open, or it has said why it is not. From any thread."""
        return self.open_state() is not None

    def stats(self) -> Mapping[str, float]:
        """Return the tier's own figures. From any thread."""
        return {}


def poll_getters(
    tier: SecondaryTierManager, finished: Callable[[SecondaryTierManager], Iterable[JobResult]] | None = None
) -> Iterator[TierEvent]:
    """Yield what a tier's getters return: starts, then failures, then results. ``finished``: asks it for the results.

    All three are asked whatever one of them raises; the first exception is raised after the last event.
    """
    raised: Exception | None = None
    try:  # by hand, three times: each step of the engine comes by here, with nothing to report
        for job_id in tier.get_started_jobs() or ():
            yield JobStarted(job_id)
    except Exception as error:  # noqa: BLE001 -- for the caller, who catches it
        raised = error
    try:
        for job_id in tier.get_failed_jobs() or ():
            yield JobFailed(job_id, "")
    except Exception as error:  # noqa: BLE001 -- as above
        raised = raised or error
    try:
        yield from (tier.get_finished_jobs() if finished is None else finished(tier)) or ()
    except Exception as error:  # noqa: BLE001 -- as above
        raised = raised or error
    if raised is not None:
        raise raised


def good_keys(job: TransferJob, result: JobResult) -> Sequence[OffloadKey]:
    """Return the job's keys that the tier moved, in order. Keys that it names count more than its ``success``."""
    if result.successful_keys is None:
        return job.keys if result.success else ()
    named = set(result.successful_keys)
    return job.keys if len(named) == len(job.keys) else [key for key in job.keys if key in named]


def landed_keys(job: TransferJob, event: JobReleased) -> Sequence[OffloadKey]:
    """Return the keys of a load whose values had landed when it was detached from its memory."""
    return [key for key, status in zip(job.keys, event.statuses, strict=False) if status in _GOOD]


def without(keys: Sequence[OffloadKey], some: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
    """Return the keys that are not among ``some``, all of which are among them."""
    if len(keys) == len(some):
        return ()
    left_out = set(some)
    return [key for key in keys if key not in left_out]


def is_of(job: TransferJob, result: JobResult) -> bool:
    """Return whether a result says yes or no, and the keys that it names are the job's."""
    try:
        bool(result.success)  # an array's raises
        return result.successful_keys is None or set(result.successful_keys) <= set(job.keys)
    except Exception:  # noqa: BLE001 -- a plugin made it
        return False


def moved(result: JobResult) -> tuple[int, float]:
    """Return the bytes and seconds of a result; 0 for what is no such number."""
    try:
        nbytes, seconds = int(result.nbytes), float(result.seconds)
    except Exception:  # noqa: BLE001 -- a plugin made it
        return 0, 0.0
    return max(0, nbytes), seconds if 0 <= seconds < math.inf else 0.0


def not_done(unfinished: Mapping[int, TransferJob], results: Iterable[JobResult]) -> tuple[int, int]:
    """Return how many of these jobs, and how many of their chunks, were not done, by their results as far as known."""
    missing = {job_id: len(job.keys) for job_id, job in unfinished.items()}
    for result in results:
        if result.job_id in missing:
            missing[result.job_id] -= _chunks_done(unfinished[result.job_id], result)
    lost = [chunks for chunks in missing.values() if chunks]
    return len(lost), sum(lost)


def _chunks_done(job: TransferJob, result: JobResult) -> int:
    if result.successful_keys is None:
        return len(job.keys) if result.success else 0
    named = set(result.successful_keys)  # one that is named twice is done once, and others' keys say nothing
    return sum(key in named for key in job.keys)


@dataclass(slots=True, eq=False)
class InflightJob:
    """A job in flight. ``generation``: of the names it was sent under.

    ``is_delete``: it removes chunks, and has no rows. ``failed_in_use``: it was reported, or given up, as failed
    while something may still touch its rows. ``to_release``: it was to be detached from its rows, so what it did not do
    is no failure of the store.
    """

    job: TransferJob
    generation: int
    is_delete: bool = False
    parts: list["JobPart"] = field(default_factory=list)
    """Those that have not ended; the fields below sum up those that have."""
    statuses: bytes | bytearray = b""
    """A Status for each of ``keys``, once a part has ended or is released; FAILED where nothing is known yet."""
    is_started: bool = False
    failed_in_use: bool = False
    to_release: bool = False
    is_released: bool = False
    nbytes: int = 0
    seconds: float = 0.0
    """The mean of the parts, which run side by side, by their values."""
    ended_values: int = 0
    retries: int = 0
    error: str = ""

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """The job's keys."""
        return self.job.keys

    @property
    def is_store(self) -> bool:
        """Whether it writes chunks."""
        return not (self.job.is_promotion or self.is_delete)

    def message(self, start: int, count: int, overwrites: bytes) -> StoreJob:
        """Return the message for ``count`` of its values from ``start`` on. ``overwrites``: of all of them."""
        job, keys, end = self.job, self.keys, start + count
        if count < len(keys):
            keys, overwrites = keys[start:end], overwrites[start:end]
        rows, parts = job.chunk_ids[start:end].tolist(), job.parts[start:end]
        is_load, keeps = job.is_promotion, job.keep_damaged
        return StoreJob(job.job_id, is_load, keys, rows, overwrites, self.is_delete, parts, keeps)

    def take_statuses(self, part: "JobPart", statuses: bytes) -> None:
        """Record what has become of a part's values, as far as it is known."""
        if len(part.message.keys) == len(self.keys):
            self.statuses = statuses
        else:
            merged = self.statuses = bytearray(self.statuses or _FAILED * len(self.keys))
            merged[part.start : part.start + len(part.message.keys)] = statuses

    def end_part(self, part: "JobPart", event: JobDone) -> bool:
        """Add a part's outcome; return whether it was the last part."""
        self.parts.remove(part)
        self.take_statuses(part, event.statuses)
        self.nbytes += event.nbytes
        values = len(part.message.keys)
        self.ended_values += values
        self.seconds += (event.seconds - self.seconds) * values / self.ended_values
        self.retries += event.retries
        self.error = self.error or event.error
        return not self.parts

    def result(self) -> JobResult:
        """Return the result, once all parts have ended."""
        job, statuses = self.job, self.statuses
        if len(statuses) == len(job.keys) and _GOOD.issuperset(statuses):
            return JobResult(job.job_id, success=True, nbytes=self.nbytes, seconds=self.seconds)
        done = [key for key, status in zip(job.keys, statuses, strict=False) if status in _GOOD]
        return JobResult(job.job_id, success=False, successful_keys=done, nbytes=self.nbytes, seconds=self.seconds)


@dataclass(slots=True, eq=False)
class JobPart:
    """One host's part of a job: the values of ``message``, which are those of the job from ``start`` on."""

    of: InflightJob
    message: StoreJob
    start: int = 0
    is_started: bool = False
    failed_in_use: bool = False
    to_release: bool = False
    is_released: bool = False
    has_ended: bool = False
    """Its host has reported its end, or was reaped."""
