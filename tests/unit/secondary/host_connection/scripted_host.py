"""The host's end of the connection, which the test plays, and what the tests of it have in common."""

import contextlib
import threading
import time

import pytest

from kvtiers.host import wire
from kvtiers.host.messages import StoreJob
from kvtiers.host.wire import FrameReader
from kvtiers.secondary.supervisor import HostPace
from kvtiers.secondary.tier_jobs import JobPart


class Host:
    """The other end of the socket: what the engine said, and what is answered."""

    def __init__(self, socket):
        self.socket = socket
        socket.setblocking(False)
        self._reader = FrameReader()

    def heard(self):
        """Return the messages that have come."""
        with contextlib.suppress(BlockingIOError):
            self._reader.feed(self.socket.recv(1 << 20))
        return [wire.decode_request(message) for message in self._reader.messages(10_000)]

    def say(self, *events):
        self.send(*(wire.encode(event) for event in events))

    def send(self, *messages):
        self.socket.setblocking(True)
        self.socket.settimeout(60)
        self.socket.sendall(b"".join(messages))
        self.socket.setblocking(False)


def paced(**pace):
    """Give the test a host with this pace; each is started again soon."""
    return pytest.mark.parametrize("pace", [HostPace(first_delay=0.01, **pace)], ids=["-".join(pace)])


def load(job_id, keys):
    return JobPart(None, StoreJob(job_id, True, keys, list(range(len(keys)))))


def store(job_id, keys):
    return JobPart(None, StoreJob(job_id, False, keys, list(range(len(keys)))))


def overdue(ends, kit):
    """Let the time be over that the host has, and the launcher look at it."""
    for reason in list(ends.process.life.kill_at):
        ends.process.life.kill_at[reason] = time.monotonic()
    for _ in range(2):  # it looks at its hosts after each request
        looked = threading.Event()
        ends.link.launcher._requests.put(looked.set)
        assert looked.wait(kit.PATIENCE)
