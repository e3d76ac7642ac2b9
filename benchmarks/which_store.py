"""The stores side by side, as one engine on this machine has them: seconds of a small load, GB/s of large ones.

docs/which-store.md names it. Every tier is the whole contract with its defaults, but one host each
(`processes: 1`): `memory` in its host's memory, `fs` in a folder (`--folder`: on the disk that is meant), `redis` and
`mooncake` in another process behind a loopback socket, `redis, UNIX` behind a UNIX socket, `s3`, `gcs` and `azure` on a
server that does no more than their protocols. `memory again` is the first one once more in the same turns: what differs
is this machine.

A loopback socket is no network: over one, its link and round trip are added. All shares are of `memory` in the same
turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from baselines import redis_lanes as lanes
from lib.results import WAYS, middle_share, say
from rigs.store_tier_lane import PATIENCE, TierLane

from kvtiers.api import LookupResult, TierConfig, TransferJob, make_offload_key
from kvtiers.api.units import format_size
from kvtiers.plugins import load_tier
from kvtiers.testing.ports import free_port
from kvtiers.types import RequestContext

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
sys.path[:0] = [str(PLUGINS / name / "tests") for name in ("redis_tier", "mooncake_tier")]

from pool import Master, SegmentOwner  # noqa: E402 -- the pool of the tier's tests
from servers import Server, wait_until  # noqa: E402 -- the servers of the tier's tests

S3_SERVER = PLUGINS / "s3_tier" / "tests" / "trivial.py"
SMALL, LARGE = 64 << 10, 2 << 20
LOADS = 100
REQUEST = RequestContext("bench")
STEP_SECONDS = 0.00005
AGAIN = "memory again"
BUCKETS = {"s3", "gcs", "azure"}


class StoreLane(TierLane):
    """A tier of any type: old values are deleted by the tier itself."""

    def __init__(self, fd: int, rows: memoryview, nbytes: int, config: TierConfig, stack: ExitStack) -> None:
        super().__init__(lambda: None, fd, rows, nbytes, config, stack)
        self.step_seconds = STEP_SECONDS
        self._deletes = config.type not in BUCKETS  # whose server here keeps the last GiB, and deletes nothing

    def forget(self) -> None:
        """Delete all values, and take new keys."""
        if self.keys and self._deletes:
            self._end(self.tier.submit_delete, TransferJob(self._next(), self.keys, _rows(0, 0), False, REQUEST))
        self.keys = [make_offload_key(os.urandom(32), 0) for _ in range(self._count)]

    def _next(self) -> int:
        return next(self._numbers)

    def _end(self, submit: Callable[[TransferJob], None], job: TransferJob) -> None:
        submit(job)
        self.tier.on_schedule_end()
        until = time.perf_counter() + PATIENCE
        while not (results := self.tier.get_finished_jobs()):
            time.sleep(self.step_seconds)
            assert time.perf_counter() < until, "the tier has not answered"
        assert all(result.success for result in results), results

    def load_seconds(self) -> float:
        """Return the seconds from the question for a small value to its row: a lookup, then a load."""
        seconds = []
        for number in range(LOADS):
            key = self.keys[number % self._count]
            begin = time.perf_counter()
            while self.tier.lookup_many([key], REQUEST)[0] is LookupResult.RETRY:
                self.tier.on_schedule_end()
                self.tier.get_finished_jobs()
                time.sleep(self.step_seconds)
            self._end(self.tier.submit_load, TransferJob(self._next(), [key], _rows(0, 1), True, REQUEST))
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


def _rows(start: int, count: int) -> memoryview:
    return memoryview(array("i", range(start, start + count)))


def configs(folder: Path, stack: ExitStack) -> dict[str, TierConfig]:
    """Start what the stores need; return each tier's config."""
    # What is deleted while it is leased keeps its memory for ten minutes by default; each turn deletes the last one's.
    released = ("--put_start_discard_timeout_sec=2", "--put_start_release_timeout_sec=4")
    master = Master(folder / "mooncake", *released).start()
    stack.callback(master.kill)
    stack.callback(SegmentOwner(master.address, 2 << 30).kill)
    redis = Server(folder / "redis", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru").start()
    stack.callback(redis.stop)
    port = free_port()
    s3 = stack.enter_context(subprocess.Popen([sys.executable, str(S3_SERVER), str(port)]))
    stack.callback(s3.kill)
    wait_until(lambda: _listens(port), "the S3 server listens")
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"access_key": "a", "secret_key": "b", "region": "us-east-1"}
    memory = {"type": "memory", "capacity": "1GiB"}
    options: dict[str, dict[str, Any]] = {
        "memory": memory,
        AGAIN: memory,
        "fs": {"type": "fs", "path": str(folder / "fs"), "capacity": "2GiB"},
        "redis": {"type": "redis", "url": redis.url, "processes": 1},
        "redis, UNIX": {"type": "redis", "url": f"unix://{redis.socket}", "processes": 1, "prefix": "unix:"},
        "mooncake": {"type": "mooncake", "master": master.address},
        "s3": {"type": "s3", "endpoint": endpoint, "bucket": "bucket", "processes": 1, **keys},
        "gcs": {"type": "gcs", "endpoint": endpoint, "bucket": "bucket-g", "processes": 1, "anonymous": True},
        "azure": {
            "type": "azure",
            "endpoint": f"{endpoint}/devstoreaccount1",
            "container": "bucket-a",
            "processes": 1,
            "emulator": True,
        },
    }
    common = {"store_queue": 1 << 20, "deadline": "60s", "nice": 0}
    return {name: load_tier(of["type"]).config.model_validate({**of, **common}) for name, of in options.items()}


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as way:
        return way.connect_ex(("127.0.0.1", port)) == 0


