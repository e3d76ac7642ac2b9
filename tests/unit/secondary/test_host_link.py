"""The engine's end of a host, whose other end the test plays: a real launcher, a real process to kill, a real socket.

Here are the lies that a host can tell one by one; whole lying hosts are in ``tests/integration/hosts``.
"""

import contextlib
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtiers.secondary import host_backend, host_link, wire
from kvtiers.secondary.framing import FrameReader, Kind, frame
from kvtiers.secondary.host_backend import HostBackend
from kvtiers.secondary.host_link import HostLink
from kvtiers.secondary.launcher import HostLauncher, HostProcess
from kvtiers.secondary.log_thread import LogThread
from kvtiers.secondary.protocol import JobDone, JobFailed, JobReleased, JobStarted, Opened, Probed, Status, StoreJob

DONE, FAILED = Status.DONE, Status.FAILED


class Host:
    """The other end of the socket: what the engine said, and what is answered."""

    def __init__(self, socket):
        self.socket = socket
        socket.setblocking(False)
        self._reader = FrameReader()

    def heard(self):
        """Return (kind, tier, body) of the messages that have come."""
        with contextlib.suppress(BlockingIOError):
            self._reader.feed(self.socket.recv(1 << 20))
        return self._reader.frames(10_000)

    def say(self, *events, tier=0):
        self.send(*(wire.encode_event(tier, event) for event in events))

    def send(self, *messages):
        self.socket.setblocking(True)
        self.socket.settimeout(60)
        self.socket.sendall(b"".join(messages))
        self.socket.setblocking(False)


@pytest.fixture
def ends(kit, monkeypatch):
    """Two tiers in one host, the second with time to spare, and all its lives, of which the test plays each."""
    hosts, processes = [], []

    def fork(_launcher, _host, theirs):
        hosts.append(Host(theirs.dup()))
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        return processes[-1]

    monkeypatch.setattr(HostLauncher, "_fork", fork)
    monkeypatch.setattr("kvtiers.secondary.launcher._FIRST_DELAY", 0.01)
    logs = LogThread()
    launcher = HostLauncher(0, logs.post)
    process = HostProcess("test", lambda: wire.encode_hello({"protocol": 1}))
    link = HostLink(launcher, process, logs)
    tiers = [HostBackend(link, kit.NAMES, deadline=kit.PATIENCE, grace=grace) for grace in (0.05, kit.PATIENCE)]
    launcher.start(process)

    def poll(tier=0, *, until=None):
        """Poll until an event of this kind has come; return all that came."""
        events = list(tiers[tier].poll())
        if until is not None:
            kit.wait_until(
                lambda: events.extend(tiers[tier].poll()) or any(isinstance(event, until) for event in events),
                f"a {until.__name__}",
            )
        return events

    kit.wait_until(lambda: tiers[0].poll() or link.connected, "the first life")
    yield SimpleNamespace(hosts=hosts, link=link, tiers=tiers, process=process, processes=processes, poll=poll)
    launcher.close(0.0)
    link.let_go()
    for host in hosts:
        host.socket.close()
    logs.close(kit.PATIENCE)
    assert all(process.returncode is not None for process in processes)


def load(job_id, keys):
    return StoreJob(job_id, True, keys, list(range(len(keys))))


def store(job_id, keys):
    return StoreJob(job_id, False, keys, list(range(len(keys))))


# -- what is sent


def test_a_host_hears_hello_then_its_names_then_jobs_and_questions_in_order(ends, kit, keys):
    tier = ends.tiers[1]
    assert tier.send_job(load(1, keys))
    other = type(kit.NAMES)("test/other-0123456789abcdef01234567/", b"layout-2")
    tier.set_names(other)
    assert tier.send_probe(5, keys[:2], is_prefix=True)
    tier.abandon(1)
    tier.flush()
    heard = ends.hosts[0].heard()
    assert [(Kind(message.kind).name, message.tier) for message in heard] == [
        ("HELLO", 0),
        ("NAMES", 0),
        ("NAMES", 1),
        ("JOB", 1),
        ("NAMES", 1),
        ("PROBE", 1),
        ("ABANDON", 1),
    ]
    assert wire.decode_names(heard[4].body) == other


