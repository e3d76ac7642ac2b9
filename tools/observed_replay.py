"""A replay under a real Prometheus: a busy engine, ``kvtiers metrics`` beside it, and a server that scrapes that.

For the test of ``examples/observability``, and for the picture in the documentation. Servers have free ports, files are
in the caller's folder, and all processes are ended with the block.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dashboard import ROWS, Panel

__all__ = ["EXAMPLES", "Server", "observed", "panels", "range_queries", "substituted", "wait_until"]

EXAMPLES = Path(__file__).parents[1] / "examples" / "observability"
SECONDS = 60.0
_CLI = (sys.executable, "-c", "from kvtiers.cli.main import main; main()")
_TIERS = """\
version: 1
primary: {capacity: 1MiB}
secondary:
  - {type: fs, path: FOLDER, capacity: 64MiB}
  - {type: memory, capacity: 64MiB}
what_if: true
"""
_SCRAPES = """\
global: {scrape_interval: INTERVAL, evaluation_interval: INTERVAL}
rule_files: [ALERTS]
scrape_configs:
  - job_name: kvtiers
    static_configs: [{targets: [TARGET]}]
"""


class Server:
    """A Prometheus' HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: object) -> Any:
        """Return an answer's data; RuntimeError with the server's words if it is an error."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} {parameters}: {json.load(error)['error']}") from None
        return said["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found

    def is_up(self) -> bool:
        """Return whether it answers questions."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=30):
                return True
        except OSError:
            return False


def wait_until(what: Callable[[], Any], which: str, alive: Sequence[subprocess.Popen[Any]] = ()) -> None:
    """Wait until ``what()`` is true; RuntimeError if it does not become so, or if one of the processes ends."""
    until = time.monotonic() + SECONDS
    while not what():
        if gone := [process.args for process in alive if process.poll() is not None]:
            raise RuntimeError(f"{which}: ended early: {gone}")
        if time.monotonic() > until:
            raise RuntimeError(f"{which}: not within {SECONDS:g} s")
        time.sleep(0.05)


@contextlib.contextmanager
def observed(
    folder: Path, tiers: str | None = None, replay: Sequence[object] = (), interval: str = "500ms"
) -> Iterator[tuple[Server, subprocess.Popen[Any]]]:
    """Start an engine, the exporter and Prometheus; give the server, once it scrapes, and the engine's process."""
    (folder / "tiers.yaml").write_text((tiers or _TIERS).replace("FOLDER", str(folder / "fs")), encoding="utf-8")
    arguments = replay or ("--trace", _trace(folder), "--speed", 1, "--concurrency", 4, "--bytes-per-chunk", 4032)
    with contextlib.ExitStack() as ending:
        engine = _start(ending, folder, "replay", *_CLI, "replay", "--config", folder / "tiers.yaml", *arguments)
        exporter = _start(
            ending, folder, "metrics", *_CLI, "metrics", "--listen", "127.0.0.1:0", "--engine", engine.pid
        )
        target = _address_in(folder / "metrics.log", exporter)
        prometheus, server = _prometheus(ending, folder, target, interval)
        running = (engine, exporter, prometheus)
        wait_until(server.is_up, "Prometheus", running)
        wait_until(lambda: server.query("kvtiers_tier_open == 1"), "the first scrape of an open tier", running)
        yield server, engine


def _trace(folder: Path) -> Path:
    """Write a trace: every other prompt is new, and comes again when the primary has it no more. Minutes of it."""
    path = folder / "trace.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        for number in range(20_000):
            prompt = number // 2 - (40 if number % 2 else 0)
            ids = [f"{prompt}.{place}" for place in range(6)]
            lines.write(json.dumps({"timestamp": 20 * number, "input_length": 3073, "hash_ids": [*ids, "rest"]}) + "\n")
    return path


def _prometheus(
    ending: contextlib.ExitStack, folder: Path, target: str, interval: str
) -> tuple[subprocess.Popen[Any], Server]:
    program = shutil.which("prometheus")
    if program is None:
        raise RuntimeError("prometheus is missing: apt-get install prometheus, or: make system")
    text = _SCRAPES.replace("TARGET", target).replace("INTERVAL", interval)
    (folder / "prometheus.yml").write_text(text.replace("ALERTS", str(EXAMPLES / "alerts.yaml")), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb")
    process = _start(ending, folder, "prometheus", program, *options, f"--web.listen-address={address}")
    return process, Server(f"http://{address}")


def _start(ending: contextlib.ExitStack, folder: Path, name: str, *command: object) -> subprocess.Popen[Any]:
    log = ending.enter_context((folder / f"{name}.log").open("w", encoding="utf-8"))
    process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    ending.callback(process.wait, SECONDS)
    ending.callback(process.kill)
    return process


def _address_in(log: Path, process: subprocess.Popen[Any]) -> str:
    def line() -> str:
        return next((line for line in log.read_text("utf-8").splitlines() if line.startswith("serving ")), "")

    wait_until(line, "the exporter", [process])
    return urllib.parse.urlsplit(line().split()[1]).netloc


def panels() -> list[Panel]:
    """Return the dashboard's panels."""
    return [panel for row in ROWS.values() for panel in row]


def substituted(expr: str, rate_interval: str, whole_range: str) -> str:
    """Return a query with Grafana's variables replaced: all jobs, instances and tiers."""
    for name, value in {
        "$__rate_interval": rate_interval, "$__range": whole_range, "$job": ".*", "$instance": ".*", "$tier": ".*",
    }.items():  # fmt: skip
        expr = expr.replace(name, value)
    return expr


def range_queries(server: Server, panel: Panel, start: float, end: float, step: float) -> list[list[dict[str, Any]]]:
    """Return what a panel shows: for each of its queries the series that it gives between two times."""
    rate_interval, whole = f"{max(2, int(4 * step))}s", f"{int(end - start)}s"
    return [
        server.get(
            "query_range", query=substituted(query.expr, rate_interval, whole), start=start, end=end, step=step
        )["result"]
        for query in panel.queries
    ]  # fmt: skip
