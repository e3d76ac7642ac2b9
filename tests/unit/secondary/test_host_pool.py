"""Several hosts that look like one: who is given what, and how what they say is put together.

The test plays each host, by the protocol that a ``HostClient`` keeps to.
"""

import logging
from array import array

import pytest
from tests.unit.secondary.scripted_backend import ScriptedBackend

from kvtiers.api import TransferJob
from kvtiers.host.messages import (
    JobDone,
    JobFailed,
    JobReleased,
    JobStarted,
    Opened,
    Probed,
    Status,
    StoreJob,
)
from kvtiers.secondary.host_client import BUMPED
from kvtiers.secondary.host_pool import HostPool, PooledHost
from kvtiers.secondary.tier_jobs import InflightJob

DONE, FAILED, MISSING = Status.DONE, Status.FAILED, Status.MISSING
VALUE = 64 * 1024


class Group:
    """A group whose hosts are played, all open at first."""

    def __init__(self, count, opened=True, value_bytes=VALUE, **options):
        self.played = [ScriptedBackend() for _ in range(count)]
        hosts = [PooledHost(f"t ({n} of {count})", backend) for n, backend in enumerate(self.played, 1)]
        self.group = HostPool(hosts, value_bytes, **options)
        if opened:
            for backend in self.played:
                backend.say(Opened())
            assert self.events() == [Opened()]

    def send(self, job):
        """Send what is to go to the store as one job."""
        rows = memoryview(array("i", job.rows))
        return self.group.send_job(
            InflightJob(TransferJob(job.job_id, job.keys, rows, job.is_load, None), 0), job.overwrites
        )

    def events(self):
        self.group._look_at = 0.0
        return [event if job is None else as_reported(job, event) for job, event in self.group.poll()]


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(96)]


def as_reported(job, event):
    """The event; of a job that has ended with all that its parts came to."""
    if not isinstance(event, JobDone):
        return event
    return JobDone(job.job.job_id, bytes(job.statuses), job.nbytes, job.seconds, job.retries, job.error)


def load(job_id, keys):
    return StoreJob(job_id, True, keys, list(range(100, 100 + len(keys))))


# -- who is given what


def test_jobs_go_to_the_host_with_the_fewest_values_in_flight(keys):
    tier = Group(3)
    for job_id, count in ((1, 8), (2, 2), (3, 4), (4, 1), (5, 4)):
        assert tier.send(load(job_id, keys[:count]))
    assert [sorted(backend.jobs) for backend in tier.played] == [[1], [2, 4, 5], [3]]
    tier.played[0].end(1)
    tier.events()
    assert tier.send(load(6, keys[:4]))
    assert sorted(tier.played[0].jobs) == [6]


@pytest.mark.parametrize("is_awaited", [False, True])
def test_hosts_without_work_are_polled_once_in_a_while_or_each_time_if_they_are_awaited(is_awaited):
    group = Group(2, is_awaited=is_awaited, look_seconds=1e6)
    group.events()
    group.played[0].say(Opened("it is gone"))
    group.played[1].say(Opened("it is gone"))
    assert bool(group.group.poll()) == is_awaited


def test_idle_hosts_take_turns(keys):
    tier = Group(3)
    order = []
    for job_id in range(6):
        tier.send(load(job_id, keys[:1]))
        order += [number for number, backend in enumerate(tier.played) if job_id in backend.jobs]
        tier.played[order[-1]].end(job_id)
        tier.events()
    assert order == [0, 1, 2, 0, 1, 2]


def test_a_job_that_finds_idle_hosts_is_cut_evenly_among_them(keys):
    tier = Group(3)
    job = load(1, keys[:64])
    assert tier.send(job)
    parts = [backend.jobs[1] for backend in tier.played]
    assert [len(part.keys) for part in parts] == [21, 21, 22]
    assert [key for part in parts for key in part.keys] == list(job.keys)
    assert [row for part in parts for row in part.rows] == list(job.rows)
    assert all(part.is_load for part in parts)


def test_each_part_of_a_store_has_its_own_of_what_is_to_be_overwritten(keys):
    tier = Group(3)
    overwrites = bytes(number in {20, 21, 63} for number in range(64))
    assert tier.send(StoreJob(1, False, keys[:64], list(range(64)), overwrites))
    parts = [backend.jobs[1].overwrites for backend in tier.played]
    assert parts == [overwrites[:21], overwrites[21:42], overwrites[42:]]


