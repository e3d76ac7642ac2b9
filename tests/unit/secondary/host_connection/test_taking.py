"""What is taken from a host, when it is listened to, and the lies that it can send, one by one.

Whole lying hosts are in ``tests/integration/hosts``.
"""

import logging
import math
import select
import threading
import time

import pytest
from tests.unit.secondary.host_connection.scripted_host import load, paced, store

from kvtiers.host import wire
from kvtiers.host.messages import (
    SAY_ONCE,
    Abandon,
    JobDone,
    JobFailed,
    JobReleased,
    JobStarted,
    LogLine,
    Opened,
    Probed,
    Status,
)
from kvtiers.secondary import host_connection

DONE, FAILED = Status.DONE, Status.FAILED


def test_what_is_sent_is_recorded_before_another_thread_can_take_the_answer(ends, kit, keys, monkeypatch):
    send = ends.link.send
    overtaken = []

    def poll_for(answer):
        """Do what the start line's thread does, if it gets in between: send, and take what comes."""
        if ends.link.lock.acquire(blocking=False):
            overtaken.append(answer)
            before = len(ends.tier._events)
            kit.wait_until(
                lambda: ends.link.poll() or len(ends.tier._events) > before or not ends.link.connected, "the answer"
            )
            ends.link.lock.release()

    def and_answer(answer):
        def sent(message):
            assert send(message)
            ends.hosts[0].say(answer)
            thread = threading.Thread(target=poll_for, args=(answer,))
            thread.start()
            thread.join()
            return True

        monkeypatch.setattr(ends.link, "send", sent)

    and_answer(JobDone(1, bytes([DONE] * 4), 4, 0.1))
    assert ends.tier.send_job(load(1, keys))
    ends.poll(until=JobDone)
    and_answer(JobStarted(2))
    assert ends.tier.send_job(load(2, keys))
    and_answer(JobReleased(2, bytes([FAILED] * 4)))
    ends.tier.release(2)
    ends.poll(until=JobReleased)
    and_answer(Probed(7, bytes(4)))
    assert ends.tier.send_probe(7, keys, is_prefix=True)
    ends.poll(until=Probed)
    assert ends.link.connected, "it was killed over an answer to what it was asked"
    assert not overtaken


@paced(look_seconds=1e6)
def test_a_host_with_only_stores_in_flight_is_listened_to_once_in_a_while(ends, keys):
    tier, say = ends.tier, ends.hosts[0].say
    tier.poll()  # the look that is due
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


@paced(look_seconds=1e6)
@pytest.mark.parametrize("is_awaited", [True])
def test_a_host_whose_stores_are_awaited_is_listened_to_at_each_poll(ends, keys):
    tier = ends.tier
    tier.poll()  # the look that is due
    assert tier.send_job(store(1, keys))
    ends.hosts[0].say(JobDone(1, bytes([DONE] * 4), 4, 0.1))
    assert [event.job_id for event in tier.poll()] == [1]


def test_what_a_host_says_and_its_end_can_be_waited_for_and_room_for_what_it_is_sent(ends, kit, keys):
    def ready():
        waiting = select.poll()
        waiting.register(*ends.link.waitable())
        return [event for _, event in waiting.poll(0)]

    tier = ends.tier
    tier.flush()
    ends.hosts[0].heard()
    assert ready() == []
    assert tier.send_job(load(1, keys))
    assert ready() == [select.POLLOUT], "it is still to be sent"
    tier.flush()
    ends.hosts[0].say(JobStarted(1))
    assert ready() == [select.POLLIN]
    assert tier.poll()
    assert ready() == []
    ends.hosts[0].socket.close()
    assert ready()
    kit.wait_until(lambda: tier.poll() is None or not ends.link.connected, "the loss")
    assert ends.link.waitable() is None


@paced(look_seconds=1e6)
def test_loads_that_ended_with_their_host_are_in_flight_no_more(ends, kit, keys):
    assert ends.tier.send_job(load(1, keys))
    ends.hosts[0].socket.close()
    ends.poll(until=JobDone)
    kit.wait_until(lambda: ends.link.poll() or (len(ends.hosts) == 2 and ends.link.connected), "its successor")
    assert ends.tier.send_job(store(2, keys))
    ends.hosts[1].say(JobDone(2, bytes([DONE] * 4), 4, 0.1))
    assert not ends.tier.poll()


