"""A backend that does what the test says, and how a tier over it is stepped."""

from array import array
from collections import deque

from kvtiers.api import JobResult, LookupResult, TransferJob
from kvtiers.host.messages import JobDone, JobFailed, JobStarted, Status
from kvtiers.types import RequestContext

MISS, HIT, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.RETRY
REQUEST = RequestContext("r")


class HandBackend:
    """A backend whose host is the test: it sees what is sent, and says what comes back."""

    def __init__(self):
        self.jobs, self.probes, self.abandoned, self.restarts = [], [], [], []
        self.caplog = None
        self.names = None
        self.parts = {}
        self.takes_jobs = self.takes_probes = True
        self._events = deque()
        self.drained = True
        self.state = None

    @property
    def logged(self):
        """What the tier has logged so far."""
        return self.caplog.messages

    def say(self, *events):
        self._events.extend(events)

    def wait_open(self, timeout):
        return ""

    def open_state(self):
        return self.state

    def send_job(self, part):
        self.jobs.append(part.message)
        if self.takes_jobs:
            self.parts[part.message.job_id] = part
        return self.takes_jobs

    def send_probe(self, probe_id, keys, *, is_prefix):
        self.probes.append((probe_id, list(keys)))
        return self.takes_probes

    def set_names(self, names):
        self.names = names

    def expect_end(self):
        pass

    def abandon(self, job_id):
        self.abandoned.append(job_id)

    def flush(self):
        pass

    def poll(self):
        events, self._events = list(self._events), deque()
        return events

    def restart(self, reason):
        self.restarts.append(reason)

    def stats(self):
        return {"held_values": 3.0}

    def drain(self, timeout):
        return self.drained

    def close(self, timeout):
        pass


def step(tier):
    """One step of the engine: events, then questions; returns the results, and which jobs have failed in use."""
    events = tier.poll()
    tier.on_schedule_end()
    finished = [event for event in events if isinstance(event, JobResult)]
    return finished, [event.job_id for event in events if isinstance(event, JobFailed)]


def job(job_id, keys, *, promotion=False, context=REQUEST):
    return TransferJob(job_id, keys, memoryview(array("i", range(len(keys)))), promotion, context)


def result_of(backend, job_id, *statuses, error=""):
    backend.say(JobStarted(job_id), JobDone(job_id, bytes(statuses), 4096, 0.1, 0, error))


def lookup(tier, keys):
    return list(tier.lookup_many(keys, REQUEST))


def fail_often(tier, backend, times, first=1000):
    """Let so many stores fail."""
    for number in range(first, first + times):
        tier.submit_store(job(number, [b"k" * 36]))
        result_of(backend, number, Status.FAILED, error="OSError: down")
        step(tier)
