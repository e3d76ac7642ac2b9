"""Replicas behind one Redis, with a shared directory before it: what is read out of Redis when they are warmed up.

Real processes, a real server, a real directory; the bytes are the server's own count.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis_servers import Server

from kvtiers.api import make_offload_key

CHUNKS, VALUE = 80, 65_536
KEYS = [make_offload_key(bytes([number]) * 16, 0) for number in range(CHUNKS)]
RATE = 4 << 20  # of a warm-up, in bytes a second, so that those that begin together are all at it for a while


class Started:
    """An engine in a process of its own."""

    def __init__(self, what, tiers, keys):
        config = {
            "version": 1,
            "primary": {"capacity": "16MiB", "prefault": False},
            "secondary": tiers,
            "start_wait": "30s",
            "lookup_wait": "30s",  # a busy machine's answer of the directory is waited for
        }
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("herd_engine.py"), what, json.dumps(config), keys, str(RATE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self):
        assert self.process.stdout.readline() == "ready\n"

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self):
        out, _ = self.process.communicate(timeout=100)
        assert self.process.returncode == 0
        return json.loads(out)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with all chunks, and a file of their keys."""
    folder = tmp_path_factory.mktemp("herd")
    server = Server(folder / "redis").start()
    try:
        (keys := folder / "keys").write_text("\n".join(key.hex() for key in KEYS), "utf-8")
        seeding = Started("seed", [redis_tier(server)], keys)
        seeding.wait_ready()
        seeding.go()
        assert seeding.result()["stored"] == CHUNKS
        yield server, keys
    finally:
        server.stop()


def redis_tier(server, **more):
    return {"type": "redis", "url": f"unix://{server.socket}", "io": "thread", "threads": 2, **more}


@pytest.fixture
def replicas(server, tmp_path):
    """Return a function that starts engines whose tiers are one directory and the server, ready to begin."""
    (folder := tmp_path / "fs").mkdir(0o700)
    engines = []

    def start(count):
        fs = {"type": "fs", "path": str(folder), "capacity": "1GiB", "io": "thread", "threads": 2}
        tiers = [fs, redis_tier(server[0], read_only=True)]
        engines.extend(Started("warm", tiers, server[1]) for _ in range(count))
        for one in engines:
            one.wait_ready()
        return engines

    yield start
    for one in engines:
        if one.process.poll() is None:
            one.kill()


def read_out(server):
    return server[0].info("stats")["total_net_output_bytes"]


def finish(*engines):
    for one in engines:
        one.go()
    for done in [one.result() for one in engines]:
        assert {name: done[name] for name in ("loaded", "failed", "missing", "wrong")} == {
            "loaded": CHUNKS,
            "failed": 0,
            "missing": 0,
            "wrong": 0,
        }


def test_where_one_replica_is_warmed_up_first_the_others_read_nothing_out_of_the_far_tier(server, replicas):
    first, *others = replicas(4)
    before = read_out(server)
    finish(first)
    finish(*others)
    assert CHUNKS * VALUE <= read_out(server) - before <= 1.2 * CHUNKS * VALUE


def test_replicas_that_are_warmed_up_at_once_have_all_chunks_and_read_them_once_each_at_most(server, replicas):
    before = read_out(server)
    finish(*replicas(4))
    read = (read_out(server) - before) / (CHUNKS * VALUE)
    assert 1.0 <= read <= 4.2
