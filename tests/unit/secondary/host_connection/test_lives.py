"""The end of a host's life, and the next one."""

import threading

import pytest
from tests.unit.secondary.host_connection.scripted_host import load, overdue, paced, store

from kvtiers.host import wire
from kvtiers.host.messages import Abandon, Close, JobDone, JobFailed, Opened, Probed, Status, StoreJob
from kvtiers.secondary.host_client import _UNOPENED
from kvtiers.testing.running import open_descriptors

DONE, FAILED = Status.DONE, Status.FAILED


@paced(last_seconds=3600.0)
def test_jobs_fail_at_once_and_are_done_only_when_the_process_has_been_reaped(ends, keys):
    ends.tier.send_job(load(1, keys))
    ends.tier.send_probe(5, keys, is_prefix=True)
    ends.hosts[0].socket.close()
    events = ends.poll(until=JobFailed)
    assert [type(event) for event in events] == [Opened, JobFailed, Probed]
    assert ends.process.lives == type(ends.process.lives)(), "its successor waits until it is reaped"
    assert ends.processes[0].returncode is None
    assert not ends.tier.send_job(load(2, keys))
    ends.link.launcher.kill_after(ends.link.life, "it has closed its connection", 0.0)
    (result,) = ends.poll(until=JobDone)
    assert result.job_id == 1
    assert ends.processes[0].returncode is not None


def test_what_a_host_reported_before_it_died_still_counts(ends, kit, keys):
    ends.tier.send_job(load(1, keys))
    ends.tier.send_job(load(2, keys))
    ends.hosts[0].say(JobDone(1, bytes([DONE] * 4), 16, 0.1))
    ends.hosts[0].socket.close()
    ends.processes[0].kill()
    events = ends.poll(until=Opened)
    kit.wait_until(
        lambda: events.extend(ends.tier.poll()) or sum(isinstance(event, JobDone) for event in events) == 2,
        "both results",
    )
    results = {event.job_id: event.statuses for event in events if isinstance(event, JobDone)}
    assert results == {1: bytes([DONE] * 4), 2: bytes([FAILED] * 4)}
    assert [event.job_id for event in events if isinstance(event, JobFailed)] == [2]


def test_a_death_that_only_the_kernel_reports_is_noticed_too(ends, keys):
    """Another process holds the other end of the socket open, so there is no EOF."""
    ends.tier.send_job(load(1, keys))
    ends.processes[0].kill()
    events = ends.poll(until=JobDone)
    assert [type(event) for event in events] == [Opened, JobFailed, JobDone]


def test_a_failed_job_costs_the_host_its_life_after_the_grace_unless_it_ends(ends, kit, keys):
    life = ends.link.life
    ends.hosts[0].say(Opened())
    ends.poll(until=Opened)
    for number in (1, 2):
        ends.tier.send_job(load(number, keys))
        ends.tier.abandon(number)
    assert len(life.kill_at) == 2
    ends.hosts[0].say(*[JobDone(number, bytes([FAILED] * 4), 0, 0.1) for number in (1, 2)])
    kit.wait_until(lambda: ends.poll() is None or not life.kill_at, "its pardon")
    ends.tier._grace = 0.05
    ends.tier.send_job(load(3, keys))
    ends.hosts[0].say(JobFailed(3, "it kept the buffer"))
    ends.poll(until=JobDone)
    assert ends.processes[0].returncode is not None


def test_an_engine_that_was_idle_does_not_have_a_host_killed_for_what_it_has_not_heard(ends, kit, keys):
    tier = ends.tier
    tier.send_job(load(1, keys))
    tier.flush()
    tier.abandon(1)
    ends.hosts[0].say(Opened(), JobDone(1, bytes([DONE] * 4), 4, 0.1))
    overdue(ends, kit)
    assert not ends.process.life.being_killed, "the engine has not stepped since"
    ends.poll(until=JobDone)
    assert not ends.process.life.kill_at
    assert ends.processes[0].returncode is None


@pytest.mark.parametrize("said", [b"", wire.encode(Opened())[:-1]], ids=["nothing", "half a message"])
def test_an_engine_that_listens_again_has_a_host_killed_that_did_not_end_its_job(ends, kit, keys, log_lines, said):
    tier = ends.tier
    tier.send_job(load(1, keys))
    tier.flush()
    tier.abandon(1)
    ends.hosts[0].send(said)
    ends.process.life.cancel_kill(_UNOPENED)
    overdue(ends, kit)
    assert not ends.process.life.being_killed
    ends.poll(until=JobDone)
    assert log_lines("its host is killed: job 1 did not end")


def test_a_store_that_could_not_be_opened_and_then_hangs_while_it_opens_costs_its_host_too(ends, kit, log_lines):
    ends.hosts[0].say(Opened("OSError: not yet"))
    ends.poll(until=Opened)
    assert list(ends.process.life.kill_at) == [_UNOPENED]
    ends.hosts[0].say(Opened("OSError: not yet either"))
    ends.poll(until=Opened)
    overdue(ends, kit)
    kit.wait_until(lambda: ends.tier.poll() is None or len(ends.processes) == 2, "the next life")
    assert log_lines("its host is killed: its store has neither opened nor said why not")


