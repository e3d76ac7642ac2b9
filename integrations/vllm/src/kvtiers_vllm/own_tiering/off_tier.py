"""The null tier, for engines in which a tier is off: every lookup misses, every job is refused."""

from collections.abc import Sequence

from kvtiers.api import JobResult, LookupResult, OffloadKey, SecondaryTierManager, TierRequest, TransferJob

__all__ = ["OffTier"]


class OffTier(SecondaryTierManager):
    """Never available."""

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:  # noqa: ARG002 -- it has nothing, for any request
        """Return a miss for each key."""
        return [LookupResult.MISS] * len(keys)

    def submit_store(self, job: TransferJob) -> None:
        """Refuse a job."""
        raise RuntimeError(f"job {job.job_id} was given to a tier that is off")

    def submit_load(self, job: TransferJob) -> None:
        """Refuse a job."""
        raise RuntimeError(f"job {job.job_id} was given to a tier that is off")

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return nothing."""
        return ()

    def drain(self, timeout: float) -> bool:  # noqa: ARG002 -- there is nothing to wait for
        """Do nothing: there are no jobs."""
        return True

    def is_available(self) -> bool:
        """Return False."""
        return False