@pytest.mark.parametrize(
    ("count", "value_bytes", "parts"), [(31, 4096, 1), (32, 4096, 2), (2, 8 << 20, 2), (1, 1 << 30, 1), (3, 2 << 20, 1)]
)
def test_a_job_is_cut_only_into_parts_that_are_worth_it(keys, count, value_bytes, parts):
    tier = Group(4, value_bytes=value_bytes)
    tier.send(load(1, keys[:count]))
    assert sum(bool(backend.jobs) for backend in tier.played) == parts


def test_hosts_that_share_a_job_have_equally_many_values_in_flight_afterwards(keys):
    tier = Group(3)
    tier.send(load(1, keys[:6]))
    tier.send(load(2, keys[:66]))
    assert [[len(job.keys) for job in backend.jobs.values()] for backend in tier.played] == [[6, 18], [24], [24]]


def test_a_host_that_lags_behind_gets_no_part(keys):
    tier = Group(3)
    tier.send(load(1, keys[:15]))
    tier.send(load(2, keys[:64]))
    assert [sorted(backend.jobs) for backend in tier.played] == [[1], [2], [2]]


def test_a_job_goes_past_a_host_that_has_no_room_and_is_refused_only_when_none_has(keys):
    tier = Group(2)
    tier.played[0].has_room = False
    assert tier.send(load(1, keys[:1]))
    assert 1 in tier.played[1].jobs
    tier.played[1].has_room = False
    assert not tier.send(load(2, keys[:1]))
    assert not tier.group.send_probe(3, keys[:1], is_prefix=False)


def test_a_part_for_which_there_is_no_room_has_failed_and_the_others_land(keys):
    tier = Group(2)
    tier.played[0].has_room = False
    assert tier.send(load(1, keys[:64]))
    tier.played[1].end(1)
    assert tier.events() == [JobDone(1, bytes([FAILED] * 32 + [DONE] * 32), 32 * VALUE, 0.5)]


def test_nothing_is_sent_to_a_host_that_is_not_open(keys):
    tier = Group(2)
    tier.played[0].lose()
    tier.events()
    for job_id in range(3):
        assert tier.send(load(job_id, keys[:64]))
        assert tier.group.send_probe(10 + job_id, keys, is_prefix=True)
    assert not tier.played[0].jobs
    assert not [call for call in tier.played[0].calls if call[0] == "probe"]
    tier.played[1].lose()
    tier.events()
    assert not tier.send(load(9, keys))


def test_what_is_sent_before_any_host_has_listened_reaches_hosts_that_may_be_open(keys):
    """After ``wait_open``, which listens on another thread, the engine has not taken their words yet."""
    tier = Group(2, opened=False)
    assert tier.send(load(1, keys[:1]))
    assert tier.group.send_probe(2, keys, is_prefix=True)
    for backend in tier.played:
        backend.say(Opened("no"))
    tier.events()
    assert not tier.send(load(3, keys[:1]))
    assert not tier.group.send_probe(4, keys, is_prefix=True)


def test_a_question_goes_to_the_host_with_the_fewest_answers_in_flight(keys):
    """So one that is stopped is asked once, and not again before all others have as many in flight."""
    tier = Group(2)
    asked = []
    for probe_id in range(4):
        assert tier.group.send_probe(probe_id, keys, is_prefix=True)
        asked += [
            number for number, backend in enumerate(tier.played) if ("probe", probe_id, keys, True) in backend.calls
        ]
        if asked[-1] == 1:
            tier.played[1].say(Probed(probe_id, bytes(96)))
            assert tier.events() == [Probed(probe_id, bytes(96))]
    assert asked == [0, 1, 1, 1]


def test_names_flushes_and_the_end_reach_all_hosts(kit):
    tier = Group(2, close_seconds=7.0)
    tier.group.set_names(kit.NAMES)
    tier.group.flush()
    tier.group.close()
    for backend in tier.played:
        assert backend.calls == [("names", kit.NAMES), ("flush",), ("close", 7.0)]


# -- what they say of jobs


def test_a_job_in_parts_starts_once_and_ends_once_with_a_status_for_each_value_in_its_order(keys):
    tier = Group(3)
    tier.send(load(7, keys[:64]))
    first, second, third = tier.played
    second.say(JobStarted(7))
    first.say(JobStarted(7))
    assert tier.events() == [JobStarted(7)]
    third.end(7, MISSING, nbytes=5, retries=1)
    first.end(7, nbytes=70, retries=2, error="once")
    third.say()
    assert tier.events() == []
    second.say(JobDone(7, bytes([DONE] * 20 + [FAILED]), 20, 2.5, 4, "last"))
    second.jobs.clear()
    statuses = bytes([DONE] * 41 + [FAILED] + [MISSING] * 22)
    mean = (21 * 2.5 + 43 * 0.5) / 64  # of hosts that work side by side
    assert tier.events() == [JobDone(7, statuses, 95, mean, 7, "once")]
    assert tier.events() == []


