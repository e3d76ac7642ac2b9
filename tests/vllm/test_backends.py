"""The same over other tiers: memory within one process, and a Redis that two engines share and that has troubles."""

import shutil
import signal
import socket
import subprocess
import time

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import BLOCK, tiers

DEADLINE, GRACE = 3.0, 1.0
BOUND = 2 * DEADLINE + GRACE + 10.0


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


def usable(figures):
    return figures.get("kvtiers_tier_open{redis}") and not figures["kvtiers_tier_breaker_state{redis}"]


def hits(engine, right):
    """Wait until the tier is in use; then it, and nothing else, has everything."""
    engine.wait_for(usable)
    engine.forget()
    right(engine, *PROMPTS)  # whatever was lost meanwhile is stored again
    engine.forget()
    assert right(engine, *PROMPTS) == WHOLE


def test_two_engines_share_a_redis_which_stops_dies_and_comes_back(start, model, right, redis):
    config = tiers(
        {
            "type": "kvtiers-redis",
            "url": f"redis://127.0.0.1:{redis.port}/0",
            "deadline": f"{DEADLINE}s",
            "grace": f"{GRACE}s",
            "breaker": {"delay": "200ms", "max_delay": "1s"},
        }
    )
    first = start(model, config)
    assert right(first, *PROMPTS) == [0, 0], "it is down at the start, and nobody waits for it"
    redis.start()
    hits(first, right)
    first.shutdown()

    second = start(model, config)
    second.wait_for(usable)
    assert right(second, *PROMPTS) == WHOLE
    assert second.metrics()["kvtiers_tier_shared{redis}"] == 1

    for trouble, end in (
        ("SIGSTOP", lambda: redis.signal("SIGCONT")),
        ("SIGKILL", lambda: (redis.stop(), redis.start())),
    ):
        second.forget()
        redis.signal(trouble)
        begun = time.monotonic()
        right(second, *PROMPTS)
        assert time.monotonic() - begun < BOUND, trouble
        end()
        hits(second, right)
    second.shutdown()
