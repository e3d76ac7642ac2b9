"""A host's backend of which the test decides what it takes, and what it says."""

from collections import deque

from kvtiers.host.messages import JobDone, JobFailed, Opened, Status

DONE = Status.DONE
VALUE = 64 * 1024


class ScriptedBackend:
    """Keeps what it was given; by the protocol of a ``StoreBackend``, as a ``HostClient`` keeps to it."""

    def __init__(self):
        self.jobs = {}
        self.parts = {}
        self.calls = []
        self.says = deque()
        self.has_room = True
        self.own = {}
        self.names = None
        self.opening = ""

    def wait_open(self, timeout):
        return self.opening

    def send_job(self, part):
        if self.has_room:
            self.jobs[part.message.job_id] = part.message
            self.parts[part.message.job_id] = part
        return self.has_room

    def send_probe(self, probe_id, keys, *, is_prefix):
        if self.has_room:
            self.calls.append(("probe", probe_id, list(keys), is_prefix))
        return self.has_room

    def set_names(self, names):
        self.calls.append(("names", names))

    def expect_end(self):
        pass

    def abandon(self, job_id):
        self.calls.append(("abandon", job_id))

    def release(self, job_id):
        self.calls.append(("release", job_id))

    def flush(self):
        self.calls.append(("flush",))

    def restart(self, reason):
        self.calls.append(("restart", reason))

    def close(self, timeout):
        self.calls.append(("close", timeout))

    def stats(self):
        return self.own

    def drain(self, timeout):
        assert timeout == 0.0, "no call waits for one host alone"
        return not self.jobs

    def poll(self):
        says, self.says = list(self.says), deque()
        return says

    def say(self, *events):
        for event in events:
            if isinstance(event, JobDone):
                del self.jobs[event.job_id]
            self.says.append(event)

    def end(self, job_id, status=DONE, **more):
        """Report this job's end, all its values alike."""
        count = len(self.jobs[job_id].keys)
        self.say(JobDone(job_id, bytes([status]) * count, more.pop("nbytes", count * VALUE), 0.5, **more))

    def lose(self):
        """Say what a backend says of a host that is gone; its jobs are still to be ended, once it is reaped."""
        self.say(Opened("its host ended"), *(JobFailed(job_id, "its host ended") for job_id in self.jobs))