def test_a_host_that_does_not_read_fills_the_outbox_and_then_nothing_is_taken(ends, keys, monkeypatch):
    monkeypatch.setattr(host_link, "_OUTBOX_BYTES", 1 << 16)
    tier = ends.tiers[0]
    many = keys * 2000
    taken = 0
    while tier.send_probe(taken, many[:1000], is_prefix=False):
        tier.flush()
        taken += 1
    assert 5 < taken < 100
    assert not tier.send_job(load(1, many[:1000]))
    assert tier.send_job(load(2, keys[:1])), "what is small may still fit"
    ends.hosts[0].heard()
    tier.flush()
    assert tier.send_probe(taken, many[:1000], is_prefix=False)


def test_a_host_that_cannot_be_told_new_names_is_killed(ends, kit, keys, monkeypatch, log_lines):
    monkeypatch.setattr(host_link, "_OUTBOX_BYTES", 100)
    ends.tiers[0].set_names(type(kit.NAMES)("x" * 200 + "/", b"layout-2"))
    assert log_lines("its host is killed: it cannot be told that the weights have changed")


def test_after_a_death_the_next_life_gets_the_names_of_now(ends, kit, keys):
    ends.processes[0].kill()
    ends.poll(until=Opened)
    other = type(kit.NAMES)("test/other-0123456789abcdef01234567/", b"layout-2")
    ends.tiers[0].set_names(other)
    kit.wait_until(lambda: ends.tiers[0].poll() or ends.link.connected, "the next life")
    ends.link.flush()
    names = [wire.decode_names(message.body) for message in ends.hosts[1].heard() if message.kind == Kind.NAMES]
    assert names == [other, kit.NAMES]


# -- what is taken


def test_results_come_to_the_tier_that_they_are_for(ends, keys):
    ends.tiers[0].send_job(load(1, keys))
    ends.tiers[1].send_job(store(2, keys))
    ends.hosts[0].say(JobStarted(1), JobDone(1, bytes([DONE] * 4), 4, 0.1))
    ends.hosts[0].say(JobStarted(2), JobDone(2, bytes([DONE] * 4), 4, 0.1), tier=1)
    assert [event.job_id for event in ends.poll(0, until=JobDone)] == [1, 1]
    assert [event.job_id for event in ends.poll(1, until=JobDone)] == [2, 2]


def test_a_host_that_owes_only_stores_is_listened_to_once_in_a_while(ends, kit, keys, monkeypatch):
    tier, say = ends.tiers[0], ends.hosts[0].say
    monkeypatch.setattr(host_backend, "_LOOK_SECONDS", 1e6)
    kit.wait_until(lambda: tier.poll() is None or tier._look_at > 1e5, "the look that is due")
    for job in (store(1, keys), store(2, keys)):
        assert tier.send_job(job)
    say(JobDone(1, bytes([DONE] * 4), 4, 0.1))
    assert not tier.poll()
    tier._look_at = 0.0  # the while is over
    assert [event.job_id for event in tier.poll()] == [1]
    say(JobDone(2, bytes([DONE] * 4), 4, 0.1))
    assert not tier.poll()
    assert tier.send_job(load(3, keys))
    assert [event.job_id for event in tier.poll()] == [2], "a request waits for a load"
    say(JobDone(3, bytes([DONE] * 4), 4, 0.1))
    assert [event.job_id for event in tier.poll()] == [3]
    assert tier.send_job(store(4, keys))
    say(JobDone(4, bytes([DONE] * 4), 4, 0.1))
    assert not tier.poll()
    assert tier.send_probe(5, keys, is_prefix=True)
    assert [event.job_id for event in tier.poll()] == [4], "a request waits for an answer"