def test_no_step_takes_more_than_its_share_and_nothing_is_lost(ends, kit):
    tier = ends.tier
    count = 3 * ends.link.launcher.pace.frames_per_poll
    for number in range(count):
        tier.send_job(load(number, [kit.key(number)]))
        if number % 1000 == 0:
            tier.flush()
            ends.hosts[0].heard()
    message = [wire.encode(JobDone(number, bytes([DONE]), 1, 0.1)) for number in range(count)]
    events = []
    for at in range(0, count, 512):
        ends.hosts[0].send(*message[at : at + 512])
        came = tier.poll()
        assert len(came) <= ends.link.launcher.pace.frames_per_poll
        events += came
    kit.wait_until(lambda: events.extend(tier.poll()) or len(events) == count, "the last result")
    assert [event.job_id for event in events] == list(range(count))


def test_what_is_to_be_said_once_is_logged_once_for_each_text_whichever_host_says_it(ends, kit, caplog):
    """Two texts are remembered here."""
    once, always = logging.WARNING | SAY_ONCE, logging.WARNING
    said = [(once, text) for text in ("a", "b", "a", "b")] + [(always, "a")] * 2 + [(once, text) for text in "caa"]
    ends.hosts[0].say(*(LogLine(level, text) for level, text in said), Opened())
    ends.poll(until=Opened)
    assert caplog.messages == ["a", "b", "a", "a", "c", "a"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_line_that_could_not_be_logged_has_not_been_said(ends, caplog, monkeypatch):
    def log(*_arguments):
        raise OSError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(host_connection._log, "log", log)
        with pytest.raises(OSError, match="no room"):
            ends.link._log_line(logging.WARNING | SAY_ONCE, "a")
    ends.link._log_line(logging.WARNING | SAY_ONCE, "a")
    assert caplog.messages == ["a"]


ABOUT_NOTHING = {
    "garbage": b"\xff" * 100,
    "a message of two gigabytes": (2**31).to_bytes(4, "little") + bytes(10),
    "a message of the engine's": wire.encode(Abandon(1)),
    "an unknown kind": (2).to_bytes(4, "little") + b"\x91\x7f",
    "figures that are none": (2).to_bytes(4, "little") + b"\x91\x45",
    "a result of no job": wire.encode(JobDone(99, b"\x01", 0, 0.1)),
    "the start of no job": wire.encode(JobStarted(99)),
    "the failure of no job": wire.encode(JobFailed(99, "?")),
    "an answer to no question": wire.encode(Probed(99, b"")),
    "rows released that were not in use": wire.encode(JobReleased(1, bytes([FAILED] * 4))),
}


def is_killed(ends, kit, log_lines):
    """The host is killed for what it said, and reaped; what was in flight is reported as failed."""
    assert "it does not keep to the protocol" in log_lines("its host is killed")
    kit.wait_until(lambda: ends.processes[0].returncode is not None, "it is reaped")


@pytest.mark.parametrize("message", ABOUT_NOTHING.values(), ids=ABOUT_NOTHING.keys())
def test_a_message_that_makes_no_sense_kills_the_host_and_fails_its_jobs(ends, kit, keys, log_lines, message):
    ends.tier.send_job(load(1, keys))
    ends.hosts[0].send(message)
    events = ends.poll(until=JobDone)
    assert [type(event) for event in events] == [Opened, JobFailed, JobDone]
    assert events[-1].statuses == bytes([FAILED]) * 4
    assert events[0] == Opened("its host ended")
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
    tier = ends.tier
    tier.send_job(load(1, keys))
    tier.send_probe(5, keys[:2], is_prefix=True)
    ends.hosts[0].say(*lie)
    ends.poll(until=Opened)
    is_killed(ends, kit, log_lines)
    kit.wait_until(lambda: tier.poll() is None or not tier._in_flight, "the end of its jobs")


def test_a_loads_status_for_a_store_kills_the_host(ends, kit, keys, log_lines):
    ends.tier.send_job(store(1, keys))
    ends.hosts[0].say(*done([Status.MISSING] * 4))
    ends.poll(until=Opened)
    is_killed(ends, kit, log_lines)


LINES = wire.encode(LogLine(logging.INFO, "a")) * 500  # what a poll takes whole


def test_a_host_of_any_age_that_floods_the_engine_is_killed(ends, kit, caplog, log_lines, wound):
    """An hour would be worth 720,000 lines, of which the engine's thread logs a thousand in each step."""
    wound[0] = 3600.0
    begin = time.monotonic()
    while ends.link.connected:
        ends.hosts[0].send(LINES)
        ends.link.poll()
    assert caplog.messages.count("a") <= 10_000 + 200 * (time.monotonic() - begin)
    assert "it floods the engine" in log_lines("its host is killed")
    is_killed(ends, kit, log_lines)


def test_what_a_host_has_logged_while_its_engine_was_idle_is_no_flood(ends, caplog, wound):
    caplog.set_level(logging.INFO, "kvtiers")
    wound[0] = 3600.0
    for _ in range(20):
        ends.hosts[0].send(LINES)
        ends.link.poll()
    assert ends.link.connected
    assert caplog.messages.count("a") == 10_000
