"""Validation of job results, which plugins make: nothing in them is taken for granted."""

import math
from collections.abc import Sequence

from kvtiers.api import JobResult, OffloadKey, TransferJob

__all__ = ["good_keys", "is_of", "moved", "without"]


def good_keys(job: TransferJob, result: JobResult) -> Sequence[OffloadKey]:
    """Return the job's keys that the tier moved, in order. Keys that it names count more than its ``success``."""
    if result.successful_keys is None:
        return job.keys if result.success else ()
    named = set(result.successful_keys)
    return job.keys if len(named) == len(job.keys) else [key for key in job.keys if key in named]


def without(keys: Sequence[OffloadKey], some: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
    """Return the keys that are not among ``some``, all of which are among them."""
    if len(keys) == len(some):
        return ()
    left_out = set(some)
    return [key for key in keys if key not in left_out]


def is_of(job: TransferJob, result: JobResult) -> bool:
    """Return whether the keys that a result names are the job's."""
    try:
        return result.successful_keys is None or set(result.successful_keys) <= set(job.keys)
    except TypeError:
        return False


def moved(result: JobResult) -> tuple[int, float]:
    """Return the bytes and seconds of a result; 0 for what is no such number."""
    try:
        nbytes, seconds = int(result.nbytes), float(result.seconds)
    except (TypeError, ValueError, OverflowError):
        return 0, 0.0
    return max(0, nbytes), seconds if 0 <= seconds < math.inf else 0.0