def test_loads_that_a_host_took_with_it_are_owed_no_more(ends, kit, keys, monkeypatch):
    assert ends.tiers[0].send_job(load(1, keys))
    ends.hosts[0].socket.close()
    ends.poll(until=JobDone)
    kit.wait_until(
        lambda: ends.tiers[0].poll() is None or (len(ends.hosts) == 2 and ends.link.connected), "its successor"
    )
    monkeypatch.setattr(host_backend, "_LOOK_SECONDS", 1e6)
    kit.wait_until(lambda: ends.tiers[0].poll() is None or ends.tiers[0]._look_at > 1e5, "the look that is due")
    assert ends.tiers[0].send_job(store(2, keys))
    ends.hosts[1].say(JobDone(2, bytes([DONE] * 4), 4, 0.1))
    assert not ends.tiers[0].poll()


def test_no_step_takes_more_than_its_share_and_nothing_is_lost(ends, kit):
    tier = ends.tiers[0]
    count = 3 * host_link._FRAMES_PER_POLL
    for number in range(count):
        tier.send_job(load(number, [kit.key(number)]))
        if number % 1000 == 0:
            tier.flush()
            ends.hosts[0].heard()
    message = [wire.encode_event(0, JobDone(number, bytes([DONE]), 1, 0.1)) for number in range(count)]
    events = []
    for at in range(0, count, 512):
        ends.hosts[0].send(*message[at : at + 512])
        came = tier.poll()
        assert len(came) <= host_link._FRAMES_PER_POLL
        events += came
    kit.wait_until(lambda: events.extend(tier.poll()) or len(events) == count, "the last result")
    assert [event.job_id for event in events] == list(range(count))


ABOUT_NOTHING = {
    "garbage": b"\xff" * 100,
    "a message of two gigabytes": (2**31).to_bytes(4, "little") + bytes(10),
    "a tier that is not there": wire.encode_event(7, Opened()),
    "a message of the engine's": frame(Kind.JOB, 0, bytes(30)),
    "an unknown kind": frame(200, 0, b"?"),
    "figures that are none": frame(Kind.STATS, 0, b"[[[["),
    "a log line without a level": frame(Kind.LOG, 0),
    "a result of no job": wire.encode_event(0, JobDone(99, b"\x01", 0, 0.1)),
    "the start of no job": wire.encode_event(0, JobStarted(99)),
    "the failure of no job": wire.encode_event(0, JobFailed(99, "?")),
    "an answer to no question": wire.encode_event(0, Probed(99, b"")),
    "rows let go that nobody wants back": wire.encode_event(0, JobReleased(1)),
}


def is_killed(ends, kit, log_lines):
    """The host is killed for what it said, and reaped; what it owed is reported as failed."""
    assert "it does not keep to the protocol" in log_lines("its host is killed")
    kit.wait_until(lambda: ends.processes[0].returncode is not None, "its burial")


@pytest.mark.parametrize("message", ABOUT_NOTHING.values(), ids=ABOUT_NOTHING.keys())
def test_a_message_that_makes_no_sense_kills_the_host_and_fails_its_jobs(ends, kit, keys, log_lines, message):
    ends.tiers[0].send_job(load(1, keys))
    ends.hosts[0].send(message)
    events = ends.poll(until=JobDone)
    assert [type(event) for event in events] == [Opened, JobFailed, JobDone]
    assert events[-1].statuses == bytes([FAILED]) * 4
    assert Opened("its host ended") in ends.poll(1)
    is_killed(ends, kit, log_lines)


def done(statuses, seconds=0.1):
    return [JobDone(1, bytes(statuses), 0, seconds)]


