"""Headless Chromium, driven over a pair of pipes (its DevTools protocol), and what it says meanwhile."""

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

_SECONDS = 60.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--no-first-run", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page of one browser. ``events``: all that it has said, by method and parameters."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Have something done; return what came of it."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._hear()
            if said.get("id") == number:
                assert "error" not in said, (method, said["error"])
                return said["result"]

    def open(self, url: str) -> None:
        """Go to a page, and come back when it has loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._hear()

    def evaluate(self, script: str) -> Any:
        """Return what an expression is in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def requests(self) -> list[str]:
        """Return the URLs that the page asked for, itself left out."""
        asked = [params["request"]["url"] for method, params in self.events if method == "Network.requestWillBeSent"]
        return asked[1:]

    def complaints(self) -> list[str]:
        """Return what went to the console: errors, warnings, exceptions."""
        self.evaluate("0")  # what was said before has arrived with the answer
        said = []
        for method, params in self.events:
            if method == "Runtime.exceptionThrown":
                said.append(params["exceptionDetails"]["text"])
            elif method == "Runtime.consoleAPICalled":
                said.append(str(params["args"]))
            elif method == "Log.entryAdded":
                said.append(params["entry"]["text"])
        return said

    def _hear(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self._from, 1 << 20) if ready else b""
            assert more, "chromium said nothing more"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        said: dict[str, Any] = json.loads(line)
        if "method" in said:
            self.events.append((said["method"], said["params"]))
        return said


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Give a browser that ends with the block."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "chromium is missing: apt-get install chromium, or: make system"
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="kvtiers-browser-", ignore_cleanup_errors=True) as profile:
        # The protocol's pipes are descriptors 3 and 4; bash can put them there (others have no numbers above 9).
        shell = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": profile},
        )
        os.close(their_in)
        os.close(their_out)
        try:
            opened = Browser(our_out, our_in)
            yield opened
            opened._session = None
            opened.call("Browser.close")
            process.wait(_SECONDS)
        finally:
            process.kill()
            process.wait(_SECONDS)
            os.close(our_out)
            os.close(our_in)
