"""The thread of a host that sends: what it says of a job's start, and in which order."""

import socket

import pytest

from kvtiers.host.sender import HostSender

START, END, OTHER = b"start", b"end", b"other"


class Sending:
    """A writer, which nothing but messages wakes up, and all that it has sent when it is closed."""

    def __init__(self, clock, **more):
        self.engine, self.host = socket.socketpair()
        self.engine.settimeout(30)
        self.writer = HostSender(
            self.host, lambda: b"", lambda: False, lambda: None, clock, tick_seconds=3600.0, **more
        )
        self.writer.start()

    def receive(self, length):
        data = b""
        while len(data) < length:
            data += self.engine.recv(length - len(data))
        return data

    def rest(self):
        self.writer.close(30)
        self.host.close()
        data = b""
        while more := self.engine.recv(1 << 16):
            data += more
        return data


@pytest.fixture
def start_seconds():
    return 0.05


@pytest.fixture
def sending(clock, start_seconds):
    sending = Sending(clock, start_seconds=start_seconds)
    yield sending
    sending.writer.close(30)
    sending.host.close()
    sending.engine.close()


def test_log_lines_for_an_engine_that_does_not_read_do_not_pile_up():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = HostSender(theirs, figures=lambda: b"", check_kept=lambda: False, idle=lambda: None)
        taken = sum(writer.post_line(b"line") for _ in range(5000))
        assert 0 < taken <= 1000
        writer.post_end(1, b"what a job came to is never dropped")
        assert writer._messages.qsize() == taken + 1


def test_of_a_job_that_has_ended_at_once_nothing_is_said_but_its_end(sending, clock):
    sending.writer.post_start(1, START)
    sending.writer.post_end(1, END)
    assert sending.receive(len(END)) == END
    clock.now += 10.0
    sending.writer.post(OTHER)
    assert sending.rest() == OTHER


def test_a_jobs_start_is_kept_back_while_it_may_still_end_at_once(sending):
    sending.writer.post_start(1, START)
    sending.writer.post(OTHER)
    assert sending.rest() == OTHER


@pytest.mark.parametrize("start_seconds", [0.0])
def test_that_a_job_has_begun_is_said_by_itself_and_before_its_end(sending):
    sending.writer.post_start(1, START)
    assert sending.receive(len(START)) == START
    sending.writer.post_end(1, END)
    assert sending.rest() == END
