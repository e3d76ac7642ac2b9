"""Engines that start together behind one Redis, with a shared directory before it: bytes out of Redis, also at a kill.

Real processes, a real server, a real directory; the bytes are the server's own count. As Kubernetes runs them, each
engine has namespaces of its own, and nothing in common with the others but a mounted directory and the server.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis_servers import Server, wait_until

from kvtiers.api import make_offload_key

CHUNKS, VALUE = 80, 65_536
KEYS = [make_offload_key(bytes([number]) * 16, 0) for number in range(CHUNKS)]
RATES = {False: 4 << 20, True: 1 << 20}  # of an engine, so that all are at it for a while; longer where one is killed
CONTAINER = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c"]
MOUNT = 'mount --bind "$0" "$1" && shift && exec "$@"'


class Started:
    """An engine in a process of its own, or, with a ``folder`` to mount at its ``path``, in a container of its own."""

    def __init__(self, what, tiers, keys, rate, folder=None, path=None):
        config = {
            "version": 1,
            "primary": {"capacity": "16MiB", "prefault": False},
            "secondary": tiers,
            "start_wait": "30s",
        }
        engine = [sys.executable, Path(__file__).with_name("herd_engine.py"), what, json.dumps(config), keys, str(rate)]
        self.process = subprocess.Popen(
            [*CONTAINER, MOUNT, folder, path, *engine] if folder else engine,
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
        seeding = Started("seed", [redis_tier(server)], keys, RATES[False])
        seeding.wait_ready()
        seeding.go()
        assert seeding.result()["stored"] == CHUNKS
        yield server, keys
    finally:
        server.stop()


def redis_tier(server, **more):
    return {"type": "redis", "url": f"unix://{server.socket}", "io": "thread", "threads": 2, **more}


@pytest.fixture(scope="module")
def has_containers():
    """Whether engines are in containers of their own: where none can be made, they are plain processes."""
    try:
        return subprocess.run([*CONTAINER, "mount --bind / /"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def four(killed, server, tmp_path, has_containers):
    """Four engines whose tiers are a directory and the server, ready to begin."""
    (folder := tmp_path / "fs").mkdir(0o700)
    engines = []
    try:
        for number in range(4):
            path, mounted = folder, ()
            if has_containers:
                (path := tmp_path / f"mounted-{number}").mkdir()
                mounted = folder, path
            fs = {"type": "fs", "path": str(path), "capacity": "1GiB", "io": "thread", "threads": 2}
            tiers = [fs, redis_tier(server[0], read_only=True)]
            engines.append(Started("warm", tiers, server[1], RATES[killed], *mounted))
        for one in engines:
            one.wait_ready()
        yield engines
    finally:
        for one in engines:
            if one.process.poll() is None:
                one.kill()


@pytest.mark.parametrize("killed", [False, True], ids=["all live", "one is killed"])
def test_engines_that_start_together_read_little_more_than_the_set_once(server, four, killed, tmp_path, has_containers):
    def sent():
        return server[0].info("stats")["total_net_output_bytes"]

    before = sent()
    for one in four:
        one.go()
    if killed:
        wait_until(lambda: sent() - before > CHUNKS * VALUE // 10, "some have been fetched")
        assert sent() - before < CHUNKS * VALUE
        four[0].kill()
    done = [one.result() for one in four[killed:]]
    expected = {"loaded": CHUNKS, "failed": 0, "missing": 0, "wrong": 0}
    assert [{name: one[name] for name in expected} for one in done] == [expected] * len(done)
    assert CHUNKS * VALUE <= sent() - before <= 1.2 * CHUNKS * VALUE
    left = tmp_path / "fs"
    assert {path.name for path in left.iterdir()} == {".kvtiers-fs", ".usage", "default"}
    assert (left / ".kvtiers-fs").read_bytes() == b"kvtiers-fs 1\n"
    if not has_containers:
        pytest.skip(
            "NOT TESTED: engines in containers, since none can be made here. It takes root with CAP_SYS_ADMIN. What "
            "was tested instead: the same engines as processes"
        )
