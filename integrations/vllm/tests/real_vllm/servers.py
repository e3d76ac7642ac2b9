"""Real stores for the tests: a directory, and a Redis and Ceph's S3 gateway, which can hang, be killed, start again.

What each holds can be read and replaced beside its tier, by another client.
"""

import contextlib
import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import redis

from .engines import PATIENCE
from .ways import fs

VALUE_BYTES = 64 << 10
"""Of the tests' model, the seal aside."""
ENDING = "00000000"
"""Of the names of values; with those the KV of a model without windows is stored."""


class Directory:
    """A directory on this machine."""

    kind = "fs"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stores = 0

    def tier(self, **options: Any) -> dict[str, Any]:
        """Return the tier of a new, empty store in it."""
        self._stores += 1
        return fs(self._path / str(self._stores), **options)

    def values(self, tier: dict[str, Any]) -> dict[str, bytes]:
        """Return the values that a tier has, by name."""
        files = [path for path in Path(tier["path"]).rglob(f"*{ENDING}") if path.is_file()]
        return {str(path): path.read_bytes() for path in sorted(files)}

    def put(self, tier: dict[str, Any], values: dict[str, bytes]) -> None:
        """Replace values that a tier has."""
        for path, value in values.items():
            assert Path(path).is_relative_to(tier["path"])
            Path(path).write_bytes(value)


class Redis:
    """A server on a port of its own; what it holds is gone when it is killed."""

    kind = "redis"

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server")
        assert binary, "redis-server is missing; install it with: sudo apt-get install redis-server"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._command = ["setpriv", "--pdeathsig", "KILL", binary, *options, "--databases", "64"]
        self._log = folder / "log"
        self._databases = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def tier(self, **options: Any) -> dict[str, Any]:
        """Return the tier of a new, empty store on this server."""
        self._databases += 1
        return {"type": "redis", "url": f"redis://127.0.0.1:{self._port}/{self._databases}"} | options

    def start(self) -> None:
        """Start it where it does not run, and wait until it answers."""
        if self._process is not None:
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                assert time.monotonic() < until, "no Redis"
                time.sleep(0.01)
            else:
                return

    def values(self, tier: dict[str, Any]) -> dict[str, bytes]:
        """Return the values that a tier has, by name."""
        with redis.Redis.from_url(tier["url"]) as client:
            names = sorted(name.decode() for name in client.scan_iter(f"*{ENDING}"))
            return {name: client.get(name) for name in names}

    def put(self, tier: dict[str, Any], values: dict[str, bytes]) -> None:
        """Replace values that a tier has."""
        with redis.Redis.from_url(tier["url"]) as client:
            client.mset(values)

    def reads(self) -> int:
        """Return how often a value has been read."""
        with redis.Redis(port=self._port) as client:
            return int(client.info("commandstats").get("cmdstat_get", {}).get("calls", 0))

    def hang(self) -> None:
        """Have it hang until ``resume``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on where it hangs."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE)
            self._process = None

    close = kill


class SmallS3:
    """The S3 tier's own small server: all of S3 that the tier uses, in the memory of a process."""

    def __init__(self) -> None:
        file = Path(__file__).parents[4] / "plugins" / "s3_tier" / "tests" / "trivial.py"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, str(file), str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, "the S3 server has ended"
                assert time.monotonic() < until, "no S3 server"
                time.sleep(0.01)
            else:
                return

    def tier(self, **options: Any) -> dict[str, Any]:
        """Return a tier on this server."""
        where = {"endpoint": f"http://127.0.0.1:{self._port}", "bucket": "bucket", "region": "us-east-1"}
        return {"type": "s3", **where, "access_key": "a", "secret_key": "b"} | options

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(PATIENCE)


class Gateway:
    """Ceph's S3 gateway, as the S3 tier's own tests run it; what it holds outlives its being killed."""

    kind = "s3"

    def __init__(self) -> None:
        file = Path(__file__).parents[4] / "plugins" / "s3_tier" / "tests" / "servers.py"
        spec = importlib.util.spec_from_file_location("s3_servers", file)
        assert spec
        assert spec.loader
        self._servers = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._servers)
        self._ceph = self._servers.Radosgw()
        self._ceph.__enter__()

    def tier(self, **options: Any) -> dict[str, Any]:
        """Return the tier of a new, empty bucket on this server."""
        return {
            "type": "s3",
            "endpoint": self._ceph.endpoint,
            "bucket": self._servers.new_bucket(self._ceph.endpoint),
            "access_key": self._servers.ACCESS_KEY,
            "secret_key": self._servers.SECRET_KEY,
            "region": "us-east-1",
        } | options

    def values(self, tier: dict[str, Any]) -> dict[str, bytes]:
        """Return the values that a tier has, by name."""
        with contextlib.closing(self._servers.client_of(self._ceph.endpoint)) as client:
            names = [entry["Key"] for entry in client.list_objects_v2(Bucket=tier["bucket"]).get("Contents", ())]
            names = [name for name in names if name.endswith(ENDING)]
            return {name: client.get_object(Bucket=tier["bucket"], Key=name)["Body"].read() for name in names}

    def put(self, tier: dict[str, Any], values: dict[str, bytes]) -> None:
        """Replace values that a tier has."""
        with contextlib.closing(self._servers.client_of(self._ceph.endpoint)) as client:
            for name, value in values.items():
                client.put_object(Bucket=tier["bucket"], Key=name, Body=value)

    def reads(self) -> int:
        """Return how often a value has been read, by the bytes that were."""
        # As `ceph daemon ... perf dump rgw` does, which takes a second to start: half of the time that loads take.
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(PATIENCE)
            asked.connect(f"{self._ceph.folder}/client.rgw.asok")
            asked.sendall(json.dumps({"prefix": "perf dump", "logger": "rgw"}).encode() + b"\0")
            with asked.makefile("rb") as answer:
                figures = json.loads(answer.read(int.from_bytes(answer.read(4), "big")))
        return int(figures["rgw"]["get_b"]) // VALUE_BYTES

    def start(self) -> None:
        """Start it where it does not run, and wait until it answers."""
        if self._process.poll() is not None:
            self._ceph.processes.pop()
            self._ceph.serve("radosgw", "-n", "client.rgw", "-f")
            self._servers.until(lambda: self._servers.answers(self._ceph.endpoint), "Ceph's gateway", self._process)

    def hang(self) -> None:
        """Have it hang until ``resume``."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on where it hangs."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait(PATIENCE)

    @property
    def _process(self) -> "subprocess.Popen[bytes]":
        process: subprocess.Popen[bytes] = self._ceph.processes[-1]
        return process

    def close(self) -> None:
        """End it and all that belongs to it."""
        self._ceph.__exit__()
