"""A group of hosts against a model that has for each job which host has which part, and what became of it."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.secondary.scripted_backend import ScriptedBackend
from tests.unit.secondary.test_host_pool import as_reported

from kvtiers.api import TransferJob, make_offload_key
from kvtiers.host.messages import (
    JobDone,
    JobFailed,
    JobReleased,
    JobStarted,
    Opened,
    Probed,
    Status,
)
from kvtiers.secondary.host_pool import HostPool, PooledHost
from kvtiers.secondary.tier_jobs import InflightJob

HOSTS = range(3)
KEYS = [make_offload_key(number.to_bytes(8, "big"), 0) for number in range(70)]
ENDS = st.sampled_from([Status.DONE, Status.MISSING, Status.FAILED, Status.CORRUPT])
EVENTS = {JobStarted: "started", JobFailed: "failed", JobReleased: "released"}


class GroupMachine(RuleBasedStateMachine):
    """``parts[job, host]``: what has been said of it; a host that is gone ends its parts when it is reaped."""

    def __init__(self):
        super().__init__()
        self.played = [ScriptedBackend() for _ in HOSTS]
        hosts = [PooledHost(f"host {n}", backend) for n, backend in zip(HOSTS, self.played, strict=True)]
        self.group = HostPool(hosts, 4096)
        self.states = dict.fromkeys(HOSTS, "open")
        self.jobs = {}  # id -> its keys
        self.parts = {}  # (job, host) -> what the host has said: "started", "failed", "released"
        self.results = {}  # id -> key -> status, of parts that have ended
        self.reported = {}  # id -> what the group has said
        self.wished = set()
        self.asked = {}
        self.is_open = False
        for backend in self.played:
            backend.say(Opened())
        self.listen()

    # -- the engine

    @rule(
        count=st.sampled_from([70, 50, 33, 20, 1]), is_load=st.booleans(), full=st.sampled_from([(), (), (0,), (1, 2)])
    )
    def send(self, count, is_load, full):
        job_id = len(self.reported) + 1
        for number, backend in enumerate(self.played):
            backend.has_room = number not in full
        job = TransferJob(job_id, KEYS[:count], memoryview(array("i", range(count))), is_load, None)
        sent = self.group.send_job(InflightJob(job, 0))
        takers = [number for number in HOSTS if job_id in self.played[number].jobs]
        assert sent == bool(takers)
        self.reported[job_id] = []
        if not sent:
            return
        self.jobs[job_id] = KEYS[:count]
        self.results[job_id] = dict.fromkeys(KEYS[:count], Status.FAILED)
        seen = []
        for number in takers:
            assert self.states[number] == "open"
            part = self.played[number].jobs[job_id]
            assert part.is_load == is_load
            assert [KEYS[row] for row in part.rows] == list(part.keys)
            assert part.keys
            seen += part.keys
            self.parts[job_id, number] = set()
        assert len(seen) == len(set(seen))
        assert set(seen) <= set(KEYS[:count])
        if not full:
            assert set(seen) == set(KEYS[:count])

    @rule(probe=st.integers(1000, 10**9))
    def ask(self, probe):
        if probe in self.asked:
            return
        for backend in self.played:
            backend.has_room = True
        before = [len(backend.calls) for backend in self.played]
        if self.group.send_probe(probe, KEYS[:2], is_prefix=True):
            (self.asked[probe],) = [n for n in HOSTS if len(self.played[n].calls) > before[n]]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def release(self, data):
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        self.group.release(job_id)
        self.wished.add(job_id)

    # -- the hosts

    def a_part(self, data, wanted):
        """Draw a part of which this can be said."""
        parts = sorted(part for part, said in self.parts.items() if wanted(part, said))
        return data.draw(st.sampled_from(parts)) if parts else None

    def lives(self, part):
        return self.states[part[1]] != "lost"

    @rule(data=st.data(), what=st.sampled_from(["started", "failed", "released"]), landed=st.booleans())
    def say(self, data, what, landed):
        def can(part, said):
            return self.lives(part) and what not in said and (what != "released" or part[0] in self.wished)

        if (part := self.a_part(data, can)) is None:
            return
        job_id, number = part
        keys = self.played[number].jobs[job_id].keys
        status = Status.DONE if landed and what == "released" else Status.FAILED
        if what == "released":
            self.results[job_id] |= dict.fromkeys(keys, status)
        event = {
            "started": JobStarted(job_id),
            "failed": JobFailed(job_id, "it"),
            "released": JobReleased(job_id, bytes([status] * len(keys))),
        }[what]
        self.parts[part].add(what)
        self.played[number].say(event)
        self.listen()

    @rule(data=st.data(), status=ENDS)
    def end(self, data, status):
        part = self.a_part(data, lambda part, _said: self.lives(part))
        if part is not None:
            self.end_part(*part, status)
            self.listen()

    def end_part(self, job_id, number, status):
        job = self.played[number].jobs[job_id]
        self.results[job_id] |= dict.fromkeys(job.keys, status)
        del self.parts[job_id, number]
        self.played[number].end(job_id, status)

    @rule(data=st.data())
    def answer(self, data):
        probes = sorted(probe for probe, number in self.asked.items() if self.states[number] != "lost")
        if probes:
            probe = data.draw(st.sampled_from(probes))
            self.played[self.asked.pop(probe)].say(Probed(probe, b"\x01"))
            assert self.listen() == [Probed(probe, b"\x01")]

    @rule(number=st.sampled_from(HOSTS), error=st.sampled_from(["", "", "no"]))
    def open(self, number, error):
        if self.states[number] != "lost":
            self.states[number] = "closed" if error else "open"
            self.played[number].say(Opened(error))
            self.listen()

    @rule(number=st.sampled_from([None, None, None, *HOSTS]))
    def lose(self, number):
        """The host is gone; once it has been reaped, its parts have ended and it can open again."""
        if number is None or self.states[number] == "lost":
            return
        self.states[number] = "lost"
        mine = [part for part in self.parts if part[1] == number]
        self.played[number].say(Opened("gone"))
        for part in mine:
            if "failed" not in self.parts[part]:
                self.parts[part].add("failed")
                self.played[number].say(JobFailed(part[0], "gone"))
        for probe in [probe for probe, asked in self.asked.items() if asked == number]:
            del self.asked[probe]
            self.played[number].say(Probed(probe, b"", "gone"))
        self.listen()

    @rule(number=st.sampled_from(HOSTS))
    def reap(self, number):
        if self.states[number] != "lost":
            return
        for part in [part for part in self.parts if part[1] == number]:
            self.end_part(*part, Status.FAILED)
        self.listen()
        self.states[number] = "closed"

    # -- what the group says

    def listen(self):
        """Take the events; check each against what is known of the job."""
        self.group._look_at = 0.0
        events = [event if job is None else as_reported(job, event) for job, event in self.group.poll()]
        for event in events:
            match event:
                case Opened(error):
                    self.is_open = not error
                case JobDone(job_id, statuses):
                    assert not [part for part in self.parts if part[0] == job_id], (
                        "rows are free when no part is in flight"
                    )
                    assert list(statuses) == [self.results[job_id][key] for key in self.jobs.pop(job_id)]
                    self.reported[job_id].append("done")
                case JobStarted(job_id) | JobFailed(job_id) | JobReleased(job_id):
                    if isinstance(event, JobReleased):
                        assert list(event.statuses) == [self.results[job_id][key] for key in self.jobs[job_id]]
                    what = EVENTS[type(event)]
                    assert what not in self.reported[job_id]
                    assert "done" not in self.reported[job_id]
                    said = [said for part, said in self.parts.items() if part[0] == job_id]
                    assert (any if what == "started" else all)(what in part for part in said)
                    self.reported[job_id].append(what)
        return events

    @invariant()
    def what_is_reported_of_a_job_is_so_and_at_once(self):
        for job_id in self.jobs:
            said = [said for part, said in self.parts.items() if part[0] == job_id]
            assert said, "a job of which no part is left has ended"
            for what in ("failed", "released"):
                assert (what in self.reported[job_id]) >= all(what in part for part in said)

    @invariant()
    def nothing_is_reported_twice_and_everything_ends_once(self):
        for job_id, reported in self.reported.items():
            assert len(reported) == len(set(reported))
            assert ("done" in reported) == (job_id not in self.jobs and job_id in self.results)

    @invariant()
    def the_tier_is_open_while_one_of_its_hosts_is(self):
        assert self.is_open == ("open" in self.states.values())

    @invariant()
    def what_is_in_flight_is_known(self):
        for number, host in enumerate(self.group._hosts):
            assert host.values == sum(len(job.keys) for job in self.played[number].jobs.values())
            assert host.questions == list(self.asked.values()).count(number)


TestGroup = GroupMachine.TestCase
TestGroup.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
