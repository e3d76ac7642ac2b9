"""A host that does not keep to the protocol: what it does is in the file that its caller names, once."""

import os
import socket
import sys
import time
from pathlib import Path

from kvtiers.host import wire
from kvtiers.host.messages import Hello, JobDone, JobStarted, LogLine, Opened, Stats, Status, StoreJob
from kvtiers.host.wire import FrameReader


class Liar:
    def __init__(self, lie):
        self.socket = socket.socket(fileno=int(sys.argv[1]))
        self.lie = getattr(self, lie)

    def send(self, *messages):
        self.socket.sendall(b"".join(messages))

    def say(self, *events):
        self.send(*(wire.encode(event) for event in events))

    def run(self):
        """Open as a host does; lie at the first job, or (``job`` is None) at once."""
        reader = FrameReader()
        while data := self.socket.recv(1 << 16):
            reader.feed(data)
            for frame in reader.messages(1000):
                message = wire.decode_request(frame)
                if isinstance(message, Hello):
                    self.say(Opened())
                    self.lie(None)
                elif isinstance(message, StoreJob):
                    self.lie(message)

    def garbage(self, job):
        while job is None:  # of some of it the first bytes are the length of a message that is still to come
            self.send(os.urandom(1 << 16))

    def twice(self, job):
        if job is not None:
            done = JobDone(job.job_id, bytes([Status.DONE]) * len(job.keys), 0, 0.1)
            self.say(JobStarted(job.job_id), done, done)

    def flood_log(self, job):
        while True:
            self.send(wire.encode(LogLine(30, "flood " * 100)) * 100)

    def flood_figures(self, job):
        while True:
            self.send(wire.encode(Stats({"a": 1.0})) * 1000)

    def flood_opened(self, job):
        while True:
            self.say(*[Opened()] * 1000)

    def hangs_up(self, job):
        self.socket.close()
        time.sleep(600)


def main(orders):
    """Lie as ordered; False if there is no order."""
    try:
        lie = Path(orders).read_text()
        Path(orders).unlink()
    except FileNotFoundError:
        return False
    Liar(lie).run()
    return True
