"""Azurite for tests and the benchmark: Microsoft's emulator of the Blob service, and requests as its owner."""

import base64
import contextlib
import hashlib
import hmac
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Self

from kvtiers.testing.ports import free_port

__all__ = [
    "ACCOUNT",
    "ACCOUNT_KEY",
    "Azurite",
    "account_sas",
    "delete_blob",
    "delete_container",
    "get_blob",
    "new_container",
    "put_blob",
]

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2023-11-03"
_PATIENCE = 60.0
_INSTALLED = Path(__file__).resolve().parents[3] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"


def azurite() -> str:
    found = shutil.which("azurite-blob") or (str(_INSTALLED) if _INSTALLED.exists() else None)
    if found is None:
        raise RuntimeError("Azurite is not installed; run 'make emulators', which gets it from npm")
    return found


class Azurite:
    """Azurite's blob service on a free port, killed with its owner.

    ``keeps``: in a folder of its own, gone at the end, and not in memory. ``stop`` kills it, and ``start`` starts it
    again, with what it has kept.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._folder = tempfile.mkdtemp(prefix="kvazurite")
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        self.process: subprocess.Popen[bytes] | None = None

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
        """Start it, and wait until it answers."""
        where = ["--location", self._folder] if self._keeps else ["--inMemoryPersistence"]
        program = [azurite(), *where, "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        with Path(self._folder, "output").open("ab") as output:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *program, *quiet],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        until = time.monotonic() + _PATIENCE
        while not _answers(f"http://127.0.0.1:{self.port}/"):
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Azurite does not start: {Path(self._folder, 'output').read_text()[-2000:]}")
            time.sleep(0.02)

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        """End it, and all connections to it. It writes its index then: killed, it forgets what is newer than 5 s."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def new_container(endpoint: str) -> str:
    """Make a container of its own."""
    name = f"kv-{uuid.uuid4().hex[:16]}"
    _request("PUT", endpoint, name, {"restype": "container"})
    return name


def put_blob(endpoint: str, container: str, name: str, body: bytes) -> None:
    """Write a blob, as another program."""
    _request("PUT", endpoint, f"{container}/{name}", {}, body, {"x-ms-blob-type": "BlockBlob"})


def get_blob(endpoint: str, container: str, name: str) -> bytes:
    """Read a blob, as another program."""
    return _request("GET", endpoint, f"{container}/{name}", {})


def delete_blob(endpoint: str, container: str, name: str) -> None:
    """Delete a blob, as another program, if it is there."""
    try:
        _request("DELETE", endpoint, f"{container}/{name}", {})
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != HTTPStatus.NOT_FOUND:
            raise


def delete_container(endpoint: str, container: str) -> None:
    """Delete a container."""
    _request("DELETE", endpoint, container, {"restype": "container"})


def _request(
    method: str,
    endpoint: str,
    path: str,
    query: dict[str, str],
    body: bytes = b"",
    headers: dict[str, str] | None = None,
) -> bytes:
    """Make a request with the account's shared key."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    more = {"x-ms-date": date, "x-ms-version": _VERSION, **(headers or {})}
    kind = "application/octet-stream" if body else ""
    canonical = "".join(f"{name}:{more[name]}\n" for name in sorted(more))
    resource = f"/{ACCOUNT}/{ACCOUNT}/{path}" + "".join(f"\n{name}:{query[name]}" for name in sorted(query))
    text = f"{method}\n\n\n{len(body) or ''}\n\n{kind}\n\n\n\n\n\n\n{canonical}{resource}"
    url = f"{endpoint}/{path}?{urllib.parse.urlencode(query)}"
    request = urllib.request.Request(url, data=body or None, method=method, headers=more)
    request.add_header("Authorization", f"SharedKey {ACCOUNT}:{_signature(text)}")
    if kind:
        request.add_header("Content-Type", kind)
    with contextlib.closing(urllib.request.urlopen(request, timeout=30)) as answer:
        return bytes(answer.read())


def _signature(text: str) -> str:
    key = base64.b64decode(ACCOUNT_KEY)
    return base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()


def account_sas(permissions: str = "rwdlac", valid: timedelta = timedelta(hours=1)) -> str:
    """Return a shared access signature of the account, for blobs, with these permissions, valid so long from now."""
    expiry = (datetime.now(UTC) + valid).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = [ACCOUNT, permissions, "b", "co", "", expiry, "", "http,https", _VERSION, "", ""]
    values = {"sv": _VERSION, "ss": "b", "srt": "co", "sp": permissions, "se": expiry, "spr": "http,https"}
    return urllib.parse.urlencode({**values, "sig": _signature("\n".join(fields))})
