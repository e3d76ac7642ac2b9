"""The smallest engine that drives a tier: rows, jobs, steps, and a record of every result."""

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import ClassVar

import numpy as np

from kvtiers.api import (
    JobResult,
    LookupResult,
    OffloadKey,
    SecondaryTierManager,
    TierContext,
    TransferJob,
    make_offload_key,
)
from kvtiers.testing.guarded import PAGE, POISON, pattern
from kvtiers.testing.running import call_within
from kvtiers.types import RequestContext

__all__ = ["SmallEngine", "new_keys"]

_ROWS, _VALUE_BYTES, _ROW_STRIDE = 64, 3 * PAGE, 4 * PAGE
_STEPS_AFTER, _STEPS_AT_LEAST = 20, 200


def new_keys(number: int, tenant: str = "") -> list[OffloadKey]:
    """Return this many keys of a tenant, or of none, that no run has used."""
    return [make_offload_key(os.urandom(32), 0, tenant) for _ in range(number)]


class SmallEngine:
    """One tier over a region of its own. A row is longer than a value: what lies between is not the tier's either."""

    value_bytes = _VALUE_BYTES

    late_seconds: ClassVar[float] = 1.0
    """By which what a tier does at its end may take longer than it was given."""

    def __init__(self, open_tier: Callable[[TierContext], SecondaryTierManager], *, patience: float) -> None:
        self._patience = patience
        region = memoryview(mmap.mmap(-1, _ROWS * _ROW_STRIDE))
        self.rows = np.frombuffer(region, np.uint8).reshape(_ROWS, _ROW_STRIDE)
        self.rows[:] = POISON
        self.request = RequestContext("kit-request")
        self.results: list[JobResult] = []
        self._jobs: dict[int, TransferJob] = {}
        self._ids = count(1)
        self._is_open, self._is_drained = True, False
        context = TierContext(
            tier_name="kit",
            value_bytes=_VALUE_BYTES,
            namespace="kvtiers-kit",
            read_only=False,
            region=region,
            row_stride=_ROW_STRIDE,
        )
        self.tier = open_tier(context)

    def fill(self, row: int, seed: int) -> bytes:
        """Put a value into a row and return it."""
        content = pattern(seed, _VALUE_BYTES)
        self.rows[row, :_VALUE_BYTES] = np.frombuffer(content, np.uint8)
        return content

    def value_in(self, row: int) -> bytes:
        """Return a copy of the value in a row."""
        return self.rows[row, :_VALUE_BYTES].tobytes()

    def new_job(self, keys: Sequence[OffloadKey], rows: Sequence[int], *, is_promotion: bool) -> TransferJob:
        """Return a new job, which the record has."""
        chunk_ids = memoryview(np.array(rows, np.int32).data)
        job = TransferJob(next(self._ids), list(keys), chunk_ids, is_promotion, self.request)
        self._jobs[job.job_id] = job
        return job

    def store(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> int:
        """Submit a store of these rows under these keys; return the job's id."""
        job = self.new_job(keys, rows, is_promotion=False)
        self.tier.submit_store(job)
        return job.job_id

    def load(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> int:
        """Submit a load of these keys into these rows; return the job's id."""
        job = self.new_job(keys, rows, is_promotion=True)
        self.tier.submit_load(job)
        return job.job_id

    def step(self) -> None:
        """Do what an engine does to a tier at the end of each step."""
        self.tier.on_schedule_end()
        self.note(self.tier.get_finished_jobs())

    def note(self, results: Sequence[JobResult]) -> None:
        """Record what the tier has reported; fail if it cannot be."""
        for result in results:
            assert result.job_id in self._jobs, f"the tier reported job {result.job_id}, which was never submitted"
            landed = set(result.successful_keys or ())
            assert landed <= set(self._jobs[result.job_id].keys), "successful_keys has keys that are not of the job"
            self.results.append(result)

    def finish(self, *job_ids: int) -> list[JobResult]:
        """Step until these jobs are reported; return their results."""
        for _ in self._patiently(f"of the jobs {list(job_ids)} some were not reported"):
            if set(job_ids) <= {result.job_id for result in self.results}:
                break
            self.step()
        return [next(r for r in self.results if r.job_id == job_id) for job_id in job_ids]

    def finish_all(self) -> None:
        """Step until every job is reported, and on for a while; fail unless each has exactly one result."""
        self.finish(*self._jobs)
        for _ in range(_STEPS_AFTER):
            self.step()
        self._check_book()

    def drain(self) -> None:
        """Drain the tier as core does, on another thread and at the end alone; fail unless each job has one result."""
        self._drain()
        self._check_book()

    def present(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Look each key up alone, step by step until it is answered; True for a hit."""
        return [self._ask(key) is LookupResult.HIT for key in keys]

    def close(self) -> None:
        """Drain, unless that has been done, and close the tier, once; each on a thread of its own, as core does."""
        if self._is_open:
            self._is_open = False
            if not self._is_drained:
                self._drain()
            self._elsewhere("close", self.tier.close)

    def _drain(self) -> None:
        self._is_drained = True  # core calls it once, at the end
        drained: list[bool] = []
        self._elsewhere("drain", lambda: drained.append(self.tier.drain(self._patience)))
        assert drained == [True], f"drain did not bring all jobs to an end in {self._patience:g} s"
        for _ in range(2):  # with no step before it: the last one is over
            self.note(self.tier.get_finished_jobs())

    def _ask(self, key: OffloadKey) -> LookupResult:
        for _ in self._patiently("lookup answered RETRY"):
            answer = self.tier.lookup(key, self.request)
            if answer is not LookupResult.RETRY:
                break
            self.step()
        assert answer in {LookupResult.HIT, LookupResult.MISS}, f"lookup answered {answer!r}; HIT, MISS or RETRY only"
        return answer

    def _patiently(self, complaint: str) -> Iterator[None]:
        """Yield until patience is at an end; a machine that stands still does not use it up."""
        deadline = time.monotonic() + self._patience
        for turn in count():
            yield
            if turn > _STEPS_AT_LEAST and time.monotonic() > deadline:
                raise AssertionError(f"{complaint} within {self._patience:g} s")
            time.sleep(0)  # lets the tier's own threads run

    def _elsewhere(self, name: str, calls: Callable[[], object]) -> None:
        """Make calls to the tier on another thread, which must return in time."""
        where = call_within(self._patience + self.late_seconds, calls)
        assert not where, f"{name} did not return in time{where}"

    def _check_book(self) -> None:
        times = Counter(result.job_id for result in self.results)
        assert times == dict.fromkeys(self._jobs, 1), (
            f"each job is reported exactly once; reported: {dict(sorted(times.items()))}, submitted: {list(self._jobs)}"
        )