def test_a_store_that_opens_at_last_costs_nothing(ends, kit):
    for error in ("OSError: not yet", ""):
        ends.hosts[0].say(Opened(error))
        ends.poll(until=Opened)
    assert not ends.process.life.kill_at


@paced(frames_per_poll=3)
def test_a_drain_without_time_takes_all_that_has_been_said(ends, keys):
    tier = ends.tier
    for number in range(20):
        tier.send_job(store(number, keys))
    ends.hosts[0].say(*(JobDone(number, bytes([DONE] * 4), 4, 0.1) for number in range(19)))
    assert not tier.drain(0.0)
    assert [number for number, part in tier.parts.items() if not part.has_ended] == [19], (
        "nothing of the others was dropped"
    )
    ends.hosts[0].say(JobDone(19, bytes([DONE] * 4), 4, 0.1))
    assert tier.drain(0.0)


def test_what_was_meant_for_one_life_does_not_reach_the_next(ends, kit, keys):
    tier = ends.tier
    tier.send_job(load(1, keys))
    tier.flush()
    tier.abandon(1)
    ends.processes[0].kill()
    kit.wait_until(lambda: len(ends.processes) == 2, "the next life")
    ends.poll(until=JobDone)
    kit.wait_until(lambda: tier.poll() is None or ends.link.connected, "its connection")
    tier.flush()
    assert not [reason for reason in ends.link.life.kill_at if reason.startswith("job")]
    assert not [message for message in ends.hosts[1].heard() if isinstance(message, StoreJob | Abandon)]


def test_lives_that_an_idle_engine_never_polled_leave_no_descriptor(ends, kit):
    for number in range(5):
        ends.processes[number].kill()
        kit.wait_until(lambda number=number: len(ends.processes) == number + 2, "the next life")
        kit.wait_until(lambda: list(ends.process.lives) == [ends.process.life], "its connection, and no other")
    events = ends.poll(until=Opened)
    assert events == [Opened("its host ended")]
    kit.wait_until(lambda: ends.tier.poll() is None or ends.link.connected, "the last life")
    assert ends.link.life is ends.process.life


@paced(longest_delay=0.01)
def test_many_lives_that_the_engine_polled_leave_no_descriptor_no_thread_and_no_zombie(ends, kit, keys):
    def counted():
        return len(open_descriptors()), threading.active_count()

    tier, counts = ends.tier, []
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
        counts.append(counted())
    assert all(process.returncode is not None for process in ends.processes[:-1])
    kit.wait_until(
        lambda: all(now <= then for now, then in zip(counted(), counts[5], strict=True)),
        f"the end of all but what was there after some: {counts}",
    )


def test_a_host_that_cannot_be_waited_for_is_not_kept(ends, kit, monkeypatch, log_lines):
    honest = threading.Thread.start

    def start(thread):
        if thread.name == "kvtiers-waiter":
            raise RuntimeError("can't start new thread")
        honest(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    ends.processes[0].kill()
    assert "its host cannot be started: RuntimeError" in log_lines("cannot be started")
    kit.wait_until(lambda: ends.processes[1].returncode is not None, "it is reaped")
    monkeypatch.undo()


def test_an_engine_without_a_descriptor_left_tries_again_later_and_not_all_the_time(ends, kit, monkeypatch, log_lines):
    tries = []

    def socketpair():
        tries.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("kvtiers.secondary.supervisor.socket.socketpair", socketpair)
        ends.processes[0].kill()
        assert "its host cannot be started: OSError: [Errno 24]" in log_lines("cannot be started")
        kit.wait_until(lambda: len(tries) >= 4, "the fourth try")
        assert ends.process.delay >= 8 * 0.01
    kit.wait_until(lambda: len(ends.processes) == 2, "the next life")


def test_an_end_is_reported_once(ends):
    ends.hosts[0].say(Opened())
    ends.poll(until=Opened)
    ends.link.end(1.5)
    ends.link.end(9.0)
    heard = ends.hosts[0].heard()
    assert [message.seconds for message in heard if isinstance(message, Close)] == [1.5]


@pytest.mark.parametrize("was_connected", [True, False])
def test_a_host_that_has_not_said_a_word_is_ended_without_one(ends, kit, was_connected):
    if not was_connected:
        ends.processes[0].kill()
        kit.wait_until(lambda: ends.process.lives, "the next life")
    ends.link.end(1.5)
    kit.wait_until(lambda: ends.tier.poll() is None or ends.process.life is None, "it is reaped")
    assert len(ends.processes) == (1 if was_connected else 2)
    assert not [message for message in ends.hosts[-1].heard() if isinstance(message, Close)]


def test_a_host_that_was_asked_to_end_is_not_started_again(ends, kit):
    ends.link.end(1.5)
    ends.processes[0].kill()
    ends.poll(until=Opened)
    kit.wait_until(lambda: ends.tier.poll() is None or ends.link.life is None, "it is reaped")
    ends.process.start_at = 0.0
    for _ in range(2):  # the launcher looks at its hosts after each request
        looked = threading.Event()
        ends.link.launcher._requests.put(looked.set)
        assert looked.wait(kit.PATIENCE)
    assert len(ends.processes) == 1
