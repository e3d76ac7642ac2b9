"""A Redis of the demo's own, where redis-server and the tier for it are installed."""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from demo.acts import expect
from demo.machine import wait_until

__all__ = ["local_redis"]

_PATIENCE = 30.0


@contextlib.contextmanager
def local_redis(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Give the tier over a server that ends with the block; nothing where there is none to be had."""
    program = shutil.which("redis-server")
    if program is None or not entry_points(group="kvtiers.tiers", name="redis"):
        yield []
        return
    # No port, so that no other server can have it; the path of a socket must be short. Nothing is saved.
    with tempfile.TemporaryDirectory(prefix="kvtiers-demo-") as place, (folder / "redis.log").open("wb") as log:
        socket = Path(place) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
        server = subprocess.Popen([program, *options], cwd=place, stdout=log, stderr=log)
        try:
            wait_until(lambda: socket.exists() or server.poll() is not None, _PATIENCE)
            expect(socket.exists(), f"redis-server does not start: exit status {server.poll()}")
            yield [{"type": "redis", "url": f"unix://{socket}", "required": True}]
        finally:
            server.kill()
            server.wait()
