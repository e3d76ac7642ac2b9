"""The same over other tiers: memory within one process, and a Redis and an S3 bucket, shared and in trouble."""

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import BLOCK, tiers

DEADLINE, GRACE = 3.0, 1.0
BOUND = 2 * DEADLINE + GRACE + 10.0
PATIENCE = 60.0


def test_a_tier_in_memory_serves_what_the_primary_has_lost(start, model, right):
    engine = start(model, tiers({"type": "kvtiers-memory", "capacity": "64MiB", "required": True}))
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    assert right(engine, *reversed(PROMPTS)) == WHOLE[::-1]
    assert engine.metrics()["kvtiers_tier_loaded_chunks{memory}"] == sum(WHOLE) / BLOCK
    first, whole = PROMPTS[0], WHOLE[0]
    assert right(engine, first, salt="mine") == [0], "a salted request shares nothing with one that is not"
    engine.forget()
    assert right(engine, first, salt="mine") == [whole]
    assert right(engine, first, salt="somebody else's") == [0]
    engine.shutdown()


class Redis:
    """A server on a port of its own, which can be stopped, killed and started again, empty."""

    def __init__(self, folder):
        self.binary = shutil.which("redis-server")
        assert self.binary, "redis-server is missing; install it with: sudo apt-get install redis-server"
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = None

    def start(self):
        self.stop()
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([self.binary, *options], stdout=log, stderr=log)
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert time.monotonic() < until, "no Redis"
                time.sleep(0.01)
            else:
                return self

    def signal(self, name):
        self.process.send_signal(getattr(signal, name))

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None


@pytest.fixture
def redis(tmp_path):
    server = Redis(tmp_path)
    yield server
    server.stop()


class Gateway:
    """Ceph's S3 gateway, as the S3 tier's own tests run it; what it holds outlives its being killed."""

    def __init__(self):
        file = Path(__file__).parents[2] / "plugins" / "s3_tier" / "tests" / "servers.py"
        spec = importlib.util.spec_from_file_location("s3_servers", file)
        self.servers = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.servers)
        self.ceph = self.servers.Radosgw()
        self.ceph.__enter__()
        self.bucket = self.servers.new_bucket(self.ceph.endpoint)

    def signal(self, name):
        self.ceph._processes[-1].send_signal(getattr(signal, name))

    def start(self):
        self.ceph._processes[-1].wait(30)
        self.ceph._serve("radosgw", "-n", "client.rgw", "-f")

    def stop(self):
        self.signal("SIGCONT")
        self.ceph.__exit__()


@pytest.fixture
def gateway():
    server = Gateway()
    yield server
    server.stop()


def tier(kind, **options):
    quick = {"deadline": f"{DEADLINE}s", "grace": f"{GRACE}s", "breaker": {"delay": "200ms", "max_delay": "1s"}}
    return tiers({"type": f"kvtiers-{kind}", **quick, **options})


def hits(engine, right, kind):
    """Wait until the tier, and nothing else, brings everything; what was lost meanwhile is computed and stored anew."""
    until = time.monotonic() + PATIENCE
    engine.wait_for(
        lambda figures: (
            figures.get(f"kvtiers_tier_open{{{kind}}}") and not figures[f"kvtiers_tier_breaker_state{{{kind}}}"]
        )
    )
    cached = []
    while cached != WHOLE:
        assert time.monotonic() < until, f"hits do not resume: {cached} of {WHOLE}; {engine.metrics()}"
        engine.forget()
        cached = right(engine, *PROMPTS)


def endures(engine, right, kind, server):
    """While its server hangs, and when it is killed, every request gets right tokens in time; then hits resume."""
    for trouble in ("SIGSTOP", "SIGKILL"):
        engine.forget()
        server.signal(trouble)
        begun = time.monotonic()
        right(engine, *PROMPTS)
        assert time.monotonic() - begun < BOUND, trouble
        if trouble == "SIGSTOP":
            server.signal("SIGCONT")
        else:
            server.start()
        hits(engine, right, kind)


def test_two_engines_share_a_redis_which_stops_dies_and_comes_back(start, model, right, redis):
    config = tier("redis", url=f"redis://127.0.0.1:{redis.port}/0")
    first = start(model, config)
    assert right(first, *PROMPTS) == [0, 0], "it is down at the start, and nobody waits for it"
    redis.start()
    hits(first, right, "redis")
    first.shutdown()

    second = start(model, config)
    hits(second, right, "redis")
    assert second.metrics().get("kvtiers_tier_stored_chunks{redis}", 0) == 0, "the first one had stored it all"
    assert second.metrics()["kvtiers_tier_shared{redis}"] == 1
    endures(second, right, "redis", redis)
    second.shutdown()


def test_two_engines_share_a_bucket_whose_gateway_stops_dies_and_comes_back(start, model, right, gateway):
    keys = {"access_key": gateway.servers.ACCESS_KEY, "secret_key": gateway.servers.SECRET_KEY, "region": "us-east-1"}
    config = tier("s3", endpoint=gateway.ceph.endpoint, bucket=gateway.bucket, timeout="2s", **keys)
    first = start(model, config)
    hits(first, right, "s3")
    first.shutdown()

    second = start(model, config)
    hits(second, right, "s3")
    assert second.metrics().get("kvtiers_tier_stored_chunks{s3}", 0) == 0, "the first one had stored it all"
    endures(second, right, "s3", gateway)
    second.shutdown()
