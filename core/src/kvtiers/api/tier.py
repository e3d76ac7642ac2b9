"""The third rung of the contract: a tier that moves chunks asynchronously and never blocks.

Most authors want ``ChunkStore`` (``kvtiers.api.store``); this rung is for RDMA, io_uring, peers and the like. All tiers
that the tiering code calls are of this class, core's own too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from kvtiers.api.keys import OffloadKey

__all__ = ["JobResult", "LookupResult", "SecondaryTierManager", "SupportsQuotas", "TierRequest", "TransferJob"]


class LookupResult(Enum):
    """The answer to a chunk's lookup. A secondary tier gives MISS, HIT or RETRY; only the primary HIT_PENDING."""

    MISS = "miss"
    """Not there."""
    HIT = "hit"
    """There, and ready to be read."""
    HIT_PENDING = "hit_pending"
    """Known to be on its way into the primary: a write is in flight."""
    RETRY = "retry"
    """Not known yet: ask again in the next step."""


class TierRequest(Protocol):
    """The request that a tier works for, as far as the tier may see it."""

    @property
    def request_id(self) -> str:
        """The engine's name of the request, unique among those in flight; empty in a job without a request."""

    @property
    def params(self) -> Mapping[str, object]:
        """The request's free-form transfer parameters, as the engine received them."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferJob:
    """An asynchronous transfer of chunks between the primary's rows and a tier.

    ``keys[i]`` belongs to the row ``chunk_ids[i]`` of the region (``chunk_ids``: a buffer of int32). A promotion
    writes into the rows, a store only reads them. Job ids increase and are never reused in a process.

    ``parts``: of a client's job for a ``ChunkStore``, where a value lies in the client's region instead of its row: an
    offset and a length in bytes for each part. No other tier is given any.

    ``keep_damaged``: of a promotion, a value that fails its check is not deleted from the store: the tier is read-only,
    by its config or since an operator has switched it.
    """

    job_id: int
    keys: Sequence[OffloadKey]
    chunk_ids: memoryview
    is_promotion: bool
    context: TierRequest
    parts: Sequence[Sequence[tuple[int, int]]] = ()
    keep_damaged: bool = False


@dataclass(frozen=True, slots=True)
class JobResult:
    """The one result of a job, reported only when nothing of the tier's can touch the job's rows any more.

    ``success``: all chunks were moved. ``successful_keys``: if the job failed in part, the keys that were moved (a
    subset of the job's); None: all keys have the outcome that ``success`` states. ``nbytes`` moved, ``seconds`` taken.
    """

    job_id: int
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    nbytes: int = 0
    seconds: float = 0.0


class SecondaryTierManager(ABC):
    """A tier that the tiering code drives directly. Its methods run on the engine's thread and must not block.

    The end is the exception: ``drain`` runs on a thread of core's own, ``close`` on another; no other call is made
    meanwhile. ``stats`` (``SupportsStats``), if the tier has
    it, is called once a second on a thread of core's own, beside the engine's calls.

    A subclass implements ``lookup`` or ``lookup_many`` and the three transfer methods. Every submitted job is
    reported exactly once by ``get_finished_jobs``, also a failed one, and also after ``drain``; a ``submit_*`` that
    raises has started nothing and is not reported. A tier that reports what it was not given (an unknown job, a key
    that is not of the job, a job twice) is put out of use.

    Keys are opaque and differ between models, weights and layouts, so one store may serve many engines. Every row that
    a tier is given to store carries a seal, and every row that it loads is checked, by core.
    """

    def lookup(self, key: OffloadKey, context: TierRequest) -> LookupResult:
        """Return whether this tier has the chunk: MISS, HIT or RETRY. Override this or ``lookup_many``."""
        return self.lookup_many([key], context)[0]

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:
        """Answer for each key, in order; the keys are a run of one request's prefix, head first.

        The answers may end early, after the first MISS or RETRY: what follows is then neither asked nor used.
        """
        answers: list[LookupResult] = []
        for key in keys:
            answers.append(self.lookup(key, context))
            if answers[-1] is not LookupResult.HIT:
                break
        return answers

    @abstractmethod
    def submit_store(self, job: TransferJob) -> None:
        """Start to copy the job's rows into the tier. The rows do not change until the job is reported."""

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Start to fill the job's rows from the tier. The rows are the tier's alone until the job is reported."""

    @abstractmethod
    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return the results that have come since the last call. A job is never reported while its rows are in use."""

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Bring all jobs to an end within ``timeout`` seconds; True if none is left. May block: only at shutdown.

        Queued jobs may be dropped; each is still reported. A running copy is never cut off. A tier whose drain does not
        return in time is asked nothing more, and not closed.
        """

    def get_started_jobs(self) -> Sequence[int] | None:
        """Return the jobs whose transfer has begun since the last call; None: a job begins when it is submitted.

        A job that does not begin within the tier's ``deadline``, or does not end ``deadline`` after it began, is
        given up: ``abandon_job``.
        """
        return None

    def get_failed_jobs(self) -> Sequence[int]:
        """Return the jobs that have failed since the last call though something may still touch their rows.

        Waiting requests go on at once. Each job's result must still follow: it frees the rows. Without it the job is
        given up at its deadline, too.
        """
        return ()

    def is_available(self) -> bool:
        """Return whether the tier can be used now. While it cannot, its lookups miss and it is given no job."""
        return True

    def abandon_job(self, job_id: int) -> None:
        """Record that core has given this job up. Its result must still follow: it frees the rows."""

    def on_new_request(self, context: TierRequest) -> bool:
        """Handle a new request. Return True to be offered all its chunks, also those already in the primary.

        Requests that came while the tier was being opened are reported first, and the answers for them are not used.
        """
        return False

    def on_request_finished(self, context: TierRequest) -> None:
        """Handle a request's end: no further call names it. Its transfers may still run."""

    def on_schedule_end(self) -> None:
        """Handle the end of an engine step: the time to send what was collected."""

    def has_pending_work(self) -> bool:
        """Return whether this tier needs further engine steps although no job is in flight."""
        return False

    def close(self) -> None:
        """Release everything. Called once, after ``drain``."""


@runtime_checkable
class SupportsQuotas(Protocol):
    """A ``SecondaryTierManager`` that keeps each tenant within its quota, the option ``quotas``.

    Its type declares that option again (``quotas: Quotas``); that of a tier without this ability is refused.
    """

    def set_quotas(self, quota_of: Callable[[str], int | None]) -> None:
        """Keep each tenant's chunks within ``quota_of(tenant)`` bytes; None: without a bound.

        Called once, if there are quotas, after opening and before any other call, on the thread that opened the tier.
        ``tenant_of(key)`` is whose a chunk is; ``quota_of("")``, of chunks without a tenant, is None.

        A new chunk for which its tenant has no room takes the place of that tenant's oldest ones, in the order in which
        they were stored; some more of them may go, a tenth of the quota say, so that not each new chunk evicts. Chunks
        of other tenants, of none, and of the same job do not. One for which there is no room all the same is declined:
        its job is reported with ``success=False`` and ``successful_keys`` without it.
        """
