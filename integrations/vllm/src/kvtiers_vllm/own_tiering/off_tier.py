"""The tier that stands where none may: it has nothing and takes nothing."""

from collections.abc import Sequence

from kvtiers.api import JobResult, LookupResult, OffloadKey, SecondaryTierManager, TierRequest, TransferJob

__all__ = ["OffTier"]


class OffTier(SecondaryTierManager):
    """Never available."""

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:  # noqa: ARG002 -- it has nothing, whoever asks
        """Have nothing."""
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
        """Have nothing to do."""
        return True

    def is_available(self) -> bool:
        """Say no."""
        return False