LIES = {
    "a result of another job": [JobDone(2, bytes([DONE] * 4), 0, 0.1)],
    "two results": done([DONE] * 4) * 2,
    "two starts": [JobStarted(1), JobStarted(1)],
    "two failures": [JobFailed(1, "a"), JobFailed(1, "b")],
    "too few statuses": done([DONE] * 3),
    "too many statuses": done([DONE] * 5),
    "no status": done([]),
    "a status that is none": done([99] * 4),
    "a store's status for a load": done([Status.PRESENT] * 4),
    "a time that is none": done([DONE] * 4, math.nan),
    "a time before the start": done([DONE] * 4, -1.0),
    "more answers than questions": [Probed(5, b"\x01\x01\x01")],
    "two answers": [Probed(5, b"\x01\x01"), Probed(5, b"\x01\x01")],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_report_that_cannot_be_kills_the_host(ends, kit, keys, log_lines, lie):
    tier = ends.tiers[0]
    tier.send_job(load(1, keys))
    tier.send_probe(5, keys[:2], is_prefix=True)
    ends.hosts[0].say(*lie)
    ends.poll(until=Opened)
    is_killed(ends, kit, log_lines)
    kit.wait_until(lambda: tier.poll() is None or not tier._jobs, "the end of its jobs")


def test_a_loads_status_for_a_store_kills_the_host(ends, kit, keys, log_lines):
    ends.tiers[0].send_job(store(1, keys))
    ends.hosts[0].say(*done([Status.MISSING] * 4))
    ends.poll(until=Opened)
    is_killed(ends, kit, log_lines)


# -- the end of a life


def test_jobs_fail_at_once_and_are_done_only_when_the_process_has_been_reaped(ends, kit, keys, monkeypatch):
    monkeypatch.setattr(host_link, "_LAST_SECONDS", kit.PATIENCE)
    ends.tiers[0].send_job(load(1, keys))
    ends.tiers[0].send_probe(5, keys, is_prefix=True)
    ends.hosts[0].socket.close()
    events = ends.poll(until=JobFailed)
    assert [type(event) for event in events] == [Opened, JobFailed, Probed]
    assert ends.process.lives == type(ends.process.lives)(), "its successor waits for the burial"
    assert ends.processes[0].returncode is None
    assert not ends.tiers[0].send_job(load(2, keys))
    ends.link.launcher.kill_unless_forgiven(ends.link.life, "it has closed its connection", 0.0)
    (result,) = ends.poll(until=JobDone)
    assert result.job_id == 1
    assert ends.processes[0].returncode is not None


def test_what_a_host_reported_before_it_died_still_counts(ends, kit, keys):
    ends.tiers[0].send_job(load(1, keys))
    ends.tiers[0].send_job(load(2, keys))
    ends.hosts[0].say(JobDone(1, bytes([DONE] * 4), 16, 0.1))
    ends.hosts[0].socket.close()
    ends.processes[0].kill()
    events = ends.poll(until=Opened)
    kit.wait_until(
        lambda: events.extend(ends.tiers[0].poll()) or sum(isinstance(event, JobDone) for event in events) == 2,
        "both results",
    )
    results = {event.job_id: event.statuses for event in events if isinstance(event, JobDone)}
    assert results == {1: bytes([DONE] * 4), 2: bytes([FAILED] * 4)}
    assert [event.job_id for event in events if isinstance(event, JobFailed)] == [2]


def test_a_death_that_only_the_kernel_reports_is_noticed_too(ends, keys):
    """Somebody else holds the other end of the socket open, so there is no EOF."""
    ends.tiers[0].send_job(load(1, keys))
    ends.processes[0].kill()
    events = ends.poll(until=JobDone)
    assert [type(event) for event in events] == [Opened, JobFailed, JobDone]


def test_a_failed_job_costs_the_host_its_life_after_the_grace_unless_it_ends(ends, kit, keys):
    life = ends.link.life
    ends.hosts[0].say(Opened())
    ends.hosts[0].say(Opened(), tier=1)
    ends.poll(until=Opened)
    for number in (1, 2):
        ends.tiers[1].send_job(load(number, keys))
        ends.tiers[1].abandon(number)
    assert len(life.kill_at) == 2
    ends.hosts[0].say(*[JobDone(number, bytes([FAILED] * 4), 0, 0.1) for number in (1, 2)], tier=1)
    kit.wait_until(lambda: ends.poll(1) is None or not life.kill_at, "its pardon")
    ends.tiers[0].send_job(load(3, keys))
    ends.hosts[0].say(JobFailed(3, "it kept the buffer"))
    ends.poll(until=JobDone)
    assert ends.processes[0].returncode is not None


def overdue(ends, kit):
    """Let the time be over that the host has, and the launcher look at it."""
    for reason in list(ends.process.life.kill_at):
        ends.process.life.kill_at[reason] = time.monotonic()
    for _ in range(2):  # it looks at its hosts after each request
        looked = threading.Event()
        ends.link.launcher._requests.put(looked.set)
        assert looked.wait(kit.PATIENCE)


def test_an_engine_that_was_idle_does_not_have_a_host_killed_for_what_it_has_not_heard(ends, kit, keys):
    tier = ends.tiers[0]
    tier.send_job(load(1, keys))
    tier.flush()
    tier.abandon(1)
    ends.hosts[0].say(Opened(), JobDone(1, bytes([DONE] * 4), 4, 0.1))
    ends.hosts[0].say(Opened(), tier=1)
    overdue(ends, kit)
    assert not ends.process.life.condemned, "the engine has not stepped since"
    ends.poll(until=JobDone)
    assert not ends.process.life.kill_at
    assert ends.processes[0].returncode is None


@pytest.mark.parametrize("said", [b"", wire.encode_event(0, Opened())[:-1]], ids=["nothing", "half a message"])
def test_an_engine_that_listens_again_has_a_host_killed_that_did_not_end_its_job(ends, kit, keys, log_lines, said):
    tier = ends.tiers[0]
    tier.send_job(load(1, keys))
    tier.flush()
    tier.abandon(1)
    ends.hosts[0].say(Opened(), tier=1)
    ends.hosts[0].send(said)
    for other in ends.tiers:
        ends.process.life.forgive(other._unopened)
    overdue(ends, kit)
    assert not ends.process.life.condemned
    ends.poll(until=JobDone)
    assert log_lines("its host is killed: job 1 did not end")


def test_a_store_that_could_not_be_opened_and_then_hangs_while_it_opens_costs_its_host_too(ends, kit, log_lines):
    ends.hosts[0].say(Opened(), tier=1)
    ends.hosts[0].say(Opened("OSError: not yet"))
    ends.poll(until=Opened)
    assert list(ends.process.life.kill_at) == [ends.tiers[0]._unopened]
    ends.hosts[0].say(Opened("OSError: not yet either"))
    ends.poll(until=Opened)
    overdue(ends, kit)
    kit.wait_until(lambda: ends.tiers[0].poll() is None or len(ends.processes) == 2, "the next life")
    assert log_lines("its host is killed: store 0 of it has neither opened nor said why not")


def test_a_store_that_opens_at_last_costs_nothing(ends, kit):
    ends.hosts[0].say(Opened(), tier=1)
    for error in ("OSError: not yet", ""):
        ends.hosts[0].say(Opened(error))
        ends.poll(until=Opened)
    assert not ends.process.life.kill_at


def test_a_drain_without_time_takes_all_that_has_been_said(ends, keys, monkeypatch):
    monkeypatch.setattr(host_link, "_FRAMES_PER_POLL", 3)
    tier = ends.tiers[0]
    for number in range(20):
        tier.send_job(store(number, keys))
    ends.hosts[0].say(*(JobDone(number, bytes([DONE] * 4), 4, 0.1) for number in range(19)))
    assert not tier.drain(0.0)
    assert list(tier._jobs) == [19], "nothing of the others was dropped"
    ends.hosts[0].say(JobDone(19, bytes([DONE] * 4), 4, 0.1))
    assert tier.drain(0.0)


def test_what_was_meant_for_one_life_does_not_reach_the_next(ends, kit, keys):
    tier = ends.tiers[0]
    tier.send_job(load(1, keys))
    tier.flush()
    tier.abandon(1)
    ends.processes[0].kill()
    kit.wait_until(lambda: len(ends.processes) == 2, "the next life")
    ends.poll(until=JobDone)
    kit.wait_until(lambda: tier.poll() is None or ends.link.connected, "its connection")
    tier.flush()
    assert not [reason for reason in ends.link.life.kill_at if reason.startswith("job")]
    kinds = [message.kind for message in ends.hosts[1].heard()]
    assert Kind.JOB not in kinds
    assert Kind.ABANDON not in kinds


def test_lives_that_an_idle_engine_never_met_leave_no_descriptor(ends, kit):
    for number in range(5):
        ends.processes[number].kill()
        kit.wait_until(lambda number=number: len(ends.processes) == number + 2, "the next life")
        kit.wait_until(lambda: ends.process.life is not None and ends.process.lives, "its connection")
        assert len(ends.process.lives) == 1
    events = ends.poll(until=Opened)
    assert events == [Opened("its host ended")]
    kit.wait_until(lambda: ends.tiers[0].poll() is None or ends.link.connected, "the last life")
    assert ends.link.life is ends.process.life


def test_many_lives_that_the_engine_met_leave_no_descriptor_no_thread_and_no_zombie(ends, kit, keys, monkeypatch):
    monkeypatch.setattr("kvtiers.secondary.launcher._LONGEST_DELAY", 0.01)
    tier, seen = ends.tiers[0], []
    for number in range(30):
        tier.send_job(load(number, keys))
        tier.flush()
        ends.processes[number].kill()
        ends.poll(until=JobDone)
        ends.hosts[number].socket.close()
        kit.wait_until(lambda: tier.poll() is None or ends.link.connected, "the next life")
        kit.wait_until(
            lambda: not [t for t in threading.enumerate() if "waiter" in t.name][1:], "the last waiter's end"
        )
        seen.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
    assert all(process.returncode is not None for process in ends.processes[:-1])
    assert seen[-1] == seen[5], seen


def test_a_host_that_cannot_be_waited_for_is_not_kept(ends, kit, monkeypatch, log_lines):
    honest = threading.Thread.start

    def start(thread):
        if thread.name == "kvtiers-waiter":
            raise RuntimeError("can't start new thread")
        honest(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    ends.processes[0].kill()
    assert "its host cannot be started: RuntimeError" in log_lines("cannot be started")
    kit.wait_until(lambda: ends.processes[1].returncode is not None, "its burial")
    monkeypatch.undo()


def test_an_engine_without_a_descriptor_left_tries_again_later_and_not_all_the_time(ends, kit, monkeypatch, log_lines):
    tries = []

    def socketpair():
        tries.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("kvtiers.secondary.launcher.socket.socketpair", socketpair)
        ends.processes[0].kill()
        assert "its host cannot be started: OSError: [Errno 24]" in log_lines("cannot be started")
        kit.wait_until(lambda: len(tries) >= 4, "the fourth try")
        assert ends.process.delay >= 8 * 0.01
    kit.wait_until(lambda: len(ends.processes) == 2, "the next life")


def test_an_end_is_told_once(ends):
    ends.hosts[0].say(Opened())
    ends.poll(until=Opened)
    ends.link.end(1.5)
    ends.link.end(9.0)
    heard = ends.hosts[0].heard()
    assert [wire.decode_close(message.body) for message in heard if message.kind == Kind.CLOSE] == [1.5]


@pytest.mark.parametrize("met", [True, False])
def test_a_host_that_has_not_said_a_word_is_ended_without_one(ends, kit, met):
    if not met:
        ends.processes[0].kill()
        kit.wait_until(lambda: ends.process.lives, "the next life")
    ends.link.end(1.5)
    kit.wait_until(lambda: ends.tiers[0].poll() is None or ends.process.life is None, "its burial")
    assert len(ends.processes) == (1 if met else 2)
    assert not [message for message in ends.hosts[-1].heard() if message.kind == Kind.CLOSE]


def test_a_host_that_was_told_to_end_is_not_started_again(ends, kit):
    ends.link.end(1.5)
    ends.processes[0].kill()
    ends.poll(until=Opened)
    kit.wait_until(lambda: ends.tiers[0].poll() is None or ends.link.life is None, "its burial")
    ends.process.start_at = 0.0
    for _ in range(2):  # the launcher looks at its hosts after each request
        looked = threading.Event()
        ends.link.launcher._requests.put(looked.set)
        assert looked.wait(kit.PATIENCE)
    assert len(ends.processes) == 1
