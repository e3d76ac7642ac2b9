"""A driver whose tiers the test plays, stepped by hand on a clock that only the test winds."""

from collections import deque

import pytest

from kvtiers.api import JobResult, LookupResult, make_offload_key
from kvtiers.client.driver import Driver
from kvtiers.client.rows import BounceRows
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.tiering.tier_slot import TierOptions, TierSlot

FAR = 1e9


class PlayedTier(EventTier):
    """It has what the test says (``has``; None: it does not answer), and ends a job when the test says so."""

    def __init__(self, *has):
        self.has = set(has)
        self.answers = True
        self.usable = True
        self.raises = False
        self.jobs = {}
        self.asked = []
        self.abandoned = []
        self.released = []
        self.killed = []
        self.says = deque()

    def lookup_many(self, keys, context):
        self.asked += keys
        if not self.answers:
            return [LookupResult.RETRY]
        answers = [LookupResult.HIT if key in self.has else LookupResult.MISS for key in keys]
        return answers[: answers.index(LookupResult.MISS) + 1] if LookupResult.MISS in answers else answers

    def _submit(self, job):
        if self.raises:
            raise OSError("it was to")
        self.jobs[job.job_id] = job

    submit_store = submit_load = submit_delete = _submit

    def end(self, *good, success=False):
        """End the oldest job."""
        job = self.jobs.pop(next(iter(self.jobs)))
        self.says.append(JobResult(job.job_id, success=success, successful_keys=None if success else good))
        return job

    def poll(self):
        says, self.says = self.says, deque()
        return says

    def abandon_job(self, job_id):
        self.abandoned.append(job_id)

    def release_job(self, job_id):
        self.released.append(job_id)

    def kill_job(self, job_id, reason):
        self.killed.append(job_id)

    def is_available(self):
        return self.usable

    def drain(self, timeout):
        return True


class Bench:
    detach_seconds = 0.15

    def __init__(self, clock):
        self.clock = clock
        self.rows = BounceRows(8, 4096)
        self.driver = None

    def drive(self, *tiers, read_only=(), wait=lambda seconds, fd: None, clock=None):
        slots = [
            TierSlot(index, tier, TierOptions(f"t{index}", read_only=tier in read_only, deadline=30.0))
            for index, tier in enumerate(tiers)
        ]
        self.driver = Driver(slots, wait, is_polled=True, clock=clock or self.clock, detach_seconds=self.detach_seconds)
        return self.driver

    def begin(self, kind, keys, until=FAR):
        """Send a request as a caller does, who holds its rows, and let the driver take a step."""
        return self.begin_on(kind, keys, self.rows.take(len(keys), 0.0), until)

    def begin_on(self, kind, keys, lease, until=FAR):
        """Do the same with these rows."""
        request = kind(keys, lease, until)
        self.driver.send(request)
        self.step()
        return request

    def step(self):
        self.driver._step()

    @property
    def free(self):
        return len(self.rows.free)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def bench(clock):
    bench = Bench(clock)
    yield bench
    if bench.driver is not None:
        bench.driver.close()
    bench.rows.close()


@pytest.fixture
def keys():
    return [make_offload_key(bytes([number]) * 8, 0) for number in range(4)]


@pytest.fixture
def played():
    return PlayedTier