def test_what_a_lost_host_had_of_a_job_fails_and_the_rest_lands(keys):
    tier = Group(2)
    tier.send(load(1, keys[:64]))
    tier.played[0].lose()
    assert [event for event in tier.events() if not isinstance(event, Opened)] == [], "the other part may still succeed"
    tier.played[0].end(1, FAILED, nbytes=0, error="its host ended")
    assert tier.events() == []
    tier.played[1].end(1)
    assert tier.events() == [JobDone(1, bytes([FAILED] * 32 + [DONE] * 32), 32 * VALUE, 0.5, 0, "its host ended")]


def test_a_job_has_failed_at_once_when_none_of_its_parts_can_succeed_any_more(keys):
    tier = Group(2)
    tier.send(load(1, keys[:64]))
    tier.played[1].end(1)
    tier.played[0].lose()
    assert JobFailed(1, "its host ended") in tier.events(), "reported, though it is not reaped"
    tier.played[0].end(1, FAILED)
    (done,) = tier.events()
    assert done.statuses == bytes([FAILED] * 32 + [DONE] * 32)


def test_a_job_is_reported_as_failed_once_also_if_its_last_sound_part_ends_after_the_failure(keys):
    tier = Group(3)
    tier.send(load(1, keys[:64]))
    tier.played[0].say(JobFailed(1, "kept"))
    tier.played[1].say(JobFailed(1, "kept, too"))
    assert tier.events() == []
    tier.played[2].end(1)
    assert tier.events() == [JobFailed(1, "kept")]
    tier.played[0].end(1, FAILED)
    assert tier.events() == []


def test_a_load_has_released_its_rows_when_all_its_parts_have_or_have_ended(keys):
    tier = Group(3)
    tier.send(load(1, keys[:64]))
    tier.group.release(1)
    first, second, third = tier.played
    shares = [len(host.jobs[1].keys) for host in tier.played]
    first.say(JobReleased(1, bytes([Status.DONE] + [Status.FAILED] * (shares[0] - 1))))
    assert tier.events() == []
    second.end(1)
    assert tier.events() == []
    third.say(JobReleased(1, bytes([Status.FAILED] * shares[2])))
    landed = [Status.DONE] + [Status.FAILED] * (shares[0] - 1) + [Status.DONE] * shares[1] + [Status.FAILED] * shares[2]
    assert tier.events() == [JobReleased(1, bytes(landed))], "what has landed is known of all parts"
    first.end(1, FAILED)
    third.end(1, FAILED)
    (done,) = tier.events()
    assert isinstance(done, JobDone)


def test_only_hosts_that_have_not_released_their_part_are_killed_for_it(keys):
    tier = Group(3)
    tier.send(load(1, keys[:64]))
    tier.group.release(1)
    first, second, _ = tier.played
    first.say(JobReleased(1, bytes([Status.FAILED] * len(first.jobs[1].keys))))
    second.end(1)
    tier.events()
    tier.group.kill(1, "why")
    assert [("restart", "why") in host.calls for host in tier.played] == [False, False, True]


def test_giving_up_and_releasing_reach_those_that_still_have_a_part(keys):
    tier = Group(2)
    tier.send(load(1, keys[:64]))
    tier.played[0].end(1)
    tier.events()
    tier.group.release(1)
    tier.group.abandon(1)
    tier.group.abandon(2)
    assert [backend.calls for backend in tier.played] == [[], [("release", 1), ("abandon", 1)]]


def test_draining_listens_to_all_hosts_and_says_whether_all_have_ended(keys):
    tier = Group(2)
    tier.send(load(1, keys[:64]))
    assert not tier.group.drain(0.0)
    tier.played[0].jobs.clear()
    assert not tier.group.drain(0.0)
    tier.played[1].jobs.clear()
    assert tier.group.drain(60.0)


# -- whether it is open


