"""A tier of the third rung whose transfers the test moves, and how a sealed one is stepped."""

import itertools
from array import array

from kvtiers.api import JobResult, LookupResult, SecondaryTierManager, TransferJob
from kvtiers.types import RequestContext

HIT, MISS = LookupResult.HIT, LookupResult.MISS
REQUEST = RequestContext("r")


class AsyncTier(SecondaryTierManager):
    """Holds values by key; a job moves when the test says so. ``heard``: what named a request, in order."""

    def __init__(self, rows, value_bytes):
        self.rows, self.value_bytes = rows, value_bytes
        self.values, self.waiting, self.results = {}, [], []
        self.abandoned, self.closed, self.ended_steps = [], 0, 0
        self.refuse = False
        self.heard = []

    def on_new_request(self, context):
        self.heard.append(("new", context))
        return True

    def on_request_finished(self, context):
        self.heard.append(("finished", context))

    def lookup(self, key, context):
        self.heard.append(("lookup", context))
        return HIT if key in self.values else MISS

    def submit_store(self, job):
        self._submit(job)

    def submit_load(self, job):
        self._submit(job)

    def _submit(self, job):
        self.heard.append(("load" if job.is_promotion else "store", job.context))
        if self.refuse:
            raise OSError("no")
        self.waiting.append(job)

    def move(self, *, success=True, keys=None):
        """End the oldest job."""
        job = self.waiting.pop(0)
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            place = slice(row * self.value_bytes, (row + 1) * self.value_bytes)
            if job.is_promotion:
                self.rows.memory[place] = self.values[key]
            else:
                self.values[key] = bytes(self.rows.memory[place])
        self.results.append(JobResult(job.job_id, success, keys, 1, 0.1))

    def get_finished_jobs(self):
        results, self.results = self.results, []
        return results

    def drain(self, timeout):
        while self.waiting:
            self.move()
        return True

    def abandon_job(self, job_id):
        self.abandoned.append(job_id)

    def on_schedule_end(self):
        self.ended_steps += 1

    def close(self):
        self.closed += 1


_job_ids = itertools.count(1)


def job(keys, *, rows=None, promotion=False, context=REQUEST):
    rows = array("i", range(len(keys)) if rows is None else rows)
    return TransferJob(next(_job_ids), keys, memoryview(rows), promotion, context)


def finish(kit, tier):
    """Step until a result comes."""
    results = []

    def step():
        tier.on_schedule_end()
        results.extend(tier.get_finished_jobs())
        return bool(results)

    kit.wait_until(step, "a result")
    return results


def handed_over(kit, tier, inner):
    def step():
        tier.on_schedule_end()
        return bool(inner.waiting)

    kit.wait_until(step, "the job's hand-over")


def store(kit, tier, inner, keys):
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)
    tier.submit_store(job(keys))
    handed_over(kit, tier, inner)
    inner.move()
    (result,) = finish(kit, tier)
    assert result.success
    for row in range(len(keys)):
        kit.rows.poison(row)
