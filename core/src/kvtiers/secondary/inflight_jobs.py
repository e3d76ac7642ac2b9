"""The in-flight jobs of a store tier: each job as a whole, and the part of it that each host has.

The backend of each host keeps the parts that its host has, by job id; together these tables are the tier's one ledger.
A part leads to its job, which sums up the parts that have ended::

    TransferJob <- InflightJob <- JobPart, one a host -> StoreJob, the message to the host

Engine's thread. A host's client also changes ``is_started``, ``failed_in_use``, ``is_released`` and ``has_ended`` of
its parts wherever it polls, under its connection's lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtiers.api import JobResult, OffloadKey, TransferJob
from kvtiers.host.messages import JobDone, Status, StoreJob

__all__ = ["InflightJob", "JobPart"]

_FAILED = bytes([Status.FAILED])
_GOOD = frozenset({Status.DONE, Status.PRESENT})


@dataclass(slots=True, eq=False)
class InflightJob:
    """A job in flight. ``keys``: those handed over, the first ones. ``generation``: of the names it was sent under.

    ``failed_in_use``: it was reported, or given up, as failed while something may still touch its rows. ``to_release``:
    it was to be detached from its rows, so what it did not do is no failure of the store.
    """

    job: TransferJob
    keys: Sequence[OffloadKey]
    generation: int
    parts: list["JobPart"] = field(default_factory=list)
    """Those that have not ended; the fields below sum up those that have."""
    statuses: bytes | bytearray = b""
    """A Status for each of ``keys``, once a part has ended; FAILED for those that have not, or were not sent."""
    is_started: bool = False
    failed_in_use: bool = False
    to_release: bool = False
    is_released: bool = False
    nbytes: int = 0
    seconds: float = 0.0
    retries: int = 0
    error: str = ""

    def message(self, start: int, count: int, overwrites: bytes) -> StoreJob:
        """Return the message for ``count`` of its values from ``start`` on. ``overwrites``: of all of them."""
        job, keys, end = self.job, self.keys, start + count
        if count < len(keys):
            keys, overwrites = keys[start:end], overwrites[start:end]
        return StoreJob(job.job_id, job.is_promotion, keys, job.chunk_ids[start:end].tolist(), overwrites)

    def end_part(self, part: "JobPart", event: JobDone) -> bool:
        """Add a part's outcome; return whether it was the last part."""
        self.parts.remove(part)
        if len(part.message.keys) == len(self.keys):
            self.statuses = event.statuses
        else:
            statuses = self.statuses = bytearray(self.statuses or _FAILED * len(self.keys))
            statuses[part.start : part.start + len(part.message.keys)] = event.statuses
        self.nbytes += event.nbytes
        self.seconds = max(self.seconds, event.seconds)  # they ran side by side
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
