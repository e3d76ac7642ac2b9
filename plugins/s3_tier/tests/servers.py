"""S3 servers for tests and the benchmark: Ceph's gateway, and moto's.

Each runs as processes on free ports of this machine, ends with its owner, also when that is killed, and leaves nothing.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config

from kvtiers.testing.ports import free_port

__all__ = [
    "ACCESS_KEY",
    "SECRET_KEY",
    "Radosgw",
    "client_of",
    "delete_bucket",
    "moto_server",
    "new_bucket",
    "trivial_server",
    "uploads",
]

ACCESS_KEY, SECRET_KEY = "AKKV", "SKKV"
_PATIENCE = 60.0
_CEPH_PROGRAMS = {"ceph-mon": "ceph-mon", "ceph-osd": "ceph-osd", "radosgw": "radosgw"}


def until(done: Callable[[], bool], what: str, process: "subprocess.Popen[bytes] | None" = None) -> None:
    """Wait until it is done; fail if its process ends before, or it takes too long."""
    deadline = time.monotonic() + _PATIENCE
    while not done():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{what} ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not ready after {_PATIENCE:g} s")
        time.sleep(0.02)


def answers(url: str) -> bool:
    """Say whether an HTTP server answers there, whatever it says."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def start(command: list[str], log: Path, **more: Any) -> "subprocess.Popen[bytes]":
    """Start a server that is killed when its owner ends, however that ends."""
    with log.open("wb") as file:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file, **more
        )


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a server and wait for its end."""
    process.terminate()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def client_of(endpoint: str, **more: Any) -> Any:
    """Return boto3's client as the servers' owner."""
    options = Config(
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        connect_timeout=5,
        read_timeout=30,
    )
    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "region_name": "us-east-1"} | more
    return boto3.client("s3", endpoint_url=endpoint, config=options, **keys)


def new_bucket(endpoint: str) -> str:
    """Make a bucket of its own."""
    name = f"kv-{uuid.uuid4().hex[:16]}"
    client_of(endpoint).create_bucket(Bucket=name)
    return name


def delete_bucket(endpoint: str, bucket: str) -> None:
    """Delete a bucket with a few objects."""
    client = client_of(endpoint)
    for entry in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        client.delete_object(Bucket=bucket, Key=entry["Key"])
    client.delete_bucket(Bucket=bucket)


def uploads(config: Any) -> list[Any]:
    """Return the uploads in parts that have not ended, under a tier's prefix."""
    client = client_of(config.endpoint)
    return list(client.list_multipart_uploads(Bucket=config.bucket, Prefix=config.prefix).get("Uploads", []))


# One request at a time: moto's own server has threads, and mixes up two writes of one object.
_MOTO = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Run moto's server; give its URL. It takes any credentials."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvmoto") as folder:
        process = start([sys.executable, "-c", _MOTO, str(port)], Path(folder, "log"))
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/moto-api/"), "moto's server", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)


@contextlib.contextmanager
def trivial_server() -> Iterator[str]:
    """Run a server that keeps objects in memory and looks at nothing, in a process of its own; give its URL."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvs3") as folder:
        script = Path(__file__).with_name("trivial.py")
        process = start([sys.executable, str(script), str(port)], Path(folder, "log"))
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/"), "the trivial server", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)


class Radosgw:
    """Ceph's S3 gateway over one object store daemon in memory, without a manager. Ready in some 12 s, about 0.5 GB."""

    def __init__(self, memory_bytes: int = 2 << 30) -> None:
        self._memory_bytes = memory_bytes
        missing = sorted(package for command, package in _CEPH_PROGRAMS.items() if shutil.which(command) is None)
        if missing:
            raise RuntimeError(
                f"Ceph's gateway is not installed; apt-get install --no-install-recommends {' '.join(missing)}"
            )
        self.folder = Path(tempfile.mkdtemp(prefix="kvceph"))  # short: it holds UNIX sockets
        self.processes: list[subprocess.Popen[bytes]] = []
        self._ports = [free_port() for _ in range(3)]
        self.endpoint = f"http://127.0.0.1:{self._ports[2]}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            logs = [f"{log.name}: {log.read_text(errors='replace')[-500:]}" for log in self.folder.glob("*.log")]
            self.__exit__()
            print("\n".join(logs), file=sys.stderr)  # noqa: T201 -- why a whole session's tests fail
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            stop(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        folder, fsid = self.folder, str(uuid.uuid4())
        mon = f"[v2:127.0.0.1:{self._ports[0]},v1:127.0.0.1:{self._ports[1]}]"
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        (folder / "keyring").touch()
        settings = {"fsid": fsid, "mon": mon, "port": self._ports[2], "memory": self._memory_bytes}
        (folder / "ceph.conf").write_text(_CEPH_CONF.format(D=folder, **settings))
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", mon, f"{folder}/monmap")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap")
        self.serve("ceph-mon", "-i", "a", "-f")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self.serve("ceph-osd", "-i", "0", "-f")
        until(lambda: "1 up" in self._run("ceph", "osd", "stat"), "Ceph's object store daemon", self.processes[-1])
        until(self._has_a_user, "Ceph's user", self.processes[-1])
        self.serve("radosgw", "-n", "client.rgw", "-f")
        until(lambda: answers(self.endpoint), "Ceph's gateway", self.processes[-1])
        # The first object makes the pools, which takes a second or more.
        client_of(self.endpoint).put_object(Bucket=new_bucket(self.endpoint), Key="first", Body=b"")

    def _has_a_user(self) -> bool:
        """Make one, unless there is one. The first command makes the zone, which a busy machine may be late with."""
        keys = [f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        for command in (["info"], ["create", "--display-name=kv", *keys]):
            with contextlib.suppress(RuntimeError):
                self.admin("user", *command, "--uid=kv")
                return True
        return False

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": f"{self.folder}/ceph.conf"}

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environment(), capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {done.stderr[-1000:]}")
        return done.stdout

    def admin(self, *command: str) -> str:
        """Run radosgw-admin."""
        return self._run("radosgw-admin", *command)

    def serve(self, *command: str) -> None:
        log = self.folder / f"{command[0]}.log"
        self.processes.append(start(list(command), log, env=self._environment()))


_CEPH_CONF = """
[global]
fsid = {fsid}
mon initial members = a
mon host = {mon}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = {D}
admin socket = {D}/$name.asok
log file = {D}/$name.log
pid file =
keyring = {D}/keyring
crash dir = {D}
ms bind ipv6 = false
ms mon client mode = crc
ms client mode = crc
ms cluster mode = crc
ms service mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon osd min down reporters = 1
debug default = 0
log to stderr = false
err to stderr = true
[mon]
mon data = {D}/mon
auth allow insecure global id reclaim = false
mon data avail crit = 0
[osd]
osd data = {D}/osd
osd objectstore = memstore
memstore device bytes = {memory}
osd memory target = 939524096
osd op num shards = 2
osd op num threads per shard = 1
osd class load list = *
osd class default list = *
osd max object name len = 1024
[client]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw rados pool pg num min = 1
rgw enable usage log = false
rgw enable ops log = false
rgw run sync thread = false
rgw enable gc threads = false
rgw enable lc threads = false
rgw enable quota threads = false
rgw thread pool size = 64
rgw max concurrent requests = 128
rgw override bucket index max shards = 1
rgw data = {D}/rgw
"""
