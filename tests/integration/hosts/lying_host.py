"""A host that does not keep to the protocol: what it does is in the file that its last argument names, once."""

import math
import os
import socket
import sys
import time
from pathlib import Path

from kvtiers.secondary import wire
from kvtiers.secondary.framing import FrameReader, Kind, frame
from kvtiers.secondary.protocol import JobDone, JobFailed, JobStarted, Opened, Probed, Status

DONE = Status.DONE


class Liar:
    def __init__(self, lie):
        self.socket = socket.socket(fileno=int(sys.argv[1]))
        self.lie = lie

    def send(self, *messages):
        self.socket.sendall(b"".join(messages))

    def say(self, *events):
        self.send(*(wire.encode_event(0, event) for event in events))

    def run(self):
        reader = FrameReader()
        while data := self.socket.recv(1 << 16):
            reader.feed(data)
            for message in reader.frames(1000):
                self.take(message)

    def take(self, message):
        if message.kind == Kind.HELLO:
            self.say(Opened())
            if hasattr(self, f"at_start_{self.lie}"):
                getattr(self, f"at_start_{self.lie}")()
        elif message.kind == Kind.JOB:
            job = wire.decode_job(message.body)
            getattr(self, f"at_job_{self.lie}", self.at_job)(job)
        elif message.kind == Kind.PROBE:
            probe_id, keys, _ = wire.decode_probe(message.body)
            getattr(self, f"at_probe_{self.lie}", self.at_probe)(probe_id, keys)

    def at_job(self, job):
        self.say(JobStarted(job.job_id), self.done(job))

    def at_probe(self, probe_id, keys):
        self.say(Probed(probe_id, bytes(len(keys))))

    @staticmethod
    def done(job, statuses=None, seconds=0.1):
        return JobDone(job.job_id, bytes([DONE]) * len(job.keys) if statuses is None else statuses, 0, seconds)

    # -- lies at the start

    def at_start_garbage(self):
        self.send(os.urandom(1 << 16))

    def at_start_endless_message(self):
        self.send((2**31).to_bytes(4, "little") + bytes(1000))

    def at_start_other_tier(self):
        self.send(wire.encode_event(7, Opened()))

    def at_start_engines_message(self):
        self.send(frame(Kind.JOB, 0, bytes(30)))

    def at_start_unknown_kind(self):
        self.send(frame(200, 0, b"?"))

    def at_start_bad_figures(self):
        self.send(frame(Kind.STATS, 0, b"[[[["))

    def at_start_empty_log(self):
        self.send(frame(Kind.LOG, 0))

    def at_start_flood_log(self):
        while True:
            self.send(wire.encode_log(0, 30, "flood " * 100) * 100)

    def at_start_flood_figures(self):
        while True:
            self.send(wire.encode_stats(0, {"a": 1.0}) * 1000)

    def at_start_flood_opened(self):
        while True:
            self.say(*[Opened()] * 1000)

    def at_start_unasked_job(self):
        self.say(JobDone(999_999, b"\x01", 0, 0.1))

    def at_start_unasked_start(self):
        self.say(JobStarted(999_999))

    def at_start_unasked_failure(self):
        self.say(JobFailed(999_999, "?"))

    def at_start_unasked_answer(self):
        self.say(Probed(999_999, b"\x01"))

    def at_start_hangs_up(self):
        self.socket.close()
        time.sleep(600)

    # -- lies about jobs and questions

    def at_job_other_job(self, job):
        self.say(JobDone(job.job_id + 1, bytes(len(job.keys)), 0, 0.1))

    def at_job_twice(self, job):
        self.say(self.done(job), self.done(job))

    def at_job_starts_twice(self, job):
        self.say(JobStarted(job.job_id), JobStarted(job.job_id))

    def at_job_fails_twice(self, job):
        self.say(JobFailed(job.job_id, "a"), JobFailed(job.job_id, "b"))

    def at_job_too_few(self, job):
        self.say(self.done(job, bytes([DONE])[: len(job.keys) - 1]))

    def at_job_too_many(self, job):
        self.say(self.done(job, bytes([DONE]) * (len(job.keys) + 1)))

    def at_job_no_such_status(self, job):
        self.say(self.done(job, bytes([99]) * len(job.keys)))

    def at_job_missing_in_a_store(self, job):
        self.say(self.done(job, bytes([Status.MISSING]) * len(job.keys)))

    def at_job_no_time(self, job):
        self.say(self.done(job, seconds=math.nan))

    def at_job_before_time(self, job):
        self.say(self.done(job, seconds=-1.0))

    def at_job_cut_short(self, job):
        self.send(frame(Kind.DONE, 0, bytes(5)))

    def at_probe_too_many_answers(self, probe_id, keys):
        self.say(Probed(probe_id, bytes([1]) * (len(keys) + 1)))

    def at_probe_answers_twice(self, probe_id, keys):
        self.say(*[Probed(probe_id, bytes(len(keys)))] * 2)


def main(orders):
    """Lie as ordered; False if there is no order."""
    try:
        lie = Path(orders).read_text()
        Path(orders).unlink()
    except FileNotFoundError:
        return False
    Liar(lie).run()
    return True