def measure(tiers: dict[str, TierConfig], total: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return each store's figures."""
    found: dict[str, dict[str, Any]] = {name: {} for name in tiers}
    with lanes.memory(total) as (fd, rows), ExitStack() as stack:
        large = {name: StoreLane(fd, rows, LARGE, config, stack) for name, config in tiers.items()}
        samples = lanes.samples_of({name: lane.rate for name, lane in large.items()}, rounds)
        for name, rates in lanes.medians(samples).items():
            shares = {way: middle_share(samples[name][way], samples["memory"][way]) for way in WAYS}
            found[name] |= {"gb_per_s": rates, "of_memory": shares}
        for lane in large.values():
            lane.forget()
    few = 64 * SMALL
    with lanes.memory(few) as (fd, rows), ExitStack() as stack:
        small = {name: StoreLane(fd, rows, SMALL, config, stack) for name, config in tiers.items()}
        for lane in small.values():
            lane.forget()
            lane.move("write")
        turns = [{name: lane.load_seconds() for name, lane in small.items()} for _ in range(rounds)]
        for name, lane in small.items():
            found[name]["load_seconds"] = statistics.median(turn[name] for turn in turns)
            lane.forget()
    return found


def report(found: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(f"{found['machine']}; {found['folder']}")
    values = f"{format_size(LARGE)} values"
    print(f"{'store':14}{'load of 64 KiB, us':>20}{f'{values}, GB/s (write / read)':>40}{'of memory':>16}")
    for name, figures in found["stores"].items():
        rates = "{write:.2f} / {read:.2f}".format(**figures["gb_per_s"])
        shares = "{write:.2f} / {read:.2f}".format(**figures["of_memory"])
        print(f"{name:14}{figures['load_seconds'] * 1e6:>20.0f}{rates:>40}{shares:>16}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help="where the fs tier writes (default: a temporary folder)")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    total, rounds = (64 << 20, 3) if options.quick else (256 << 20, 7)
    machine = f"{len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f} before the run"
    with tempfile.TemporaryDirectory(prefix="kvtiers-bench-", dir=options.folder) as top, ExitStack() as stack:
        stores = measure(configs(Path(top), stack), total, rounds)
        kind = subprocess.run(
            ["stat", "-f", "-c", "%T", top], capture_output=True, text=True, check=True
        ).stdout.strip()
    found = {"machine": machine, "folder": f"fs on {kind.strip()}", "stores": stores, "goals": []}
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