def test_a_tier_opens_with_its_first_host_and_is_gone_with_its_last(caplog):
    tier = Group(2, opened=False)
    tier.played[1].say(Opened("no"))
    assert tier.events() == [], "the other one may still open"
    tier.played[0].say(Opened())
    assert tier.events() == [Opened()]
    assert caplog.messages == ["t (2 of 2): out of use: no; the tier goes on with its other hosts"]
    tier.played[1].say(Opened("no"), Opened())
    assert tier.events() == []
    assert caplog.messages[1:] == ["t (2 of 2): back in use"]
    tier.played[1].lose()
    tier.played[0].lose()
    assert tier.events()[-1] == Opened("its host ended")


def test_a_tier_none_of_whose_hosts_opens_says_so_once_all_have_tried(caplog):
    tier = Group(2, opened=False)
    tier.played[0].say(Opened("no"))
    assert tier.events() == []
    tier.played[1].say(Opened("neither"))
    assert tier.events() == [Opened("neither")]
    assert caplog.messages == [], "the tier says it"


def test_when_a_host_is_lost_the_others_are_tried_at_once_after_its_failures(keys):
    tier = Group(2)
    for job_id in range(10):
        tier.send(load(job_id, keys[:1]))
    tier.played[0].lose()
    events = tier.events()
    assert [type(event) for event in events] == [JobFailed] * 5 + [Opened]
    assert not events[-1].error


def test_a_host_that_opens_in_another_epoch_stays_out(caplog):
    tier = Group(3, opened=False)
    tier.played[0].say(Opened(epoch="1"))
    tier.played[1].say(Opened(epoch="2"))
    tier.played[2].say(Opened(epoch="1"))
    assert tier.events() == [Opened(epoch="1")]
    assert tier.group.stats()["hosts_open"] == 2
    assert BUMPED in caplog.messages[0]
    tier.played[0].lose()
    tier.played[2].lose()
    assert [event.error for event in tier.events() if isinstance(event, Opened)][-1] == "its host ended"


def test_waiting_for_the_start_is_over_when_one_is_open_and_all_have_tried():
    tier = Group(2, opened=False)
    tier.played[0].opening = "no"
    assert tier.group.wait_open(1.0) == ""
    tier.played[1].opening = "neither"
    assert tier.group.wait_open(1.0) == "no"


def test_the_host_is_restarted_whose_answer_is_in_flight_for_longest(keys):
    tier = Group(2)
    tier.group.restart("nothing is in flight")
    for probe_id in range(2):
        tier.group.send_probe(probe_id, keys, is_prefix=True)
    tier.played[0].say(Probed(0, b""))
    tier.events()
    tier.group.send_probe(2, keys, is_prefix=True)
    tier.group.restart("silent")
    assert [[call for call in backend.calls if call[0] == "restart"] for backend in tier.played] == [
        [],
        [("restart", "silent")],
    ]


# -- one host alone


def test_one_host_alone_gets_whole_jobs_and_nothing_while_it_is_out_of_use(keys, caplog):
    tier = Group(1)
    assert tier.send(load(1, keys))
    assert list(tier.played[0].jobs[1].keys) == keys
    tier.played[0].lose()
    assert [type(event) for event in tier.events()] == [Opened, JobFailed]
    assert not tier.send(load(2, keys))
    assert not tier.group.send_probe(3, keys, is_prefix=True)
    tier.played[0].end(1, FAILED)
    tier.played[0].say(Opened())
    assert [type(event) for event in tier.events()] == [JobDone, Opened]
    assert tier.send(load(4, keys))
    assert caplog.messages == [], "the tier says it"


def test_one_host_alone_is_polled_in_each_step_and_drained_with_all_the_time(keys, monkeypatch):
    tier = Group(1)
    tier.group._look_at = float("inf")
    tier.played[0].say(Opened("no"))
    assert tier.group.poll() == [(None, Opened("no"))]
    drained = []
    monkeypatch.setattr(tier.played[0], "drain", lambda timeout: drained.append(timeout) or True)
    assert tier.group.drain(3.0)
    assert drained == [3.0], "threads drop what is queued when it is over"


# -- figures, and the config


def test_figures_of_hosts_are_added_up_and_those_of_the_store_are_not():
    tier = Group(2, shared_figures={"bytes"})
    tier.played[0].own = {"hosts": 1, "bytes": 7, "evicted": 2}
    tier.played[1].own = {"hosts": 1, "bytes": 9}
    assert tier.group.stats() == {"hosts": 2, "bytes": 7, "evicted": 2, "hosts_open": 2}
    tier.played[0].lose()
    tier.events()
    assert tier.group.stats()["bytes"] == 9, "of one that is there"


def test_lines_of_the_log_are_warnings(caplog):
    tier = Group(2)
    tier.played[1].lose()
    tier.events()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
